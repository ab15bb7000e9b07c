"""adjsim: gradients through physical simulation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adjsim import adjoints, dynamics, estimators, meshes, observables, potentials, solvers
from adjsim.adjoints import *
from adjsim.core.bounds import Between, Positive
from adjsim.core.brownian_path import BrownianPath
from adjsim.core.durable.ranks import RankError
from adjsim.core.durable.store import StoreError
from adjsim.core.trajectory import Final, TimeAverage, Trajectory
from adjsim.dynamics import *
from adjsim.estimators import *
from adjsim.observables import *
from adjsim.potentials import *
from adjsim.simulation.simulate import simulate
from adjsim.solvers import *
from adjsim.solvers.implicit.steady_state import SteadyState, steady_state

if TYPE_CHECKING:
    from adjsim.estimators.compare import Comparison, compare
    from adjsim.estimators.confidence import Confidence, confidence
    from adjsim.ivp import GrazingError, OdeResult, solve_ivp
    from adjsim.potentials.statics.minimum import minimize

__version__ = "0.1.0"

# Names whose modules import SciPy's solvers, and which are therefore imported when first used.
_LATE = {
    "Comparison": "adjsim.estimators.compare",
    "Confidence": "adjsim.estimators.confidence",
    "GrazingError": "adjsim.ivp",
    "OdeResult": "adjsim.ivp",
    "compare": "adjsim.estimators.compare",
    "confidence": "adjsim.estimators.confidence",
    "minimize": "adjsim.potentials.statics.minimum",
    "solve_ivp": "adjsim.ivp",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'adjsim' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATE[name]), name)
    return found


# A package's __all__ lists its names that are names of adjsim too. Other public names of a package,
# such as base classes, are imported there as themselves.
__all__ = [
    "Between",
    "BrownianPath",
    "Comparison",
    "Confidence",
    "Final",
    "GrazingError",
    "OdeResult",
    "Positive",
    "RankError",
    "SteadyState",
    "StoreError",
    "TimeAverage",
    "Trajectory",
    "compare",
    "confidence",
    "meshes",
    "minimize",
    "simulate",
    "solve_ivp",
    "steady_state",
]
__all__ += potentials.__all__
__all__ += dynamics.__all__
__all__ += solvers.__all__
__all__ += adjoints.__all__
__all__ += estimators.__all__
__all__ += observables.__all__
