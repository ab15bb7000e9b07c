// The sums over the neighbours of each atom. W atoms are side by side in a vector, and each has one
// neighbour at a time, in ascending order. So the sum of an atom is the same number whatever the
// list holds beyond the cutoff, however wide vectors are, and whichever thread computes it.
constexpr bool ALONE = MODE == PRODUCT && !SEVERAL;  // a product with one cotangent
constexpr bool FORCES = MODE == FORCE || MODE == PRODUCT;
#if defined(EXCLUDED) && !LISTED
#define MASKED
#endif

// The coordinates of the k-th entry of a virial, of its diagonal or row by row.
constexpr int first(int k) { return VIRIAL == DIM ? k : k / DIM; }
constexpr int second(int k) { return VIRIAL == DIM ? k : k % DIM; }

// W atoms with a neighbour each: the differences of positions, the factors of force and product, and
// which pairs a product with many cotangents takes. `slope` are the derivatives by operands, and those by
// the coefficients of functions at `place`; of a product with one cotangent they are multiplied with it.
struct Pairs {
  V d[3], weight, curvature, slope[GRADIENTS + LOOKUPS + 1], place[LOOKUPS + 1];
  Mask in;
  int other[W];
};

#if SEVERAL
COTANGENTS
#else
template <class System>
struct Steps;
#endif

// The sums of W atoms.
struct Sums {
  V force[3] = {}, product[3] = {}, energy = {}, gradient[GRADIENTS + 1] = {};
  V virial[VIRIAL] = {}, strain[VIRIAL] = {};

  // Add pairs, of which d is known: w are the differences of vectors, `valid` excludes the pair of an
  // atom with itself.
  template <bool CHECKED>
  inline void add(Pairs& pair, const V* w, const V* operands, const REAL* const* tables, Mask valid, V cutoff,
                  V grid, V virial_grid) {
    const V* d = pair.d;
    V *rest = pair.slope, *place = pair.place;
    const V s = SQUARED_DISTANCE;
    const V zero = {};
    V f[2 + GRADIENTS + 2 * LOOKUPS + 1];
    functions(s, operands, tables, f);
#if CUTOFF
    const Mask in = CHECKED ? (s < cutoff) & valid : s < cutoff;
#define INCLUDED(x) (in ? (x) : zero)
#else
    const Mask in = valid;
#define INCLUDED(x) (CHECKED ? (valid ? (x) : zero) : (x))
#endif
    if constexpr (FORCES) {
      const V weight = (REAL)-2 * INCLUDED(f[0]);
      for (int a = 0; a < DIM; ++a) {
#if GRID
        force[a] += (weight * d[a] + grid) - grid;
#else
        force[a] += weight * d[a];
#endif
      }
#if STRAINED
      for (int k = 0; k < VIRIAL; ++k) {
        const V part = weight * d[second(k)] * d[first(k)];
        virial[k] += GRID ? (part + virial_grid) - virial_grid : part;
      }
#endif
#if SEVERAL
      // A distance that is not finite is multiplied too, so that the products show it.
      pair.in = in | ((s * 0 != 0) & valid);
      pair.weight = weight, pair.curvature = (REAL)-4 * f[1];
      for (int g = 0; g < GRADIENTS; ++g) rest[g] = f[2 + g];
      for (int k = 0; k < LOOKUPS; ++k) {
        place[k] = f[2 + GRADIENTS + 2 * k];
        rest[GRADIENTS + k] = f[3 + GRADIENTS + 2 * k];
      }
#endif
      if constexpr (ALONE) {
        V dw = d[0] * w[0];
        for (int a = 1; a < DIM; ++a) dw = dw + d[a] * w[a];
        const V curvature = (REAL)-4 * INCLUDED(f[1]) * dw;
        for (int a = 0; a < DIM; ++a) {
          const V part = curvature * d[a] + weight * w[a];
          product[a] += part;
          if (STRAINED)
            for (int k = 0; k < VIRIAL; ++k)
              if (second(k) == a) strain[k] += d[first(k)] * part;
        }
        if constexpr (GRADIENTS > 0) {
#pragma GCC unroll 32
          for (int g = 0; g < GRADIENTS; ++g) {
            rest[g] = INCLUDED(-dw * f[2 + g]);
            if (GRADIENT_KIND[g] != TABLE) gradient[g] += rest[g];
          }
          for (int k = 0; k < LOOKUPS; ++k) {
            place[k] = f[2 + GRADIENTS + 2 * k];
            rest[GRADIENTS + k] = INCLUDED(-dw * f[3 + GRADIENTS + 2 * k]);
          }
        }
      }
    }
    if constexpr (MODE == ENERGY) energy += INCLUDED(f[0]);
    if constexpr (MODE == SLOPES) {
      for (int g = 0; g < GRADIENTS; ++g) {
        rest[g] = INCLUDED(f[g]);
        if (GRADIENT_KIND[g] != TABLE) gradient[g] += rest[g];
      }
      for (int k = 0; k < LOOKUPS; ++k) {
        place[k] = f[GRADIENTS + 2 * k];
        rest[GRADIENTS + k] = INCLUDED(f[GRADIENTS + 2 * k + 1]);
      }
    }
  }
};

// The operands of the atoms of one system, in the order of places.
struct Operands {
  const REAL* atoms[OPERANDS + 1];
  const REAL* tables[OPERANDS + 1];  // without a list, by entry()
  REAL few[OPERANDS + 1][W];  // with a list, the entries of tables that a vector holds
  const int* column;
};

// The place of a number of each atom and each kind of neighbour. Without a list a vector of atoms
// has one neighbour, so the numbers of its atoms are side by side.
static inline int64_t entry(int64_t atom, int64_t kinds, int64_t kind) {
  return LISTED ? kinds * atom + kind : (atom / W * kinds + kind) * W + atom % W;
}

// What one thread needs to evaluate blocks of one system.
struct System {
  const Call& call;
  const Cell& cell;
  const Operands& operands;
  int64_t number;
  const int* atom;
  const REAL* rows;
  V cutoff, grid, virial_grid;
  const V* stretch;  // the cotangent of the virial
  REAL* const* gradients;  // of each atom, for a table by entry()
  REAL* energies;
  V numbers[OPERANDS + 1];
  REAL* by_place;  // derivatives by the coefficients of functions
#if SEVERAL
  Cotangents* cotangents;
#endif
#ifdef MASKED
  const uint8_t* left_out;  // see pairs()
#endif

  // The entry of a table's derivatives by the pair of an atom with a neighbour.
  inline int64_t entry_of(int i, int j) const { return entry(atom[i], call.kinds, operands.column[j]); }

  // Add a neighbour of each of W atoms, of which the first `live` count. `row` is where the row of each
  // begins in a table.
  template <bool CHECKED>
  inline void step(const int* mine, const Places& row, int live, const int* other, const V* x, const V* v,
                   const V* own, Sums& sums, Steps<System>* steps) const {
    V y[3], u[3] = {}, w[3] = {}, found[SLOTS + 1];
#if SEVERAL
    Pairs& pair = steps->next();
#else
    Pairs pair;
#endif
    V *d = pair.d, *rest = pair.slope, *place = pair.place;
    const REAL* const tables[] = FUNCTIONS;
#if LISTED
    V packed;  // the numbers behind positions
    gather(rows, WIDTH, other, y[0], y[1], y[2], packed);
    if constexpr (ALONE) gather(rows + 4, other, u[0], u[1], u[2]);
#else
    for (int a = 0; a < 3; ++a) {
      y[a] = splat(rows[(int64_t)WIDTH * other[0] + a]);
      if (ALONE) u[a] = splat(rows[(int64_t)WIDTH * other[0] + 4 + a]);
    }
#endif
    for (int a = 0; a < 3; ++a) d[a] = x[a] - y[a], w[a] = v[a] - u[a];
    cell.nearest_image(d[0], d[1], d[2]);
#if STRAINED
    // A strain moves the two atoms of a pair apart in proportion to their distance.
    if constexpr (ALONE)
      for (int k = 0; k < VIRIAL; ++k) w[second(k)] += stretch[k] * d[first(k)];
#endif
    LOAD_OPERANDS
    Mask valid = ~Mask{};
#ifdef MASKED
    if constexpr (CHECKED) {
      const uint8_t bits = left_out[(int64_t)(mine[0] / W) * call.atoms + other[0]];
      for (int l = 0; l < W; ++l) valid[l] = bits >> l & 1 ? 0 : -1;
    }
#else
    if constexpr (CHECKED)
      for (int l = 0; l < W; ++l) valid[l] = mine[l] == other[l] ? 0 : -1;
#endif
    sums.add<CHECKED>(pair, w, found, tables, valid, cutoff, grid, virial_grid);
#if SEVERAL
    memcpy(pair.other, other, sizeof pair.other);
    steps->keep();
    return;
#endif
    for (int k = 0; k < LOOKUPS; ++k)
      for (int l = 0; l < live; ++l) {
        const REAL x = rest[GRADIENTS + k][l];
        by_place[BEGIN[LOOKUP_GRADIENT[k]] + (int64_t)place[k][l]] +=
            MODE == SLOPES ? (REAL)0.5 * call.weight[number] * x : x;
      }
    if constexpr (TABLES && GRADIENTS > 0)
      for (int g = 0; g < GRADIENTS; ++g) {
        if (GRADIENT_KIND[g] != TABLE) continue;
        const V part = MODE == SLOPES ? (REAL)0.5 * call.weight[number] * rest[g] : rest[g];
#if LISTED
        for (int l = 0; l < live; ++l)
          if (!CHECKED || valid[l])
            gradients[g][entry_of(mine[l], other[l])] += part[l];
#else
        V sum;
        REAL* place = gradients[g] + entry_of(mine[0], other[0]);
        memcpy(&sum, place, sizeof sum);
        sum += part;
        memcpy(place, &sum, sizeof sum);
#endif
      }
  }

  APART void block(int64_t first, const List* list, int64_t b) const {
    int mine[W];
    const int live = (int)(call.atoms - first < W ? call.atoms - first : W);
    const int64_t last = call.atoms - 1;
    for (int l = 0; l < W; ++l) mine[l] = (int)(first + l < last ? first + l : last);
    V x[3], v[3] = {};
    gather(rows, mine, x[0], x[1], x[2]);
    if constexpr (ALONE) gather(rows + 4, mine, v[0], v[1], v[2]);
    Places row = {};
    for (int l = 0; TABLES && l < W; ++l) row[l] = call.kinds * operands.column[mine[l]];
    V own[OPERANDS + 1];
    for (int k = 0; k < OPERANDS; ++k)
      if (KIND[k] == ATOM)
        for (int l = 0; l < W; ++l) own[k][l] = operands.atoms[k][mine[l]];
    Sums sums;
    Steps<System>* steps = nullptr;
#if SEVERAL
    Steps<System> waiting(*this, mine, live);
    steps = &waiting;
#endif
#if LISTED
    const int* index = list->index + list->start[b];
    int64_t k = 0;
    for (; k < list->full[b]; ++k) step<false>(mine, row, live, index + k * W, x, v, own, sums, steps);
    for (; k < list->steps[b]; ++k) step<true>(mine, row, live, index + k * W, x, v, own, sums, steps);
#elif defined(MASKED)
    const uint8_t* bits = left_out + b * call.atoms;
    int other[W];
    for (int64_t j = 0; j < call.atoms; ++j) {
      for (int l = 0; l < W; ++l) other[l] = (int)j;
      if (bits[j]) step<true>(mine, row, live, other, x, v, own, sums, steps);
      else step<false>(mine, row, live, other, x, v, own, sums, steps);
    }
#else
    // The vector holds atoms whose numbers follow each other, and the last atom fills it up.
    int64_t j = 0;
    int other[W];
    const int64_t stop = first + live;
    for (; j < first; ++j) {
      for (int l = 0; l < W; ++l) other[l] = (int)j;
      step<false>(mine, row, live, other, x, v, own, sums, steps);
    }
    for (; j < stop; ++j) {
      for (int l = 0; l < W; ++l) other[l] = (int)j;
      step<true>(mine, row, live, other, x, v, own, sums, steps);
    }
    for (; j < call.atoms; ++j) {
      for (int l = 0; l < W; ++l) other[l] = (int)j;
      step<false>(mine, row, live, other, x, v, own, sums, steps);
    }
#endif
#if SEVERAL
    steps->finish();
#endif
    for (int l = 0; l < live; ++l) {
      const int i = atom[first + l];
#if STRAINED
      for (int k = 0; FORCES && k < VIRIAL; ++k) {
        // The two atoms of a pair share what it adds to the whole system.
        const View &virial = call.virial, &strain = call.strain;
        virial.data[number * virial.system + i * virial.atom + k * virial.axis] =
            (REAL)0.5 * sums.virial[k][l];
        if constexpr (ALONE)
          strain.data[number * strain.system + i * strain.atom + k * strain.axis] =
              (REAL)0.5 * sums.strain[k][l];
      }
#endif
      if constexpr (FORCES)
        for (int a = 0; a < DIM; ++a) {
          const View& f = call.force;
          f.data[number * f.system + i * f.atom + a * f.axis] = sums.force[a][l];
          const View& p = call.product;
          if constexpr (ALONE)
            p.data[number * p.system + i * p.atom + a * p.axis] = sums.product[a][l];
        }
      if constexpr (MODE == ENERGY) energies[number * call.atoms + i] = sums.energy[l];
      for (int g = 0; g < GRADIENTS; ++g)
        if (GRADIENT_KIND[g] != TABLE && !SEVERAL) gradients[g][number * call.atoms + i] = sums.gradient[g][l];
    }
  }
};

#if MUTUAL
MUTUAL_SUMS
#endif

static void fill(const View& view, const Call& c, int64_t system, REAL value, int64_t width = DIM,
                 int64_t cotangents = 1) {
  for (int64_t r = 0; r < cotangents; ++r)
    for (int64_t i = 0; i < c.atoms; ++i)
      for (int64_t a = 0; a < width; ++a)
        view.data[r * view.cotangent + system * view.system + i * view.atom + a * view.axis] = value;
}

// Returns 0, 1 without memory, 3 for a species without a row, or 4 for an exclusion of an atom that
// there is not.
extern "C" ONCE int pairs(const Call* given) {
  Call c = *given;
  for (int64_t i = 0; i < c.atoms && TABLES && c.species; ++i)
    if (c.species[i] < 0 || c.species[i] >= c.kinds) return 3;
#ifdef EXCLUDED
  for (int64_t k = 0; k < 2 * c.excluded; ++k)
    if (c.exclusions[k] < 0 || c.exclusions[k] >= c.atoms) return 4;
#endif
  const int64_t n = c.atoms, blocks = (n + W - 1) / W, tasks = c.systems * blocks;
  const Cell shared(c.box);
  constexpr bool ROWS = TABLES && GRADIENTS > 0;
  // Threads that share a system have atoms of their own, and each evaluates the pairs of its atoms.
  c.mutual = MUTUAL && (c.threads == 1 || (!ROWS && c.systems >= c.threads));
  const int64_t R = SEVERAL ? (c.cotangents + W - 1) / W * W : 1, M = SEVERAL ? c.cotangents : 1;
  // Sums over the neighbours of each atom: of one system after another, or a row of a table.
  const int64_t each = blocks * W * (ROWS && c.kinds > c.systems ? c.kinds : c.systems);
  Block<REAL> sums(GRADIENTS * each * R), totals(R), energies(MODE == ENERGY ? c.systems * n : 0);
  // The rows of a table have one sum an atom for all systems, which threads must not share, and
  // which takes the systems in order.
  const int64_t rounds = ROWS ? c.systems : 1, width = ROWS ? blocks : tasks;
  // Threads must not share the sums of coefficients either, so each part of the tasks has its own.
  const int64_t parts = LOOKUPS > 0 && width > PARTS ? PARTS : width;
  Block<REAL> by_place(LOOKUPS > 0 ? parts * BEGIN[GRADIENTS] * R : 0);
  // Systems have their own order of places with a list, and one order without.
  const int64_t orders = LISTED ? c.systems : 1;
  Block<REAL> values(ATOMS ? orders * OPERANDS * n : 0);
  Block<REAL> tables(TABLES && !LISTED ? OPERANDS * blocks * W * c.kinds : 0);
  Block<int> columns(TABLES ? orders * n : 0);
  Block<Operands> operands(orders);
  Block<bool> lost(c.systems);  // Systems with a position that is not finite.
#if SEVERAL
  Cotangents cotangents(c, R);
  if (!cotangents.allocated()) return 1;
#endif
  if (!sums.data || !totals.data || !energies.data || !values.data || !tables.data || !columns.data || !operands.data || !lost.data ||
      !by_place.data)
    return 1;
  REAL* gradients[GRADIENTS + 1] = {};
  for (int g = 0; g < GRADIENTS; ++g) gradients[g] = sums.data + g * each * R;
#if LISTED
  const List* lists;
  const auto order_of = [&](int64_t b) { return lists[b].atom; };
  void* held = c.acquire(&c, WIDTH, &lists);
  if (!held) return 1;
  for (int64_t b = 0; b < c.systems; ++b) lost.data[b] = !lists[b].atom;
#else
  Block<REAL> packed(c.systems * n * WIDTH);
  Block<int> identity(n);
  const auto order_of = [&](int64_t) { return (const int*)identity.data; };
  if (!packed.data || !identity.data) return 1;
#ifdef MASKED
  // For each block and each atom, which atoms of the block, by bits, do not interact with it.
  Block<uint8_t> left_out(blocks * n);
  if (!left_out.data) return 1;
  const auto leave_out = [&](int64_t i, int64_t j) { left_out.data[i / W * n + j] |= 1 << i % W; };
  for (int64_t i = 0; i < n; ++i) leave_out(i, i);
  for (int64_t k = 0; k < c.excluded; ++k) {
    const int64_t i = c.exclusions[2 * k], j = c.exclusions[2 * k + 1];
    leave_out(i, j), leave_out(j, i);
  }
#endif
  for (int64_t i = 0; i < n; ++i) identity.data[i] = (int)i;
  for (int64_t b = 0; b < c.systems; ++b)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t a = 0; a < DIM; ++a) {
        const View &p = c.position, &v = c.vector;
        REAL* row = packed.data + (b * n + i) * WIDTH;
        row[a] = p.data[b * p.system + i * p.atom + a * p.axis];
        if (ALONE) row[4 + a] = v.data[b * v.system + i * v.atom + a * v.axis];
      }
#endif
  for (int64_t b = 0; b < orders && (ATOMS || TABLES); ++b) {
    if (lost.data[b]) continue;
    const int* atom = order_of(b);
    Operands& mine = operands.data[b];
    int* column = columns.data + b * n;
    for (int64_t p = 0; p < n && TABLES; ++p)
      column[p] = c.species ? (int)c.species[atom[p]] : atom[p];
    mine.column = column;
    for (int k = 0; k < OPERANDS; ++k) {
      REAL* value = values.data + (b * OPERANDS + k) * n;
      if (KIND[k] == ATOM)
        for (int64_t p = 0; p < n; ++p) value[p] = c.operands[k][atom[p]];
      mine.atoms[k] = value;
#if LISTED
      for (int64_t p = 0; k == PACKED && p < n; ++p) lists[b].rows[p * WIDTH + 3] = value[p];
      const int64_t entries = KIND[k] == TABLE ? c.kinds * c.kinds : 0;
      for (int64_t e = 0; entries <= W && e < entries; ++e) mine.few[k][e] = c.operands[k][e];
#endif
      REAL* table = tables.data + k * blocks * W * c.kinds;
      if (KIND[k] == TABLE && !LISTED)
        for (int64_t p = 0; p < n; ++p)
          for (int64_t kind = 0; kind < c.kinds; ++kind)
            table[entry(p, c.kinds, kind)] = c.operands[k][c.kinds * column[p] + kind];
      mine.tables[k] = table;
    }
  }
#if SEVERAL
  for (int64_t b = 0; b < c.systems; ++b)
    if (!lost.data[b]) cotangents.load(c, b, order_of(b));
#endif
#if MUTUAL
  if (c.mutual && !add_once(c, lists, lost.data, operands.data, gradients)) {
    c.release(held);
    return 1;
  }
#endif
  for (int64_t round = 0; round < (c.mutual ? 0 : rounds); ++round)
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int64_t part = 0; part < parts; ++part)
    for (int64_t task = part * width / parts; task < (part + 1) * width / parts; ++task) {
      const int64_t b = ROWS ? round : task % c.systems, block = ROWS ? task : task / c.systems;
      if (lost.data[b]) continue;
      const V cutoff = splat((REAL)(c.cutoff * c.cutoff));
      const V grid = splat(GRID ? c.spacing[b * c.spacing_step] * (REAL)0x1.8p52 : 0);
      const V virial_grid = splat(
          GRID && STRAINED ? c.virial_spacing[b * c.virial_spacing_step] * (REAL)0x1.8p52 : 0);
      V stretch[VIRIAL] = {};
#if STRAINED
      for (int k = 0; ALONE && k < VIRIAL; ++k) stretch[k] = splat(c.stretch[b * VIRIAL + k]);
      const Cell cell(c.box + b * c.box_step);
#else
      const Cell& cell = shared;
#endif
#if LISTED
      const List* list = &lists[b];
      const REAL* rows = list->rows;
#else
      const List* list = nullptr;
      const REAL* rows = packed.data + b * n * WIDTH;
#endif
      const System system{c,      cell, operands.data[LISTED ? b : 0], b, order_of(b), rows, cutoff, grid, virial_grid,
                          stretch, gradients, energies.data, NUMBERS, by_place.data + part * BEGIN[GRADIENTS] * R
#if SEVERAL
                          , &cotangents
#endif
#ifdef MASKED
                          , left_out.data
#endif
      };
      system.block(block * W, list, block);
    }
#if LISTED
  c.release(held);
#endif
  for (int64_t b = 0; b < c.systems; ++b) {
    const REAL nan = (REAL)NAN;
    if (FORCES && lost.data[b]) fill(c.force, c, b, nan);
    if (MODE == PRODUCT && lost.data[b]) fill(c.product, c, b, nan, DIM, M);
    if (STRAINED && FORCES && lost.data[b]) fill(c.virial, c, b, nan, VIRIAL);
    if (STRAINED && MODE == PRODUCT && lost.data[b]) fill(c.strain, c, b, nan, VIRIAL, M);
    if (MODE == ENERGY) {
      REAL total = 0;
      for (int64_t i = 0; i < n; ++i) total += energies.data[b * n + i];
      c.energy[b] = lost.data[b] ? nan : (REAL)0.5 * total;
    }
  }
  bool any_lost = false;
  for (int64_t b = 0; b < c.systems; ++b) any_lost |= lost.data[b];
  for (int g = 0; g < GRADIENTS; ++g) {
    REAL* out = c.gradients[g];
    const Kind kind = GRADIENT_KIND[g];
    const int64_t size = kind == NUMBER     ? 1
                         : kind == ATOM     ? n
                         : kind == FUNCTION ? LENGTH[g]
                                            : c.kinds * c.kinds;
    for (int64_t k = 0; k < M * size; ++k) out[k] = any_lost ? (REAL)NAN : 0;
    if (any_lost) continue;
    // Sums of all cotangents are side by side, results follow each other.
    const auto add = [&](int64_t k, const REAL* x, REAL scale) {
      for (int64_t r = 0; r < M; ++r) out[r * size + k] += scale * x[r];
    };
    if (kind == FUNCTION) {
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t k = 0; k < size; ++k) add(k, by_place.data + (part * BEGIN[GRADIENTS] + BEGIN[g] + k) * R, 1);
      continue;
    }
    if (kind == TABLE) {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < c.kinds; ++k)
          add(c.kinds * (c.species ? c.species[i] : i) + k, gradients[g] + entry(i, c.kinds, k) * R, 1);
      continue;
    }
    for (int64_t b = 0; b < c.systems; ++b) {
      const REAL scale = MODE == SLOPES ? (REAL)0.5 * c.weight[b] : 1;
      for (int64_t r = 0; r < R; ++r) totals.data[r] = 0;
      for (int64_t i = 0; i < n; ++i) {
        const REAL* x = gradients[g] + (b * n + i) * R;
        if (kind == ATOM) add(i, x, scale);
        for (int64_t r = 0; r < M && kind == NUMBER; ++r) totals.data[r] += x[r];
      }
      if (kind == NUMBER) add(0, totals.data, scale);
    }
  }
  return 0;
}
