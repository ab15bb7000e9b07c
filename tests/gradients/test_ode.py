"""ODE solvers: backpropagation against central differences, and the continuous adjoint approaching
it.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torchdiffeq._impl.odeint import SOLVERS

import adjsim
from adjsim import BacksolveAdjoint, DirectAdjoint, ODESolver, TimeAverage
from adjsim.solvers.continuous.ode import ADAPTIVE, MULTISTEP, ONE_STEP, SCIPY
from tests.gradients.test_table import agree, moment
from tests.problems import DYNAMICS, POTENTIALS, parameter, slow_but, square

TIMES = [0.0, 0.03, 0.1, 0.15, 0.25]


# What each adaptive method reaches in reasonable time: an order of 2 needs 1e5 steps a unit of time
# for 1e-10.
TOLERANCE = {
    "dopri8": 1e-10,
    "dopri5": 1e-10,
    "scipy_solver": 1e-9,
    "bosh3": 1e-7,
    "fehlberg2": 3e-6,
    "adaptive_heun": 3e-6,
}


# Steps at which each method of fixed step is stable and good to about a per cent on bound
# Lennard-Jones atoms.
DT = {"euler": 0.0005, **dict.fromkeys(MULTISTEP, 0.002)}


def solver_for(method: str) -> ODESolver:
    if method in ONE_STEP + MULTISTEP:
        return ODESolver(method, dt=DT.get(method, 0.005))
    return ODESolver(method, rtol=TOLERANCE[method], atol=TOLERANCE[method])


def gradients(
    method,
    adjoint,
    kind="saves",
    dynamics="hamiltonian",
    potential="lennard-jones",
    solver=None,
    shift=None,
):
    """The gradient of a loss along 0.25 time units by every input, or the loss alone after a shift
    of some of them.
    """
    if shift is not None:
        with torch.no_grad():
            return float(
                loss_and_inputs(method, adjoint, kind, dynamics, potential, solver, shift)[0]
            )
    loss, inputs = loss_and_inputs(method, adjoint, kind, dynamics, potential, solver, shift)
    found = torch.autograd.grad(
        loss, list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True))


def loss_and_inputs(method, adjoint, kind, dynamics, potential, solver, shift):
    made = DYNAMICS[dynamics](POTENTIALS[potential]())
    position, momentum = square()
    inputs = {**dict(made.named_parameters()), "position": position, "momentum": momentum}
    for name, change in (shift or {}).items():
        inputs[name] += change
    position.requires_grad_()
    momentum.requires_grad_()
    record = {"record": moment, "average": TimeAverage(moment, burn_in=0.05)}.get(kind)
    run = adjsim.simulate(
        made,
        made.init(position, momentum),
        TIMES,
        solver=solver or solver_for(method),
        adjoint=adjoint,
        record=record,
    )
    if kind == "final":
        loss = moment(run.final)
    elif kind == "saves":
        loss = sum(
            moment([getattr(run, f)[i] for f in run.final._fields]) * (1 + i)
            for i in range(len(TIMES))
        )
    else:
        loss = run.record.sum()
    return loss, inputs


@functools.cache
def exact_gradients(kind: str, dynamics: str):
    # dopri8 is good to 6e-8 only, by the order of its interpolant.
    tight = ODESolver("dopri5", rtol=1e-12, atol=1e-12)
    return gradients("dopri5", DirectAdjoint(), kind, dynamics, solver=tight)


def test_every_method_of_torchdiffeq_is_there():
    assert set(ADAPTIVE + ONE_STEP + MULTISTEP + SCIPY) == set(SOLVERS)


def marked(methods, short=("dopri5", "rk4", "scipy_solver")):
    """By default one adaptive method, one of fixed steps and SciPy's."""
    return slow_but(
        lambda m: m in short,
        methods,
        marathon=lambda m: m in ("adaptive_heun", "bosh3", "fixed_adams", "implicit_adams"),
    )


@pytest.mark.parametrize("method", marked(ADAPTIVE + ONE_STEP + MULTISTEP, ["rk4"]))
def test_direct_against_central_differences(method):
    grads = gradients(method, DirectAdjoint())
    # Steps of fixed size are smooth functions of the inputs (implicit_adams to its corrector's
    # tolerance, 1e-7). Adaptive methods choose their steps anew for each shift, which moves the
    # loss by as much as it is wrong, over h.
    fixed = method in ONE_STEP + MULTISTEP
    coarse = {"bosh3": (2e-3, 1e-4), "fehlberg2": (5e-3, 3e-3), "adaptive_heun": (5e-3, 3e-3)}
    h, rel = coarse.get(
        method,
        (1e-4 if fixed else 3e-4, 1e-4 if method in ("implicit_adams", "fixed_adams") else 1e-6),
    )
    tight = ODESolver("dopri5", rtol=1e-12, atol=1e-12)
    wrong = abs(
        gradients(method, DirectAdjoint(), shift={})
        - gradients(method, DirectAdjoint(), solver=tight, shift={})
    )
    floor = 1e-7 if fixed else 1e-5 + 4 * wrong / h
    # One direction through all parameters, and one through the start.
    for names in (["mass", "potential.epsilon", "potential.sigma"], ["position", "momentum"]):
        directions = {name: torch.randn_like(grads[name]) for name in names}
        shifts = {k: {name: k * h * d for name, d in directions.items()} for k in (-2, -1, 1, 2)}
        loss = {k: gradients(method, DirectAdjoint(), shift=shift) for k, shift in shifts.items()}
        slope = (4 * (loss[1] - loss[-1]) / (2 * h) - (loss[2] - loss[-2]) / (4 * h)) / 3
        expected = sum(float((grads[name] * d).sum()) for name, d in directions.items())
        assert slope == pytest.approx(expected, rel=rel, abs=floor), names


@pytest.mark.parametrize(
    ("dynamics", "kind"),
    slow_but(
        lambda *_: False,
        [
            *(("hamiltonian", kind) for kind in ("final", "saves", "record", "average")),
            ("chain-3", "saves"),
            ("esh", "average"),
        ],
        # Saves have the end among them, and a record is read at saves.
        marathon=lambda dynamics, kind: kind in ("final", "record"),
    ),
)
def test_continuous_adjoint_approaches_the_solver_as_tolerances_tighten(dynamics, kind):
    exact = exact_gradients(kind, dynamics)
    errors = []
    for tolerance in (1e-4, 1e-6, 1e-9):
        found = gradients(
            "dopri5",
            BacksolveAdjoint(),
            kind,
            dynamics,
            solver=ODESolver("dopri5", rtol=tolerance, atol=tolerance),
        )
        errors.append(max(float((found[k] - exact[k]).norm() / exact[k].norm()) for k in exact))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


@pytest.mark.parametrize("method", marked(ADAPTIVE + ONE_STEP + MULTISTEP + SCIPY))
def test_continuous_adjoint_of_every_method(method):
    """Away from the exact flow's gradient by the method's own error at its step or tolerance."""
    exact = exact_gradients("saves", "hamiltonian")
    agree(
        gradients(method, BacksolveAdjoint(), solver=solver_for(method)),
        exact,
        0.1 if method == "euler" else 1e-2,
    )


@pytest.mark.slow
def test_backward_tolerances_are_their_own():
    tight = ODESolver("dopri5", rtol=1e-11, atol=1e-11)
    exact = gradients("dopri5", DirectAdjoint(), solver=tight)
    loose = gradients("dopri5", BacksolveAdjoint(rtol=1e-3, atol=1e-3), solver=tight)
    good = gradients("dopri5", BacksolveAdjoint(rtol=1e-10, atol=1e-10), solver=tight)
    error = [
        max(float((g[k] - exact[k]).norm() / exact[k].norm()) for k in exact) for g in (loose, good)
    ]
    assert error[0] > 100 * error[1]


def test_scipy_cannot_be_backpropagated_through():
    with pytest.raises(TypeError, match="BacksolveAdjoint"):
        gradients("scipy_solver", DirectAdjoint())


@pytest.mark.slow
def test_time_average_is_the_integral():
    """A harmonic oscillator from q = 1 at rest: the mean of q^2 over [b, T] in closed form."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    for solver in (ODESolver("dopri5", rtol=1e-10, atol=1e-10), ODESolver("rk4", dt=0.01)):
        for burn_in in (0.0, 1.0):
            run = adjsim.simulate(
                dynamics,
                start,
                [0.0, 2.0, 3.0],
                solver=solver,
                record=TimeAverage(lambda s: s.position**2, burn_in),
            )
            exact = 0.5 + (torch.sin(torch.tensor(6.0)) - torch.sin(torch.tensor(2 * burn_in))) / (
                4 * (3 - burn_in)
            )
            torch.testing.assert_close(run.record.squeeze(), exact, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_contraction_loses_the_backward_solution_and_saving_keeps_it():
    """A stiff contraction onto q = p/2: solved backward it runs away as e^{30 t}, which saving
    bounds.
    """

    class Contraction(adjsim.ESH):
        """q' = -30 (q - tanh(a u)), on a state whose direction stands still."""

        def drift(self, t, state):
            a = self.potential.k
            pull = -30 * (state.position - torch.tanh(a * state.direction))
            return state._replace(
                position=pull,
                direction=torch.zeros_like(pull),
                log_speed=torch.zeros_like(state.log_speed),
            )

    def gradient(times, adjoint):
        dynamics = Contraction(adjsim.Harmonic(parameter(0.8)))
        start = dynamics.init(torch.ones(1, 2), torch.tensor([[0.6, 0.8]]))
        solver = ODESolver("dopri5", rtol=1e-8, atol=1e-8)
        run = adjsim.simulate(dynamics, start, times, solver=solver, adjoint=adjoint)
        return float(
            torch.autograd.grad(run.final.position.square().sum(), dynamics.potential.k)[0]
        )

    exact = sum(2 * math.tanh(0.8 * u) * u / math.cosh(0.8 * u) ** 2 for u in (0.6, 0.8))
    assert gradient([0.0, 2.0], DirectAdjoint()) == pytest.approx(exact, rel=1e-5)
    saved = [i / 10 for i in range(21)]
    assert gradient(saved, BacksolveAdjoint()) == pytest.approx(exact, rel=1e-5)


def test_vector_field_counts_its_work():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(torch.nn.Parameter(torch.tensor(1.0))))
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    run = adjsim.simulate(dynamics, start, [0.0, 1.0], solver=ODESolver("rk4", dt=0.1))
    assert run.stats["energy_evaluations"] == 40
    run.final.position.sum().backward()
    # All but the first of rk4's last slopes reach the position; each evaluation is gone back
    # through at most once.
    assert 70 <= run.stats["energy_evaluations"] <= 80


class Rate(torch.nn.Module):
    """A rate of y, of a parameter k, a buffer b and the number of evaluations so far."""

    def __init__(self, rate):
        super().__init__()
        self.k = parameter(0.5)
        self.register_buffer("b", torch.ones((), dtype=torch.float64))
        self.rate, self.evaluations = rate, 0

    def forward(self, t, y):
        self.evaluations += 1
        return self.rate(self, y)


def backsolved(rate, y, end=1.0):
    """The gradient of the final state by a start y and k, of which 33 evaluations are forward."""
    ode, y = adjsim.ODE(Rate(rate)), torch.tensor([y], dtype=torch.float64, requires_grad=True)
    run = adjsim.simulate(
        ode, ode.init(y), [0.0, end], solver=ODESolver(), adjoint=BacksolveAdjoint()
    )
    run.final.y.sum().backward()
    return y.grad, ode.fun.k.grad


def test_continuous_adjoint_of_a_rate_that_depends_on_nothing():
    assert backsolved(lambda self, y: torch.ones_like(y), 1.0) == (1.0, 0.0)


def test_continuous_adjoint_names_a_backward_solution_that_is_not_finite():
    with pytest.raises(FloatingPointError, match=r"dopri5 failed .* reaches NaN"):
        backsolved(lambda self, y: -self.k * y * (math.nan if self.evaluations > 40 else 1.0), 1.0)


@pytest.mark.parametrize("hidden", ["read late", "the rate itself"])
def test_continuous_adjoint_refuses_a_captured_tensor_wherever_it_is_read(hidden):
    outside = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def rate(self, y):
        if hidden == "the rate itself":
            return outside
        return -y * (outside if self.evaluations > 40 else 1.0)

    with pytest.raises(ValueError, match=r"captured tensor .*not registered"):
        backsolved(rate, 1.0)


@pytest.mark.parametrize("name", ["k", "b"])
@pytest.mark.parametrize("evaluations", [10, 40], ids=["forward", "backward"])
def test_continuous_adjoint_refuses_a_module_that_writes(name, evaluations):
    def rate(self, y):
        if self.evaluations > evaluations:
            with torch.no_grad():
                getattr(self, name).mul_(1.0 + 1e-12)
        return -self.k * self.b * y

    with pytest.raises(ValueError, match=f"writes to its own parameter or buffer '{name}'"):
        backsolved(rate, 1.0)


@pytest.mark.parametrize("adjoint", [DirectAdjoint(), BacksolveAdjoint()], ids=repr)
def test_the_final_state_does_not_change_with_the_frames(adjoint):
    ode = adjsim.ODE(Rate(lambda self, y: -self.k.detach() * y))
    start = ode.init(torch.ones(1, dtype=torch.float64))
    with torch.no_grad():
        run = adjsim.simulate(ode, start, [0.0, 1.0], solver=ODESolver(), adjoint=adjoint)
    run.y.zero_()
    assert float(run.final.y) == pytest.approx(math.exp(-0.5))


class Turned(torch.nn.Module):
    """A rate with parameters of several dtypes, in the dtype of the state."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 2, dtype=dtype)
        self.k = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.w = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, t, y):
        rate = torch.tanh(self.net(y)) * self.k
        return rate + (y * self.w * torch.exp(1j * t)).sum(0).real.to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous_adjoint_of_parameters_of_several_dtypes(dtype):
    """The field is evaluated at states of their own dtype, backward too."""
    found = []
    for adjoint in (DirectAdjoint(), BacksolveAdjoint()):
        ode, y = adjsim.ODE(Turned(dtype)), torch.ones(2, dtype=dtype, requires_grad=True)
        solver = ODESolver(rtol=1e-6, atol=1e-7)
        run = adjsim.simulate(ode, ode.init(y), TIMES, solver=solver, adjoint=adjoint)
        run.y.square().sum().backward()
        found.append([y.grad, *(x.grad for x in ode.parameters())])
    for direct, swept in zip(*found, strict=True):
        torch.testing.assert_close(swept, direct, rtol=1e-4, atol=1e-5)


def test_the_continuous_adjoint_refuses_complex_averages():
    """They would be in one row with the state, which would then be complex too."""
    ode, y = adjsim.ODE(Turned(torch.float64)), torch.ones(2, dtype=torch.float64)
    average = adjsim.TimeAverage(lambda state: state.y * 1j)
    with pytest.raises(TypeError, match="view_as_real"):
        adjsim.simulate(
            ode,
            ode.init(y.requires_grad_()),
            TIMES,
            solver=ODESolver(),
            adjoint=BacksolveAdjoint(),
            record=average,
        )
