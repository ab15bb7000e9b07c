// Neighbour lists, which are a cache: a list is used while it contains every pair within the cutoff,
// and built again when atoms have moved too far. It contains them as long as the two largest
// displacements since it was built sum to less than the skin. In another cell, positions are taken back
// to the same fractions of the cell of the build. A pair within the cutoff is then within cutoff |M|,
// with M the matrix that takes it back, so displacements are those after M, and the skin is shorter by
// cutoff (|M| - 1). A list is found by its size, cell, exclusions and classes, and is checked at every use, so
// nobody has to keep it or to say that it is out of date.
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <new>

namespace {

struct Built {
  std::vector<int> atom, place, index;
  std::vector<int64_t> start, steps, full;
  std::vector<REAL> at, rows;  // positions of the build and of now, by place
  std::vector<REAL> box;       // the cell of the build
};

// Lists are kept up to this number, and up to this size unless one alone is larger.
constexpr size_t KEPT = 16, BYTES = (size_t)1 << 28;

struct Slot {
  int64_t systems, atoms, dim, mutual;
  double reach;
  int64_t entries;  // numbers of a cell
  std::vector<int64_t> exclusions, classes, partners;
  std::vector<Built> built;
  std::vector<List> lists;
  bool busy = false;
};

std::list<Slot> slots;  // the last used first
std::mutex guard;
int64_t builds = 0;

bool equal(const std::vector<int64_t>& one, const int64_t* other, int64_t size) {
  return (int64_t)one.size() == size && std::equal(one.begin(), one.end(), other);
}

bool same(const Slot& s, const Call& c, int64_t entries) {
  return s.systems == c.systems && s.atoms == c.atoms && s.dim == c.dim && s.mutual == c.mutual &&
         s.reach == c.cutoff + c.skin && s.entries == entries &&
         equal(s.exclusions, c.exclusions, 2 * c.excluded) &&
         equal(s.classes, c.classes, c.classes ? c.atoms : 0) &&
         equal(s.partners, c.partners, c.class_count * c.class_count);
}

// The two largest squared displacements, and NaN if one is not finite.
struct Moved {
  REAL first = 0, second = 0, bad = 0;

  void join(const Moved& other) {
    second = std::max(std::min(first, other.first), std::max(second, other.second));
    first = std::max(first, other.first);
    bad += other.bad;
  }
};

const REAL* cell_of(const Call& c, int64_t system) { return c.box + system * c.box_step; }

// The matrix that takes positions in the cell of now to those at the same fractions of the cell of the
// build of a list.
struct Back {
  double at[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}, norm = 1;  // norm: a bound of the largest stretch
  bool moves = false;  // whether it is another matrix than the identity

  Back(const std::vector<REAL>& built, const REAL* now, int64_t dim) {
    const int64_t entries = (int64_t)built.size();
    if (!entries || !std::memcmp(built.data(), now, entries * sizeof(REAL))) return;
    moves = true;
    if (entries == dim) {
      for (int64_t a = 0; a < dim; ++a) at[a][a] = (double)built[a] / now[a];
    } else {
      double rows[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}, inverse[3][3];
      for (int64_t a = 0; a < dim; ++a)
        for (int64_t b = 0; b < dim; ++b) rows[a][b] = now[a * dim + b];
      double size = 0;
      for (int b = 0; b < 3; ++b) {
        // The columns of the inverse are the cross products of the other rows.
        for (int a = 0; a < 3; ++a) {
          const double *p = rows[(b + 1) % 3], *q = rows[(b + 2) % 3];
          inverse[a][b] = p[(a + 1) % 3] * q[(a + 2) % 3] - p[(a + 2) % 3] * q[(a + 1) % 3];
        }
        size += rows[0][b] * inverse[b][0];
      }
      for (int64_t a = 0; a < dim; ++a)
        for (int64_t b = 0; b < dim; ++b) {
          at[a][b] = 0;
          for (int64_t e = 0; e < dim; ++e) at[a][b] += inverse[a][e] / size * built[e * dim + b];
        }
    }
    double across = 0, down = 0;
    for (int a = 0; a < 3; ++a) {
      across = std::max(across, std::fabs(at[a][0]) + std::fabs(at[a][1]) + std::fabs(at[a][2]));
      down = std::max(down, std::fabs(at[0][a]) + std::fabs(at[1][a]) + std::fabs(at[2][a]));
    }
    norm = std::sqrt(across * down);
  }

  // The sum of displacements up to which a list holds all pairs, negative where no list does.
  double room(const Call& c) const { return c.skin - c.cutoff * (norm - 1); }
};

// Copy positions (and vectors) in the order of places. Returns the sum of the two largest
// displacements since the build, which is infinite or NaN where a position is not finite.
REAL pack(Built& b, const Call& c, int64_t system, int64_t width, const Back* back) {
  const int64_t n = c.atoms, dim = c.dim;
  b.rows.resize(n * width + 8);
  REAL m[3][3] = {};
  for (int a = 0; back && a < 3; ++a)
    for (int e = 0; e < 3; ++e) m[e][a] = (REAL)back->at[e][a];
  const bool moved_back = back && back->moves;
  const int *atom = b.atom.data();
  const REAL *at = b.at.data();
  REAL *rows = b.rows.data();
  const View q = c.position, v = c.vector;
  // Copy the atom of a place, and return its squared displacement since the build: zero where `back` is
  // null, since the list has just been built.
  const auto copy = [&](int64_t p) {
    const REAL* from = q.data + system * q.system + atom[p] * q.atom;
    REAL *row = rows + p * width, moved = 0;
    for (int64_t a = 0; a < dim; ++a) row[a] = from[a * q.axis];
    if (width == 8) {
      const REAL* w = v.data + system * v.system + atom[p] * v.atom;
      for (int64_t a = 0; a < dim; ++a) row[4 + a] = w[a * v.axis];
    }
    for (int64_t a = 0; back && a < dim; ++a) {
      REAL here = row[a];
      if (moved_back) {
        here = 0;
        for (int64_t e = 0; e < dim; ++e) here += row[e] * m[e][a];
      }
      moved += (here - at[p * dim + a]) * (here - at[p * dim + a]);
    }
    return moved;
  };
  Moved all;
  // Below some thousands of atoms another thread would take longer to start than to copy.
#pragma omp declare reduction(join : Moved : omp_out.join(omp_in))
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && c.systems == 1 && n > 8192) reduction(join : all)
  for (int64_t p = 0; p < n; ++p) {
    const REAL moved = copy(p);
    all.join({moved, 0, moved * 0});
  }
  return std::sqrt(all.first) + std::sqrt(all.second) + all.bad;
}

// Remove atoms of classes that do not interact from the rows of neighbours of each place.
void remove_others(const Slot& s, const std::vector<int>& atom, const std::vector<int*>& row,
                   std::vector<int64_t>& count) {
  const int64_t kinds = (int64_t)std::llround(std::sqrt((double)s.partners.size()));
  for (size_t p = 0; p < atom.size(); ++p) {
    const int64_t* partner = s.partners.data() + s.classes[atom[p]] * kinds;
    int64_t kept = 0;
    for (int64_t m = 0; m < count[p]; ++m)
      if (partner[s.classes[atom[row[p][m]]]]) row[p][kept++] = row[p][m];
    count[p] = kept;
  }
}

// Number places anew, by the classes of their atoms, so that vectors hold atoms with about as many
// neighbours.
void sort_by_class(const Slot& s, Built& b, std::vector<int*>& row, std::vector<int64_t>& count) {
  const size_t n = b.atom.size();
  std::vector<int> order(n);
  for (size_t p = 0; p < n; ++p) order[p] = (int)p;
  std::stable_sort(order.begin(), order.end(), [&](int p, int q) {
    return s.classes[b.atom[p]] < s.classes[b.atom[q]];
  });
  const std::vector<int> atom = b.atom;
  const std::vector<int*> rows = row;
  const std::vector<int64_t> counts = count;
  std::vector<int> moved(n);
  for (size_t p = 0; p < n; ++p) {
    moved[order[p]] = (int)p;
    b.atom[p] = atom[order[p]], row[p] = rows[order[p]], count[p] = counts[order[p]];
    b.place[b.atom[p]] = (int)p;
  }
  for (size_t p = 0; p < n; ++p)
    for (int64_t m = 0; m < count[p]; ++m) row[p][m] = moved[row[p][m]];
}

// Remove excluded pairs from the rows of neighbours of each place, which are in ascending order of
// the numbers of atoms.
void remove_excluded(const std::vector<int64_t>& exclusions, const std::vector<int>& atom,
                     const std::vector<int*>& row, std::vector<int64_t>& count) {
  std::vector<std::vector<int>> excluded(atom.size());
  for (size_t k = 0; k < exclusions.size(); k += 2) {
    excluded[exclusions[k]].push_back((int)exclusions[k + 1]);
    excluded[exclusions[k + 1]].push_back((int)exclusions[k]);
  }
  for (size_t p = 0; p < atom.size(); ++p) {
    std::vector<int>& others = excluded[atom[p]];
    std::sort(others.begin(), others.end());
    auto next = others.begin();
    int64_t kept = 0;
    for (int64_t m = 0; m < count[p]; ++m) {
      const int j = atom[row[p][m]];
      while (next != others.end() && *next < j) ++next;
      if (next == others.end() || *next != j) row[p][kept++] = row[p][m];
    }
    count[p] = kept;
  }
}

// Store the rows of neighbours of each place for vectors of W atoms.
void side_by_side(Built& b, const std::vector<int*>& row, const std::vector<int64_t>& count, int64_t threads) {
  const int64_t n = (int64_t)b.atom.size(), blocks = (n + W - 1) / W;
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
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < blocks; ++k)
    for (int64_t l = 0; l < W; ++l) {
      const int64_t i = std::min(k * W + l, n - 1), own = k * W + l < n ? count[i] : 0;
      int* out = b.index.data() + b.start[k] + l;
      for (int64_t m = 0; m < own; ++m) out[m * W] = row[i][m];
      for (int64_t m = own; m < b.steps[k]; ++m) out[m * W] = (int)i;
    }
}

// Store each pair once, in the order of the numbers of atoms.
void keep_once(Built& b, const std::vector<int*>& row, const std::vector<int64_t>& count) {
  const int64_t n = (int64_t)b.atom.size();
  b.start.resize(n), b.steps.resize(n), b.full.clear();
  b.index.clear();
  for (int64_t i = 0; i < n; ++i) {
    const int p = b.place[i];
    b.start[i] = (int64_t)b.index.size();
    for (int64_t m = 0; m < count[p]; ++m)
      if (const int j = b.atom[row[p][m]]; j > i) b.index.push_back(j);
    b.steps[i] = (int64_t)b.index.size() - b.start[i];
  }
  b.index.resize(b.index.size() + W);  // Vectors of places may read beyond the end.
  for (int64_t i = 0; i < n; ++i) b.atom[i] = b.place[i] = (int)i;
}

void build(Built& b, const Call& c, const Slot& s, int64_t system) {
  const int64_t n = c.atoms, dim = c.dim, threads = c.systems > 1 ? 1 : c.threads;
  std::vector<double> q(3 * n);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t a = 0; a < dim; ++a) {
      const View& v = c.position;
      q[3 * i + a] = v.data[system * v.system + i * v.atom + a * v.axis];
    }
  // Differences of positions far from the box are rounded, in the type of the positions.
  double largest = 0;
  for (double x : q) largest = std::max(largest, std::fabs(x));
  double reach = s.reach + 16 * largest * std::numeric_limits<REAL>::epsilon();
  b.box.assign(cell_of(c, system), cell_of(c, system) + s.entries);
  if (!b.box.empty()) {
    // No nearest image is farther than the sum of the edges.
    double edges = 0;
    for (const REAL x : b.box) edges += std::fabs(x);
    reach = std::min(reach, edges);
  }
  Cells cells(divide(c, b.box, q, reach), n, reach);
  const Grid& g = cells.grid;
  const int64_t total = g.cells[0] * g.cells[1] * g.cells[2];
  std::vector<int64_t>& head = cells.head;
  for (auto& column : cells.wrapped) column.resize(n);
  // Places are sorted by cell, so that neighbours are close to each other in memory.
  std::vector<int64_t> cell(n);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) {
    int64_t k = 0;
    double f[3] = {};
    for (int64_t a = 0; a < dim; ++a) {
      for (int64_t e = 0; e < dim; ++e) f[a] += (q[3 * i + e] - g.origin[e]) * g.fraction[a][e];
      if (g.periodic) f[a] -= std::floor(f[a]);
      k = k * g.cells[a] + std::clamp<int64_t>((int64_t)(f[a] * g.cells[a]), 0, g.cells[a] - 1);
    }
    for (int64_t e = 0; e < dim; ++e) {
      double x = q[3 * i + e];
      if (g.periodic) {
        x = 0;
        for (int64_t a = 0; a < dim; ++a) x += f[a] * g.rows[a][e];
      }
      cells.wrapped[e][i] = x;
    }
    cell[i] = k;
  }
  head.assign(total + 1, 0);
  for (int64_t i = 0; i < n; ++i) ++head[cell[i] + 1];
  for (int64_t k = 0; k < total; ++k) head[k + 1] += head[k];
  b.atom.resize(n), b.place.resize(n);
  for (auto& column : cells.x) column.resize(n);
  {
    std::vector<int64_t> next(head.begin(), head.end() - 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t p = next[cell[i]]++;
      b.atom[p] = (int)i, b.place[i] = (int)p;
      for (int a = 0; a < 3; ++a) cells.x[a][p] = cells.wrapped[a][i];
    }
  }
  cells.atom = b.atom.data(), cells.place = b.place.data();
  cells.nearest = !cells.once && s.entries == dim;
  cells.mutual = s.mutual;
  // Each thread finds the neighbours of the atoms of cells that follow each other.
  std::vector<int64_t> begin(n), count(n);
  std::vector<int*> row(n);
  std::vector<Search>& searches = scratch;
  searches.resize(std::max<size_t>(searches.size(), threads));
  int64_t failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : failed)
  for (int64_t t = 0; t < threads; ++t) try {
      const int64_t from = total * t / threads, to = total * (t + 1) / threads;
      cells.search(from, to, searches[t], begin.data(), count.data());
      for (int64_t i = head[from]; i < head[to]; ++i) row[i] = searches[t].rows.data() + begin[i];
    } catch (const std::bad_alloc&) {  // An exception must not leave a parallel loop.
      ++failed;
    }
  if (failed) throw std::bad_alloc();
  if (!s.classes.empty()) {
    remove_others(s, b.atom, row, count);
    if (!s.mutual) sort_by_class(s, b, row, count);
  }
  if (!s.exclusions.empty()) remove_excluded(s.exclusions, b.atom, row, count);
  if (s.mutual) keep_once(b, row, count);
  else side_by_side(b, row, count, threads);
  size_t kept = 0;
  for (const Search& search : searches) kept += search.rows.size();
  if (kept > BYTES / 16) searches.clear();
  b.at.resize(n * dim);
  for (int64_t p = 0; p < n; ++p)
    for (int64_t a = 0; a < dim; ++a) b.at[p * dim + a] = (REAL)q[3 * b.atom[p] + a];
}

bool finite(const Call& c, int64_t system, int64_t entries) {
  const View& q = c.position;
  for (int64_t k = 0; k < entries; ++k)
    if (!std::isfinite(cell_of(c, system)[k])) return false;
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

// Make the list of one system valid, unless its positions are not finite. Returns the number of builds.
int64_t prepare_one(Slot& s, const Call& c, int64_t width, int64_t k) {
  Built& b = s.built[k];
  bool valid = !b.at.empty();
  if (valid) {
    const Back back(b.box, cell_of(c, k), c.dim);
    const double room = back.room(c);
    valid = room >= 0 && pack(b, c, k, width, &back) <= (REAL)room;
  }
  const bool lost = !valid && !finite(c, k, s.entries);
  if (!valid && !lost) {
    b.at.clear();
    build(b, c, s, k);
    pack(b, c, k, width, nullptr);
  }
  s.lists[k] = lost ? List{}
                    : List{b.atom.data(), b.index.data(), b.start.data(), b.steps.data(), b.full.data(), b.rows.data()};
  return !valid && !lost;
}

void prepare(Slot& s, const Call& c, int64_t width) {
  int64_t built = 0, failed = 0;
  const auto one = [&](int64_t k, int64_t& built, int64_t& failed) {
    try {
      built += prepare_one(s, c, width, k);
    } catch (const std::bad_alloc&) {  // An exception must not leave a parallel loop.
      s.built[k] = Built();
      ++failed;
    }
  };
  // One system has parallel loops inside, which would start threads anew in a region around them, even
  // in a region of one thread.
  if (c.systems == 1) {
    one(0, built, failed);
  } else {
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (c.threads > 1) reduction(+ : built, failed)
    for (int64_t k = 0; k < c.systems; ++k) one(k, built, failed);
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
  const Back back(b.box, c.box, c.dim);
  if (!(back.room(c) >= -4 * c.skin)) return false;
  const View& q = c.position;
  const int64_t stride = std::max<int64_t>(1, c.atoms / 32);
  for (int64_t p = 0; p < c.atoms; p += stride) {
    double moved = 0;
    for (int64_t a = 0; a < c.dim; ++a) {
      double d = -b.at[p * c.dim + a];
      for (int64_t e = 0; e < c.dim; ++e) d += q.data[b.atom[p] * q.atom + e * q.axis] * back.at[e][a];
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
      best->systems = c->systems, best->atoms = c->atoms, best->dim = c->dim, best->mutual = c->mutual;
      best->reach = c->cutoff + c->skin;
      best->entries = entries;
      if (c->excluded) best->exclusions.assign(c->exclusions, c->exclusions + 2 * c->excluded);
      if (c->classes) best->classes.assign(c->classes, c->classes + c->atoms);
      if (c->classes) best->partners.assign(c->partners, c->partners + c->class_count * c->class_count);
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
