#include <stdint.h>

// The neighbours of the atoms of one system, for blocks of W atoms side by side. Atoms are numbered
// by place, in the order of `atom`. Step k of a block b has, at index[start[b] + k * W], the places
// of the W neighbours; the neighbours of an atom come in ascending order of their own numbers. An
// atom with fewer neighbours than others of its block is its own neighbour in the last steps, from
// full[b] on. Excluded pairs are not in the list.
//
// A mutual list holds each pair once. Atoms are in the order of their own numbers, and the steps[i]
// neighbours of atom i with larger numbers follow each other from index[start[i]] on.
struct List {
  const int *atom, *index;
  const int64_t *start, *steps, *full;
  // Positions, and vectors, in the order of places: `width` numbers an atom, of which the fourth is
  // for who holds the list.
  REAL* rows;
};
typedef void* Acquire(const struct Call*, int64_t width, const List** lists);
typedef void Release(void*);

#if defined(__AVX512F__)
constexpr int W = 8;
#else
constexpr int W = sizeof(REAL) == 8 ? 4 : 8;
#endif
