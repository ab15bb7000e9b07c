// The sums over pairs that are evaluated once, for both of their atoms. A queue takes the pairs of some
// atoms within the cutoff, so that formulas are evaluated for full vectors of pairs. Then each pair is
// added to the sums of its two atoms, one pair after another. Atoms come in the order of their numbers,
// and have the neighbours with larger numbers in that order. So the terms of an atom are added in the
// order of its neighbours, as in rows.cpp, and a sum has the same bits.

extern "C" int omp_get_thread_num() noexcept;

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && !defined(__clang__)
#define COMPRESSED
typedef double Doubles __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));
typedef long long Longs __attribute__((vector_size(64)));
// The lanes of a condition, by bits, and those lanes of a vector side by side.
static inline int bits_of(decltype(Doubles{} < 0) x) { return __builtin_ia32_cvtq2mask512((Longs)x); }
static inline int bits_of(decltype(Floats{} < 0) x) { return __builtin_ia32_cvtd2mask256((Ints)x); }
static inline Doubles packed(Doubles x, int bits) { return __builtin_ia32_compressdf512_mask(x, Doubles{}, bits); }
static inline Floats packed(Floats x, int bits) { return __builtin_ia32_compresssf256_mask(x, Floats{}, bits); }
#endif

// Some lanes of a vector, to be stored side by side. Memory behind them may change.
struct Chosen {
#ifdef COMPRESSED
  int bits;
  Chosen(Mask in, int64_t live) : bits(bits_of(in) & (live < W ? (1 << live) - 1 : 255)) {}
  int count() const { return __builtin_popcount(bits); }
  void store(REAL* to, V x) const {
    x = packed(x, bits);
    memcpy(to, &x, sizeof x);
  }
  void store(int* to, const int* from) const {
    Ints x;
    memcpy(&x, from, sizeof x);
    x = __builtin_ia32_compresssi256_mask(x, Ints{}, bits);
    memcpy(to, &x, sizeof x);
  }
#else
  int lane[W], number = 0;
  Chosen(Mask in, int64_t live) {
    for (int l = 0; l < W; ++l) {
      lane[number] = l;
      number += in[l] && l < live;
    }
  }
  int count() const { return number; }
  void store(REAL* to, V x) const {
    REAL all[W];
    memcpy(all, &x, sizeof x);
    for (int l = 0; l < number; ++l) to[l] = all[lane[l]];
  }
  void store(int* to, const int* from) const {
    for (int l = 0; l < number; ++l) to[l] = from[lane[l]];
  }
#endif
};

// Scalars are summed as the force is: as the fourth numbers of quads of coordinates, and in quads of
// their own. They are gradients by numbers, what an atom adds to the virial and to its product, and
// gradients by numbers of each atom.
constexpr int count(Kind kind, int before = GRADIENTS) {
  int found = 0;
  for (int g = 0; g < before; ++g) found += GRADIENT_KIND[g] == kind;
  return found;
}
constexpr int VECTORS = ALONE ? 2 : 1, ENTRIES = STRAINED ? VIRIAL : 0;
constexpr int SCALARS = count(NUMBER) + ENTRIES * VECTORS + count(ATOM);
constexpr int QUADS = SCALARS <= VECTORS ? VECTORS : VECTORS + (SCALARS - VECTORS + 3) / 4;
constexpr int place(int k) { return k < VECTORS ? 4 * k + 3 : 4 * VECTORS + k - VECTORS; }
constexpr int virial_slot(int k) { return place(count(NUMBER) + k); }
constexpr int strain_slot(int k) { return place(count(NUMBER) + ENTRIES + k); }
constexpr int slot(int g) {
  return place(GRADIENT_KIND[g] == NUMBER ? count(NUMBER, g) : SCALARS - count(ATOM) + count(ATOM, g));
}
constexpr bool has(Kind kind, int quad) {
  for (int g = 0; g < GRADIENTS; ++g)
    if (GRADIENT_KIND[g] == kind && slot(g) / 4 == quad) return true;
  return false;
}
// The terms of the two atoms of a pair are opposite, but for scalars, which are equal. Quads with gradients
// by numbers of each atom have terms for either atom.
constexpr int SIDES = count(ATOM) > 0 ? 2 : 1;
// The slope, and of a product the curvature and the derivatives of the slope.
constexpr int FORMULAS = ALONE ? 2 + GRADIENTS : 1;

// Pairs of some atoms, in memory that a thread has for itself.
struct Queue {
  static constexpr int64_t LEAST = 256;
  static constexpr int64_t REALS =
      4 * QUADS * SIDES + 3 * VECTORS + 2 * ATOMS + FORMULAS + GRADIENTS, INTS = 2 + TABLES;
  // Vectors are stored whole, and may be behind the last pair.
  static int64_t room(int64_t most) { return (most > LEAST ? most : LEAST) + 2 * W; }
  static int64_t bytes(int64_t size) { return (size * (REALS * sizeof(REAL) + INTS * sizeof(int)) + 63) / 64 * 64; }

  const int64_t size;
  REAL *terms[2], *d[3], *w[3], *own, *packed, *results[FORMULAS], *turned[GRADIENTS + 1];
  int *mine, *other, *row;

  Queue(char* memory, int64_t size) : size(size) {
    REAL* next = (REAL*)memory;
    const auto take = [&](int64_t each) { return (next += each * size) - each * size; };
    for (int side = 0; side < SIDES; ++side) terms[side] = take(4 * QUADS);
    for (int a = 0; a < 3; ++a) d[a] = take(1);
    for (int a = 0; ALONE && a < 3; ++a) w[a] = take(1);
    if (ATOMS) own = take(1), packed = take(1);
    for (int r = 0; r < FORMULAS; ++r) results[r] = take(1);
    for (int g = 0; g < GRADIENTS; ++g) turned[g] = take(1);
    mine = (int*)next, other = mine + size, row = other + size;
  }
};

static inline void keep(REAL* to, V x) { memcpy(to, &x, sizeof x); }

// W whole numbers side by side.
static inline Places whole(const int* x) {
  Ints found;
  memcpy(&found, x, sizeof found);
  return __builtin_convertvector(found, Places);
}

// Store vectors as the rows of four numbers of their lanes.
static inline void spread(const V& x, const V& y, const V& z, const V& w, REAL* to) {
#if defined(__clang__) || __GNUC__ >= 12
  if constexpr (W == 8) {
    Eight fx, fy, fz, fw;
    memcpy(&fx, &x, sizeof x), memcpy(&fy, &y, sizeof y), memcpy(&fz, &z, sizeof z), memcpy(&fw, &w, sizeof w);
    const Eight xy = EVEN(fx, fy);
    const Eight oxy = ODD(fx, fy);
    const Eight zw = EVEN(fz, fw);
    const Eight ozw = ODD(fz, fw);
    const Eight rows[4] = {LOW(xy, zw), LOW(oxy, ozw), HIGH(xy, zw), HIGH(oxy, ozw)};
    for (int r = 0; r < 4; ++r) {
      const Quad low = __builtin_shufflevector(rows[r], rows[r], 0, 1, 2, 3);
      const Quad high = __builtin_shufflevector(rows[r], rows[r], 4, 5, 6, 7);
      memcpy(to + 4 * r, &low, sizeof low);
      memcpy(to + 4 * (r + 4), &high, sizeof high);
    }
    return;
  }
#endif
  for (int l = 0; l < W; ++l) {
    const Quad row = {x[l], y[l], z[l], w[l]};
    memcpy(to + 4 * l, &row, sizeof row);
  }
}

typedef decltype(Quad{} < 0) QuadMask;
static constexpr QuadMask ONE_OF_FOUR[] = {{-1, 0, 0, 0}, {0, -1, 0, 0}, {0, 0, -1, 0}, {0, 0, 0, -1}};

struct Mutual {
  const Call& call;
  const Cell& cell;
  const Operands& operands;
  const List& list;
  V cutoff, grid, virial_grid, numbers[OPERANDS + 1];
  const REAL* stretch;  // the cotangent of the virial
  REAL* sums;  // QUADS of each atom
  REAL* const* gradients;

  // Take the pairs of atoms within the cutoff, and return their number.
  APART int64_t fill(const Queue q, int64_t from, int64_t to) const {
    const Cell cell = this->cell;
    const REAL* const rows = list.rows;
    const V cutoff = this->cutoff;
    int64_t filled = 0;
    for (int64_t i = from; i < to; ++i) {
      const int* index = list.index + list.start[i];
      const int64_t steps = list.steps[i];
      V x[3], v[3] = {}, mine = {};
      for (int a = 0; a < 3; ++a) {
        x[a] = splat(rows[WIDTH * i + a]);
        if (ALONE) v[a] = splat(rows[WIDTH * i + 4 + a]);
      }
      if (ATOMS) mine = splat(rows[WIDTH * i + 3]);
      int at[W], line[W];
      for (int l = 0; l < W; ++l) at[l] = (int)i, line[l] = TABLES ? (int)call.kinds * operands.column[i] : 0;
      for (int64_t k = 0; k < steps; k += W) {
        V y[3], u[3] = {}, d[3], packed;
        gather(rows, WIDTH, index + k, y[0], y[1], y[2], packed);
        if constexpr (ALONE) gather(rows + 4, index + k, u[0], u[1], u[2]);
        for (int a = 0; a < 3; ++a) d[a] = x[a] - y[a];
        cell.nearest_image(d[0], d[1], d[2]);
        // A distance that is not a number counts, so that the sums show it.
        const Chosen in(~(SQUARED_DISTANCE >= cutoff), steps - k);
        V w[3];
        for (int a = 0; a < 3; ++a) w[a] = v[a] - u[a];
        for (int e = 0; ALONE && e < ENTRIES; ++e) w[second(e)] += stretch[e] * d[first(e)];
        for (int a = 0; a < 3; ++a) {
          in.store(q.d[a] + filled, d[a]);
          if (ALONE) in.store(q.w[a] + filled, w[a]);
        }
        if (ATOMS) {
          in.store(q.packed + filled, packed);
          memcpy(q.own + filled, &mine, sizeof mine);
        }
        in.store(q.other + filled, index + k);
        memcpy(q.mine + filled, at, sizeof at);
        if (TABLES) memcpy(q.row + filled, line, sizeof line);
        filled += in.count();
      }
    }
    // The formulas of the last vector are evaluated for pairs behind the last one too.
    for (int64_t k = filled; k < filled + W; ++k) {
      q.mine[k] = q.other[k] = 0;
      if (TABLES) q.row[k] = 0;
    }
    return filled;
  }

  // Evaluate the formulas of all pairs.
  APART void evaluate(const Queue q, int64_t filled) const {
    const REAL* const coefficients[] = FUNCTIONS;
    for (int64_t k = 0; k < filled; k += W) {
      V d[3], found[SLOTS + 1], own[OPERANDS + 1], packed = {}, f[FORMULAS + 1];
      const int *mine = q.mine + k, *other = q.other + k;
      for (int a = 0; a < 3; ++a) d[a] = beside(q.d[a] + k);
      Places row = {};
      if constexpr (TABLES) row = whole(q.row + k);
      for (int o = 0; o < OPERANDS; ++o)
        if (KIND[o] == ATOM) own[o] = o == PACKED ? beside(q.own + k) : lanes(operands.atoms[o], mine);
      if (ATOMS) packed = beside(q.packed + k);
      LOAD_OPERANDS
      const V s = SQUARED_DISTANCE;
      functions(s, found, coefficients, f);
      if constexpr (SIDES == 2) {
        // Of the second atom, by numbers of it.
        V turned[SLOTS + 1], t[FORMULAS + 1];
        for (int o = 0, place = 0; o < OPERANDS; ++o) {
          if (KIND[o] == FUNCTION) continue;
          turned[place] = found[place];
          if (KIND[o] == ATOM) turned[place] = found[place + 1], turned[place + 1] = found[place], ++place;
          ++place;
        }
        functions(s, turned, coefficients, t);
        for (int g = 0; g < GRADIENTS; ++g)
          if (GRADIENT_KIND[g] == ATOM) keep(q.turned[g] + k, t[2 + g]);
      }
      for (int r = 0; r < FORMULAS; ++r) keep(q.results[r] + k, f[r]);
    }
  }

  // Compute the terms of all pairs from their formulas.
  APART void multiply(const Queue q, int64_t filled) const {
    for (int64_t k = 0; k < filled; k += W) {
      V d[3], w[3] = {}, part[4 * QUADS] = {}, theirs[4 * QUADS];
      for (int a = 0; a < 3; ++a) {
        d[a] = beside(q.d[a] + k);
        if (ALONE) w[a] = beside(q.w[a] + k);
      }
      const V weight = (REAL)-2 * beside(q.results[0] + k);
      for (int a = 0; a < DIM; ++a) {
        part[a] = weight * d[a];
        if (GRID) part[a] = (part[a] + grid) - grid;
      }
      for (int e = 0; e < ENTRIES; ++e) {
        const V entry = weight * d[second(e)] * d[first(e)];
        part[virial_slot(e)] = GRID ? (entry + virial_grid) - virial_grid : entry;
      }
      if constexpr (ALONE) {
        V dw = d[0] * w[0];
        for (int a = 1; a < DIM; ++a) dw = dw + d[a] * w[a];
        const V curvature = (REAL)-4 * beside(q.results[1] + k) * dw;
        for (int a = 0; a < DIM; ++a) part[4 + a] = curvature * d[a] + weight * w[a];
        for (int e = 0; e < ENTRIES; ++e) part[strain_slot(e)] = d[first(e)] * part[4 + second(e)];
        for (int g = 0; g < GRADIENTS; ++g) {
          const V rest = -dw * beside(q.results[2 + g] + k);
          if (GRADIENT_KIND[g] == TABLE) keep(q.results[2 + g] + k, rest);
          else part[slot(g)] = rest;
        }
        memcpy(theirs, part, sizeof theirs);
        for (int g = 0; g < GRADIENTS; ++g)
          if (GRADIENT_KIND[g] == ATOM) theirs[slot(g)] = -dw * beside(q.turned[g] + k);
      }
      for (int p = 0; p < QUADS; ++p) {
        const int64_t to = 4 * (p * q.size + k);
        spread(part[4 * p], part[4 * p + 1], part[4 * p + 2], part[4 * p + 3], q.terms[0] + to);
        if (has(ATOM, p))
          spread(theirs[4 * p], theirs[4 * p + 1], theirs[4 * p + 2], theirs[4 * p + 3], q.terms[1] + to);
      }
    }
  }

  // Add the terms of all pairs to the sums of their atoms.
  APART void add(const Queue q, int64_t filled) const {
    // What is stored might change the members of this, for all that compilers know.
    REAL *const sums = this->sums, *gradients[GRADIENTS + 1];
    for (int g = 0; g < GRADIENTS; ++g) gradients[g] = this->gradients[g];
    const int* const column = operands.column;
    const int64_t kinds = call.kinds;
    const bool few = kinds <= 4;
    Quad sign[QUADS];
    for (int p = 0; p < QUADS; ++p) sign[p] = p < VECTORS ? Quad{-1, -1, -1, 1} : Quad{1, 1, 1, 1};
    for (int64_t k = 0; k < filled;) {
      const int64_t i = q.mine[k];
      Quad own[QUADS], term, sum, by_kind[GRADIENTS + 1] = {};
      memcpy(own, sums + 4 * QUADS * i, sizeof own);
      const int64_t line = kinds * i, mine = TABLES ? column[i] : 0;
      for (int g = 0; g < GRADIENTS; ++g)
        for (int64_t e = 0; GRADIENT_KIND[g] == TABLE && few && e < kinds; ++e) by_kind[g][e] = gradients[g][line + e];
      for (; k < filled && q.mine[k] == i; ++k) {
        const int64_t j = q.other[k];
        REAL* other = sums + 4 * QUADS * j;
        for (int p = 0; p < QUADS; ++p) {
          const int64_t at = 4 * (p * q.size + k);
          memcpy(&term, q.terms[0] + at, sizeof term);
          own[p] += term;
          if (has(ATOM, p)) memcpy(&term, q.terms[1] + at, sizeof term);
          memcpy(&sum, other + 4 * p, sizeof sum);
          sum += term * sign[p];
          memcpy(other + 4 * p, &sum, sizeof sum);
        }
        for (int g = 0; g < GRADIENTS; ++g) {
          if (GRADIENT_KIND[g] != TABLE) continue;
          const REAL part = q.results[2 + g][k];
          const int kind = column[j];
          // A sum in memory would wait for the one before.
          if (few) by_kind[g] += ONE_OF_FOUR[kind] ? Quad{} + part : Quad{};
          else gradients[g][line + kind] += part;
          gradients[g][kinds * j + mine] += part;
        }
      }
      memcpy(sums + 4 * QUADS * i, own, sizeof own);
      for (int g = 0; g < GRADIENTS; ++g)
        for (int64_t e = 0; GRADIENT_KIND[g] == TABLE && few && e < kinds; ++e) gradients[g][line + e] = by_kind[g][e];
    }
  }

  // Store the sums of atoms where their rows are stored.
  void store(int64_t number) const {
    for (int64_t i = 0; i < call.atoms; ++i) {
      const REAL* sum = sums + 4 * QUADS * i;
      const View &f = call.force, &p = call.product, &virial = call.virial, &strain = call.strain;
      for (int a = 0; a < DIM; ++a) {
        f.data[number * f.system + i * f.atom + a * f.axis] = sum[a];
        if (ALONE) p.data[number * p.system + i * p.atom + a * p.axis] = sum[4 + a];
      }
      // The two atoms of a pair share what it adds to the whole system.
      for (int e = 0; e < ENTRIES; ++e) {
        virial.data[number * virial.system + i * virial.atom + e * virial.axis] = (REAL)0.5 * sum[virial_slot(e)];
        if (ALONE)
          strain.data[number * strain.system + i * strain.atom + e * strain.axis] = (REAL)0.5 * sum[strain_slot(e)];
      }
      for (int g = 0; g < GRADIENTS; ++g)
        if (GRADIENT_KIND[g] != TABLE) gradients[g][number * call.atoms + i] = sum[slot(g)];
    }
  }
};

// Sum the pairs of all systems, which threads do not share. Returns whether there was memory.
static bool add_once(const Call& c, const List* lists, const bool* lost, const Operands* operands,
                     REAL* const* gradients) {
  const int64_t n = c.atoms;
  int64_t most = 0;
  for (int64_t b = 0; b < c.systems; ++b)
    for (int64_t i = 0; i < n && !lost[b]; ++i) most = lists[b].steps[i] > most ? lists[b].steps[i] : most;
  const int64_t size = Queue::room(most), bytes = Queue::bytes(size);
  Block<char> queues(c.threads * bytes);
  Block<REAL> sums(c.systems * n * 4 * QUADS);
  if (!queues.data || !sums.data) return false;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
  for (int64_t b = 0; b < c.systems; ++b) {
    if (lost[b]) continue;
    const auto shift = [&](const REAL* spacing, int64_t step) { return splat(spacing[b * step] * (REAL)0x1.8p52); };
    const V grid = GRID ? shift(c.spacing, c.spacing_step) : V{};
    const V virial_grid = GRID && STRAINED ? shift(c.virial_spacing, c.virial_spacing_step) : V{};
    const Cell cell(c.box + b * c.box_step);
    const Mutual system{c, cell, operands[b], lists[b], splat((REAL)(c.cutoff * c.cutoff)), grid, virial_grid,
                        NUMBERS, STRAINED && ALONE ? c.stretch + b * VIRIAL : nullptr, sums.data + b * n * 4 * QUADS, gradients};
    const Queue queue(queues.data + omp_get_thread_num() * bytes, size);
    for (int64_t from = 0, to = 0; from < n; from = to) {
      for (int64_t pairs = 0; to < n && pairs + lists[b].steps[to] <= size - 2 * W; ++to) pairs += lists[b].steps[to];
      const int64_t filled = system.fill(queue, from, to);
      system.evaluate(queue, filled);
      system.multiply(queue, filled);
      system.add(queue, filled);
    }
    system.store(b);
  }
  return true;
}
