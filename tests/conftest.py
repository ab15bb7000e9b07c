"""Public calls are checked against their annotations, and every test runs in float64 on one thread.

The moves of a step and the sweep over them are left unchecked: they run a hundred times a step, and
would make up most of the time of the tests.
"""

from jaxtyping import install_import_hook

CHECKED = [
    "adjsim._noise",
    "adjsim._params",
    "adjsim._trajectory",
    "adjsim.compare",
    "adjsim.dynamics.base",
    "adjsim.dynamics.esh",
    "adjsim.dynamics.gle",
    "adjsim.dynamics.hamiltonian",
    "adjsim.dynamics.langevin",
    "adjsim.dynamics.nose_hoover",
    "adjsim.dynamics.overdamped",
    "adjsim.estimators",
    "adjsim.observables",
    "adjsim.potentials",
    "adjsim.simulation",
    "adjsim.solvers.euler_maruyama",
    "adjsim.solvers.ode",
    "adjsim.solvers.sde",
    "adjsim.solvers.splitting",
]
install_import_hook(CHECKED, "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _setting():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
