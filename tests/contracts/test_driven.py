"""Potentials whose parameters follow signals, controls, and sums of both with energies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import adjsim
from adjsim import (
    CheckpointAdjoint,
    DirectAdjoint,
    ReversibleAdjoint,
    Splitting,
    meshes,
)
from adjsim.core.rounding import Rounding
from adjsim.potentials import NeoHookean
from adjsim.potentials.base import ForceField, SumForce, SumPotential, force, force_vjp
from adjsim.potentials.gravity import Gravity
from adjsim.potentials.products import VJPSum
from adjsim.potentials.signals.actuated import Actuated
from adjsim.potentials.signals.controls import Controller, NeuralController, OpenLoop
from adjsim.potentials.signals.signals import CubicSpline, Harmonics, PiecewiseLinear
from adjsim.potentials.solids.bending import HingeBending
from tests.problems import parameter, slow_but, square, vector
from tests.retracing import forth_and_back

BONDS = [[0, 1], [0, 2], [1, 3], [2, 3], [0, 3]]
# Between steps: at a node a difference with respect to its time would see a kink.
TIMES = [0.003, 0.047, 0.082, 0.134, 0.187]
BOX = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
ELEMENTS = len(BOX.tetrahedra)
SHEET = meshes.sheet([1.0, 1.0], [2, 2])


def numbers(*shape: int, around: float = 0.0, spread: float = 0.2, seed: int = 0) -> nn.Parameter:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(around + spread * drawn)


class Wells(nn.Module):
    """A plain module with no closed forms."""

    def __init__(self):
        super().__init__()
        self.k = parameter(0.8)
        self.register_buffer("center", torch.zeros(2, dtype=torch.float64))

    def forward(self, position: Tensor) -> Tensor:
        return self.k * ((position - self.center) ** 4).sum((-1, -2))


def springs() -> ForceField:
    """Springs with a gait, a spline of forces on two atoms, and wells."""
    gait = Harmonics(
        numbers(2, 5, spread=0.1), vector(1.0, 2.3), numbers(2, 5, seed=1), numbers(5, around=1.1)
    )
    bonds = adjsim.HarmonicBond(BONDS, numbers(5, around=4.0), torch.ones(5))
    spline = CubicSpline(vector(*TIMES), numbers(5, 2, 2, seed=2), slopes=parameter(0.3))
    return Actuated(bonds, length=gait) + OpenLoop(spline, [1, 3]) + adjsim.Harmonic(parameter(0.4))


def solid() -> ForceField:
    """A solid whose elements contract, under gravity."""
    stretch = PiecewiseLinear(vector(*TIMES), numbers(5, ELEMENTS, 3, around=1.0, spread=0.05))
    body = NeoHookean(
        BOX, numbers(ELEMENTS, around=3.0), parameter(0.3), rest_stretch=torch.ones(ELEMENTS, 3)
    )
    return Gravity(numbers(8, around=1.0), parameter(1.5)) + Actuated(body, rest_stretch=stretch)


def shell() -> ForceField:
    """A shell that folds, of springs, with a force on its corners, under a tilted weight."""
    hinges, edges = len(SHEET.hinges()), SHEET.edges()
    fold = Harmonics(numbers(1, hinges), parameter(1.3), numbers(1, hinges, seed=1))
    bending = HingeBending(SHEET, numbers(hinges, around=0.5), torch.zeros(hinges))
    lengths = (SHEET.vertices[edges[:, 0]] - SHEET.vertices[edges[:, 1]]).norm(dim=-1)
    pull = OpenLoop(PiecewiseLinear(vector(*TIMES), numbers(5, 3, 3, seed=2)), [0, 2, 6])
    weight = Gravity(parameter(1.3), parameter(0.7), direction=vector(0.2, -0.5, 1.0))
    springs = adjsim.HarmonicBond(edges, parameter(5.0), nn.Parameter(lengths))
    return Actuated(bending, rest_angle=fold) + pull + springs + weight


def pairs() -> ForceField:
    """Pairs by the operator, whose width and depth vary, and a module without closed forms."""
    width = Harmonics(parameter(0.05), parameter(1.7), parameter(0.3), parameter(0.95))
    depth = PiecewiseLinear(TIMES, numbers(5, around=1.0))
    center = CubicSpline(TIMES, numbers(5, 2, seed=3))
    fluid = adjsim.LennardJones(1.0, 1.0, cutoff=1.9)
    return Actuated(fluid, sigma=width, epsilon=depth) + Actuated(Wells(), center=center)


KINDS: dict[str, Callable[[], ForceField]] = {
    "springs": springs,
    "solid": solid,
    "shell": shell,
    "pairs": pairs,
}


def start(kind: str, replicas: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    if kind in ("springs", "pairs"):
        return square(replicas)
    vertices = BOX.vertices if kind == "solid" else SHEET.vertices
    shape, generator = (*replicas, *vertices.shape), torch.Generator().manual_seed(4)
    shift, momentum = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return vertices + 0.05 * shift, 0.3 * momentum


def ran(dynamics, kind, adjoint, *, exact=False, compile=False):
    """The loss of a run of 20 steps, which begins before the first node and ends after the last
    one, and the run.
    """
    state = dynamics.init(*start(kind))
    run = adjsim.simulate(
        dynamics,
        state,
        [0.0, 0.2],
        solver=Splitting("BAB", 0.01, exact=exact),
        adjoint=adjoint,
        compile=compile,
    )
    weight = torch.linspace(1.0, 2.0, state.position.numel()).reshape(state.position.shape)
    loss = (weight * run.final.position**3).sum() + (run.final.momentum**2 * weight).sum()
    return loss, run


ROWS = slow_but(lambda kind: kind in ("springs", "solid"), KINDS)


def gradients(kind, adjoint, **options):
    dynamics = adjsim.Hamiltonian(KINDS[kind](), parameter(1.3))
    loss, run = ran(dynamics, kind, adjoint, **options)
    loss.backward()
    return {name: p.grad for name, p in dynamics.named_parameters()}, run


def agree(found, expected, tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad, rtol=tolerance, atol=tolerance * float(grad.abs().max())
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_every_adjoint_agrees(kind):
    direct, _ = gradients(kind, DirectAdjoint())
    assert all(bool(grad.any()) for grad in direct.values())
    agree(gradients(kind, CheckpointAdjoint(7))[0], direct, 1e-12)
    # Reversed steps differ by rounding, which 20 steps do not amplify.
    agree(gradients(kind, ReversibleAdjoint())[0], direct, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(lambda kind: kind == "springs", KINDS))
def test_gradients_against_central_differences(kind):
    grads, _ = gradients(kind, ReversibleAdjoint())
    dynamics = adjsim.Hamiltonian(KINDS[kind](), parameter(1.3))
    named = dict(dynamics.named_parameters())
    h, generator = 1e-5, torch.Generator().manual_seed(8)
    for name, value in named.items():
        along = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        ends: list[float] = []
        for sign in (1, -1):
            with torch.no_grad():
                value.add_(sign * h * along)
                ends.append(float(ran(dynamics, kind, DirectAdjoint())[0]))
                value.sub_(sign * h * along)
        expected = float((grads[name] * along).sum())
        # Truncation h^2 and rounding 1e-16 / h of a loss of some tens.
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(expected, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("kind", ROWS)
def test_exact_runs_are_retraced(kind):
    dynamics = adjsim.Hamiltonian(KINDS[kind](), parameter(1.3))
    before, after, found = forth_and_back(
        dynamics, dynamics.init(*start(kind)), Splitting("BAB", 0.01, exact=True), 40
    )
    assert not torch.equal(after.position, before.position)
    for x, y in zip(found, before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ROWS)
def test_exact_runs_have_one_gradient(kind):
    direct, _ = gradients(kind, DirectAdjoint(), exact=True)
    mine, run = gradients(kind, ReversibleAdjoint(), exact=True)
    assert run.stats["reconstruction_error"] == 0.0
    agree(mine, direct, 1e-12)


@pytest.mark.parametrize(
    ("kind", "exact"),
    slow_but(
        lambda kind, exact: False,
        product(KINDS, (False, True)),
        marathon=lambda kind, exact: kind != "springs" or exact,
    ),
)
def test_compiled_equals_eager(kind, exact):
    plain, eager = gradients(kind, ReversibleAdjoint(), exact=exact)
    mine, run = gradients(kind, ReversibleAdjoint(), exact=exact, compile=True)
    assert run.stats["compiled_forward"] == run.stats["compiled_backward"] == "C++"
    # Sums in another order; on a lattice, each contribution is the same multiple of its spacing.
    for x, y in zip(run.final, eager.final, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    if exact:
        assert run.stats["reconstruction_error"] == 0.0
    agree(mine, plain, 1e-10)


@pytest.mark.parametrize("kind", ROWS)
def test_products_equal_automatic_differentiation(kind):
    drive = KINDS[kind]()
    position, _ = start(kind, (2,))
    parameters = list(drive.parameters())
    v, t = torch.randn_like(position), 0.17
    q = position.clone().requires_grad_()
    through = drive(t, q)
    expected = torch.autograd.grad(through, (q, *parameters), v)
    value, pullback = force_vjp(drive, position, parameters, t)
    along, rest = pullback(v)
    torch.testing.assert_close(value, through.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(along, expected[0], rtol=1e-12, atol=1e-12)
    assert isinstance(rest, VJPSum)
    for mine, theirs in zip(rest.gradient(parameters), expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ROWS)
def test_on_a_grid_the_force_has_one_value(kind):
    drive, (position, _) = KINDS[kind](), start(kind)
    rounding = Rounding(torch.tensor(2.0**-30).reshape(1, 1, 1))
    value = force(drive, position, 0.17, rounding)
    assert torch.equal(value.detach(), force_vjp(drive, position, [], 0.17, rounding)[0])
    torch.testing.assert_close(value, force(drive, position, 0.17), rtol=0, atol=1e-7)
    assert not torch.equal(value, force(drive, position, 0.17))


def test_the_force_is_that_of_the_values_of_the_time():
    lengths = PiecewiseLinear([0.0, 1.0], [[1.0] * 5, [2.0] * 5])
    bonds = adjsim.HarmonicBond(BONDS, 4.0, torch.ones(5))
    driven, q = Actuated(bonds, length=lengths), square()[0]
    same = adjsim.HarmonicBond(BONDS, 4.0, torch.full((5,), 1.25))
    assert torch.equal(driven(0.25, q), force(same, q))
    assert torch.equal(driven.energy(0.25, q), same(q))
    # The potential has its own values again.
    assert torch.equal(bonds.length, torch.ones(5))
    assert not torch.equal(driven(0.5, q), driven(0.25, q))


def test_a_signal_of_one_number_serves_all_entries():
    length = Harmonics(0.1, 1.0, offset=parameter(1.0))
    driven = Actuated(adjsim.HarmonicBond(BONDS, 4.0, torch.ones(5)), length=length)
    q = square()[0]
    (found,) = torch.autograd.grad(driven(0.1, q)[0].sum(), length.offset)
    _, pullback = force_vjp(driven, q, [length.offset], 0.1)
    v = torch.zeros_like(q)
    v[0] = 1.0
    rest = pullback(v)[1]
    assert isinstance(rest, VJPSum)
    torch.testing.assert_close(rest.gradient([length.offset])[0], found, rtol=1e-13, atol=1e-13)


def test_two_threads_do_not_see_each_others_values():
    bonds, q = adjsim.HarmonicBond(BONDS, 4.0, torch.ones(5)), square()[0]
    drives = [
        Actuated(bonds, length=PiecewiseLinear([0.0, 1.0], [first, 2.0])) for first in (0.5, 1.0)
    ]
    expected = [drive(0.5, q) for drive in drives]
    wrong: list[int] = []

    def evaluate(number: int) -> None:
        for _ in range(200):
            found = force_vjp(drives[number], q, [], 0.5)[0]
            if not torch.equal(found, expected[number]):
                wrong.append(number)

    threads = [Thread(target=evaluate, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_cannot_be_actuated_is_refused(unchecked):
    bonds, signal = adjsim.HarmonicBond(BONDS, 4.0, parameter(1.0)), Harmonics(0.1, 1.0)
    with pytest.raises(ValueError, match="length of HarmonicBond requires grad, and a signal"):
        Actuated(bonds, length=signal)
    with pytest.raises(ValueError, match=r"index is no parameter .* these are length, k"):
        Actuated(bonds, index=signal)
    with pytest.raises(ValueError, match="needs a signal for at least one parameter"):
        Actuated(bonds)
    with pytest.raises(TypeError, match=r"k must be an nn\.Module; got floa"):
        Actuated(bonds, k=3.0)
    with pytest.raises(TypeError, match="must be a module with an energy; got OpenLoop"):
        Actuated(OpenLoop(signal), signal=signal)
    with pytest.raises(ValueError, match=r"gives shape \(5,\), and k of HarmonicBond has shape"):
        Actuated(bonds, k=Harmonics(torch.ones(1, 5), 1.0))
    body = NeoHookean(BOX, 1.0, 0.3)
    with pytest.raises(ValueError, match="is None: give it a number of the shape"):
        Actuated(body, rest_stretch=Harmonics(torch.ones(1, 3), 1.0))


# Sums.


def test_sums_of_energies_and_force_fields_are_flat():
    a, b, c = adjsim.Harmonic(), OpenLoop(Harmonics(0.1, 1.0)), Wells()
    for total, parts in (
        (a + b, [a, b]),
        (b + a, [b, a]),
        (c + b, [c, b]),
        ((a + adjsim.DoubleWell()) + b, None),
        (b + (a + b), [b, a, b]),
    ):
        assert isinstance(total, SumForce)
        assert parts is None or list(total.parts) == parts
        assert not any(isinstance(part, SumForce | SumPotential) for part in total.parts)
    assert dict((a + c + b).named_parameters()).keys() == {"parts.1.k"}
    q = square()[0]
    expected = force(a, q) + force(c, q) + b(0.3, q)
    torch.testing.assert_close((a + c + b)(0.3, q), expected, rtol=1e-14, atol=1e-14)


def test_what_is_no_sum_of_forces_is_refused(unchecked):
    with pytest.raises(ValueError, match="at least one part"):
        SumForce()
    with pytest.raises(TypeError, match="an energy module or a ForceField; got a float"):
        OpenLoop(Harmonics(0.1, 1.0)) + 1.0
    with pytest.raises(TypeError, match="has no known stationary density"):
        adjsim.Langevin(springs(), kT=1.0).stationary_density()


def test_a_closed_form_of_a_force_field_is_used():
    class Drag(ForceField):
        calls = 0

        def forward(self, t, position):
            return -position

        def force_vjp(self, t, position, parameters, rounding=None):
            Drag.calls += 1
            return -position, lambda v: (-v, [None] * len(parameters))

    dynamics = adjsim.Hamiltonian(Drag() + adjsim.Harmonic(parameter(0.4)))
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 0.05],
        solver=Splitting("BAB", 0.01),
        adjoint=ReversibleAdjoint(),
    )
    run.final.position.sum().backward()
    # One at each of six positions.
    assert Drag.calls == 6


# Controls.


def test_open_loop_acts_on_its_vertices():
    signal = PiecewiseLinear([0.0, 1.0], [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 2.0]]])
    q = torch.zeros(3, 5, 2)
    f = OpenLoop(signal, [3, 1])(0.5, q)
    expected = torch.zeros(3, 5, 2)
    expected[:, 3, 0], expected[:, 1, 1] = 2.0, 2.0
    assert torch.equal(f, expected)
    everywhere = OpenLoop(PiecewiseLinear([0.0, 1.0], [[1.0, 0.0], [3.0, 0.0]]))(0.5, q)
    assert torch.equal(everywhere, torch.tensor([2.0, 0.0]).expand(3, 5, 2))


def test_feedback_sees_time_positions_and_velocities():
    network = nn.Linear(1 + 2 * 4 * 2, 2)
    control = NeuralController(network, index=[2], scale=parameter(0.5))
    q, p = square((3,))
    found = control(0.3, q, p)
    row = torch.cat([torch.tensor([0.3]), q[1].flatten(), p[1].flatten()])
    expected = 0.5 * (network.weight @ row + network.bias)
    torch.testing.assert_close(found[1, 2], expected, rtol=1e-13, atol=1e-13)
    assert not found[:, [0, 1, 3]].any()
    # Time as a tensor, as compiled loops pass it.
    assert torch.equal(control(torch.tensor(0.3), q, p), found)
    cart = NeuralController(nn.Linear(17, 8), scale=[[1.0, 0.0]])(0.0, q, p)
    assert bool(cart[..., 0].any())
    assert not cart[..., 1].any()
    grads = torch.autograd.grad(found.sum(), list(control.parameters()))
    assert all(bool(grad.any()) for grad in grads)


def test_controls_that_do_not_fit_are_refused(unchecked):
    signal, q = Harmonics(torch.ones(1, 2), 1.0), square()[0]
    with pytest.raises(ValueError, match="index must not repeat a vertex"):
        OpenLoop(signal, [1, 1])
    with pytest.raises(ValueError, match=r"index must be \(vertices,\) integers from 0"):
        OpenLoop(signal, [-1])
    with pytest.raises(ValueError, match="names vertex 7 and position has 4 vertices"):
        OpenLoop(signal, [7])(0.0, q)
    with pytest.raises(TypeError, match=r"signal must be an nn.Module; got float"):
        OpenLoop(1.0)
    with pytest.raises(ValueError, match=r"maps \(17,\) to \(3,\); it must be \(8,\)"):
        NeuralController(nn.Linear(17, 3))(0.0, q, q)
    control = NeuralController(nn.Linear(17, 8))
    for potential in (control, control + adjsim.Harmonic()):
        dynamics = adjsim.Hamiltonian(potential)
        with pytest.raises(TypeError, match="reads velocities, which a potential does not see"):
            adjsim.simulate(dynamics, dynamics.init(q, q), [0.0, 0.1], solver=Splitting("BAB", 0.1))
    with pytest.raises(TypeError, match=r"abstract method '?forward"):
        Controller()


def test_functional_calls_reach_every_number():
    """An optimiser's trial values, without a change of the module."""
    drive, (q, _) = springs(), square()
    doubled = {name: 2 * p.detach() for name, p in drive.named_parameters()}
    found = functional_call(drive, doubled, (0.1, q))
    with torch.no_grad():
        for p in drive.parameters():
            p.mul_(2)
    assert torch.equal(found, drive(0.1, q).detach())
