// Positions of W atoms as vectors, nearest images in a cell, and memory, for sums over pairs. Rows have
// WIDTH numbers an atom.

// The loops over pairs are functions of their own, and what runs once a call is compiled with few
// optimisations, so that a kernel compiles in four fifths of the time.
#if defined(__GNUC__) && !defined(__clang__)
#define ONCE __attribute__((optimize("O1")))
#define APART __attribute__((noinline))
#else
#define ONCE
#define APART inline
#endif

typedef REAL Quad __attribute__((vector_size(4 * sizeof(REAL))));
typedef REAL Eight __attribute__((vector_size(8 * sizeof(REAL))));

// The first four numbers of W rows, as four vectors.
static inline void gather(const REAL* rows, int64_t width, const int* place, V& x, V& y, V& z, V& w) {
#if defined(__clang__) || __GNUC__ >= 12
  Quad r[W];
  for (int l = 0; l < W; ++l) memcpy(&r[l], rows + width * place[l], sizeof(Quad));
  if constexpr (W == 8) {
#define JOIN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
    const Eight a = JOIN(r[0], r[4]), b = JOIN(r[1], r[5]), c = JOIN(r[2], r[6]), d = JOIN(r[3], r[7]);
    const Eight ab = EVEN(a, b), cd = EVEN(c, d), oab = ODD(a, b), ocd = ODD(c, d);
    const Eight fx = LOW(ab, cd), fy = LOW(oab, ocd), fz = HIGH(ab, cd), fw = HIGH(oab, ocd);
    memcpy(&x, &fx, sizeof x), memcpy(&y, &fy, sizeof y), memcpy(&z, &fz, sizeof z), memcpy(&w, &fw, sizeof w);
  } else {
    const Quad ab = __builtin_shufflevector(r[0], r[1], 0, 4, 2, 6);
    const Quad cd = __builtin_shufflevector(r[2], r[3], 0, 4, 2, 6);
    const Quad oab = __builtin_shufflevector(r[0], r[1], 1, 5, 3, 7);
    const Quad ocd = __builtin_shufflevector(r[2], r[3], 1, 5, 3, 7);
    const Quad fx = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    const Quad fy = __builtin_shufflevector(oab, ocd, 0, 1, 4, 5);
    const Quad fz = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    const Quad fw = __builtin_shufflevector(oab, ocd, 2, 3, 6, 7);
    memcpy(&x, &fx, sizeof x), memcpy(&y, &fy, sizeof y), memcpy(&z, &fz, sizeof z), memcpy(&w, &fw, sizeof w);
  }
#else
  for (int l = 0; l < W; ++l) {
    const REAL* row = rows + width * place[l];
    x[l] = row[0], y[l] = row[1], z[l] = row[2], w[l] = row[3];
  }
#endif
}

// The numbers at W places. A loop over the entries of a vector would go through memory.
template <class Place>
static inline V lanes(const REAL* x, const Place& p) {
  V found;
  if constexpr (W == 8) {
    const Eight all = {x[p[0]], x[p[1]], x[p[2]], x[p[3]], x[p[4]], x[p[5]], x[p[6]], x[p[7]]};
    memcpy(&found, &all, sizeof found);
  } else {
    const Quad all = {x[p[0]], x[p[1]], x[p[2]], x[p[3]]};
    memcpy(&found, &all, sizeof found);
  }
  return found;
}

// Places in memory of W numbers.
typedef int64_t Places __attribute__((vector_size(W * sizeof(int64_t))));

typedef int Ints __attribute__((vector_size(W * sizeof(int))));

// The whole numbers at W places. Only a template may leave out the other number of places.
template <class T>
static inline T whole_at(const int* x, const int* p) {
  if constexpr (sizeof(T) == 8 * sizeof(int))
    return T{x[p[0]], x[p[1]], x[p[2]], x[p[3]], x[p[4]], x[p[5]], x[p[6]], x[p[7]]};
  else
    return T{x[p[0]], x[p[1]], x[p[2]], x[p[3]]};
}

static inline Places columns(const int* x, const int* p) {
  return __builtin_convertvector(whole_at<Ints>(x, p), Places);
}

// Numbers of a table with W entries at most, of which each lane has one.
static inline V among(const V& table, const Places& place) {
#if defined(__GNUC__) && !defined(__clang__)
  return __builtin_shuffle(table, __builtin_convertvector(place, Mask));
#else
  V found;
  for (int l = 0; l < W; ++l) found[l] = table[place[l]];
  return found;
#endif
}

// W numbers side by side.
static inline V beside(const REAL* x) {
  V found;
  memcpy(&found, x, sizeof found);
  return found;
}

static inline void gather(const REAL* rows, const int* place, V& x, V& y, V& z) {
  V rest;
  gather(rows, WIDTH, place, x, y, z, rest);
}

// The periodic cell. The numbers and the order of operations are those of adjsim._box, so that
// differences have the same bits.
struct Cell {
  V length[3], inverse[3], row[3][3], fraction[3][3];

  explicit Cell(const REAL* box) {
#if IMAGE == ORTHOGONAL
    for (int a = 0; a < 3; ++a) {
      length[a] = splat(a < DIM ? box[a] : 0);
      inverse[a] = splat(a < DIM ? 1 / box[a] : 0);
    }
#elif IMAGE == TILTED
    REAL r[3][3] = {}, n[3][3] = {};
    for (int a = 0; a < DIM; ++a)
      for (int b = 0; b < DIM; ++b) r[a][b] = box[a * DIM + b];
    if (DIM == 1) n[0][0] = 1;
    if (DIM == 2) n[0][0] = r[1][1], n[0][1] = -r[1][0], n[1][0] = -r[0][1], n[1][1] = r[0][0];
    if (DIM == 3)
      for (int a = 0; a < 3; ++a) {
        const REAL *p = r[(a + 1) % 3], *q = r[(a + 2) % 3];
        for (int b = 0; b < 3; ++b) {
          const int d = (b + 1) % 3, e = (b + 2) % 3;
          n[a][b] = p[d] * q[e] - p[e] * q[d];
        }
      }
    REAL size = r[0][0] * n[0][0];
    for (int b = 1; b < DIM; ++b) size = size + r[0][b] * n[0][b];
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) {
        row[a][b] = splat(r[a][b]);
        fraction[a][b] = splat(n[a][b] / size);
      }
#endif
  }

  inline void nearest_image(V& x, V& y, V& z) const {
#if IMAGE == ORTHOGONAL
    x = x - length[0] * math::nearbyint(x * inverse[0]);
    if (DIM > 1) y = y - length[1] * math::nearbyint(y * inverse[1]);
    if (DIM > 2) z = z - length[2] * math::nearbyint(z * inverse[2]);
#elif IMAGE == TILTED
    V n[3] = {}, shift[3] = {};
    const V d[3] = {x, y, z};
    for (int a = 0; a < DIM; ++a) {
      V total = d[0] * fraction[a][0];
      for (int b = 1; b < DIM; ++b) total = total + d[b] * fraction[a][b];
      n[a] = -math::nearbyint(total);
    }
    for (int b = 0; b < DIM; ++b) {
      shift[b] = n[0] * row[0][b];
      for (int a = 1; a < DIM; ++a) shift[b] = shift[b] + n[a] * row[a][b];
    }
    x = x + shift[0], y = y + shift[1], z = z + shift[2];
#endif
  }
};

// Memory that is zero at first, and is freed at the end of its scope.
template <class T>
struct Block {
  T* data;
  explicit Block(int64_t size) : data((T*)calloc(size > 0 ? size : 1, sizeof(T))) {}
  Block(const Block&) = delete;
  ~Block() { free(data); }
};
