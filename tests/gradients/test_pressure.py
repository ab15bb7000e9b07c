"""Gradients through runs at constant pressure, by every adjoint, compiled and on the lattice."""

from __future__ import annotations

import pytest
import torch
from ase import units

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.compiler import to_cpp
from adjsim.io import from_openmm
from tests.openmm_systems import flexible_water
from tests.pressure import parameter, piston, start
from tests.problems import chaotic

STEPS, DT = 12, 0.005
ROWS = [
    ("orthogonal", "isotropic", {}),
    ("orthogonal", "each", {"piston_friction": parameter(0.3)}),
    ("tilted", "isotropic", {"tail": True}),
    ("turned", "each", {"tail": True}),
    ("turned bonded", "each", {"chains": True}),
    ("mixture", "isotropic", {"tail": True}),
    ("sum", "each", {}),
    ("mesh", "isotropic", {}),
    ("turned mesh", "each", {}),
    ("ewald", "each", {}),
    ("bonded", "each", {}),
    ("dispersion", "isotropic", {}),
    ("own", "each", {}),
    ("orthogonal", "each", {"chains": True}),
]
NAMES = [f"{kind}-{axes}{'-chains' * ('chains' in more)}" for kind, axes, more in ROWS]


def moment(state):
    """A smooth function of every field of the state."""
    return sum((torch.sin(1.3 * x) + 0.3 * x**2).sum() for x in state)


def gradient(row, adjoint, *, exact=False, compile=False, batch=(2,), record=None):
    """The loss of a run, and its gradient by the numbers of the dynamics and the start."""
    kind, axes, settings = row
    dynamics = piston(kind, axes, **settings)
    dynamics.zero_grad()
    state = type(start(dynamics, batch))(*(x.requires_grad_() for x in start(dynamics, batch)))
    trajectory = adjsim.simulate(
        dynamics,
        state,
        torch.tensor([0.0, 7 * DT, STEPS * DT]),
        solver=adjsim.Splitting(dynamics.scheme, DT, exact=exact),
        adjoint=adjoint,
        generator=5,
        compile=compile,
        record=record,
    )
    end = trajectory.final if record is None else trajectory.record
    loss = moment(end) if record is None else end.sum()
    leaves = [*dynamics.parameters(), *state]
    return float(loss.detach()), torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_same(found, expected, rtol=1e-10):
    size = max(float(x.abs().max()) for x in expected[1] if x is not None)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12 * size)


# Each of its numbers is moved, which takes half a minute; its parts have rows of their own.
LONG = ("turned bonded-each-chains",)
# A run takes no more of a force than its products, and these have those in tests/contracts.
OTHER_FORCES = (
    *("mixture-isotropic", "dispersion-isotropic"),
    *("turned mesh-each", "ewald-each"),
)


def rows(*short):
    """All rows, of which others than these are slow, or marathons."""
    marathons = (*LONG, *OTHER_FORCES, "mesh-isotropic", "bonded-each")
    return [
        pytest.param(
            row,
            id=name,
            marks=[]
            if name in short
            else [pytest.mark.marathon if name in marathons else pytest.mark.slow],
        )
        for row, name in zip(ROWS, NAMES, strict=True)
    ]


# How a force is evaluated does not depend on how steps are rounded: other rows are slow with one of
# both.
LATTICE = ("turned bonded-each-chains", "mixture-isotropic", "bonded-each")


def exact_and_plain(*short, marathons=()):
    """All rows on the lattice and off it, of which others than these are slow, or marathons."""
    return [
        pytest.param(
            *(row, exact),
            id=f"{name}-{exact}",
            marks=[]
            if name in short or f"{name}-{exact}" in short
            else [
                pytest.mark.slow
                if exact == (name in LATTICE) and name not in marathons
                else pytest.mark.marathon
            ],
        )
        for row, name in zip(ROWS, NAMES, strict=True)
        for exact in (False, True)
    ]


@pytest.mark.parametrize(
    ("row", "exact"),
    exact_and_plain("orthogonal-each", "turned-each", marathons=(*LONG, *OTHER_FORCES)),
)
def test_adjoints_agree(row, exact):
    expected = gradient(row, DirectAdjoint(), exact=exact)
    for adjoint in (CheckpointAdjoint(3), ReversibleAdjoint()):
        assert_same(gradient(row, adjoint, exact=exact), expected)


@pytest.mark.parametrize(
    ("row", "exact"),
    # Their compilation takes up to a minute.
    exact_and_plain(
        "orthogonal-isotropic-True",
        marathons=(*LONG, *OTHER_FORCES, "orthogonal-each-chains", "bonded-each"),
    ),
)
def test_compiled_runs_agree(row, exact):
    expected = gradient(row, ReversibleAdjoint(), exact=exact)
    assert_same(gradient(row, ReversibleAdjoint(), exact=exact, compile=True), expected, 1e-8)


@pytest.mark.slow
def test_a_time_average():
    record = TimeAverage(moment, burn_in=5 * DT)
    expected = gradient(ROWS[0], DirectAdjoint(), record=record)
    for compile in (False, True):
        found = gradient(ROWS[0], ReversibleAdjoint(), record=record, compile=compile)
        assert_same(found, expected, 1e-8)


@pytest.mark.parametrize("row", rows("orthogonal-each"))
def test_against_central_differences(row):
    """Of every number, and of the start along a direction."""
    kind, axes, settings = row
    _, grads = gradient(row, ReversibleAdjoint(), batch=())

    def loss(change):
        dynamics = piston(kind, axes, **settings)
        state = [x.clone() for x in start(dynamics)]
        with torch.no_grad():
            parameters = list(dynamics.parameters())
            kept = [p.clone() for p in parameters]
            for x, step in zip((*parameters, *state), change, strict=True):
                x += step
            end = adjsim.simulate(
                dynamics,
                dynamics.state_type._make(state),
                torch.tensor([0.0, STEPS * DT]),
                solver=adjsim.Splitting(dynamics.scheme, DT),
                generator=5,
            ).final
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
            return float(moment(end))

    generator = torch.Generator().manual_seed(1)
    for number, grad in enumerate(grads):
        if grad is None:
            continue
        direction = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        if grad.shape == (2,) and kind == "mixture":
            direction = direction.abs()
        h = 1e-6

        def along(sign, number=number, direction=direction, h=h):
            return [sign * h * direction if k == number else 0.0 for k in range(len(grads))]

        slope = (loss(along(1)) - loss(along(-1))) / (2 * h)
        # Rounding of the loss over h is about 1e-8 of a loss of 30, truncation is smaller.
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=2e-7)


def test_systems_do_not_depend_on_their_batch():
    dynamics = piston(axes="each")
    state = start(dynamics, (3,))
    solver, times = adjsim.Splitting(dynamics.scheme, DT), torch.tensor([0.0, STEPS * DT])
    whole = adjsim.simulate(dynamics, state, times, solver=solver, generator=5).final
    first = type(state)(*(x[:2] for x in state))
    part = adjsim.simulate(dynamics, first, times, solver=solver, generator=5).final
    for x, y in zip(whole, part, strict=True):
        torch.testing.assert_close(x[:2], y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compile", [False, True])
def test_a_run_goes_on(compile):
    dynamics = piston()
    state = start(dynamics)
    solver = adjsim.Splitting(dynamics.scheme, DT, exact=True)
    whole = adjsim.simulate(
        dynamics, state, torch.tensor([0.0, 0.1]), solver=solver, generator=5, compile=compile
    )
    first = adjsim.simulate(
        dynamics, state, torch.tensor([0.0, 0.06]), solver=solver, generator=5, compile=compile
    )
    second = adjsim.simulate(
        dynamics,
        None,
        torch.tensor([0.06, 0.1]),
        solver=solver,
        continues=first,
        compile=compile,
    )
    for x, y in zip(whole.final, second.final, strict=True):
        assert torch.equal(x, y)


def test_a_run_does_not_go_on_in_another_box():
    dynamics, solver = piston(), adjsim.Splitting("BVSAOASVB", DT)
    first = adjsim.simulate(dynamics, start(dynamics), [0.0, 0.1], solver=solver, generator=5)
    with pytest.raises(ValueError, match="strain of the run is that of a box"):
        adjsim.simulate(piston("tilted"), None, [0.1, 0.2], solver=solver, continues=first)


@pytest.mark.slow
def test_float32():
    dynamics = piston()
    state = start(dynamics, (2,))
    times, solver = torch.tensor([0.0, STEPS * DT]), adjsim.Splitting(dynamics.scheme, DT)
    expected = adjsim.simulate(dynamics, state, times, solver=solver, generator=5).final
    single = type(state)(*(x.float() for x in state))
    for compile in (False, True):
        found = adjsim.simulate(
            dynamics, single, times, solver=solver, generator=5, compile=compile
        ).final
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@chaotic
@pytest.mark.marathon
@pytest.mark.parametrize(
    ("axes", "density", "kT", "skew"),
    [("isotropic", 0.8, 0.85, 0.0), ("each", 0.95, 0.3, 0.0), ("each", 0.95, 0.3, 0.25)],
)
def test_a_hundred_thousand_exact_steps_come_back(axes, density, kT, skew):
    """Bit for bit, a liquid of 256 atoms, and crystals whose edges move apart, compiled."""
    cell = torch.tensor([[0.0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    places = torch.cartesian_prod(*[torch.arange(4.0)] * 3)[:, None] + cell
    edge = (256 / density) ** (1 / 3)
    position = (places.reshape(-1, 3) * edge / 4).double()
    box = torch.tensor([[1, 0, 0], [skew, 1, 0], [0, -skew, 1]], dtype=torch.float64) * edge
    liquid = adjsim.LennardJones(cutoff=2.5, box=box if skew else [edge] * 3)
    dynamics = adjsim.LangevinPiston(liquid, 1.0, parameter(kT), 1.0, 0.55, axes=axes)
    state = dynamics.init(position, generator=0)
    state = type(state)(*(x.detach() for x in state))
    trajectory = adjsim.simulate(
        dynamics,
        state,
        torch.tensor([0.0, 400.0]),
        solver=adjsim.Splitting(dynamics.scheme, 0.004, exact=True),
        adjoint=ReversibleAdjoint(),
        generator=1,
        compile=True,
        record=dynamics.volume,
    )
    trajectory.record.sum().backward()
    assert trajectory.stats["reconstruction_error"] == 0
    assert trajectory.stats["steps"] == 100_000


@chaotic
@pytest.mark.marathon
def test_a_hundred_thousand_exact_steps_of_water_come_back():
    """Bit for bit, 64 flexible molecules with a mesh at 298 K and 1 bar, compiled."""
    force_field, structure = from_openmm(*flexible_water(cutoff=0.5))
    for number in force_field.parameters():
        number.requires_grad_(False)
    fs, kT = units.fs, parameter(298 * units.kB)
    dynamics = adjsim.LangevinPiston(
        force_field, structure.mass, kT, 1 / (1000 * fs), units.bar, 500 * fs
    )
    # The molecules of the lattice are turned at random: steps of a quarter, and a strong bath.
    bath = adjsim.Langevin(force_field, structure.mass, 298 * units.kB, 1 / (50 * fs))
    with torch.no_grad():
        melt = adjsim.simulate(
            bath, bath.init(structure.position, generator=0), [0.0, 200 * fs],
            solver=adjsim.BAOAB(fs / 4), generator=1, compile=True,
        ).final  # fmt: skip
        state = dynamics.init(melt.position, generator=2)
    trajectory = adjsim.simulate(
        dynamics,
        state,
        [0.0, 100_000 * fs],
        solver=adjsim.Splitting(dynamics.scheme, fs, exact=True),
        adjoint=ReversibleAdjoint(),
        generator=3,
        compile=True,
        record=dynamics.volume,
    )
    trajectory.record.sum().backward()
    assert trajectory.stats["reconstruction_error"] == 0
    assert trajectory.stats["steps"] == 100_000
    assert not torch.equal(trajectory.record[-1], trajectory.record[0])


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("orthogonal", "isotropic"),
        pytest.param("tilted", "isotropic", marks=pytest.mark.marathon),
        pytest.param("tilted", "each", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_do_not_return_to_python(kind, axes, monkeypatch):
    """No operation of a step is left to torch."""
    found = []
    described = to_cpp.described
    monkeypatch.setattr(to_cpp, "described", lambda x: found.append(described(x)) or found[-1])
    dynamics = piston(kind, axes, tau=parameter(0.45))
    run = adjsim.simulate(
        dynamics,
        start(dynamics),
        [0.0, 0.05],
        solver=adjsim.Splitting(dynamics.scheme, DT),
        generator=1,
        compile=True,
        adjoint=ReversibleAdjoint(),
    )
    moment(run.final).backward()
    assert found
    assert not any(found)
