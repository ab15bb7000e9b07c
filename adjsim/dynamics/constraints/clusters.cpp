namespace { namespace constraints {
// Clusters of N constraints, L at once. Row k of a matrix has the columns l of the window: all, or
// those with |k - l| <= W / 2.
template <class T, int N, int W, int DIM, int L>
struct Clusters {
  T u[DIM][N][L], e[DIM][N][L], d[DIM][N][L], S[N][W][L], m[N][W][L], x[N][L];

  static constexpr int begin(int k) { return W == N || k < W / 2 ? 0 : k - W / 2; }
  static constexpr int end(int k) { return W == N || k + W / 2 + 1 > N ? N : k + W / 2 + 1; }
  static constexpr int at(int k, int l) { return W == N ? l : l - k + W / 2; }

  // Set m to S * (e . d).
  void assemble(const T (&rows)[DIM][N][L]) {
    for (int k = 0; k < N; ++k)
      for (int c = begin(k); c < end(k); ++c) {
#pragma omp simd
        for (int l = 0; l < L; ++l) {
          T sum = 0;
          for (int a = 0; a < DIM; ++a) sum += rows[a][k][l] * d[a][c][l];
          m[k][at(k, c)][l] = S[k][at(k, c)][l] * sum;
        }
      }
  }
  // Solve m x = r in r, without pivots: m is near S * (d . d), which is positive definite.
  void eliminate(T (&r)[N][L]) {
    T scale[L], factor[L];
    for (int k = 0; k < N; ++k) {
#pragma omp simd
      for (int l = 0; l < L; ++l) m[k][at(k, k)][l] = scale[l] = 1 / m[k][at(k, k)][l];
      for (int i = k + 1; i < end(k); ++i) {
#pragma omp simd
        for (int l = 0; l < L; ++l) {
          factor[l] = m[i][at(i, k)][l] * scale[l];
          r[i][l] -= factor[l] * r[k][l];
        }
        for (int c = k + 1; c < end(k); ++c) {
#pragma omp simd
          for (int l = 0; l < L; ++l) m[i][at(i, c)][l] -= factor[l] * m[k][at(k, c)][l];
        }
      }
    }
    for (int k = N - 1; k >= 0; --k) {
      for (int c = k + 1; c < end(k); ++c) {
#pragma omp simd
        for (int l = 0; l < L; ++l) r[k][l] -= m[k][at(k, c)][l] * r[c][l];
      }
#pragma omp simd
      for (int l = 0; l < L; ++l) r[k][l] *= m[k][at(k, k)][l];
    }
  }
  // The multipliers of triangles, in closed form: see triangles.py.
  void triangle(const T* length, const int64_t (&place)[L]) {
    T dd[3][L] = {}, uu[3][L] = {}, w[3][L] = {}, up[3][L] = {};
    for (int k = 0; k < 3; ++k)
      for (int a = 0; a < DIM; ++a) {
#pragma omp simd
        for (int l = 0; l < L; ++l) {
          dd[k][l] += d[a][k][l] * d[a][k][l];
          uu[k][l] += u[a][k][l] * u[a][k][l];
          w[k][l] += d[a][0][l] * u[a][k][l];
          up[k][l] += d[a][1][l] * u[a][k][l];
        }
      }
    T a[3][L], A[3][L], b[3][L], B[3][L], c[3][L];
    for (int l = 0; l < L; ++l)
      for (int k = 0; k < 3; ++k) c[k][l] = length[place[l] * 3 + k] * length[place[l] * 3 + k];
    sides(dd, a, A);
    for (int k = 0; k < 3; ++k) {
#pragma omp simd
      for (int l = 0; l < L; ++l) {
        w[k][l] /= a[0][l];
        up[k][l] = (up[k][l] - a[1][l] * w[k][l]) / A[1][l];
        c[k][l] += w[k][l] * w[k][l] + up[k][l] * up[k][l] - uu[k][l];
      }
    }
    sides(c, b, B);
    T dot[L] = {}, cross[L] = {}, torque[L] = {}, cosine[L], sine[L];
    for (int k = 0; k < 3; ++k) {
#pragma omp simd
      for (int l = 0; l < L; ++l) {
        const T weight = c[k][l] = -S[(k + 1) % 3][(k + 2) % 3][l];
        dot[l] += weight * (a[k][l] * b[k][l] + A[k][l] * B[k][l]);
        cross[l] += weight * (a[k][l] * B[k][l] - A[k][l] * b[k][l]);
        torque[l] += weight * (a[k][l] * up[k][l] - A[k][l] * w[k][l]);
      }
    }
#pragma omp simd
    for (int l = 0; l < L; ++l) {
      const T square = dot[l] * dot[l] + cross[l] * cross[l];
      const T size = math::sqrt(square - torque[l] * torque[l]), root = dot[l] < 0 ? -size : size;
      cosine[l] = (cross[l] * torque[l] + dot[l] * root) / square;
      sine[l] = (dot[l] * torque[l] - cross[l] * root) / square;
    }
    for (int k = 0; k < 3; ++k) {
#pragma omp simd
      for (int l = 0; l < L; ++l) {
        w[k][l] = c[k][l] * (cosine[l] * b[k][l] - sine[l] * B[k][l] - w[k][l]);
        up[k][l] = c[k][l] * (sine[l] * b[k][l] + cosine[l] * B[k][l] - up[k][l]);
      }
    }
    for (int k = 0, n = 1; k < 3; ++k, n = (k + 1) % 3) {
#pragma omp simd
      for (int l = 0; l < L; ++l) {
        const T area = a[0][l] * A[1][l] * (S[0][0][l] * S[1][1][l] - S[0][1][l] * S[0][1][l]);
        x[k][l] = (a[n][l] * (up[n][l] - up[k][l]) - A[n][l] * (w[n][l] - w[k][l])) / area;
      }
    }
  }
  static void sides(const T (&squares)[3][L], T (&along)[3][L], T (&up)[3][L]) {
#pragma omp simd
    for (int l = 0; l < L; ++l) {
      const T p = math::sqrt(squares[0][l]);
      const T q = (squares[2][l] - squares[0][l] - squares[1][l]) / (2 * p);
      const T r = math::sqrt(squares[1][l] - q * q);
      along[0][l] = p, along[1][l] = q, along[2][l] = -(p + q);
      up[0][l] = 0, up[1][l] = r, up[2][l] = -r;
    }
  }
  // Newton's method from x, for |e_k| = L_k.
  void newton(const T* length, const int64_t (&place)[L]) {
    const T enough = sizeof(T) == 8 ? T(1.4901161193847656e-08) : T(3.4526698300124393e-04);
    T r[N][L];
    bool solved[L] = {};
    for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
      bool now[L], all = true;
      for (int l = 0; l < L; ++l) now[l] = true;
      for (int k = 0; k < N; ++k) {
        for (int a = 0; a < DIM; ++a) {
#pragma omp simd
          for (int l = 0; l < L; ++l) e[a][k][l] = 0;
          for (int c = begin(k); c < end(k); ++c) {
#pragma omp simd
            for (int l = 0; l < L; ++l)
              e[a][k][l] += S[k][at(k, c)][l] * (x[c][l] * d[a][c][l]);
          }
#pragma omp simd
          for (int l = 0; l < L; ++l) e[a][k][l] = u[a][k][l] + e[a][k][l];
        }
        for (int l = 0; l < L; ++l) {
          T square = 0;
          for (int a = 0; a < DIM; ++a) square += e[a][k][l] * e[a][k][l];
          const T wanted = length[place[l] * N + k] * length[place[l] * N + k];
          r[k][l] = (square - wanted) / 2;
          now[l] = now[l] && absolute(square - wanted) <= enough * wanted;
        }
      }
      assemble(e);
      eliminate(r);
      for (int k = 0; k < N; ++k) {
#pragma omp simd
        for (int l = 0; l < L; ++l) x[k][l] -= solved[l] ? 0 : r[k][l];
      }
      for (int l = 0; l < L; ++l) {
        solved[l] = now[l];
        all = all && now[l];
      }
      if (all) return;
    }
    for (int l = 0; l < L; ++l)
      for (int k = 0; k < N && !solved[l]; ++k) x[k][l] = NAN;
  }
};

// Load clusters of each system, with `first` as u, call `found`, which sets x, and store x.
template <class T, int N, int W, int DIM, class Found>
void each(int64_t systems, int64_t clusters, const T* first, const T* d, const T* S, T* x,
          Found found) {
  constexpr int L = N > 8 ? 1 : 8;
  typedef Clusters<T, N, W, DIM, L> Work;
  static thread_local Work work;
  for (int64_t s = 0; s < systems; ++s)
    for (int64_t begin = 0; begin < clusters; begin += L) {
      int64_t place[L];
      for (int l = 0; l < L; ++l) place[l] = begin + l < clusters ? begin + l : clusters - 1;
      for (int l = 0; l < L; ++l) {
        for (int a = 0; a < DIM; ++a)
          for (int k = 0; k < N; ++k) {
            const int64_t from = ((s * DIM + a) * clusters + place[l]) * N + k;
            work.u[a][k][l] = first[from];
            work.d[a][k][l] = d[from];
          }
        for (int k = 0; k < N; ++k)
          for (int j = 0; j < W; ++j) work.S[k][j][l] = S[(place[l] * N + k) * W + j];
      }
      found(work, s, place);
      for (int l = 0; l < L && begin + l < clusters; ++l)
        for (int k = 0; k < N; ++k) x[(s * clusters + begin + l) * N + k] = work.x[k][l];
    }
}
// Solve S * (e . d) x = v.
template <class T, int N, int W, int DIM>
void solve(int64_t systems, int64_t clusters, const T* e, const T* d, const T* S, const T* v,
           T* x) {
  each<T, N, W, DIM>(systems, clusters, e, d, S, x, [&](auto& work, int64_t s, auto& place) {
    int l = 0;
    for (int64_t cluster : place) {
      for (int k = 0; k < N; ++k) work.x[k][l] = v[(s * clusters + cluster) * N + k];
      ++l;
    }
    work.assemble(work.u);
    work.eliminate(work.x);
  });
}
// Solve for the lengths.
template <class T, int N, int W, int DIM>
void lengths(int64_t systems, int64_t clusters, const T* u, const T* d, const T* S,
             const T* length, T* x) {
  each<T, N, W, DIM>(systems, clusters, u, d, S, x, [&](auto& work, int64_t, auto& place) {
    for (auto& row : work.x)
      for (T& each : row) each = 0;
    work.newton(length, place);
  });
}
template <class T, int N, int W, int DIM>
void triangles(int64_t systems, int64_t clusters, const T* u, const T* d, const T* S,
               const T* length, T* x) {
  each<T, N, W, DIM>(systems, clusters, u, d, S, x, [&](auto& work, int64_t, auto& place) {
    work.triangle(length, place);
    work.newton(length, place);
  });
}
} }
