"""Mass matrices: equations of index one against reduced equations, closed forms and differences."""

from __future__ import annotations

import pytest
import torch

import adjsim

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradients(total: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, given))


def agree(found, known, rel: float) -> None:
    for x, y in zip(found, known, strict=True):
        torch.testing.assert_close(x, y, rtol=rel, atol=rel * float(y.abs().max()))


def robertson(t, y, k):
    rate = k[0] * y[0] - k[2] * y[1] * y[2]
    return torch.stack([-rate, rate - k[1] * y[1] ** 2, y[0] + y[1] + y[2] - 1])


def kinetics(t, y, k):
    rate, last = k[0] * y[0] - k[2] * y[1] * y[2], k[1] * y[1] ** 2
    return torch.stack([-rate, rate - last, last])


METHODS = pytest.mark.parametrize("method", ["Rodas4", "Radau"])


@pytest.mark.slow
@METHODS
def test_robertson_as_an_algebraic_problem(method):
    """The third species by conservation of mass; its start is found."""
    k = tensor(0.04, 3e7, 1e4)
    options = {"t_eval": [0.4, 40.0], "args": (k,), "rtol": 1e-7, "atol": 1e-12}
    found = adjsim.solve_ivp(
        robertson, (0, 40), [1.0, 0.0, 0.7], method, mass_matrix=torch.diag(tensor(1, 1, 0)),
        dense_output=True, **options,
    )  # fmt: skip
    known = adjsim.solve_ivp(kinetics, (0, 40), [1.0, 0.0, 0.0], "Radau", **options)
    torch.testing.assert_close(found.y, known.y, rtol=1e-6, atol=1e-9)
    assert found.sol(0.0)[2] == 0
    weights = torch.tensor([[1.0], [1e4], [-2.0]], dtype=torch.float64)
    agree(
        gradients((weights * found.y).sum(), [k]), gradients((weights * known.y).sum(), [k]), 1e-6
    )


SHAPE = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)


def circuit(t, y, volt, r1, r2):
    """A source, a resistor, a capacitor between two nodes, a resistor to the ground."""
    return torch.stack([(volt - y[0]) / r1, -y[1] / r2])


@METHODS
def test_an_electric_circuit(method):
    """The voltage over the capacitor is V (1 - exp(-t / ((R1 + R2) C)))."""
    volt, r1, r2, c = given = [tensor(x)[0].detach().requires_grad_() for x in (5.0, 2.0, 1.0, 3.0)]
    start = torch.zeros(2, dtype=torch.float64)
    found = adjsim.solve_ivp(
        circuit, (0, 6), start, method, t_eval=[2.0, 6.0], args=(volt, r1, r2),
        mass_matrix=c * SHAPE, **TIGHT,
    )  # fmt: skip
    times = torch.tensor([2.0, 6.0], dtype=torch.float64)
    over = volt * (1 - torch.exp(-times / ((r1 + r2) * c)))
    known = torch.stack([over + (volt - over) * r2 / (r1 + r2), (volt - over) * r2 / (r1 + r2)])
    torch.testing.assert_close(found.y, known, rtol=0, atol=1e-7)
    weights = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    agree(
        gradients((weights * found.y).sum(), given), gradients((weights * known).sum(), given), 1e-6
    )


def varying(t, c, *rest):
    return c[0] * (1 + 0.5 * torch.sin(c[1] * t)) * SHAPE


@pytest.mark.slow
@METHODS
def test_a_matrix_that_depends_on_time_and_parameters(method):
    """C(t) dw/dt = (V - w) / (R1 + R2) for the voltage w over the capacitor."""
    c, volt, t1 = tensor(3.0, 1.3), tensor(5.0), tensor(1.5)

    def fun(t, y, c, volt):
        return circuit(t, y, volt[0], 2.0, 1.0)

    found = adjsim.solve_ivp(
        fun, (0, t1[0]), torch.zeros(2).double(), method, args=(c, volt), mass_matrix=varying,
        adjoint="checkpoint", **TIGHT,
    )  # fmt: skip
    known = adjsim.solve_ivp(
        lambda t, w, c, volt: (volt - w) / (3 * c[0] * (1 + 0.5 * torch.sin(c[1] * t))),
        (0, t1[0]), torch.zeros(1).double(), "DOP853", args=(c, volt), max_step=0.2,
        rtol=1e-11, atol=1e-13,
    )  # fmt: skip
    over = found.y[0, -1] - found.y[1, -1]
    torch.testing.assert_close(over, known.y[0, -1], rtol=0, atol=1e-7)
    agree(gradients(over, [c, volt, t1]), gradients(known.y[0, -1], [c, volt, t1]), 1e-6)


def pendulum(t, y, g):
    """x, y, velocities and the tension by length: the constraint differentiated twice."""
    x, z, u, v, tension = y
    constraint = u * u + v * v - tension * (x * x + z * z) - g * z
    return torch.stack([u, v, -tension * x, -tension * z - g, constraint])


POINTS = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.slow
@METHODS
def test_a_pendulum_of_index_one(method):
    """Against the equation of its angle; the tension at the start is found."""
    g, angle = tensor(9.81), tensor(1.0)

    def swing(g, angle, **options):
        zero = torch.zeros_like(angle[0])
        start = torch.stack([torch.sin(angle[0]), -torch.cos(angle[0]), zero, zero, zero])
        return adjsim.solve_ivp(
            pendulum, (0.0, 0.6), start, method, args=(g[0],), mass_matrix=POINTS, **options
        )

    found = swing(g, angle, t_eval=[0.0, 0.6], **TIGHT)
    assert float(found.y[4, 0]) == pytest.approx(9.81 * float(torch.cos(angle.detach())))
    known = adjsim.solve_ivp(
        lambda t, y, g: torch.stack([y[1], -g[0] * torch.sin(y[0])]), (0.0, 0.6),
        torch.stack([angle[0], torch.zeros(()).double()]), "RK45", args=(g,),
        rtol=1e-10, atol=1e-12,
    ).y[0, -1]  # fmt: skip
    place = torch.stack([torch.sin(known), -torch.cos(known)])
    torch.testing.assert_close(found.y[:2, -1], place, rtol=0, atol=1e-6)
    loss = lambda y: y[0] - 0.5 * y[1]  # noqa: E731
    agree(gradients(loss(found.y[:2, -1]), [g, angle]), gradients(loss(place), [g, angle]), 1e-5)


@pytest.mark.slow
def test_radau_resolves_an_algebraic_unknown_between_its_steps():
    """z = sin(15 t) beside a slow x' = -k x, and z = sign(t - 1) there, which jumps."""
    k = tensor(0.3)
    times = torch.linspace(0, 2, 9, dtype=torch.float64)

    def fast(t, y, k):
        return torch.stack(
            [-k[0] * y[0], y[1] - y[0] * torch.sin(15 * t), y[2] - torch.sign(t - 1.1)]
        )

    found = adjsim.solve_ivp(
        fast, (0, 2), [1.0, 0.0, 0.0], "Radau", times, args=(k,), rtol=1e-6, atol=1e-8,
        mass_matrix=torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)),
    )  # fmt: skip
    slow = torch.exp(-k * times)
    known = torch.stack([slow, slow * torch.sin(15 * times), torch.sign(times - 1.1)])
    torch.testing.assert_close(found.y, known, rtol=0, atol=1e-5)
    agree(gradients(found.y[:2].sum(), [k]), gradients(known[:2].sum(), [k]), 1e-6)


@pytest.mark.slow
def test_radau_with_events_times_and_a_matrix_of_captured_tensors():
    """The node behind the capacitor falls below a volt: all in closed form."""
    c, r1, t0 = given = [x[0].detach().requires_grad_() for x in map(tensor, (0.7, 2.0, 0.1))]

    def below(t, y, r1):
        return y[1] - 1.0

    below.terminal = True
    grads = []
    for adjoint in ("interpolate", "checkpoint"):
        found = adjsim.solve_ivp(
            lambda t, y, r1: circuit(t, y, 5.0, r1, 1.0), (t0, 9), [0.0, 0.0], "Radau",
            args=(r1,), mass_matrix=lambda t, r1: c * SHAPE, events=below, dense_output=True,
            adjoint=adjoint, rtol=1e-9, atol=1e-11,
        )  # fmt: skip
        time = found.t_events[0][0]
        known = t0 + (r1 + 1) * c * torch.log(5 / (r1 + 1))
        torch.testing.assert_close(time, known, rtol=1e-7, atol=0)
        inside = found.sol(0.4)[1], 5 / (r1 + 1) * torch.exp(-(0.4 - t0) / ((r1 + 1) * c))
        start = found.y[1, 0], 5 / (r1 + 1)
        both = zip(*(inside, start, (time, known)), strict=True)
        grads += [gradients(sum(parts), given) for parts in both]
    agree(grads[0], grads[1], 1e-6)
    agree(grads[2], grads[0], 1e-10)


@pytest.mark.slow
def test_columns_samples_events_and_checkpoints():
    """The node behind the capacitor falls below a volt, in a circuit where it starts above."""
    r1 = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    c = tensor(0.7)
    zero = torch.zeros(2, 3, dtype=torch.float64)

    def below(t, y, r1, c):
        return y[1] - 1.0

    below.terminal = True
    grads = []
    for adjoint in ("interpolate", "checkpoint"):
        found = adjsim.solve_ivp(
            lambda t, y, r1, c: circuit(t, y, 5.0, r1, 1.0), (0, 9), zero, "Rodas4",
            args=(r1, c), mass_matrix=lambda t, r1, c: c[0] * SHAPE, events=below,
            adjoint=adjoint, **TIGHT,
        )  # fmt: skip
        known = (r1 + 1) * c * torch.log(5 / (r1 + 1))
        assert [len(x) for x in found.t_events[0]] == [1, 1, 0]
        torch.testing.assert_close(found.t[1, :2], known[:2], rtol=1e-6, atol=0)
        grads.append(gradients(found.t[1, :2].sum(), [r1, c]))
    agree(grads[0], gradients(known[:2].sum(), [r1, c]), 1e-6)
    agree(grads[1], grads[0], 1e-12)
    samples = adjsim.solve_ivp(
        lambda t, y, r1, c: torch.cat([(5 - y[:, :1]) / r1, -y[:, 1:]], -1), (0, 1.0), zero.T,
        "Rodas4", args=(r1[:, None], c), mass_matrix=lambda t, r1, c: c[0] * SHAPE,
        batch_first=True,
        **TIGHT,
    )  # fmt: skip
    over = 5 * (1 - torch.exp(-1 / ((r1 + 1) * c)))
    torch.testing.assert_close(samples.y[:, -1, 0] - samples.y[:, -1, 1], over, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_rodas4_takes_a_single_state():
    mu = tensor(5.0)
    options = {"args": (mu,), "t_eval": [1.0, 4.0], "rtol": 1e-7, "atol": 1e-9}

    def fun(t, y, mu):
        return [y[1], mu[0] * (1 - y[0] ** 2) * y[1] - y[0]]

    found = adjsim.solve_ivp(fun, (0, 4), [2.0, 0.0], "Rodas4", **options)
    known = adjsim.solve_ivp(fun, (0, 4), [2.0, 0.0], "Radau", **options)
    assert isinstance(found.steps, int)
    torch.testing.assert_close(found.y, known.y, rtol=1e-5, atol=1e-8)
    agree(gradients(found.y[0, 1], [mu]), gradients(known.y[0, 1], [mu]), 1e-5)


def free(t, y, g):
    """The pendulum by its positions alone: of index three."""
    x, z, u, v, tension = y
    return torch.stack([u, v, -tension * x, -tension * z - g, x * x + z * z - 1])


def switching(t, y, g):
    return y[0]


switching.reset = lambda t, y, g: y


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "RK45"}, 'mass_matrix takes method="Rodas4", or "Radau" for one.*\'RK45\''),
        ({"method": "Radau", "fun": free}, "is not of index one at t = 0:.*Differentiate"),
        ({"method": "Radau", "adjoint": "backsolve"}, 'adjoint must be "interpolate" or "check'),
        ({"fun": free}, "is not of index one at t = 0:.*Differentiate constraints"),
        ({"method": "Radau", "events": switching}, "events have no reset"),
        ({"mass_matrix": POINTS[:4]}, r"mass_matrix must have shape \(5, 5\); got \(4, 5\)"),
        ({"mass_matrix": POINTS * torch.nan}, "mass_matrix must be finite"),
        (
            {"mass_matrix": lambda t, g: POINTS.roll(1, 1) * t + POINTS * (1 - t)},
            "null space of mass_matrix changes in time",
        ),
    ],
)
def test_what_is_refused(changed, message):
    given = {"fun": pendulum, "method": "Rodas4", "mass_matrix": POINTS, **changed}
    start = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        adjsim.solve_ivp(t_span=(0, 1), y0=start, args=(9.81,), **given)


def test_a_start_that_is_not_found_is_refused():
    matrix = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"no consistent start was found.*y0 = \[1.0, 1.0\]"):
        adjsim.solve_ivp(
            lambda t, y: torch.stack([-y[0], y[1] ** 2 + 1]), (0, 1),
            torch.ones(2, dtype=torch.float64), "Rodas4", mass_matrix=matrix,
        )  # fmt: skip


@pytest.mark.parametrize("columns", [1, 2])
def test_a_reset_satisfies_the_algebraic_equations(columns):
    """y0' = -y0 and y1 = y0, where the reset adds one to y0 below a half, and to y1 or not."""
    matrix = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    start = torch.tensor([[1.0, 9.0], [1.0, 9.0]], dtype=torch.float64)[:, :columns]

    def low(t, y):
        return y[0] - 0.5

    def solve(*added):
        low.reset = lambda t, y: torch.stack([x + a for x, a in zip(y, added, strict=True)])
        return adjsim.solve_ivp(
            lambda t, y: torch.stack([-y[0], y[1] - y[0]]), (0, 1), start, "Rodas4",
            mass_matrix=matrix, events=low, rtol=1e-6, atol=1e-8,
        ).y[:, -1, 0]  # fmt: skip

    known = torch.tensor((1 + 2) / torch.e, dtype=torch.float64)
    torch.testing.assert_close(solve(1.0, 1.0), known.expand(2), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"leaves column 0 off its algebraic equations by 1: ret"):
        solve(1.0, 0.0)


def test_the_null_space_of_each_column_is_compared_with_its_own_matrix():
    def matrix(t):
        zero = 0 * t
        large, small = torch.stack([1e10 + zero, zero]), torch.stack([zero + 1, t])
        return torch.stack([torch.where(torch.tensor([True, False]), large, small), 0 * small])

    start = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"null space .* changes in time.* \(column 1\)"):
        adjsim.solve_ivp(lambda t, y: 1 - y, (0, 1), start, "Rodas4", mass_matrix=matrix)
