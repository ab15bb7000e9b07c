// The neighbours of atoms, by cells that are as wide as the reach of a list.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct Grid {
  int64_t cells[3] = {1, 1, 1}, reach[3] = {0, 0, 0};
  double fraction[3][3] = {}, rows[3][3] = {}, origin[3] = {}, edge[3] = {};
  bool periodic = false;
};

// Cells that are at least as wide as the reach, if the system is wide enough.
Grid divide(const Call& c, const std::vector<REAL>& box, const std::vector<double>& q, double reach) {
  Grid g;
  const int64_t dim = c.dim, n = c.atoms;
  double widths[3] = {1, 1, 1};
  const int64_t most = std::max<int64_t>(1, (int64_t)std::pow((double)n, 1.0 / dim) + 1);
  g.periodic = !box.empty();
  if (!g.periodic) {
    for (int64_t a = 0; a < dim; ++a) {
      double low = q[a], high = q[a];
      for (int64_t i = 0; i < n; ++i) low = std::min(low, q[i * 3 + a]), high = std::max(high, q[i * 3 + a]);
      g.origin[a] = low;
      widths[a] = g.edge[a] = std::max(high - low, 1e-300);
      g.fraction[a][a] = 1 / widths[a];
    }
  } else if ((int64_t)box.size() == dim) {
    for (int64_t a = 0; a < dim; ++a) {
      widths[a] = g.edge[a] = g.rows[a][a] = box[a];
      g.fraction[a][a] = 1 / widths[a];
    }
  } else {
    double r[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}, m[3][3];
    for (int64_t a = 0; a < dim; ++a)
      for (int64_t b = 0; b < dim; ++b) r[a][b] = box[a * dim + b];
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
        g.edge[a] += r[a][b] * r[a][b];
      }
      g.edge[a] = std::sqrt(g.edge[a]);
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

// The atoms among which neighbours are sought, in ascending order of their numbers, and the rows of
// neighbours that were found, one after another. Columns are in single precision, in units of the
// reach from a point nearby: a list may hold a few pairs more than it has to.
struct Search {
  std::vector<float> x[3];
  std::vector<int> place, rows;
  std::vector<uint8_t> near;
  int64_t found = 0;

  // Vectors of sixteen may read beyond the end.
  void resize(int64_t m) {
    for (auto& column : x) column.resize(m + 16);
    place.resize(m + 16), near.resize(m);
  }

  // Add the places of points, from one before m on, that are within a squared distance.
  void keep(const float* at, int64_t first, int64_t m, float limit) {
    const int64_t room = found + m + 16;
    if ((int64_t)rows.size() < room) rows.resize(2 * room);
    const float *X = x[0].data(), *Y = x[1].data(), *Z = x[2].data();
    const int* ids = place.data();
    int* out = rows.data() + found;
#if defined(__AVX512F__)
    const __m512 px = _mm512_set1_ps(at[0]), py = _mm512_set1_ps(at[1]), pz = _mm512_set1_ps(at[2]);
    const __m512 most = _mm512_set1_ps(limit);
    for (int64_t j = first; j < m; j += 16) {
      const __m512 dx = px - _mm512_loadu_ps(X + j), dy = py - _mm512_loadu_ps(Y + j), dz = pz - _mm512_loadu_ps(Z + j);
      __mmask16 in = _mm512_cmp_ps_mask(dx * dx + dy * dy + dz * dz, most, _CMP_LT_OQ);
      if (m - j < 16) in &= (1 << (m - j)) - 1;
      _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(in, _mm512_loadu_si512(ids + j)));
      out += __builtin_popcount(in);
    }
#else
    for (int64_t j = first; j < m; ++j) {
      const float dx = at[0] - X[j], dy = at[1] - Y[j], dz = at[2] - Z[j];
      near[j] = dx * dx + dy * dy + dz * dz < limit;
    }
    for (int64_t j = first; j < m; ++j) {
      *out = ids[j];
      out += near[j];
    }
#endif
    found = out - rows.data();
  }

  // The same in double precision, with positions by place.
  void keep_exactly(const std::vector<double>* points, int64_t i, int64_t m, double reach) {
    const int64_t room = found + m;
    if ((int64_t)rows.size() < room) rows.resize(2 * room);
    for (int64_t k = 0; k < m; ++k) {
      const int j = place[k];
      double squared = 0;
      for (int a = 0; a < 3; ++a) squared += (points[a][j] - points[a][i]) * (points[a][j] - points[a][i]);
      if (j != i && std::sqrt(squared) < reach) rows[found++] = j;
    }
  }

  // Remove an atom itself and repeated neighbours from its row, which begins here.
  void remove_images(int own, int64_t begin) {
    int64_t end = begin;
    for (int64_t k = begin; k < found; ++k)
      if (rows[k] != own && (end == begin || rows[k] != rows[end - 1])) rows[end++] = rows[k];
    found = end;
  }
};

// Memory of the threads of a build, kept by the thread that starts it unless it is large.
thread_local std::vector<Search> scratch;

// The atoms of some cells, to be sorted by their numbers.
struct Unsorted {
  std::vector<float> x[3];
  std::vector<int> place, ends;
  std::vector<uint64_t> keys, spare;  // a number, and the row of the atom

  void resize(int64_t m) {
    keys.resize(m), place.resize(m), spare.resize(m);
    for (auto& column : x) column.resize(m);
  }

  // Sort by the lower half of the bits of a number, and then by the upper half.
  void sort(int64_t atoms, Search& out) {
    int bits = 1;
    while ((atoms - 1) >> 2 * bits) ++bits;
    const uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int half = 0; half < 2; ++half) {
      const int shift = 32 + half * bits;
      ends.assign(mask + 2, 0);
      for (const uint64_t key : keys) ++ends[((key >> shift) & mask) + 1];
      for (uint64_t d = 0; d < mask; ++d) ends[d + 1] += ends[d];
      for (const uint64_t key : keys) spare[ends[(key >> shift) & mask]++] = key;
      keys.swap(spare);
    }
    const int64_t m = (int64_t)keys.size();
    out.resize(m);
    for (int64_t k = 0; k < m; ++k) {
      const uint32_t row = (uint32_t)keys[k];
      out.place[k] = place[row];
      for (int a = 0; a < 3; ++a) out.x[a][k] = x[a][row];
    }
  }
};

// Atoms in their cells.
struct Cells {
  Grid grid;
  int64_t atoms;
  std::vector<int64_t> head;  // the first place of each cell
  std::vector<double> wrapped[3], x[3];  // positions in the box, by number and by place
  const int *atom, *place;
  // Whether an atom meets at most one image of another in cells nearby. Where it may meet several, it
  // meets the nearest image in a box with orthogonal edges.
  bool once = true, nearest = false;
  // Whether neighbours with smaller numbers may be left out.
  bool mutual = false;
  double reach, unit = 1 / reach;
  // In units of the reach, the squared distance that no neighbour has in single precision. Where it is
  // too large, since cells without images are, distances are compared in double precision.
  float limit = 0;
  bool coarse = false;

  Cells(const Grid& g, int64_t n, double reach) : grid(g), atoms(n), reach(reach) {
    double span = 0;
    for (int a = 0; a < 3; ++a) {
      once &= !grid.periodic || grid.cells[a] >= 2 * grid.reach[a] + 1;
      span += (grid.reach[a] + 1) * grid.edge[a] / grid.cells[a];
    }
    const double most = 1 + 1e-6 * (span / reach + 1);
    limit = (float)(most * most);
    coarse = !grid.periodic && most > 1.01;
  }

  // Collect the atoms in and around a cell.
  void around(int64_t cell, const double* origin, Unsorted& out) const {
    const int64_t at[3] = {cell / (grid.cells[1] * grid.cells[2]), cell / grid.cells[2] % grid.cells[1], cell % grid.cells[2]};
    int64_t o[3], m = 0;
    for (o[0] = -grid.reach[0]; o[0] <= grid.reach[0]; ++o[0])
      for (o[1] = -grid.reach[1]; o[1] <= grid.reach[1]; ++o[1])
        for (o[2] = -grid.reach[2]; o[2] <= grid.reach[2]; ++o[2]) {
          int64_t k = 0;
          double shift[3] = {};
          bool outside = false;
          for (int a = 0; a < 3; ++a) {
            int64_t c = at[a] + o[a], turns = 0;
            while (c < 0) c += grid.cells[a], --turns;
            while (c >= grid.cells[a]) c -= grid.cells[a], ++turns;
            outside |= turns != 0 && !grid.periodic;
            for (int e = 0; e < 3; ++e) shift[e] += turns * grid.rows[a][e];
            k = k * grid.cells[a] + c;
          }
          if (outside) continue;
          if ((int64_t)out.keys.size() < m + head[k + 1] - head[k]) out.resize(2 * (m + head[k + 1] - head[k]));
          for (int64_t j = head[k]; j < head[k + 1]; ++j, ++m) {
            out.keys[m] = (uint64_t)atom[j] << 32 | (uint32_t)m;
            out.place[m] = (int)j;
            for (int a = 0; a < 3; ++a) out.x[a][m] = (float)((x[a][j] - origin[a] + shift[a]) * unit);
          }
        }
    out.resize(m);
  }

  // Find the neighbours of the atoms of some cells, in ascending order of their numbers.
  void search(int64_t from, int64_t to, Search& near, int64_t* begin, int64_t* count) const {
    Unsorted unsorted;
    near.found = 0;
    near.resize(atoms);
    if (nearest) std::copy(place, place + atoms, near.place.begin());
    for (int64_t cell = from; cell < to; ++cell) {
      if (head[cell] == head[cell + 1]) continue;
      const double origin[3] = {x[0][head[cell]], x[1][head[cell]], x[2][head[cell]]};
      if (!nearest) around(cell, origin, unsorted), unsorted.sort(atoms, near);
      const int64_t m = nearest ? atoms : (int64_t)unsorted.keys.size();
      for (int64_t i = head[cell], own = 0; i < head[cell + 1]; ++i) {
        begin[i] = near.found;
        if (nearest) images(i, mutual ? atom[i] : 0, near);
        float here[3] = {};
        for (int a = 0; a < 3 && !nearest; ++a) here[a] = (float)((x[a][i] - origin[a]) * unit);
        if (coarse) {
          near.keep_exactly(x, i, m, reach);
        } else if (once || nearest) {
          while (near.place[own] != (int)i) own = nearest ? atom[i] : own + 1;
          float& own_x = near.x[0][own];  // No distance to it is below the limit.
          const float kept = own_x;
          own_x = NAN;
          near.keep(here, mutual ? own + 1 : 0, m, limit);
          own_x = kept;
        } else {
          near.keep(here, 0, m, limit);
        }
        if (!once && !nearest) near.remove_images((int)i, begin[i]);
        count[i] = near.found - begin[i];
      }
    }
  }

  // Compute the differences of atoms, by number from one on, from place i, to the nearest image.
  void images(int64_t i, int64_t first, Search& near) const {
    for (int a = 0; a < 3; ++a) {
      const double length = grid.rows[a][a], inverse = length > 0 ? 1 / length : 0, mine = x[a][i];
      const double* all = wrapped[a].data();
      float* to = near.x[a].data();
      for (int64_t j = first; j < atoms; ++j) {
        const double d = all[j] - mine;
        to[j] = (float)((d - length * std::nearbyint(d * inverse)) * unit);
      }
    }
  }
};

}  // namespace
