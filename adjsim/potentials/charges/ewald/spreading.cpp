// Spreading of charges to a mesh by splines, and gathering from it. REAL is float or double, and
// ORDER that of the splines. Positions are in units of the spacing of the mesh.
#include <math.h>
#include <stdint.h>

// The splines of one atom along one axis, with first and second derivatives, at ORDER points that
// begin at index[0]. Whether the points are adjacent in memory: they do not cross the boundary.
struct Axis {
  REAL value[3][ORDER];
  int64_t index[ORDER];
  bool adjacent;
};

static inline void set(Axis& axis, REAL u, int64_t points) {
  const REAL base = floor(u), x = u - base;
  // The spline of order p at x + t, t = 0 ... p - 1; the highest three orders are kept.
  REAL spline[3][ORDER + 2] = {}, now[ORDER + 1] = {x, 1 - x};
#pragma GCC unroll 16
  for (int p = 2; p <= ORDER; ++p) {
    if (p >= ORDER - 2)
      for (int t = 0; t < p; ++t) spline[ORDER - p][t + 2] = now[t];
    if (p == ORDER) break;
    REAL before = 0;
#pragma GCC unroll 16
    for (int t = 0; t <= p; ++t) {
      const REAL here = t < p ? now[t] : 0;
      now[t] = ((x + t) * here + (p + 1 - t - x) * before) / p;
      before = here;
    }
  }
  // Points in ascending order, so the farthest argument of the spline comes first.
  for (int t = 0; t < ORDER; ++t) {
    const int k = ORDER - 1 - t;
    axis.value[0][k] = spline[0][t + 2];
    axis.value[1][k] = spline[1][t + 2] - spline[1][t + 1];
    axis.value[2][k] = spline[2][t + 2] - 2 * spline[2][t + 1] + spline[2][t];
  }
  // The remainder comes first: a position that is not a number stays inside the mesh.
  int64_t first = ((int64_t)base - (ORDER - 1)) % points;
  if (first < 0) first += points;
  axis.adjacent = first + ORDER <= points;
  // The mesh has at least as many points as the spline.
  for (int k = 0; k < ORDER; ++k) axis.index[k] = first + k - (first + k < points ? 0 : points);
}

// The mesh is zero before. Systems share threads; the atoms of one are spread in order.
extern "C" void spread(int64_t systems, int64_t atoms, int64_t columns, int64_t threads,
                       const int64_t* shape, const REAL* u, const REAL* coefficients, REAL* mesh) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t s = 0; s < systems; ++s) {
    REAL* const origin = mesh + s * shape[0] * shape[1] * shape[2];
    for (int64_t i = s * atoms; i < (s + 1) * atoms; ++i) {
      Axis x, y, z;
      set(x, u[3 * i], shape[0]), set(y, u[3 * i + 1], shape[1]), set(z, u[3 * i + 2], shape[2]);
      const REAL* c = coefficients + columns * i;
      for (int a = 0; a < ORDER; ++a)
        for (int b = 0; b < ORDER; ++b) {
          REAL* const row = origin + (x.index[a] * shape[1] + y.index[b]) * shape[2];
          const REAL plane = x.value[0][a] * y.value[0][b];
          REAL along = c[0] * plane, slope = 0, part[ORDER];
          if (columns == 4) {
            along += c[1] * x.value[1][a] * y.value[0][b] + c[2] * x.value[0][a] * y.value[1][b];
            slope = c[3] * plane;
          }
          for (int k = 0; k < ORDER; ++k) part[k] = along * z.value[0][k] + slope * z.value[1][k];
          if (z.adjacent)
            for (int k = 0; k < ORDER; ++k) row[z.index[0] + k] += part[k];
          else
            for (int k = 0; k < ORDER; ++k) row[z.index[k]] += part[k];
        }
    }
  }
}

// The value, the slope (x y z) and the curvature (xx xy xz yy yz zz), as far as `columns` asks.
extern "C" void gather(int64_t systems, int64_t atoms, int64_t columns, int64_t threads,
                       const int64_t* shape, const REAL* u, const REAL* mesh, REAL* found) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < systems * atoms; ++i) {
    const REAL* const origin = mesh + i / atoms * shape[0] * shape[1] * shape[2];
    Axis x, y, z;
    set(x, u[3 * i], shape[0]), set(y, u[3 * i + 1], shape[1]), set(z, u[3 * i + 2], shape[2]);
    REAL sum[10] = {};
    for (int a = 0; a < ORDER; ++a) {
      // Sums over a plane of derivatives along y and z: value, y, z, yy, yz, zz.
      REAL plane[6] = {};
      for (int b = 0; b < ORDER; ++b) {
        const REAL* const row = origin + (x.index[a] * shape[1] + y.index[b]) * shape[2];
        REAL local[ORDER], line[3] = {};
        if (z.adjacent)
          for (int k = 0; k < ORDER; ++k) local[k] = row[z.index[0] + k];
        else
          for (int k = 0; k < ORDER; ++k) local[k] = row[z.index[k]];
        for (int k = 0; k < ORDER; ++k)
          for (int n = 0; n < 3; ++n) line[n] += local[k] * z.value[n][k];
        plane[0] += y.value[0][b] * line[0];
        plane[1] += y.value[1][b] * line[0];
        plane[2] += y.value[0][b] * line[1];
        if (columns == 10) {
          plane[3] += y.value[2][b] * line[0];
          plane[4] += y.value[1][b] * line[1];
          plane[5] += y.value[0][b] * line[2];
        }
      }
      sum[0] += x.value[0][a] * plane[0];
      sum[1] += x.value[1][a] * plane[0];
      sum[2] += x.value[0][a] * plane[1];
      sum[3] += x.value[0][a] * plane[2];
      if (columns == 10) {
        sum[4] += x.value[2][a] * plane[0];
        sum[5] += x.value[1][a] * plane[1];
        sum[6] += x.value[1][a] * plane[2];
        sum[7] += x.value[0][a] * plane[3];
        sum[8] += x.value[0][a] * plane[4];
        sum[9] += x.value[0][a] * plane[5];
      }
    }
    for (int k = 0; k < columns; ++k) found[columns * i + k] = sum[k];
  }
}
