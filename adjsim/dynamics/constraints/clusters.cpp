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
  // Newton's method from x = 0, for |e_k| = L_k.
  void newton(const T* length, const int64_t (&place)[L], int iterations) {
    const T enough = sizeof(T) == 8 ? T(1.4901161193847656e-08) : T(3.4526698300124393e-04);
    T r[N][L];
    bool solved[L] = {};
    for (int k = 0; k < N; ++k)
      for (int l = 0; l < L; ++l) x[k][l] = 0;
    for (int iteration = 0; iteration < iterations; ++iteration) {
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

// For each cluster of each system, solve for the lengths (iterations > 0) from `first` = u, or
// S * (e . d) x = v from `first` = e.
template <class T, int N, int W, int DIM>
void solve(int64_t systems, int64_t clusters, const T* first, const T* d, const T* S,
           const T* right, T* x, int iterations) {
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
      if (iterations) {
        work.newton(right, place, iterations);
      } else {
        for (int l = 0; l < L; ++l)
          for (int k = 0; k < N; ++k) work.x[k][l] = right[(s * clusters + place[l]) * N + k];
        work.assemble(work.u);
        work.eliminate(work.x);
      }
      for (int l = 0; l < L && begin + l < clusters; ++l)
        for (int k = 0; k < N; ++k) x[(s * clusters + begin + l) * N + k] = work.x[k][l];
    }
}
} }
