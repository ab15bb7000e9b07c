// The products of a pair with many cotangents. What they share is computed once, for W atoms side by
// side, and stored for some steps. Then the cotangents are side by side in vectors: R of them, a multiple
// of W, follow each other for each coordinate of each atom. Sums have the order of single products.

extern "C" int omp_get_thread_num() noexcept;
extern "C" void* memset(void*, int, __SIZE_TYPE__) noexcept;

// Numbers that are zero at first, in memory on which vectors are aligned.
struct Aligned {
  Block<char> memory;
  REAL* data;
  explicit Aligned(int64_t size)
      : memory(size * sizeof(REAL) + 64), data((REAL*)(((uintptr_t)memory.data + 63) / 64 * 64)) {}
};

// The cotangents of positions, in the order of places, and of virials; and for each thread the products of
// one block of W atoms.
struct Cotangents {
  static constexpr int64_t STRAIN = STRAINED ? VIRIAL : 0;
  const int64_t R;
  Aligned vector, stretch, product, strain;

  Cotangents(const Call& c, int64_t R)
      : R(R),
        vector(c.systems * c.atoms * DIM * R),
        stretch(c.systems * STRAIN * R),
        product(c.threads * W * DIM * R),
        strain(c.threads * W * STRAIN * R) {}

  bool allocated() const {
    return vector.memory.data && stretch.memory.data && product.memory.data && strain.memory.data;
  }

  void load(const Call& c, int64_t system, const int* atom) {
    const View& v = c.vector;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int64_t first = 0; first < c.atoms; first += W)
      for (int64_t r = 0; r < c.cotangents; ++r)
        for (int64_t p = first; p < c.atoms && p < first + W; ++p)
          for (int64_t a = 0; a < DIM; ++a)
            vector.data[((system * c.atoms + p) * DIM + a) * R + r] =
                v.data[r * v.cotangent + system * v.system + atom[p] * v.atom + a * v.axis];
    for (int64_t k = 0; k < STRAIN; ++k)
      for (int64_t r = 0; r < c.cotangents; ++r)
        stretch.data[(system * VIRIAL + k) * R + r] = c.stretch[(r * c.systems + system) * VIRIAL + k];
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
  const int64_t R;
  REAL *product, *strain;
  Pairs kept[DEPTH];
  int filled = 0, included[W][DEPTH], count[W] = {};

  Steps(const System& system, const int* mine, int live)
      : system(system), mine(mine), live(live), R(system.cotangents->R) {
    const int thread = omp_get_thread_num();
    product = system.cotangents->product.data + thread * W * DIM * R;
    strain = system.cotangents->strain.data + thread * W * Cotangents::STRAIN * R;
    memset(product, 0, W * DIM * R * sizeof(REAL));
    memset(strain, 0, W * Cotangents::STRAIN * R * sizeof(REAL));
  }

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

  // Multiply the last steps, and store all products.
  void finish() {
    multiply();
    store(system.call.product, product, DIM, 1);
    if (STRAINED) store(system.call.strain, strain, VIRIAL, (REAL)0.5);
  }

  void store(const View& view, const REAL* sums, int64_t width, REAL scale) const {
    for (int64_t r = 0; r < system.call.cotangents; ++r)
      for (int l = 0; l < live; ++l) {
        REAL* to = view.data + r * view.cotangent + system.number * view.system + system.atom[mine[l]] * view.atom;
        for (int64_t a = 0; a < width; ++a) to[a * view.axis] = scale * sums[(l * width + a) * R + r];
      }
  }

  void multiply() {
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
    const int64_t atoms = system.call.atoms;
    const REAL *vectors = c.vector.data + r, *stretches = c.stretch.data + system.number * VIRIAL * R + r;
    const REAL* v = vectors + (system.number * atoms + mine[l]) * DIM * R;
    REAL *product = this->product + l * DIM * R + r, *strain = this->strain + l * VIRIAL * R + r;
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
      EACH(g, GRADIENTS)
        EACH(n, N) {
          part = along[n] * p.slope[g][l];
          if (GRADIENT_KIND[g] != TABLE) gradient[g][n] -= part;
          else add(system.gradients[g] + system.entry_of(mine[l], p.other[l]) * R + r, n, -part);
        }
      for (int k = 0; k < LOOKUPS; ++k) {
        const int64_t place = BEGIN[LOOKUP_GRADIENT[k]] + (int64_t)p.place[k][l];
        EACH(n, N) add(system.by_place + place * R + r, n, -along[n] * p.slope[GRADIENTS + k][l]);
      }
    }
    EACH(a, DIM) EACH(n, N) memcpy(product + a * R + n * W, &sum[a][n], sizeof(V));
    const int64_t slot = system.number * atoms + system.atom[mine[l]];
    EACH(g, GRADIENTS)
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
