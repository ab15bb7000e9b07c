"""Traced loops of steps, compiled as C++ functions with one function a loop.

:func:`compile_loop` is the entry. The other names are what loops are made of and refused for, what
printed calls and kernels of other packages share with them, and the folder of compiled libraries.
"""

from adjsim.compiler.cache import CACHE_LIMIT, cache_entries, cache_folder, trim_cache
from adjsim.compiler.calls import Address, Call, Operators, address_of, in_order, pointer_to
from adjsim.compiler.formulas import TRITON, print_formulas, print_on_vectors, triton_type
from adjsim.compiler.library import CompilerError, compiled
from adjsim.compiler.loops import LoopSpec, clone, compile_loop, filled, leaves, mapped
from adjsim.compiler.mathematics import FUNCTIONS, scalar_functions, vector_functions
from adjsim.compiler.nests import PARALLEL_WORK
from adjsim.compiler.operations import lookup
from adjsim.compiler.products import multiplications
from adjsim.compiler.refusals import CompileError, Constant, NoCapture
from adjsim.compiler.repetitions import merge_repetitions
from adjsim.compiler.systems import (
    LARGEST_SYSTEM,
    has_negative_eigenvalue,
    has_negative_eigenvalue_if,
    solve,
)
from adjsim.compiler.tracing import graph_of, present_recorder
from adjsim.compiler.values import TYPES, UnprintableError, Value, dense_copy

__all__ = [
    "CACHE_LIMIT", "FUNCTIONS", "LARGEST_SYSTEM", "PARALLEL_WORK", "TRITON", "TYPES",
    "Address", "Call", "CompileError", "CompilerError", "Constant", "LoopSpec", "NoCapture",
    "Operators", "UnprintableError", "Value", "address_of", "cache_entries", "cache_folder",
    "clone", "compile_loop", "compiled", "dense_copy", "filled", "graph_of",
    "has_negative_eigenvalue", "has_negative_eigenvalue_if", "in_order", "leaves", "lookup",
    "mapped", "merge_repetitions", "multiplications", "pointer_to", "present_recorder",
    "print_formulas", "print_on_vectors", "scalar_functions", "solve", "trim_cache", "triton_type",
    "vector_functions",
]  # fmt: skip
