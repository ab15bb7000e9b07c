// The products of a pair with many cotangents. What they share is computed once, for W atoms side by
// side, and stored for some steps. Then the cotangents are side by side in vectors: R of them, a multiple
// of W, follow each other for each coordinate of each atom. Sums have the order of single products.

// Numbers that are zero at first, in memory on which vectors are aligned.
struct Aligned {
  Block<char> memory;
  REAL* data;
  explicit Aligned(int64_t size)
      : memory(size * sizeof(REAL) + 64), data((REAL*)(((uintptr_t)memory.data + 63) / 64 * 64)) {}
};

// The cotangents of positions and of virials, and their products, in the order of places.
struct Cotangents {
  const int64_t R;
  Aligned vector, stretch, product, strain;

  Cotangents(const Call& c, int64_t R)
      : R(R),
        vector(c.systems * c.atoms * DIM * R),
        stretch(STRAINED ? c.systems * VIRIAL * R : 0),
        product(c.systems * c.atoms * DIM * R),
        strain(STRAINED ? c.systems * c.atoms * VIRIAL * R : 0) {}

  bool allocated() const {
    return vector.memory.data && stretch.memory.data && product.memory.data && strain.memory.data;
  }

  void load(const Call& c, int64_t system, const int* atom) {
    const View& v = c.vector;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int64_t p = 0; p < c.atoms; ++p)
      for (int64_t a = 0; a < DIM; ++a) {
        const REAL* from = v.data + system * v.system + atom[p] * v.atom + a * v.axis;
        REAL* to = vector.data + ((system * c.atoms + p) * DIM + a) * R;
        for (int64_t r = 0; r < c.cotangents; ++r) to[r] = from[r * v.cotangent];
      }
    for (int64_t k = 0; k < VIRIAL && STRAINED; ++k)
      for (int64_t r = 0; r < c.cotangents; ++r)
        stretch.data[(system * VIRIAL + k) * R + r] = c.stretch[(r * c.systems + system) * VIRIAL + k];
  }

  void store(const Call& c, int64_t system, const int* atom) const {
    unpack(c, system, atom, c.product, product.data, DIM, 1);
    if (STRAINED) unpack(c, system, atom, c.strain, strain.data, VIRIAL, (REAL)0.5);
  }

  void unpack(const Call& c, int64_t system, const int* atom, const View& view, const REAL* sums, int64_t width,
              REAL scale) const {
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int64_t p = 0; p < c.atoms; ++p)
      for (int64_t a = 0; a < width; ++a) {
        const REAL* from = sums + ((system * c.atoms + p) * width + a) * R;
        REAL* to = view.data + system * view.system + atom[p] * view.atom + a * view.axis;
        for (int64_t r = 0; r < c.cotangents; ++r) to[r * view.cotangent] = scale * from[r];
      }
  }
};

// The steps of one block of W atoms that have not been multiplied yet.
template <class System>
struct Steps {
  static constexpr int DEPTH = 64;
  // As many vectors of cotangents at once as have their sums in registers.
  static constexpr int WIDE = W * sizeof(REAL) == 64 ? 4 : 2;

  const System& system;
  const int* mine;
  const int live;
  Pairs kept[DEPTH];
  int filled = 0, included[W][DEPTH], count[W] = {};

  Pairs& next() {
    if (filled == DEPTH) multiply();
    return kept[filled];
  }

  // Keep the pairs that are included in the step at next().
  void keep() {
    for (int l = 0; l < live; ++l) {
      included[l][count[l]] = filled;
      count[l] -= (int)kept[filled].in[l];
    }
    ++filled;
  }

  void multiply() {
    const int64_t R = system.cotangents->R;
    for (int l = 0; l < live; ++l) {
      int64_t r = 0;
      for (; r + WIDE * W <= R; r += WIDE * W) products<WIDE>(l, r);
      if (WIDE > 2 && r + 2 * W <= R) products<2>(l, r), r += 2 * W;
      if (r < R) products<1>(l, r);
      count[l] = 0;
    }
    filled = 0;
  }

  // The products of atom l with N vectors of cotangents from number r on.
  template <int N>
  void products(int l, int64_t r) {
#define EACH(n, count) _Pragma("GCC unroll 8") for (int n = 0; n < count; ++n)
    const Cotangents& c = *system.cotangents;
    const int64_t R = c.R, atoms = system.call.atoms, own = system.number * atoms + mine[l];
    const REAL *vectors = c.vector.data + r, *stretches = c.stretch.data + system.number * VIRIAL * R + r;
    const REAL* v = vectors + own * DIM * R;
    REAL *product = c.product.data + own * DIM * R + r, *strain = c.strain.data + own * VIRIAL * R + r;
    V sum[DIM][N], gradient[GRADIENTS + 1][N] = {};
    EACH(a, DIM) EACH(n, N) sum[a][n] = at(product + a * R, n);
    for (int m = 0; m < count[l]; ++m) {
      const Pairs& p = kept[included[l][m]];
      const REAL* u = vectors + (system.number * atoms + p.other[l]) * DIM * R;
      V w[DIM][N], along[N], part;
      EACH(a, DIM) EACH(n, N) w[a][n] = at(v + a * R, n) - at(u + a * R, n);
      if (STRAINED)
        for (int k = 0; k < VIRIAL; ++k)
          EACH(n, N) w[second(k)][n] += at(stretches + k * R, n) * p.d[first(k)][l];
      EACH(n, N) along[n] = p.d[0][l] * w[0][n];
      for (int a = 1; a < DIM; ++a) EACH(n, N) along[n] = along[n] + p.d[a][l] * w[a][n];
      EACH(a, DIM) EACH(n, N) {
        part = p.curvature[l] * along[n] * p.d[a][l] + p.weight[l] * w[a][n];
        sum[a][n] += part;
        if (STRAINED)
          for (int k = 0; k < VIRIAL; ++k)
            if (second(k) == a) add(strain + k * R, n, p.d[first(k)][l] * part);
      }
      for (int g = 0; g < GRADIENTS; ++g)
        EACH(n, N) {
          part = -along[n] * p.slope[g][l];
          if (GRADIENT_KIND[g] != TABLE) gradient[g][n] += part;
          else add(system.gradients[g] + system.entry_of(mine[l], p.other[l]) * R + r, n, part);
        }
      for (int k = 0; k < LOOKUPS; ++k) {
        const int64_t place = BEGIN[LOOKUP_GRADIENT[k]] + (int64_t)p.place[k][l];
        EACH(n, N) add(system.by_place + place * R + r, n, -along[n] * p.slope[GRADIENTS + k][l]);
      }
    }
    EACH(a, DIM) EACH(n, N) memcpy(product + a * R + n * W, &sum[a][n], sizeof(V));
    const int64_t slot = system.number * atoms + system.atom[mine[l]];
    for (int g = 0; g < GRADIENTS; ++g)
      if (GRADIENT_KIND[g] != TABLE) EACH(n, N) add(system.gradients[g] + slot * R + r, n, gradient[g][n]);
#undef EACH
  }

  static V at(const REAL* numbers, int n) {
    V x;
    memcpy(&x, numbers + n * W, sizeof x);
    return x;
  }

  static void add(REAL* numbers, int n, V x) {
    x += at(numbers, n);
    memcpy(numbers + n * W, &x, sizeof x);
  }
};
