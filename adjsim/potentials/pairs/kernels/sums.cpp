// Sums over the neighbours of each atom of terms that read numbers of both atoms. As in rows.cpp, W
// atoms are side by side and each takes its neighbours in ascending order, so a sum is the same
// number whatever the list holds beyond the cutoff.

// Of the numbers of other atoms, those that the terms read: in groups of four, by place.
constexpr int READ[] = {READ_OF_OTHERS, -1};
constexpr int64_t STRIDE = 4 * GROUPS;

struct Terms {
  const Call& call;
  const Cell cell;
  const int* atom;
  const REAL *rows, *values, *numbers;
  V cutoff;

  // Add the terms of a neighbour of each of W atoms.
  template <bool CHECKED>
  inline void step(const int* mine, const int* other, const V* x, const V* own, V* sums) const {
    V y[3], d[3], read[STRIDE + 1], found[SLOTS + 1], term[SUMS];
    gather(rows, other, y[0], y[1], y[2]);
    for (int a = 0; a < 3; ++a) d[a] = x[a] - y[a];
    cell.nearest_image(d[0], d[1], d[2]);
    const V s = SQUARED_DISTANCE;
    for (int g = 0; g < GROUPS; ++g) {
      V* at = read + 4 * g;
      gather(values + 4 * g, STRIDE, other, at[0], at[1], at[2], at[3]);
    }
    LOAD_NUMBERS
    functions(s, found, nullptr, term);
    Mask in = s < cutoff;
    if constexpr (CHECKED)
      for (int l = 0; l < W; ++l) in[l] = mine[l] == other[l] ? 0 : in[l];
    const V zero = {};
    for (int k = 0; k < SUMS; ++k) sums[k] += in ? term[k] : zero;
  }

  APART void block(const List& list, int64_t b, REAL* out, int64_t apart) const {
    int mine[W];
    const int64_t first = b * W, last = call.atoms - 1;
    for (int l = 0; l < W; ++l) mine[l] = (int)(first + l < last ? first + l : last);
    V x[3], own[NUMBERS + 1], sums[SUMS] = {};
    gather(rows, mine, x[0], x[1], x[2]);
    for (int k = 0; k < NUMBERS; ++k)
      for (int l = 0; l < W; ++l) own[k][l] = numbers[k * apart + atom[mine[l]]];
    const int* index = list.index + list.start[b];
    int64_t k = 0;
    for (; k < list.full[b]; ++k) step<false>(mine, index + k * W, x, own, sums);
    for (; k < list.steps[b]; ++k) step<true>(mine, index + k * W, x, own, sums);
    for (int l = 0; l < W && first + l <= last; ++l)
      for (int m = 0; m < SUMS; ++m) out[m * apart + atom[first + l]] = sums[m][l];
  }
};

// Returns 0, 1 without memory, or 4 for an exclusion of an atom that there is not. Numbers are the
// first operand, (NUMBERS, systems, atoms), and tables the others; the sums, (SUMS, systems, atoms),
// are NaN in systems with a position that is not finite.
extern "C" ONCE int pair_sums(const Call* given) {
  const Call& c = *given;
  for (int64_t k = 0; k < 2 * c.excluded; ++k)
    if (c.exclusions[k] < 0 || c.exclusions[k] >= c.atoms) return 4;
  const int64_t n = c.atoms, blocks = (n + W - 1) / W, tasks = c.systems * blocks;
  Block<REAL> values(c.systems * n * STRIDE);
  const List* lists;
  void* held = values.data ? c.acquire(given, WIDTH, &lists) : nullptr;
  if (!held) return 1;
  REAL* out = c.gradients[0];
  for (int64_t b = 0; b < c.systems; ++b) {
    const int* atom = lists[b].atom;
    for (int64_t i = 0; i < n && !atom; ++i)
      for (int m = 0; m < SUMS; ++m) out[(m * c.systems + b) * n + i] = (REAL)NAN;
    for (int k = 0; READ[k] >= 0 && atom; ++k)
      for (int64_t p = 0; p < n; ++p)
        values.data[(b * n + p) * STRIDE + k] = c.operands[0][(READ[k] * c.systems + b) * n + atom[p]];
  }
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t b = task / blocks;
    const List& list = lists[b];
    if (!list.atom) continue;
    const Terms terms{c, Cell(c.box + b * c.box_step), list.atom, list.rows, values.data + b * n * STRIDE,
                      c.operands[0] + b * n, splat((REAL)(c.cutoff * c.cutoff))};
    terms.block(list, task % blocks, out + b * n, c.systems * n);
  }
  c.release(held);
  return 0;
}
