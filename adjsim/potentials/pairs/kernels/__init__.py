"""The pair operator: forces and energies of pairs, evaluated on the CPU by generated C++."""

from adjsim.potentials.pairs.kernels.printing import PAIR_OPERATORS

__all__ = ["PAIR_OPERATORS"]
