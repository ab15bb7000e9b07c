"""The pair operator: forces and energies of pairs, evaluated on the CPU by generated C++."""

from adjsim.potentials.pairs.kernels.printing import PairCall

__all__ = ["PairCall"]
