"""What the public functions take: numbers, arrays, lists, seeds; what they refuse, in words of
their own; what can be saved.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import re

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    BAOAB,
    EulerMaruyama,
    Final,
    ODESolver,
    ReversibleAdjoint,
    SDESolver,
    Splitting,
    TimeAverage,
    VelocityVerlet,
)
from adjsim.core.box import checked_box, perpendicular_widths
from tests.problems import (
    DYNAMICS,
    POTENTIALS,
    SCHEMES,
    STOCHASTIC,
    STOCHASTIC_SCHEMES,
    THERMOSTAT_SCHEMES,
    THERMOSTATS,
    Cage,
    parameter,
    square,
)

EVERY = {**DYNAMICS, **STOCHASTIC, **THERMOSTATS}
SCHEME = {
    name: words[0]
    for name, words in {**SCHEMES, **STOCHASTIC_SCHEMES, **THERMOSTAT_SCHEMES}.items()
}


@pytest.fixture
def unchecked():
    """Call as users do, without the tests' checks of annotations, which would refuse first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def solver_for(name, dt=0.01):
    if name == "overdamped":
        return EulerMaruyama(dt)
    return Splitting(SCHEME[name], dt)


# Boxes.


def shears(rng, dim, times):
    """A random unimodular matrix: as many rows are added to others as ``times`` says."""
    whole = np.eye(dim)
    for _ in range(times):
        i, j = rng.permutation(dim)[:2]
        whole[i] += rng.integers(-3, 4) * whole[j]
    return whole


@pytest.mark.parametrize("dim", [2, 3])
def test_the_nearest_image_in_any_cell_is_that_of_brute_force(dim):
    """Images two cells away are enough for a reduced cell; the library is given skewed rows."""
    rng = np.random.default_rng(dim)
    images = np.array(list(itertools.product(range(-2, 3), repeat=dim)), dtype=float)
    for trial in range(40):
        cell = np.diag(rng.uniform(1, 3, dim)) + np.tril(rng.uniform(-0.4, 0.4, (dim, dim)), -1)
        skewed = shears(rng, dim, 6) @ cell
        q = rng.uniform(-0.5, 0.5, (6, dim)) @ cell
        d = (q[:, None] - q)[:, :, None] + images @ cell
        nearest = np.linalg.norm(d, axis=-1).min(-1)[np.triu_indices(6, 1)]
        np.testing.assert_allclose(
            adjsim.pair_distances(q, skewed).numpy(), nearest, rtol=1e-9, err_msg=f"{trial}"
        )


def test_images_around_a_reduced_cell_are_enough():
    """Random rows: their reduced cell against three images to every side, and at its corners."""
    rng = np.random.default_rng(0)
    images = torch.tensor(list(itertools.product(range(-3, 4), repeat=3)), dtype=torch.float64)
    for _ in range(15):
        rows = torch.from_numpy(rng.normal(size=(3, 3)) * 10 ** rng.uniform(-0.5, 0.5, (3, 1)))
        cell = checked_box(rows, None)
        assert float(perpendicular_widths(cell).min()) >= float(
            perpendicular_widths(rows).min()
        ) * (1 - 1e-9)
        whole = cell @ torch.linalg.inv(rows)
        torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-9)
        assert float(torch.linalg.det(whole).abs()) == pytest.approx(1)
        f = torch.from_numpy(
            np.concatenate(
                [rng.uniform(-0.5, 0.5, (20, 3)), rng.choice([-0.4999, 0.4999], (20, 3))]
            )
        )
        d = f @ cell
        nearest = (d[:, None] + images @ cell).norm(dim=-1).amin(1)
        found = adjsim.pair_distances(torch.stack([d, torch.zeros_like(d)], -2), rows)[:, 0]
        torch.testing.assert_close(found, nearest, rtol=1e-9, atol=1e-9)


def test_a_cutoff_counts_every_pair_once_in_a_skewed_cell():
    rng = np.random.default_rng(1)
    cell = np.array([[4.0, 0.0, 0.0], [0.3, 4.2, 0.0], [-0.4, 0.2, 3.9]])
    skewed = shears(rng, 3, 8) @ cell
    q = (
        (np.array(list(itertools.product(range(3), repeat=3))) + rng.uniform(-0.1, 0.1, (27, 3)))
        / 3
        @ cell
    )
    cutoff = 1.9
    images = np.array(list(itertools.product(range(-2, 3), repeat=3)), dtype=float) @ cell
    r = np.linalg.norm((q[:, None] - q)[:, :, None] + images, axis=-1)[
        np.triu_indices(27, 1)
    ].ravel()
    energy = 4 * (r**-12 - r**-6) - 4 * (cutoff**-12 - cutoff**-6)
    potential = adjsim.LennardJones(cutoff=cutoff, box=skewed)
    assert float(potential(torch.from_numpy(q))) == pytest.approx(
        energy[r < cutoff].sum(), rel=1e-10
    )


def test_the_cutoff_of_a_skewed_cell_is_that_of_its_lattice():
    """Rows of a square lattice of spacing 2: half the spacing is allowed for any such rows."""
    rows = [[2.0, 0.0], [14.0, 2.0]]
    assert adjsim.LennardJones(cutoff=1.0, box=rows).cutoff == 1.0
    with pytest.raises(ValueError, match="half the smallest perpendicular width of the box, 1:"):
        adjsim.LennardJones(cutoff=1.01, box=rows)
    with pytest.raises(ValueError, match="one to three dimensions"):
        adjsim.LennardJones(box=np.eye(4))


# Potentials' parameters.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["epsilon", "sigma"])
def test_pair_matrices_that_are_refused(name):
    with pytest.raises(
        ValueError, match=rf"{name} must be symmetric.*\(0, 1\) and \(1, 0\) are 2 and 3"
    ):
        adjsim.LennardJones(**{name: [[1.0, 2.0], [3.0, 1.0]]})
    for shape in ((2, 3), (4,), (4, 4, 4)):
        with pytest.raises(
            ValueError,
            match=rf"{name} has shape {re.escape(str(shape))}; "
            r"it must be a number or \(atoms, atoms\)",
        ):
            adjsim.LennardJones(**{name: np.ones(shape)})
    three = adjsim.Hamiltonian(adjsim.LennardJones(**{name: np.ones((3, 3))}))
    with pytest.raises(ValueError, match=f"{name} is for 3 atoms and position has 4"):
        simulate(dynamics=three, state=three.init(*square()))
    assert torch.equal(
        adjsim.LennardJones(**{name: np.ones((4, 4))})(square()[0]),
        adjsim.LennardJones()(square()[0]),
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([0, 1, 2], [1.0, 1.0], [1.0, 1.0]), "species must be indices from 0 to 1"),
        (([0, -1], [1.0, 1.0], [1.0, 1.0]), "species must be indices from 0 to 1"),
        (([0.5, 0.0], [1.0, 1.0], [1.0, 1.0]), "species must be integers"),
        (([[0], [1]], [1.0, 1.0], [1.0, 1.0]), r"species must be \(atoms,\)"),
        (([0, 1], [1.0, 1.0], [1.0]), "one number for each species"),
        (([0, 1], [1.0, -1.0], [1.0, 1.0]), "epsilon must not be negative"),
    ],
)
def test_mixtures_that_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        adjsim.LennardJonesMixture(*arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: adjsim.LennardJones(-1.0),
        lambda: adjsim.LennardJones([[1.0, -1.0], [-1.0, 1.0]]),
        lambda: adjsim.WCA(-1.0),
        lambda: adjsim.Mie(-1.0),
        lambda: adjsim.ExplicitPairs([[0, 1]], [-1.0], 1.0),
    ],
)
def test_a_well_of_negative_depth_is_refused(make):
    with pytest.raises(ValueError, match=r"epsilon must not be negative; got .*-1.*Positive"):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: adjsim.HarmonicAngle([[0, 1, 2]], 1.0, x), "angle"),
        (lambda x: adjsim.CosineAngle([[0, 1, 2]], 1.0, [x]), "angle"),
        (lambda x: adjsim.PeriodicTorsion([[0, 1, 2, 3]], 1.0, 1, x), "phase"),
        (lambda x: adjsim.HarmonicImproper([[0, 1, 2, 3]], 1.0, x), "angle"),
    ],
)
def test_angles_in_degrees_are_refused(make, name):
    for value in (109.5, -180.0):
        with pytest.raises(ValueError, match=rf"{name} must be in radians.*got {abs(value):g}"):
            make(value)
    # A full turn, rounded to float32, is none.
    make(float(torch.tensor(2 * torch.pi, dtype=torch.float32)))


@pytest.mark.parametrize("mass", [[1.0, 2.0, 3.0], [[1.0], [2.0], [3.0], [4.0], [5.0]]])
def test_masses_of_another_number_of_atoms_are_refused(mass):
    q, p = square()
    thermal = (adjsim.Langevin, adjsim.NoseHooverChain, adjsim.Bussi, adjsim.Andersen)
    calls = [lambda make=make: make(adjsim.Harmonic(), mass).init(q) for make in thermal]
    state = adjsim.PhaseState(q, p)
    boxed = adjsim.Hamiltonian(adjsim.LennardJones(cutoff=2.0, box=[9.0, 9.0]), mass)
    calls += [
        lambda: adjsim.GeneralizedLangevin(adjsim.Harmonic(), mass).init(q, p),
        lambda: boxed.kinetic_energy(state),
        lambda: adjsim.kinetic_temperature(p, mass),
        lambda: adjsim.stress(boxed, state),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"mass has {len(mass)} entries and .* 4 atoms: give"):
            call()


def test_a_mixture_is_for_its_atoms():
    mixture = adjsim.LennardJonesMixture(range(3), [1.0, 1.1, 1.2], [1.0, 0.9, 0.8])
    with pytest.raises(ValueError, match="species is for 3 atoms and position has 4"):
        mixture(square()[0])


# What can be saved.


@functools.cache
def trajectories():
    runs, langevin = [], STOCHASTIC["langevin"](POTENTIALS["lennard-jones"]())
    start = langevin.init(*square(), generator=0)
    for options in (
        {"solver": BAOAB(0.01)},
        {"solver": BAOAB(0.01), "adjoint": ReversibleAdjoint(), "record": lambda s: s.position},
        {"solver": Splitting("BAOAB", 0.01, exact=True), "adjoint": ReversibleAdjoint()},
        {"solver": BAOAB(0.01), "record": TimeAverage(lambda s: s.position)},
    ):
        run = adjsim.simulate(langevin, start, [0.0, 0.02, 0.04], generator=0, **options)
        if "adjoint" in options:
            run.final.position.sum().backward(retain_graph=True)
        runs.append(run)
    return runs


def through_torch(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "torch": lambda x: through_torch(x, weights_only=False),
    "weights only": lambda x: through_torch(x, weights_only=True),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_trajectory_can_be_saved_and_copied(way):
    for run in trajectories():
        again = COPIES[way](run)
        assert isinstance(again, adjsim.Trajectory)
        assert again.stats == run.stats
        pairs = [(again.times, run.times), *zip(again.final, run.final, strict=True)]
        pairs += (
            [(again.record, run.record)]
            if run.record is not None
            else [(again.momentum, run.momentum)]
        )
        for mine, theirs in pairs:
            assert torch.equal(mine, theirs)
            assert mine.requires_grad == (way == "copy" and theirs.requires_grad)
        with pytest.raises(AttributeError, match="has no 'direction'"):
            again.direction  # noqa: B018


@pytest.mark.parametrize("name", EVERY)
def test_every_state_loads_with_weights_only(name):
    dynamics = EVERY[name](adjsim.Harmonic())
    position, momentum = square()
    start = dynamics.init(position, None if name == "overdamped" else momentum, generator=0)
    again = through_torch(start, weights_only=True)
    assert type(again) is type(start)
    assert all(torch.equal(a, b) for a, b in zip(again, start, strict=True))


# Inference mode.


@pytest.mark.parametrize(
    "potential", [lambda: adjsim.Harmonic(parameter(1.3)), Cage], ids=["closed form", "module"]
)
@pytest.mark.parametrize("name", EVERY)
def test_inference_mode_gives_the_same_run(name, potential):
    dynamics, solver, (position, momentum) = EVERY[name](potential()), solver_for(name), square()
    options = {"ts": [0.0, 0.03], "solver": solver, "generator": 1}

    def run():
        start = dynamics.init(
            position * 1.0, None if name == "overdamped" else momentum * 1.0, generator=0
        )
        return start, adjsim.simulate(dynamics, start, record=lambda s: s.position.sum(), **options)

    _, expected = run()
    with torch.inference_mode():
        start, found = run()
    assert torch.equal(found.record, expected.record)
    assert not found.record.requires_grad
    # What was made there may be differentiated outside.
    again = adjsim.simulate(dynamics, start, **options)
    assert all(torch.equal(a, b) for a, b in zip(again.final, expected.final, strict=True))
    again.final.position.square().sum().backward()


@pytest.mark.slow
def test_a_model_may_be_made_in_inference_mode():
    with torch.inference_mode():
        dynamics = adjsim.Langevin(
            adjsim.LennardJonesMixture([0, 1], [1.0, 1.1], [1.0, 0.9], cutoff=2.0, box=[4.0, 4.0])
        )
        start = dynamics.init([[0.0, 0.0], [1.2, 0.0]], generator=0)
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=BAOAB(0.01), generator=0)
        with pytest.raises(ValueError, match=r"kT was made under torch\.inference_mode"):
            adjsim.Langevin(adjsim.Harmonic(), kT=nn.Parameter(torch.tensor(1.0)))
    start = start._replace(position=start.position.clone().requires_grad_())
    adjsim.simulate(
        dynamics, start, [0.0, 0.1], solver=BAOAB(0.01), generator=0
    ).final.position.sum().backward()


@pytest.mark.parametrize("name", POTENTIALS)
def test_forces_and_minima_are_found_in_inference_mode(name):
    """Nothing requires grad there, so a force by automatic differentiation would be zero."""
    potential, position = POTENTIALS[name](), square()[0]
    expected, minimum = adjsim.force(potential, position), None
    if name in ("harmonic", "plain-module"):
        minimum = adjsim.minimize(potential, position)
    with torch.inference_mode():
        made = position * 1.0
        torch.testing.assert_close(adjsim.force(potential, made), expected, rtol=1e-14, atol=1e-14)
        if minimum is not None:
            assert torch.equal(adjsim.minimize(potential, made), minimum)


ESTIMATORS = [
    (adjsim.Pathwise, Final),
    (adjsim.FiniteDifference, Final),
    (adjsim.Girsanov, Final),
    (adjsim.ScoreFunction, TimeAverage),
    (lambda: adjsim.Reweighting(every=0.2), TimeAverage),
]


def simulation(k):
    dynamics = adjsim.Langevin(adjsim.Harmonic(k))
    zero = torch.zeros(2, 1)
    return adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(zero.expand(n, 2, 1), generator=g),
        [0.0, 1.0],
        solver=BAOAB(0.1),
    )


@pytest.mark.parametrize(
    ("estimator", "observable"), ESTIMATORS, ids=lambda x: getattr(x, "__name__", "Reweighting")
)
def test_estimators_take_seeds_and_inference_mode_and_want_a_parameter(estimator, observable):
    asked = simulation(parameter(1.0)), observable(lambda s: s.position.square().sum((-1, -2)))
    expected = estimator()(*asked, replicas=4, chunks=2, generator=torch.Generator().manual_seed(5))
    assert torch.equal(
        estimator()(*asked, replicas=4, chunks=2, generator=5).grad["potential.k"],
        expected.grad["potential.k"],
    )
    with torch.inference_mode():
        found = estimator()(*asked, replicas=4, chunks=2, generator=5)
    assert torch.equal(found.grad["potential.k"], expected.grad["potential.k"])
    with pytest.raises(
        ValueError, match=r"Langevin has no parameter that requires grad.*nn\.Parameter"
    ):
        estimator()(simulation(1.0), asked[1], replicas=4)


@pytest.mark.slow
def test_compare_takes_a_seed_and_inference_mode():
    asked = simulation(parameter(1.0)), Final(lambda s: s.position.square().sum((-1, -2)))
    methods = {"path": adjsim.Pathwise(), "score": adjsim.Girsanov()}
    with torch.inference_mode():
        found = adjsim.compare(*asked, methods, replicas=4, generator=3)
    expected = adjsim.compare(
        *asked, methods, replicas=4, generator=torch.Generator().manual_seed(3)
    )
    for name, estimate in expected.estimates.items():
        assert torch.equal(estimate.grad["potential.k"], found.estimates[name].grad["potential.k"])


# Arrays, lists, numbers.

NUMBERS = [
    1.5,
    np.float64(1.5),
    np.array(1.5),
    torch.tensor(1.5, dtype=torch.float64),
    np.array([1.5]),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
def test_physical_numbers_of_any_kind(number):
    for made, name in (
        (adjsim.Harmonic(k=number), "k"),
        (adjsim.LennardJones(epsilon=number), "epsilon"),
        (adjsim.DoubleWell(number), "barrier"),
        (adjsim.Langevin(adjsim.Harmonic(), mass=number), "mass"),
        (adjsim.Langevin(adjsim.Harmonic(), kT=number), "kT"),
        (adjsim.NoseHooverChain(adjsim.Harmonic(), tau=number), "tau"),
        (adjsim.OverdampedLangevin(adjsim.Harmonic(), friction=number), "friction"),
    ):
        value = getattr(made, name)
        assert value.dtype == torch.float64
        assert float(value) == 1.5
        assert name in dict(made.named_buffers())


def test_lists_and_arrays_of_physical_numbers():
    for masses in (
        [1, 2, 3, 4],
        (1.0, 2.0, 3.0, 4.0),
        np.arange(1, 5),
        np.arange(1.0, 5.0),
        range(1, 5),
    ):
        dynamics = adjsim.Langevin(adjsim.Harmonic(), mass=masses, friction=masses)
        assert torch.equal(dynamics.mass, torch.arange(1.0, 5.0))
        assert torch.equal(dynamics.friction, torch.arange(1.0, 5.0))
    stiff = adjsim.Harmonic(k=[[1], [2]], center=np.zeros((2, 1)))
    assert float(stiff(torch.ones(2, 3))) == 4.5
    memory = adjsim.GeneralizedLangevin(adjsim.Harmonic(), rates=np.array([1, 4]), strengths=[1, 8])
    assert torch.equal(memory.strengths, torch.tensor([1.0, 8.0]))
    assert adjsim.Harmonic(np.float32(0.1)).k.dtype == torch.float32
    given = np.ones(4)
    dynamics = adjsim.Langevin(adjsim.Harmonic(), mass=given)
    given[:] = 7.0
    assert torch.equal(dynamics.mass, torch.ones(4))


def test_species_and_boxes_of_any_kind():
    q = square()[0]
    expected = adjsim.LennardJonesMixture(
        torch.tensor([0, 1, 0, 1]),
        [1.1, 0.8],
        [0.95, 0.9],
        cutoff=1.7,
        box=torch.tensor([3.6, 3.7]),
    )
    for species in (
        [0, 1, 0, 1],
        (0, 1, 0, 1),
        np.array([0, 1, 0, 1], dtype=np.int32),
        np.array([0.0, 1.0, 0.0, 1.0]),
    ):
        for box in ([3.6, 3.7], np.array([3.6, 3.7]), (3.6, 3.7)):
            made = adjsim.LennardJonesMixture(
                species, np.array([1.1, 0.8]), (0.95, 0.9), cutoff=np.float64(1.7), box=box
            )
            assert torch.equal(made(q), expected(q))


@pytest.mark.parametrize("name", EVERY)
def test_starts_of_any_kind(name):
    dynamics = EVERY[name](adjsim.Harmonic())
    position, momentum = [[0, 1], [1, 1], [2, 0], [0, 3]], [[1, 0], [0, 1], [1, 1], [2, 1]]
    if name == "overdamped":
        momentum = None
    expected = dynamics.init(
        torch.tensor(position, dtype=torch.float64),
        None if momentum is None else torch.tensor(momentum),
        0,
    )
    for make in (
        list,
        np.array,
        torch.tensor,
        lambda x: np.array(x, dtype=">f8"),
        np.asfortranarray,
    ):
        start = dynamics.init(
            make(position), None if momentum is None else make(momentum), generator=0
        )
        for a, b in zip(start, expected, strict=True):
            assert a.dtype == torch.float64
            assert torch.equal(a, b)
    single = dynamics.init(np.array(position, dtype=np.float32), momentum, generator=0)
    assert all(x.dtype == torch.float32 for x in single)


def test_a_start_is_a_copy_of_an_array():
    position = np.zeros((2, 1))
    start = adjsim.Hamiltonian(adjsim.Harmonic()).init(position, position)
    position[:] = 1.0
    assert torch.equal(start.position, torch.zeros(2, 1))


def test_states_and_times_of_any_kind():
    dynamics, solver = adjsim.Hamiltonian(adjsim.Harmonic()), VelocityVerlet(0.1)
    expected = adjsim.simulate(
        dynamics, adjsim.PhaseState(*square()), torch.tensor([0.0, 1.0, 2.0]), solver=solver
    )
    position, momentum = (x.numpy() for x in square())
    for times in (
        [0, 1, 2],
        (0.0, 1.0, 2.0),
        np.arange(3),
        range(3),
        np.array([0, 1, 2], dtype=np.float32),
        torch.arange(3),
    ):
        for start in (
            (position, momentum),
            (position.tolist(), momentum),
            (position, momentum.tolist()),
        ):
            run = adjsim.simulate(dynamics, adjsim.PhaseState(*start), times, solver=solver)
            assert torch.equal(run.position, expected.position)
    mixed = adjsim.PhaseState(torch.zeros(1, 1, dtype=torch.float32), [[1]])
    assert (
        adjsim.simulate(dynamics, mixed, [0, 1], solver=solver).final.momentum.dtype
        == torch.float32
    )


def test_observables_of_any_kind():
    q, p = square((5,))
    for make in (torch.Tensor.numpy, torch.Tensor.tolist):
        assert torch.equal(adjsim.radius_of_gyration(make(q)), adjsim.radius_of_gyration(q))
        assert torch.equal(
            adjsim.pair_distances(make(q), [4.0, 4.0]),
            adjsim.pair_distances(q, torch.tensor([4.0, 4.0])),
        )
        assert torch.equal(
            adjsim.mean_squared_displacement(make(q)), adjsim.mean_squared_displacement(q)
        )
        assert torch.equal(
            adjsim.velocity_autocorrelation(make(p), 2), adjsim.velocity_autocorrelation(p, 2)
        )
        masses = [1.0, 2.0, 3.0, 4.0]
        assert torch.equal(
            adjsim.kinetic_temperature(make(p), masses),
            adjsim.kinetic_temperature(p, torch.tensor(masses)),
        )
        assert adjsim.mean_with_error(make(q[:, :, 0])) == adjsim.mean_with_error(q[:, :, 0])
        assert torch.equal(
            adjsim.dynamics.canonical_weights(make(q)), adjsim.dynamics.canonical_weights(q)
        )
        rate, times = q[:, :, 0].abs(), torch.arange(5.0)
        assert torch.equal(
            adjsim.first_passage_time(make(rate), make(times)),
            adjsim.first_passage_time(rate, times),
        )
    cube = torch.rand(2, 8, 3)
    edges, box = torch.linspace(0, 0.5, 6), torch.ones(3)
    found = adjsim.radial_distribution(cube.numpy(), edges.tolist(), box.tolist())
    assert torch.equal(found, adjsim.radial_distribution(cube, edges, box))


# What is refused.

Q, P = square()


def simulate(**changes):
    dynamics = adjsim.Langevin(adjsim.Harmonic())
    options = {
        "dynamics": dynamics,
        "state": adjsim.PhaseState(Q, P),
        "ts": [0.0, 0.1],
        "solver": BAOAB(0.01),
        **changes,
    }
    return adjsim.simulate(**options)


REFUSED = [
    (
        lambda: simulate(solver=VelocityVerlet),
        TypeError,
        r"solver must be an object.*write VelocityVerlet\(dt\)",
    ),
    (
        lambda: simulate(solver=EulerMaruyama),
        TypeError,
        r"not the class EulerMaruyama: write EulerMaruyama\(dt\)",
    ),
    (lambda: simulate(solver=SDESolver), TypeError, r"write SDESolver\(dt=\.\.\.\)"),
    (lambda: simulate(solver=ODESolver), TypeError, r"write ODESolver\(\)"),
    (lambda: simulate(solver="BAOAB"), TypeError, "solver must be a solver such as"),
    (lambda: simulate(adjoint=ReversibleAdjoint), TypeError, r"write ReversibleAdjoint\(\)"),
    (lambda: simulate(dynamics=adjsim.Langevin), TypeError, r"write Langevin\(potential\)"),
    (
        lambda: simulate(dynamics=adjsim.Harmonic()),
        TypeError,
        r"dynamics must be one such as Hamiltonian\(potential\)",
    ),
    (lambda: simulate(state=Q), TypeError, "steps a PhaseState, not a Tensor"),
    (lambda: simulate(state=(Q, P)), TypeError, "steps a PhaseState, not a tuple"),
    (
        lambda: simulate(state=adjsim.PhaseState(Q, None)),
        TypeError,
        "momentum must be .*; got NoneType",
    ),
    (
        lambda: simulate(ts=torch.tensor([0.0, 0.1], requires_grad=True)),
        ValueError,
        r"respect to times.*solve_ivp",
    ),
    (
        lambda: simulate(ts=[0.0, torch.tensor(0.1, requires_grad=True)]),
        ValueError,
        "ts is a list that holds a tensor",
    ),
    (lambda: simulate(ts=["0", "1"]), TypeError, "ts must be real numbers"),
    (
        lambda: simulate(ts=None),
        TypeError,
        "ts must be a number, an array, a list or a tensor; got NoneType",
    ),
    (lambda: simulate(ts=1.0), ValueError, "ts must list the initial time"),
    (
        lambda: simulate(record=Final(lambda s: s.position)),
        TypeError,
        r"not a Final: compute fn\(trajectory.final\)",
    ),
    (
        lambda: simulate(record="position"),
        TypeError,
        "record= takes a function of the state.*got str 'position'",
    ),
    (lambda: simulate(record=TimeAverage), TypeError, r"write TimeAverage\(function\)"),
    (
        lambda: simulate(generator=0.5),
        TypeError,
        "generator must be a torch.Generator, .*got float 0.5",
    ),
    (lambda: simulate(generator="0"), TypeError, "generator must be a torch.Generator"),
    (lambda: simulate(generator=True), TypeError, "generator must be a torch.Generator"),
    (
        lambda: simulate(dynamics=adjsim.Hamiltonian(adjsim.Harmonic()), generator="0"),
        TypeError,
        "generator must be",
    ),
    (lambda: simulate(generator=2**64), ValueError, "at most 64 bits"),
    (lambda: simulate(compile="no"), TypeError, "compile must be True or False; got str 'no'"),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic()).init(Q, generator=1.0),
        TypeError,
        "generator must be",
    ),
    (lambda: VelocityVerlet("0.01"), TypeError, "dt must be a number; got str '0.01'"),
    (lambda: VelocityVerlet(None), TypeError, "dt must be a number; got NoneType"),
    (lambda: VelocityVerlet(True), TypeError, "dt must be a number; got bool True"),
    (lambda: VelocityVerlet(parameter(0.01)), ValueError, r"dt requires grad.*dt\.item\(\)"),
    (lambda: EulerMaruyama([0.1, 0.2]), TypeError, "dt must be a number"),
    (
        lambda: EulerMaruyama(np.array([0.1, 0.2])),
        ValueError,
        r"dt must be one number; got shape \(2,\)",
    ),
    (lambda: SDESolver(dt="0.1"), TypeError, "dt must be a number"),
    (lambda: ODESolver(rtol="1e-6"), TypeError, "rtol must be a number"),
    (lambda: ODESolver(atol=None), TypeError, "atol must be a number"),
    (lambda: Splitting(None, 0.1), TypeError, "scheme must be a word"),
    (lambda: Splitting("BAB", 0.1, exact="no"), TypeError, "exact must be True or False"),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic(), kT="1"),
        TypeError,
        "kT must be real numbers; got str '1'",
    ),
    (lambda: adjsim.Langevin(adjsim.Harmonic(), kT=None), TypeError, "kT must be .*; got NoneType"),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic(), mass=True),
        TypeError,
        "mass must be real numbers; got bool True",
    ),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic(), mass=[1.0, True]),
        TypeError,
        "mass must be real numbers",
    ),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic(), mass=torch.tensor(True)),
        TypeError,
        "mass must be real numbers",
    ),
    (lambda: adjsim.Langevin(adjsim.Harmonic(), mass=1j), TypeError, "mass must be .*complex"),
    (lambda: adjsim.Langevin(adjsim.Harmonic(), mass=[]), ValueError, "mass has no entries"),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic(), mass=[parameter(1.0)]),
        ValueError,
        "make one nn.Parameter of all entries",
    ),
    (lambda: adjsim.Harmonic(k=[[1.0], [1.0, 2.0]]), ValueError, "k must be rows of equal length"),
    (lambda: adjsim.Harmonic(k=[1.0, None]), TypeError, "k must be real numbers"),
    (
        lambda: adjsim.NoseHooverChain(adjsim.Harmonic(), length="3"),
        TypeError,
        "length must be a number",
    ),
    (
        lambda: adjsim.NoseHooverChain(adjsim.Harmonic(), length=2.5),
        ValueError,
        "length must be an integer",
    ),
    (lambda: adjsim.NoseHooverChain(adjsim.Harmonic(), dof="6"), TypeError, "dof must be a number"),
    *(
        (
            lambda rates=rates: adjsim.GeneralizedLangevin(adjsim.Harmonic(), rates=rates),
            ValueError,
            "rates (must list at least one number|has no entries)",
        )
        for rates in ([], [[1.0]], 1.0)
    ),
    (lambda: adjsim.NoseHooverChain(adjsim.Harmonic(), length=0), ValueError, "at least 1 link"),
    (lambda: adjsim.NoseHooverChain(adjsim.Harmonic(), dof=0), ValueError, "dof must be positive"),
    (
        lambda: adjsim.NoseHooverChain(adjsim.Harmonic()).check(
            adjsim.NoseHooverChain(adjsim.Harmonic(), length=2).init(Q, P)
        ),
        ValueError,
        r"bath_position has shape \(2, 1, 1\); it must be \(3, 1, 1\)",
    ),
    *(
        (
            lambda make=make, name=name, value=value: make(adjsim.Harmonic(), **{name: value}),
            ValueError,
            f"{name} must be positive; got {value}",
        )
        for make, names in (
            (adjsim.Langevin, ("mass", "kT", "friction")),
            (adjsim.OverdampedLangevin, ("kT", "friction")),
            (adjsim.NoseHooverChain, ("mass", "kT", "tau")),
            (adjsim.GeneralizedLangevin, ("mass", "kT")),
        )
        for name in names
        for value in (0, -2)
    ),
    *(
        (
            lambda make=make, name=name: make(adjsim.Harmonic(), **{name: [0.5, 1.0]}),
            ValueError,
            rf"{name} must be one number, for all atoms and replicas; got shape \(2,\)\. Make",
        )
        for make, names in (
            (adjsim.Langevin, ["kT"]),
            (adjsim.OverdampedLangevin, ["kT"]),
            (adjsim.GeneralizedLangevin, ["kT"]),
            (adjsim.NoseHooverChain, ["kT", "tau"]),
            (adjsim.VelocityRescale, ["kT"]),
            (adjsim.Berendsen, ["kT", "tau"]),
            (adjsim.Bussi, ["kT", "tau"]),
            (adjsim.Andersen, ["kT"]),
        )
        for name in names
    ),
    (
        lambda: adjsim.Hamiltonian(adjsim.Harmonic()).thermal_momentum(Q, [0.5, 1.0]),
        ValueError,
        "kT must be one number",
    ),
    (lambda: adjsim.LennardJones(cutoff="3"), TypeError, "cutoff must be a number; got str '3'"),
    (lambda: adjsim.LennardJones(cutoff=parameter(3.0)), ValueError, "cutoff requires grad"),
    (lambda: adjsim.LennardJones(box="cubic"), TypeError, "box must be real numbers"),
    (
        lambda: adjsim.Hamiltonian(adjsim.LennardJones),
        TypeError,
        r"potential .*the class LennardJones: write LennardJones\(\)",
    ),
    (lambda: adjsim.Hamiltonian(lambda q: q.sum()), TypeError, "potential must be"),
    (lambda: adjsim.Hamiltonian(None), TypeError, "potential must be an nn.Module"),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic()).init(Q, P[:2]),
        ValueError,
        r"momentum has shape \(2, 2\) and position",
    ),
    (
        lambda: adjsim.ESH(adjsim.Harmonic()).init(Q, P[0]),
        ValueError,
        r"momentum has shape \(2,\) and position \(4, 2\)",
    ),
    (
        lambda: adjsim.NoseHooverChain(adjsim.Harmonic()).init(Q[0]),
        ValueError,
        r"position has shape \(2,\); it must be",
    ),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic()).init("here"),
        TypeError,
        "position must be real numbers",
    ),
    (
        lambda: adjsim.Langevin(adjsim.Harmonic()).init(Q * 1j),
        TypeError,
        "position must be real numbers",
    ),
    (
        lambda: TimeAverage("position"),
        TypeError,
        "TimeAverage takes a function of the state.*got str 'position'",
    ),
    (
        lambda: TimeAverage(lambda s: s.position, burn_in="1"),
        TypeError,
        "burn_in must be a number; got str '1'",
    ),
    (
        lambda: TimeAverage(lambda s: s.position, burn_in=None),
        TypeError,
        "burn_in must be a number",
    ),
    (lambda: Final(None), TypeError, "Final takes a function of the state.*got NoneType"),
    (lambda: Final(3.0), TypeError, "Final takes a function"),
    (lambda: adjsim.velocity_autocorrelation(Q[None], 1.5), ValueError, "lags must be an integer"),
    (
        lambda: adjsim.radial_distribution(Q.new_zeros(4, 3), [1.0], [4.0, 4.0, 4.0]),
        ValueError,
        "edges must be at least two increasing",
    ),
    (
        lambda: adjsim.radial_distribution(torch.zeros(2, 3), [0.5, 1.0], None),
        ValueError,
        "radial_distribution needs a periodic box.*got None",
    ),
    (
        lambda: adjsim.smooth_radial_distribution(torch.zeros(2, 3), [1.0], None, width=0.1),
        ValueError,
        "smooth_radial_distribution needs a periodic box.*got None",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "kind", "says"), REFUSED, ids=range(len(REFUSED)))
def test_it_is_refused_in_our_own_words(call, kind, says):
    with pytest.raises(kind, match=says) as found:
        call()
    assert type(found.value) is kind


class Repulsion(nn.Module):
    """One over the distance, by torch."""

    def forward(self, position):
        i, j = torch.triu_indices(position.shape[-2], position.shape[-2], 1)
        return (1 / (position[..., i, :] - position[..., j, :]).norm(dim=-1)).sum(-1)


@pytest.mark.parametrize(
    ("potential", "move"),
    [
        (lambda: adjsim.LennardJones(), [0.0, 0.0]),
        (lambda: adjsim.LennardJones(cutoff=1.7, box=[4.0, 5.0]) + adjsim.Harmonic(), [4.0, -5.0]),
        (lambda: adjsim.LennardJones(cutoff=1.7, box=[[4.0, 0.0], [1.0, 5.0]]), [3.0, -5.0]),
        (Repulsion, [0.0, 0.0]),
    ],
    ids=["open", "box", "tilted box", "module"],
)
def test_two_atoms_at_one_place_are_named_before_the_run(potential, move):
    dynamics = adjsim.Langevin(potential())
    position = torch.stack([Q, Q])
    position[1, 3] = position[1, 1] + torch.tensor(move)
    says = (
        r"^the energy at the start of system 1 is inf\. The closest atoms, 1 and 3, are 0 apart: "
        rf"move them, or check the parameters of {type(dynamics.potential).__name__}\.$"
    )
    with pytest.raises(ValueError, match=says):
        simulate(dynamics=dynamics, state=dynamics.init(position, position))
    with pytest.raises(ValueError, match=r"^the energy at the start is inf\. The closest"):
        simulate(dynamics=dynamics, state=dynamics.init(position[1], position[1]))


@pytest.mark.parametrize("adjoint", [adjsim.DirectAdjoint(), ReversibleAdjoint()])
def test_two_atoms_at_one_place_with_a_finite_energy_are_named(adjoint):
    """The root has no derivative at zero, so the first force is NaN."""

    class Springs(nn.Module):
        def forward(self, position):
            i, j = torch.triu_indices(position.shape[-2], position.shape[-2], 1)
            d = position[..., i, :] - position[..., j, :]
            return ((d.square().sum(-1).sqrt() - 1) ** 2).sum(-1)

    dynamics = adjsim.Langevin(Springs())
    position = Q.clone()
    position[3] = position[1]
    start = dynamics.init(position, P)
    says = (
        r"in step 1 \(t = 0\.01\): the force at the start is nan\. The closest atoms, 1 and 3, are "
        r"0 apart: move them, or check the parameters of Springs\.$"
    )
    with pytest.raises(FloatingPointError, match=says):
        simulate(dynamics=dynamics, state=start, adjoint=adjoint, generator=0)


def test_a_force_that_is_not_finite_is_named_before_the_run():
    class Drive(adjsim.potentials.ForceField):
        def forward(self, t, position):
            return 1 / position

    dynamics = adjsim.Langevin(Drive())
    says = r"^the force at the start of system 1 is inf: check the parameters of Drive\.$"
    start = dynamics.init(torch.tensor([[[1.0]], [[0.0]]]), generator=0)
    with pytest.raises(ValueError, match=says):
        simulate(dynamics=dynamics, state=start)


def test_a_trajectory_without_a_graph_says_so():
    assert "no gradient" in repr(simulate(generator=0))
    assert "no gradient" not in repr(
        simulate(dynamics=adjsim.Langevin(adjsim.Harmonic(parameter(1.0))), generator=0)
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "make",
    [
        lambda: adjsim.ReversibleAdjoint(tol="1"),
        lambda: adjsim.ReversibleAdjoint(checkpoint_every="10"),
        lambda: adjsim.CheckpointAdjoint("3"),
        lambda: adjsim.FiniteDifference("1e-3"),
        lambda: adjsim.ScoreFunction("2"),
    ],
)
def test_settings_of_adjoints_and_estimators_are_numbers(make):
    with pytest.raises(TypeError, match="must be"):
        make()


def test_starts_of_a_simulation_may_be_arrays():
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(nn.Parameter(torch.tensor(1.0))))

    def initial(count, generator):
        return adjsim.PositionState(np.ones((count, 1, 1)))

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 0.1], adjsim.EulerMaruyama(0.05))
    observable = adjsim.Final(lambda state: (state.position**2).sum((-1, -2)))
    assert (
        adjsim.Pathwise()(simulation, observable, replicas=4, generator=0).value.dtype
        == torch.float64
    )


def test_numbers_on_another_device_than_the_start_are_refused():
    """Every step would copy them. The meta device is the one other that every computer has."""

    class Spring(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(1.0, device="meta"))

        def forward(self, position):
            return self.k.to("cpu") * position.square().sum((-1, -2))

    dynamics = adjsim.Hamiltonian(Spring())
    start = dynamics.init(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"potential\.k of Hamiltonian is on meta, .* on cpu"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=VelocityVerlet(0.1))
