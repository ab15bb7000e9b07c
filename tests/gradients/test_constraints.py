"""Gradients of constrained runs: adjoints against each other and against central differences."""

from __future__ import annotations

import warnings

import pytest
import torch

import adjsim
from tests.constraints import ClustersWithMemory, LongChain, MixedClusters, tensor, weighted

ADJOINTS = (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint())


@pytest.fixture
def system():
    return MixedClusters()


def gradients(system, numbers, steps, **options):
    path = system.run(numbers, steps, **options)
    found = torch.autograd.grad(weighted(path.final), list(numbers.values()))
    return dict(zip(numbers, found, strict=True))


def slope(system, numbers, name, along, steps, scheme="BAOAB"):
    h = 1e-5
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = [
            weighted(system.run(numbers | {name: numbers[name] + s * along}, steps, scheme).final)
            for s in (h, -h)
        ]
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.parametrize(
    ("made", "scheme", "steps"),
    [
        pytest.param(MixedClusters, "BAOAB", 4, marks=pytest.mark.slow),
        pytest.param(MixedClusters, "OBAAABO", 4, marks=pytest.mark.slow),
        (ClustersWithMemory, "BAGAB", 2),
    ],
)
def test_all_adjoints_equal_central_differences(made, scheme, steps):
    system = made()
    numbers = system.parameters()
    found = [gradients(system, numbers, steps, scheme=scheme, adjoint=a) for a in ADJOINTS]
    generator = torch.Generator().manual_seed(5)
    for name, number in numbers.items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], found[0][name], rtol=1e-10, atol=1e-10)
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        expected = slope(system, numbers, name, along, steps, scheme)
        # Truncation h^2 and rounding 1e-14 / h are below 1e-8.
        torch.testing.assert_close((found[0][name] * along).sum(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "thermostat", [adjsim.Bussi, adjsim.Berendsen, adjsim.VelocityRescale, adjsim.Andersen]
)
def test_thermostats_have_the_gradients_of_differences(system, thermostat):
    kept = {name: x for name, x in system.parameters().items() if name in ("length", "kT", "mass")}

    def end(numbers, adjoint):
        given = system.leaves | numbers
        constraints = adjsim.DistanceConstraints(system.index, given["length"])
        potential = adjsim.SoftSphere(given["epsilon"], 1.5)
        andersen = thermostat is adjsim.Andersen
        settings = {"rate": 20.0} if andersen else {"dof": 20}
        inner = thermostat(potential, given["mass"], given["kT"], **settings)
        held = adjsim.Constrained(inner, constraints)
        solver = adjsim.Splitting("CBABC" if andersen else "RBABR", 0.02)
        options = {"solver": solver, "adjoint": adjoint, "generator": 2}
        start = held.init(given["position"], generator=1)
        final = adjsim.simulate(held, start, [0.0, 0.08], **options).final
        return weighted(final)

    # Momenta before a collision are lost, and the kinetic energy before a rescaling that sets it.
    reversible = thermostat not in (adjsim.VelocityRescale, adjsim.Andersen)
    adjoints = ADJOINTS if reversible else ADJOINTS[:2]
    found = [torch.autograd.grad(end(kept, a), list(kept.values())) for a in adjoints]
    generator = torch.Generator().manual_seed(5)
    for k, (name, number) in enumerate(kept.items()):
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [end(kept | {name: number + s * along}, ADJOINTS[0]) for s in (1e-5, -1e-5)]
        for grads in found:
            torch.testing.assert_close(grads[k], found[0][k], rtol=1e-10, atol=1e-10)
            expected = (ends[0] - ends[1]) / 2e-5
            torch.testing.assert_close((grads[k] * along).sum(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_fixed_atom_and_its_rod_have_gradients(system):
    length = torch.nn.Parameter(tensor([1.0, 0.8]))
    mass = torch.nn.Parameter(tensor([torch.inf, 1.0, 2.0]))
    position = tensor([[0.0, 0], [1, 0], [1, 0.8]])

    def end(length, mass, adjoint):
        inner = adjsim.Hamiltonian(adjsim.Gravity([1.0, 1.0, 2.0], 9.0), mass)
        held = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 1], [1, 2]], length))
        start = held.init(position, torch.zeros(3, 2))
        return weighted(
            adjsim.simulate(
                held, start, [0.0, 0.5], solver=adjsim.VelocityVerlet(0.05), adjoint=adjoint
            ).final
        )

    found = [torch.autograd.grad(end(length, mass, a), (length, mass)) for a in ADJOINTS]
    h, along = 1e-5, tensor([0.6, -0.9])
    for k, (number, step) in enumerate(((length, along), (mass, tensor([0.0, 0.7, 0.4])))):
        ends = []
        for sign in (h, -h):
            shifted = [length.detach(), mass.detach()]
            shifted[k] = number.detach() + sign * step
            ends.append(end(*shifted, adjsim.DirectAdjoint()))
        expected = (ends[0] - ends[1]) / (2 * h)
        for grads in found:
            torch.testing.assert_close((grads[k] * step).sum(), expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(grads[k], found[0][k], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_differences_of_lengths_at_fixed_starts():
    length, position = torch.nn.Parameter(tensor([1.0, 0.8])), tensor([[0.0, 0], [1, 0], [1, 0.8]])
    inner = adjsim.Langevin(adjsim.Harmonic(1.0), [1.0, 2.0, 1.0], 0.5, 0.7)
    dynamics = adjsim.Constrained(inner, adjsim.DistanceConstraints([[0, 1], [1, 2]], length))

    def initial(replicas, generator):
        return dynamics.init(position.expand(replicas, 3, 2), generator=generator)

    simulation = adjsim.Simulation(dynamics, initial, [0.0, 0.2], solver=adjsim.BAOAB(0.1))
    end = adjsim.Final(lambda state: (state.position**2 + state.momentum).sum((-1, -2)))
    path, differences = (
        estimator(simulation, end, replicas=2, chunks=2, generator=0).grad["constraints.length"]
        for estimator in (adjsim.Pathwise(), adjsim.FiniteDifference(1e-6))
    )
    # Rounding of 1e-15 over a step of 1e-6.
    torch.testing.assert_close(differences, path, rtol=1e-7, atol=1e-8)
    with pytest.raises(ValueError, match="With FiniteDifference use h=1e-6"):
        adjsim.FiniteDifference()(simulation, end, replicas=2, chunks=2, generator=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"exact": True}, marks=pytest.mark.slow),
        pytest.param({"compile": True}, marks=pytest.mark.marathon),
        pytest.param({"compile": True, "exact": True}, marks=pytest.mark.marathon),
    ],
    ids=str,
)
def test_a_long_chain_has_the_gradients_of_differences(options):
    system = LongChain()
    numbers = {name: torch.nn.Parameter(x.clone()) for name, x in system.leaves.items()}
    found = []
    for adjoint in (adjsim.DirectAdjoint(), adjsim.ReversibleAdjoint()):
        compiled = isinstance(adjoint, adjsim.ReversibleAdjoint) and options
        path = system.run(numbers, adjoint=adjoint, **(compiled or {"exact": "exact" in options}))
        found.append(torch.autograd.grad(weighted(path.final), list(numbers.values())))
    h, generator = 1e-5, torch.Generator().manual_seed(4)
    for mine, other, (name, number) in zip(*found, numbers.items(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        along = torch.randn(number.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [
                weighted(system.run(numbers | {name: number + s * along}).final) for s in (h, -h)
            ]
        slope = (mine * along).sum()
        # An exact run has the gradient of lattice states, which differ by their grid.
        rtol = 1e-5 if "exact" in options else 1e-6
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * h), slope, rtol=rtol, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_step_of_a_long_chain_is_that_of_torch():
    system = LongChain()
    with torch.no_grad():
        plain, compiled = (system.run(system.leaves, compile=x).final for x in (False, True))
    # Elimination without pivots and by LAPACK differ by rounding.
    torch.testing.assert_close(compiled.position, plain.position, rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled.momentum, plain.momentum, rtol=0, atol=1e-12)


def test_a_gradient_can_be_differentiated_again(system):
    length = torch.nn.Parameter(system.leaves["length"].clone())
    along = torch.linspace(-1, 1, 7, dtype=torch.float64)

    def first(length):
        path = system.run(system.leaves | {"length": length}, 3)
        (found,) = torch.autograd.grad(weighted(path.final), length, create_graph=True)
        return found

    (second,) = torch.autograd.grad((first(length) * along).sum(), length)
    h = 1e-5
    ends = [first(torch.nn.Parameter((length + s * along).detach())) for s in (h, -h)]
    expected = (ends[0] - ends[1]) / (2 * h)
    torch.testing.assert_close(second, expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_constraints_may_be_made_inside_of_transforms():
    """A band and a small cluster, made where torch.func has the lengths."""
    system = LongChain()
    length = torch.nn.Parameter(system.leaves["length"].clone())

    def end(length):
        return weighted(system.run(system.leaves | {"length": length}).final)

    (expected,) = torch.autograd.grad(end(length), length)
    torch.testing.assert_close(torch.func.grad(end)(length.detach()), expected)


@pytest.mark.parametrize(
    ("made", "scheme", "adjoint"),
    [
        pytest.param(
            MixedClusters, "BAOAB", adjsim.CheckpointAdjoint(), marks=pytest.mark.marathon
        ),
        pytest.param(
            MixedClusters, "BAOAB", adjsim.ReversibleAdjoint(), marks=pytest.mark.marathon
        ),
        pytest.param(
            ClustersWithMemory, "BAGAB", adjsim.ReversibleAdjoint(), marks=pytest.mark.marathon
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", type(x).__name__),
)
def test_compiled_runs_have_the_same_gradients(made, scheme, adjoint):
    system = made()
    numbers = system.parameters()
    plain = gradients(system, numbers, 6, scheme=scheme, adjoint=adjoint)
    compiled = gradients(system, numbers, 6, scheme=scheme, adjoint=adjoint, compile=True)
    for name in numbers:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-10, atol=1e-10)
