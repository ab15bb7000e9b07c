// Neighbour lists, which are a cache: a list is used while it contains every pair within the cutoff,
// and built again when atoms have moved too far. It contains them as long as the two largest
// displacements since it was built sum to less than the skin. A list is found by its size and cell,
// and is checked at every use, so nobody has to keep it or to say that it is out of date.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <vector>
#if defined(__AVX512F__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace {

struct Built {
  std::vector<int> atom, place, index;
  std::vector<int64_t> start, steps, full;
  std::vector<REAL> at, rows;  // positions of the build and of now, by place
};

// Lists are kept up to this number, and up to this size unless one alone is larger.
constexpr size_t KEPT = 16, BYTES = (size_t)1 << 28;

struct Slot {
  int64_t systems, atoms, dim;
  double reach;
  std::vector<REAL> box;
  std::vector<Built> built;
  std::vector<List> lists;
  bool busy = false;
};

std::list<Slot> slots;  // the last used first
std::mutex guard;
int64_t builds = 0;

bool same(const Slot& s, const Call& c, int64_t entries) {
  return s.systems == c.systems && s.atoms == c.atoms && s.dim == c.dim &&
         s.reach == c.cutoff + c.skin && (int64_t)s.box.size() == entries &&
         (entries == 0 || !std::memcmp(s.box.data(), c.box, entries * sizeof(REAL)));
}

// Copy positions (and vectors) in the order of places. Returns the sum of the two largest
// displacements since the build, which is infinite or NaN where a position is not finite.
REAL pack(Built& b, const Call& c, int64_t system, int64_t width, bool compare) {
  const int64_t n = c.atoms, dim = c.dim;
  b.rows.resize(n * width + 8);
  REAL first = 0, second = 0, bad = 0;
  for (int64_t p = 0; p < n; ++p) {
    const View &q = c.position, &v = c.vector;
    const REAL* from = q.data + system * q.system + b.atom[p] * q.atom;
    REAL* row = b.rows.data() + p * width;
    REAL moved = 0;
    for (int64_t a = 0; a < dim; ++a) {
      row[a] = from[a * q.axis];
      const REAL d = row[a] - (compare ? b.at[p * dim + a] : 0);
      moved += d * d;
    }
    bad += moved * 0;
    second = std::max(second, std::min(first, moved));
    first = std::max(first, moved);
    if (width == 8) {
      const REAL* w = v.data + system * v.system + b.atom[p] * v.atom;
      for (int64_t a = 0; a < dim; ++a) row[4 + a] = w[a * v.axis];
    }
  }
  return std::sqrt(first) + std::sqrt(second) + bad;
}

struct Grid {
  int64_t cells[3] = {1, 1, 1}, reach[3] = {0, 0, 0};
  double fraction[3][3] = {}, rows[3][3] = {}, origin[3] = {};
  bool periodic = false;
};

// Cells that are at least as wide as the reach, if the system is wide enough.
Grid divide(const Call& c, const Slot& s, const std::vector<double>& q, double reach) {
  Grid g;
  const int64_t dim = c.dim, n = c.atoms;
  double widths[3] = {1, 1, 1};
  const int64_t most = std::max<int64_t>(1, (int64_t)std::pow((double)n, 1.0 / dim) + 1);
  g.periodic = !s.box.empty();
  if (!g.periodic) {
    for (int64_t a = 0; a < dim; ++a) {
      double low = q[a], high = q[a];
      for (int64_t i = 0; i < n; ++i) low = std::min(low, q[i * 3 + a]), high = std::max(high, q[i * 3 + a]);
      g.origin[a] = low;
      widths[a] = std::max(high - low, 1e-300);
      g.fraction[a][a] = 1 / widths[a];
    }
  } else if ((int64_t)s.box.size() == dim) {
    for (int64_t a = 0; a < dim; ++a) {
      widths[a] = g.rows[a][a] = s.box[a];
      g.fraction[a][a] = 1 / widths[a];
    }
  } else {
    double r[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}, m[3][3];
    for (int64_t a = 0; a < dim; ++a)
      for (int64_t b = 0; b < dim; ++b) r[a][b] = s.box[a * dim + b];
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b)
        m[a][b] = r[(a + 1) % 3][(b + 1) % 3] * r[(a + 2) % 3][(b + 2) % 3] -
                  r[(a + 1) % 3][(b + 2) % 3] * r[(a + 2) % 3][(b + 1) % 3];
    const double size = r[0][0] * m[0][0] + r[0][1] * m[0][1] + r[0][2] * m[0][2];
    for (int64_t a = 0; a < dim; ++a) {
      double norm = 0;
      for (int64_t b = 0; b < dim; ++b) {
        g.rows[a][b] = r[a][b];
        g.fraction[a][b] = m[a][b] / size;
        norm += g.fraction[a][b] * g.fraction[a][b];
      }
      widths[a] = 1 / std::sqrt(norm);
    }
  }
  for (int64_t a = 0; a < dim; ++a) {
    g.cells[a] = std::max<int64_t>(1, std::min(most, (int64_t)(widths[a] / reach)));
    // Neighbours are this many cells away at most. Without a cell to repeat, one cell has none.
    g.reach[a] = g.cells[a] == 1 && !g.periodic
                     ? 0
                     : (int64_t)std::ceil(reach / (widths[a] / g.cells[a]) * (1 - 1e-12));
  }
  return g;
}

// Write the ids of the points within a squared distance; arrays have room for eight more numbers.
inline int64_t within(double x, double y, double z, const double* X, const double* Y, const double* Z, int64_t m,
                      const int* ids, double limit, double* squared, int* out) {
  int64_t end = 0;
#if defined(__AVX512F__) && defined(__AVX512VL__)
  const __m512d xs = _mm512_set1_pd(x), ys = _mm512_set1_pd(y), zs = _mm512_set1_pd(z), most = _mm512_set1_pd(limit);
  for (int64_t j = 0; j < m; j += 8) {
    const __m512d dx = xs - _mm512_loadu_pd(X + j), dy = ys - _mm512_loadu_pd(Y + j), dz = zs - _mm512_loadu_pd(Z + j);
    __mmask8 near = _mm512_cmp_pd_mask(dx * dx + dy * dy + dz * dz, most, _CMP_LT_OQ);
    if (m - j < 8) near &= (1 << (m - j)) - 1;
    _mm256_storeu_si256((__m256i*)(out + end), _mm256_maskz_compress_epi32(near, _mm256_loadu_si256((const __m256i*)(ids + j))));
    end += __builtin_popcount(near);
  }
#else
  for (int64_t j = 0; j < m; ++j) {
    const double dx = x - X[j], dy = y - Y[j], dz = z - Z[j];
    squared[j] = dx * dx + dy * dy + dz * dz;
  }
  for (int64_t j = 0; j < m; ++j) {
    out[end] = ids[j];
    end += squared[j] < limit;
  }
#endif
  return end;
}

// Memory of a thread for builds, kept from one to the next unless it is large.
struct Scratch {
  std::vector<int> pairs, all;
};
thread_local Scratch scratch;

void build(Built& b, const Call& c, const Slot& s, int64_t system) {
  const int64_t n = c.atoms, dim = c.dim;
  std::vector<double> q(3 * n), wrapped(3 * n);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t a = 0; a < dim; ++a) {
      const View& v = c.position;
      q[3 * i + a] = v.data[system * v.system + i * v.atom + a * v.axis];
    }
  // Differences of positions far from the box are rounded, in the type of the positions.
  double largest = 0;
  for (double x : q) largest = std::max(largest, std::fabs(x));
  const double reach = s.reach + 16 * largest * std::numeric_limits<REAL>::epsilon();
  const Grid g = divide(c, s, q, reach);
  const int64_t total = g.cells[0] * g.cells[1] * g.cells[2];
  // Places are sorted by cell, so that neighbours are close to each other in memory.
  std::vector<int64_t> cell(n), head(total + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    int64_t k = 0;
    double f[3] = {}, x[3] = {};
    for (int64_t a = 0; a < dim; ++a) {
      for (int64_t e = 0; e < dim; ++e) f[a] += (q[3 * i + e] - g.origin[e]) * g.fraction[a][e];
      if (g.periodic) f[a] -= std::floor(f[a]);
      k = k * g.cells[a] + std::clamp<int64_t>((int64_t)(f[a] * g.cells[a]), 0, g.cells[a] - 1);
    }
    for (int64_t e = 0; e < dim; ++e) {
      x[e] = q[3 * i + e];
      if (g.periodic) {
        x[e] = 0;
        for (int64_t a = 0; a < dim; ++a) x[e] += f[a] * g.rows[a][e];
      }
      wrapped[3 * i + e] = x[e];
    }
    cell[i] = k;
    ++head[k + 1];
  }
  for (int64_t k = 0; k < total; ++k) head[k + 1] += head[k];
  b.atom.resize(n), b.place.resize(n);
  std::vector<double> x[3];
  for (auto& column : x) column.resize(n + 8);
  std::vector<int> places(n + 8);
  for (int64_t p = 0; p < n; ++p) places[p] = (int)p;
  {
    std::vector<int64_t> next(head.begin(), head.end() - 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t p = next[cell[i]]++;
      b.atom[p] = (int)i, b.place[i] = (int)p;
      for (int a = 0; a < 3; ++a) x[a][p] = wrapped[3 * i + a];
    }
  }
  // Half of the pairs, by place of the first atom. Where cells are few, an atom may meet several
  // images of another, and is counted once.
  bool half = true;
  for (int64_t a = 0; a < dim; ++a) half &= !g.periodic || g.cells[a] >= 2 * g.reach[a] + 1;
  const bool few = !half && (int64_t)s.box.size() == dim;
  const double limit = reach * reach * (1 + 1e-12);
  std::vector<int>&pairs = scratch.pairs, &all = scratch.all;
  std::vector<int> met(half ? 0 : n, -1);
  int64_t found = 0;
  std::vector<int64_t> begin(n + 1), count(n, 0);
  std::vector<double> near[3], image[3], squared;
  std::vector<int> who;
  int64_t at[3];
  for (at[0] = 0; at[0] < g.cells[0]; ++at[0])
    for (at[1] = 0; at[1] < g.cells[1]; ++at[1])
      for (at[2] = 0; at[2] < g.cells[2]; ++at[2]) {
        const int64_t own = (at[0] * g.cells[1] + at[1]) * g.cells[2] + at[2];
        const int64_t low = head[own], high = head[own + 1];
        if (low == high) continue;
        who.clear();
        for (auto& column : near) column.clear();
        int64_t o[3];
        for (o[0] = -g.reach[0]; o[0] <= g.reach[0]; ++o[0])
          for (o[1] = -g.reach[1]; o[1] <= g.reach[1]; ++o[1])
            for (o[2] = -g.reach[2]; o[2] <= g.reach[2]; ++o[2]) {
              const bool ahead = o[0] > 0 || (o[0] == 0 && (o[1] > 0 || (o[1] == 0 && o[2] > 0)));
              if (few || (half && !ahead)) continue;
              int64_t k = 0;
              double shift[3] = {};
              bool outside = false;
              for (int64_t a = 0; a < 3; ++a) {
                int64_t m = at[a] + o[a], turns = 0;
                while (m < 0) m += g.cells[a], --turns;
                while (m >= g.cells[a]) m -= g.cells[a], ++turns;
                outside |= turns != 0 && !g.periodic;
                for (int64_t e = 0; e < dim; ++e) shift[e] += turns * g.rows[a][e];
                k = k * g.cells[a] + m;
              }
              if (outside) continue;
              for (int64_t j = head[k]; j < head[k + 1]; ++j) {
                who.push_back((int)j);
                for (int a = 0; a < 3; ++a) near[a].push_back(x[a][j] + shift[a]);
              }
            }
        const int64_t others = (int64_t)who.size(), inside = half ? high - low : 0;
        squared.resize(std::max(others, inside));
        for (auto& column : near) column.resize(others + 8);
        who.resize(others + 8);
        for (int64_t i = low; i < high; ++i) {
          begin[i] = found;
          const double xi = x[0][i], yi = x[1][i], zi = x[2][i];
          const auto keep = [&](const double* X, const double* Y, const double* Z, int64_t m, const int* ids) {
            if ((int64_t)pairs.size() < found + m + 8) pairs.resize(2 * found + m + 8);
            found += within(xi, yi, zi, X, Y, Z, m, ids, limit, squared.data(), pairs.data() + found);
          };
          if (half)
            keep(x[0].data() + i + 1, x[1].data() + i + 1, x[2].data() + i + 1, high - i - 1, places.data() + i + 1);
          keep(near[0].data(), near[1].data(), near[2].data(), others, who.data());
          if (few) {
            // The nearest images of the atoms that follow.
            for (auto& column : image) column.resize(n + 8);
            const int64_t m = n - i - 1;
            for (int64_t a = 0; a < dim; ++a) {
              const double length = g.rows[a][a], inverse = 1 / length, mine = x[a][i];
              const double* from = x[a].data() + i + 1;
              double* to = image[a].data();
              for (int64_t j = 0; j < m; ++j) {
                const double d = from[j] - mine;
                to[j] = mine + (d - length * std::nearbyint(d * inverse));
              }
            }
            squared.resize(n);
            keep(image[0].data(), image[1].data(), image[2].data(), m, places.data() + i + 1);
          }
          if (!half && !few) {
            int64_t end = begin[i];
            for (int64_t k = begin[i]; k < found; ++k) {
              const int j = pairs[k];
              if (j > i && met[j] != (int)i) met[j] = (int)i, pairs[end++] = j;
            }
            found = end;
          }
          count[i] += found - begin[i];
          for (int64_t k = begin[i]; k < found; ++k) ++count[pairs[k]];
        }
      }
  begin[n] = found;
  // All neighbours of each atom, in any order.
  std::vector<int64_t> row(n + 1, 0), next(n);
  for (int64_t i = 0; i < n; ++i) row[i + 1] = row[i] + count[i];
  std::copy(row.begin(), row.end() - 1, next.begin());
  if ((int64_t)all.size() < row[n]) all.resize(row[n]);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = begin[i]; k < begin[i + 1]; ++k) {
      const int j = pairs[k];
      all[next[i]++] = j, all[next[j]++] = (int)i;
    }
  // Atoms enter the rows of their neighbours in ascending order.
  const int64_t blocks = (n + W - 1) / W;
  b.start.resize(blocks), b.steps.resize(blocks), b.full.resize(blocks);
  int64_t size = 0;
  for (int64_t k = 0; k < blocks; ++k) {
    int64_t most = 0, least = (k + 1) * W <= n ? INT64_MAX : 0;
    for (int64_t i = k * W; i < std::min(n, (k + 1) * W); ++i)
      most = std::max(most, count[i]), least = std::min(least, count[i]);
    b.start[k] = size, b.steps[k] = most, b.full[k] = least;
    size += most * W;
  }
  b.index.resize(size);
  for (int64_t i = 0; i < n; ++i) next[i] = b.start[i / W] + i % W;
  int* index = b.index.data();
  for (int64_t i = 0; i < n; ++i) {
    const int p = b.place[i];
    for (int64_t k = row[p]; k < row[p + 1]; ++k) {
      int64_t& slot = next[all[k]];
      index[slot] = p;
      slot += W;
    }
  }
  for (int64_t i = 0; i < blocks * W; ++i) {
    const int64_t end = b.start[i / W] + b.steps[i / W] * W;
    const int64_t p = std::min(i, n - 1);
    for (int64_t k = i < n ? next[i] : b.start[i / W] + i % W; k < end; k += W) index[k] = (int)p;
  }
  if (pairs.size() + all.size() > BYTES / 16) scratch = Scratch();
  b.at.resize(n * dim);
  for (int64_t p = 0; p < n; ++p)
    for (int64_t a = 0; a < dim; ++a) b.at[p * dim + a] = (REAL)q[3 * b.atom[p] + a];
}

bool finite(const Call& c, int64_t system) {
  const View& q = c.position;
  for (int64_t i = 0; i < c.atoms; ++i)
    for (int64_t a = 0; a < c.dim; ++a)
      if (!std::isfinite(q.data[system * q.system + i * q.atom + a * q.axis])) return false;
  return true;
}

size_t bytes(const Slot& s) {
  size_t total = 0;
  if (s.busy) return 0;
  for (const Built& b : s.built)
    total += b.index.capacity() * sizeof(int) + (b.at.capacity() + b.rows.capacity()) * sizeof(REAL);
  return total;
}

void prepare(Slot& s, const Call& c, int64_t width) {
  int64_t built = 0, failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (c.threads > 1 && c.systems > 1) reduction(+ : built, failed)
  for (int64_t k = 0; k < c.systems; ++k) try {
      Built& b = s.built[k];
      const bool valid = !b.at.empty() && pack(b, c, k, width, true) <= (REAL)c.skin;
      const bool lost = !valid && !finite(c, k);
      if (!valid && !lost) {
        b.at.clear();
        build(b, c, s, k);
        pack(b, c, k, width, false);
        ++built;
      }
      s.lists[k] = lost ? List{}
                        : List{b.atom.data(), b.index.data(), b.start.data(), b.steps.data(), b.full.data(), b.rows.data()};
    } catch (const std::bad_alloc&) {  // An exception must not leave a parallel loop.
      s.built[k] = Built();
      ++failed;
    }
  if (failed) throw std::bad_alloc();
  std::lock_guard<std::mutex> lock(guard);
  builds += built;
}

// Whether some atoms of the first system are near where they were when a list was built. A list that
// fits otherwise, but is far away, is left to another run.
bool near(const Slot& s, const Call& c) {
  const Built& b = s.built[0];
  if (b.at.empty()) return true;
  const View& q = c.position;
  const int64_t stride = std::max<int64_t>(1, c.atoms / 32);
  for (int64_t p = 0; p < c.atoms; p += stride) {
    double moved = 0;
    for (int64_t a = 0; a < c.dim; ++a) {
      const double d = q.data[b.atom[p] * q.atom + a * q.axis] - b.at[p * c.dim + a];
      moved += d * d;
    }
    if (!(moved <= 4 * c.skin * c.skin)) return false;
  }
  return true;
}

}  // namespace

extern "C" int64_t neighbours_builds() {
  std::lock_guard<std::mutex> lock(guard);
  return builds;
}

extern "C" void neighbours_release(void* held) {
  std::lock_guard<std::mutex> lock(guard);
  ((Slot*)held)->busy = false;
}

// Lists of all systems of a call, which nobody else uses until they are released. Null without
// memory.
extern "C" void* neighbours_acquire(const Call* c, int64_t width, const List** lists) try {
  const int64_t entries = c->image == 0 ? 0 : c->image == 1 ? c->dim : c->dim * c->dim;
  Slot* found = nullptr;
  {
    std::lock_guard<std::mutex> lock(guard);
    auto best = slots.begin();
    while (best != slots.end() && (best->busy || !same(*best, *c, entries) || !near(*best, *c))) ++best;
    if (best == slots.end()) {
      size_t total = 0;
      for (const Slot& s : slots) total += bytes(s);
      for (auto s = slots.end(); s != slots.begin() && (slots.size() >= KEPT || total > BYTES);) {
        --s;
        if (s->busy) continue;
        total -= bytes(*s);
        s = slots.erase(s);
      }
      slots.emplace_front();
      best = slots.begin();
      best->systems = c->systems, best->atoms = c->atoms, best->dim = c->dim;
      best->reach = c->cutoff + c->skin;
      if (entries) best->box.assign(c->box, c->box + entries);
      best->built.resize(c->systems);
      best->lists.resize(c->systems);
    }
    slots.splice(slots.begin(), slots, best);
    best->busy = true;
    found = &*best;
  }
  try {
    prepare(*found, *c, width);
  } catch (...) {
    neighbours_release(found);
    throw;
  }
  *lists = found->lists.data();
  return found;
} catch (const std::bad_alloc&) {
  return nullptr;
}
