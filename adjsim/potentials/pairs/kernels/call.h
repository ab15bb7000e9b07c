// The arguments of a pair kernel. REAL is float or double; a stride counts elements.
#include <stdint.h>

struct List;

struct View {
  REAL* data;
  int64_t system, atom, axis;
};

struct Call {
  int64_t systems, atoms, dim, threads;
  int64_t image;  // 0: no box; 1: lengths; 2: rows
  View position, vector, force, product;
  const REAL* box;      // (dim) lengths or (dim, dim) rows
  const REAL* spacing;  // of the grid, one for each system, or one if spacing_step is 0
  int64_t spacing_step;
  const REAL* weight;   // the cotangent of the energy, one for each system
  REAL* energy;         // one for each system
  const REAL* const* operands;
  REAL* const* gradients;
  const int64_t* species;  // one for each atom: its row and column in operands that are tables
  int64_t kinds;           // the number of rows of a table
  double cutoff, skin;
  // Of the library of neighbour lists; unused by kernels that evaluate all pairs.
  void* (*acquire)(const struct Call*, int64_t width, const struct List** lists);
  void (*release)(void*);
  const int64_t* exclusions;  // (excluded, 2) atoms that do not interact; used if EXCLUDED is defined
  int64_t excluded;
};

// The neighbours of the atoms of one system, for blocks of W atoms side by side. Atoms are numbered
// by place, in the order of `atom`. Step k of a block b has, at index[start[b] + k * W], the places
// of the W neighbours; the neighbours of an atom come in ascending order of their own numbers. An
// atom with fewer neighbours than others of its block is its own neighbour in the last steps, from
// full[b] on. Excluded pairs are not in the list.
struct List {
  const int *atom, *index;
  const int64_t *start, *steps, *full;
  const REAL* rows;  // positions, and vectors, in the order of places: `width` numbers an atom
};

#if defined(__AVX512F__)
constexpr int W = 8;
#else
constexpr int W = sizeof(REAL) == 8 ? 4 : 8;
#endif
