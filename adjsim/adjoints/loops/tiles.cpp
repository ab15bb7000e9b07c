// Tiles of normal numbers with the bits of NumPy's generator (core/tiles_on_device.py): the words of
// Philox 4x64, and the ziggurat, whose tables are given.

#include <stdint.h>
extern "C" {
double exp(double) noexcept;
double log1p(double) noexcept;
void* memcpy(void*, const void*, __SIZE_TYPE__) noexcept;
}

namespace {

struct Ziggurat {
  const double* widths;
  const int64_t* bounds;
  const double* layers;
  // A tile in which closer numbers are compared is unsure, since the last bits of exp decide.
  double close;
};

// The words of one key. Those of several counters are computed together, since the rounds of one
// counter wait for each other.
struct Words {
  static constexpr int SIDE = 2, SIZE = 64 * 4;
  uint64_t keys[ROUNDS][2], counter = 0, words[SIZE];
  int next = SIZE;

  Words(uint64_t first, uint64_t second) {
    for (auto& key : keys) {
      key[0] = first, key[1] = second;
      first += WEYL_0, second += WEYL_1;
    }
  }
  uint64_t take() {
    if (__builtin_expect(next == SIZE, 0)) fill();
    return words[next++];
  }
  double uniform() { return (double)(take() >> 11) * 0x1p-53; }

  __attribute__((noinline)) void fill() {
    for (uint64_t* w = words; w < words + SIZE; w += 4 * SIDE) {
      uint64_t a[SIDE], b[SIDE] = {}, c[SIDE] = {}, d[SIDE] = {};
      // NumPy increments the counter before it is used.
      for (uint64_t& x : a) x = ++counter;
      for (const auto& key : keys) {
#pragma GCC unroll 2
        for (int n = 0; n < SIDE; ++n) {
          const unsigned __int128 left = (unsigned __int128)MULTIPLIER_0 * a[n];
          const unsigned __int128 right = (unsigned __int128)MULTIPLIER_1 * c[n];
          a[n] = (uint64_t)(right >> 64) ^ b[n] ^ key[0], b[n] = (uint64_t)right;
          c[n] = (uint64_t)(left >> 64) ^ d[n] ^ key[1], d[n] = (uint64_t)left;
        }
      }
      for (int n = 0; n < SIDE; ++n) {
        uint64_t* x = w + 4 * n;
        x[0] = a[n], x[1] = b[n], x[2] = c[n], x[3] = d[n];
      }
    }
    next = 0;
  }
};

// Draw the number of an attempt that reads further words; false: another attempt begins.
__attribute__((noinline)) bool resolved(const Ziggurat& z, Words& source, uint64_t word, double& x, bool& sure) {
  const int layer = word & 0xff;
  if (layer > 0) {
    const double above = z.layers[layer - 1] - z.layers[layer];
    const double margin = above * source.uniform() + z.layers[layer] - exp(-0.5 * x * x);
    sure = sure && !(__builtin_fabs(margin) < z.close);
    return margin < 0;
  }
  for (;;) {
    const double far = -INVERSE * log1p(-source.uniform()), y = -log1p(-source.uniform());
    sure = sure && !(__builtin_fabs(y + y - far * far) < z.close);
    if (y + y > far * far) {
      x = word >> 17 & 1 ? -(TAIL + far) : TAIL + far;
      return true;
    }
  }
}

inline double number(const Ziggurat& z, Words& source, bool& sure) {
  for (;;) {
    const uint64_t word = source.take();
    const int64_t size = word >> 9 & ((UINT64_C(1) << BITS) - 1);
    double x = (double)size * z.widths[word & 0xff];
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= (word & 0x100) << 55;
    memcpy(&x, &bits, sizeof bits);
    if (__builtin_expect(size < z.bounds[word & 0xff], 1)) return x;
    if (resolved(z, source, word, x, sure)) return x;
  }
}

}

// Draw `count` columns, from number `offset` on, of the first steps of tiles side by side. `unsure`
// marks the tiles of which the last bits of exp or log1p would decide an attempt.
extern "C" void draw(uint64_t first, uint64_t second, int64_t tiles, int64_t steps, int64_t offset, int64_t count, const double* widths, const int64_t* bounds, const double* layers, double close, double* out, char* unsure, int64_t threads) {
  const Ziggurat z = {widths, bounds, layers, close};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Words source(first, second + tile);
    const int64_t at = tile * ELEMENTS - offset;
    const int64_t begin = at < 0 ? -at : 0, end = count - at < ELEMENTS ? count - at : ELEMENTS;
    bool sure = true;
    for (int64_t step = 0; step < steps; ++step) {
      // The numbers before and behind the columns are drawn too, since words are read in order.
      double part[ELEMENTS], *columns = out + step * count + at;
      double* row = end - begin == ELEMENTS ? columns : part;
      for (int64_t n = 0; n < ELEMENTS; ++n) row[n] = number(z, source, sure);
      if (row == part && begin < end) memcpy(columns + begin, row + begin, (end - begin) * sizeof(double));
    }
    unsure[tile] = !sure;
  }
}
