"""Constrained dynamics: exact motions, reversal, starts, and refusals."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from scipy.special import ellipk

import adjsim
from adjsim.dynamics.constraints.multipliers import LengthMultipliers, tangent_multipliers
from adjsim.dynamics.constraints.systems import newton, quadratic_root, solve
from tests.constraints import TRIANGLE, WATER_LENGTHS, LongChain, MixedClusters, tensor, waters

FREE = adjsim.Harmonic(0.0)


def held(position, index, length, momentum, mass=1.0, potential=FREE):
    dynamics = adjsim.Constrained(
        adjsim.Hamiltonian(potential, mass), adjsim.DistanceConstraints(index, length)
    )
    return dynamics, dynamics.init(position, momentum)


def test_a_free_rotor_turns_by_the_exact_angle_of_each_step():
    masses, length, speed, dt, steps = tensor([2.0, 3.0]), 1.4, 0.9, 0.05, 60
    reduced = float(masses.prod() / masses.sum())
    position = tensor([[0.0, 0, 0], [length, 0, 0]])
    # The relative velocity of the atoms is across their bond, and the centre of mass moves.
    momentum = tensor([[0.2, -reduced * speed, 0], [0.3, reduced * speed, 0]])
    dynamics, start = held(position, [[0, 1]], length, momentum, masses)
    path = adjsim.simulate(
        dynamics, start, [0.0, dt * steps], solver=adjsim.VelocityVerlet(dt)
    ).final
    # A drift adds dt v across the bond and scales the bond, to the length: sin(angle) = dt v / L.
    # Angular momentum and energy are those of the start. |L x p|/I = v/L is the limit dt -> 0.
    angle = steps * math.asin(dt * speed / length)
    bond, v = path.position[1] - path.position[0], path.momentum / masses[:, None]
    turned = length * tensor([math.cos(angle), math.sin(angle), 0])
    # Rounding adds up over 60 steps of 1e-16 each.
    torch.testing.assert_close(bond, turned, rtol=0, atol=1e-12)
    across = speed * tensor([-math.sin(angle), math.cos(angle), 0])
    torch.testing.assert_close(v[1] - v[0], across, rtol=0, atol=1e-12)
    assert abs(math.asin(dt * speed / length) / dt - speed / length) < 1e-3


def test_a_pendulum_on_a_fixed_atom_has_the_period_of_its_amplitude():
    length, gravity, amplitude, mass = 1.3, 9.81, 2.0, 0.7
    potential = adjsim.Gravity(mass, gravity)
    quarter = math.sqrt(length / gravity) * float(ellipk(math.sin(amplitude / 2) ** 2))
    bob = [length * math.sin(amplitude), -length * math.cos(amplitude)]
    position = tensor([[0.0, 0.0], bob])
    errors = []
    for steps in (25, 50):
        dynamics, start = held(
            position, [[0, 1]], length, torch.zeros(2, 2), tensor([math.inf, mass]), potential
        )
        solver = adjsim.VelocityVerlet(quarter / steps)
        final = adjsim.simulate(dynamics, start, [0.0, quarter], solver=solver).final
        assert torch.equal(final.position[0], position[0])
        assert torch.equal(final.momentum[0], torch.zeros(2, dtype=torch.float64))
        # After a quarter of the period the bob is at the lowest point.
        errors.append(abs(float(final.position[1, 0])))
    assert errors[1] < 8e-3
    # Second order: a ratio of 4, up to terms of fourth order.
    assert 3.8 < errors[0] / errors[1] < 4.2


def moving_waters():
    position, index = waters(3)
    momentum = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masses = tensor([4.0, 1, 1] * 3)
    potential = adjsim.SoftSphere(0.5, 1.5, exclusions=index)
    return held(position, index, tensor(WATER_LENGTHS * 3), momentum, masses, potential)


def states_of(path):
    """The states of a trajectory, as one state with an axis of times."""
    return type(path.final)(*(getattr(path, name) for name in path.final._fields))


def test_energy_is_of_second_order_while_constraints_hold():
    dynamics, start = moving_waters()
    errors = []
    for dt in (0.02, 0.01):
        path = adjsim.simulate(
            dynamics, start, [0.02 * k for k in range(21)], solver=adjsim.VelocityVerlet(dt)
        )
        energy = dynamics.invariant(states_of(path))
        errors.append(float((energy - energy[0]).abs().max()))
        assert float(dynamics.constraints.excess(path.position).abs().max()) < 1e-12
        c = dynamics.constraints.coefficients(dynamics.masses, path.position)
        along = path.momentum - dynamics.constraints.project(c, path.position, path.momentum)
        assert float(along.abs().max()) < 1e-12
    assert 3.5 < errors[0] / errors[1] < 4.5


@pytest.mark.slow
def test_reversed_momenta_return_to_the_start():
    dynamics, start = moving_waters()
    solver = adjsim.Splitting("BAAAB", 0.03)
    there = adjsim.simulate(dynamics, start, [0.0, 1.2], solver=solver).final
    turned = there._replace(momentum=-there.momentum)
    back = adjsim.simulate(dynamics, turned, [0.0, 1.2], solver=solver).final
    assert float((there.position - start.position).abs().max()) > 0.1
    # Rounding grows by collisions, over 40 steps by less than a factor of a hundred.
    torch.testing.assert_close(back.position, start.position, rtol=0, atol=1e-12)
    torch.testing.assert_close(-back.momentum, start.momentum, rtol=0, atol=1e-12)


def test_steps_equal_those_of_openmm():
    openmm = pytest.importorskip("openmm")
    dynamics, start = moving_waters()
    # OpenMM holds rigid waters to lengths in single precision.
    dynamics.constraints.length.copy_(dynamics.constraints.length.float())
    start = dynamics.init(start.position, start.momentum)
    dt, steps, masses = 0.02, 10, dynamics.dynamics.mass.tolist()
    system = openmm.System()
    pairs = openmm.CustomNonbondedForce("0.5 * (1.5 / r)^12")
    for mass in masses:
        system.addParticle(mass)
        pairs.addParticle([])
    system.addForce(pairs)
    for (i, j), length in zip(
        dynamics.constraints.index.tolist(), dynamics.constraints.length.tolist(), strict=True
    ):
        system.addConstraint(i, j, length)
        pairs.addExclusion(i, j)
    verlet = openmm.CustomIntegrator(dt)
    verlet.setConstraintTolerance(1e-13)
    verlet.addPerDofVariable("x1", 0)
    verlet.addComputePerDof("v", "v + 0.5 * dt * f / m")
    verlet.addComputePerDof("x", "x + dt * v")
    verlet.addComputePerDof("x1", "x")
    verlet.addConstrainPositions()
    verlet.addComputePerDof("v", "v + 0.5 * dt * f / m + (x - x1) / dt")
    verlet.addConstrainVelocities()
    context = openmm.Context(system, verlet, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(start.position.tolist())
    context.setVelocities((start.momentum / dynamics.dynamics.mass[:, None]).tolist())
    verlet.step(steps)
    theirs = context.getState(getPositions=True).getPositions(asNumpy=True)._value
    mine = adjsim.simulate(
        dynamics, start, [0.0, steps * dt], solver=adjsim.VelocityVerlet(dt)
    ).final.position
    # Rounding of both, which collisions amplify.
    torch.testing.assert_close(mine, torch.as_tensor(theirs), rtol=0, atol=1e-10)


def test_frictions_of_molecules_relax_their_momenta():
    position, index = waters(2)
    friction = tensor([0.5] * 3 + [2.0] * 3).requires_grad_()
    inner = adjsim.Langevin(FREE, kT=1e-30, friction=friction)
    dynamics = adjsim.Constrained(
        inner, adjsim.DistanceConstraints(index, tensor(WATER_LENGTHS * 2))
    )
    start = dynamics.init(position, 0.1 * torch.randn(6, 3))
    final = adjsim.simulate(
        dynamics, start, [0.0, 0.3], solver=adjsim.BAOAB(0.1), generator=0
    ).final
    # Without forces the momentum of a molecule decays at its rate.
    total = start.momentum.reshape(2, 3, 3).sum(1)
    decayed = final.momentum.reshape(2, 3, 3).sum(1)
    rates = tensor([[0.5], [2.0]])
    torch.testing.assert_close(decayed, total * torch.exp(-0.3 * rates), rtol=0, atol=1e-13)


def test_a_chain_of_thermostats_conserves_its_energy():
    position, index = waters(2)
    potential = adjsim.SoftSphere(0.5, 1.5, exclusions=index)
    inner = adjsim.NoseHooverChain(potential, kT=0.7, tau=0.5, dof=18 - 6)
    dynamics = adjsim.Constrained(
        inner, adjsim.DistanceConstraints(index, tensor(WATER_LENGTHS * 2))
    )
    start = dynamics.init(position, generator=0)
    errors = []
    for dt in (0.02, 0.01):
        solver = adjsim.Splitting("NBABN", dt)
        path = adjsim.simulate(dynamics, start, [0.02 * k for k in range(21)], solver=solver)
        found = dynamics.invariant(states_of(path))
        errors.append(float((found - found[0]).abs().max()))
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_drawn_momenta_have_the_energy_of_the_degrees_of_freedom():
    system = MixedClusters()
    dynamics, replicas = system.constrained(system.leaves), 4000
    position = system.leaves["position"].expand(replicas, 9, 3)
    start = dynamics.init(position, generator=3)
    dof = dynamics.dof(start.position)
    assert dof == 27 - 7
    found = adjsim.kinetic_temperature(start.momentum, system.leaves["mass"], dof)
    # Independent draws: the standard error of the mean is kT sqrt(2 / (dof replicas)).
    error = 0.8 * math.sqrt(2 / (dof * replicas))
    assert abs(float(found.mean()) - 0.8) < 4 * error


def test_the_drift_is_that_of_the_constrained_equations():
    dynamics, start = moving_waters()
    h = 2e-5
    path = adjsim.simulate(dynamics, start, [0.0, h, 2 * h], solver=adjsim.VelocityVerlet(h / 20))
    middle = type(start)(path.position[1], path.momentum[1])
    rates = dynamics.drift(0.0, middle)
    for name in ("position", "momentum"):
        values = getattr(path, name)
        # The error of a central difference is h^2 / 6 times a third derivative of about 1e4.
        slope = (values[2] - values[0]) / (2 * h)
        torch.testing.assert_close(getattr(rates, name), slope, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_multipliers_have_the_derivatives_of_the_implicit_function_theorem():
    generator = torch.Generator().manual_seed(1)
    base = tensor([[1.0, 0.2, 0], [0, 1, 0.1]]).T[:, None]
    d = base + 0.1 * torch.randn(2, 3, 2, 2, generator=generator, dtype=torch.float64)
    u = d + 0.05 * torch.randn(2, 3, 2, 2, generator=generator, dtype=torch.float64)
    S = tensor([[2.0, 1], [1, 3]]).expand(2, 2, 2) + 0.1 * tensor([1.0, 2]).reshape(2, 1, 1)
    length = tensor([[1.0, 1.05], [0.95, 1.1]])
    arguments = [x.clone().requires_grad_() for x in (u, d, S, length)]
    assert torch.autograd.gradcheck(
        LengthMultipliers.apply, arguments, check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(LengthMultipliers.apply, arguments)


@pytest.mark.parametrize("size", [1e-9, 1e-2, 0.3])
def test_the_multiplier_of_one_constraint_is_that_of_newtons_method(size):
    generator = torch.Generator().manual_seed(1)
    d, u = torch.randn(2, 5, 3, 40, 1, generator=generator, dtype=torch.float64)
    d = d / d.norm(dim=1, keepdim=True)
    u = d + size * u
    S = torch.linspace(0.1, 2.0, 40, dtype=torch.float64).reshape(40, 1, 1)
    length = torch.ones(40, 1, dtype=torch.float64)
    x = quadratic_root(u, d, S, length)
    e = u + S.squeeze(-1) * x.unsqueeze(1) * d
    torch.testing.assert_close(e.norm(dim=1), length.expand(5, 40, 1), rtol=5e-16, atol=0)
    # A multiplier has the error of a length over S, as that of Newton's method has.
    expected = newton(u, d, S, length)
    torch.testing.assert_close(S[..., 0] * x, S[..., 0] * expected, rtol=0, atol=1e-15)


@pytest.mark.slow
def test_multipliers_of_a_band_have_the_same_derivatives():
    generator = torch.Generator().manual_seed(2)
    shape = 2, 1, 4
    d = torch.randn(shape, generator=generator, dtype=torch.float64)
    d = d / d.norm(dim=0, keepdim=True)
    u = d + 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = 0.3 + torch.rand(4, generator=generator, dtype=torch.float64)
    length = tensor([[1.0, 1.05, 0.95, 1.02]])

    def band(weights):
        """The matrix S of a chain, of which a row has three entries."""
        none, along = torch.zeros(1, dtype=torch.float64), -weights[1:]
        diagonal = 1 + weights + torch.cat([weights[1:], none])
        return torch.stack([torch.cat([none, along]), diagonal, torch.cat([along, none])], -1)[None]

    def lengths(u, d, weights, length):
        return LengthMultipliers.apply(u, d, band(weights), length)

    def tangent(u, d, weights):
        return tangent_multipliers(d, u, band(weights))

    for function, *rest in ((lengths, length), (tangent,)):
        given = [x.clone().requires_grad_() for x in (u, d, weights, *rest)]
        assert torch.autograd.gradcheck(
            function, given, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(function, given)


def test_init_moves_the_start_and_says_how_far():
    position, index = waters(1)
    constraints = adjsim.DistanceConstraints(index, WATER_LENGTHS)
    dynamics = adjsim.Constrained(adjsim.Langevin(FREE), constraints)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynamics.init(position + 1e-5 * torch.eye(3), generator=0)
    moved = position + 0.01 * torch.eye(3)
    with pytest.warns(UserWarning, match=r"init moved an atom by 0\.0\d+ to satisfy"):
        start = dynamics.init(moved, generator=0)
    assert float(constraints.excess(start.position).abs().max()) < 1e-14
    # Equal masses: forces of constraints leave the centre of mass.
    torch.testing.assert_close(start.position.mean(0), moved.mean(0), rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=r"far from .* atoms 0 and 2 .* by 0\.5 .* 0\.15 is all"):
        dynamics.init(1.5 * position, generator=0)
    off = start._replace(position=moved)
    with pytest.raises(ValueError, match="Make the start by init"):
        adjsim.simulate(dynamics, off, [0.0, 0.1], solver=adjsim.BAOAB(0.1), generator=0)
    for part, refused in ((1.0, True), (2e-4, True), (5e-5, False)):
        p = start.momentum + part * float(start.momentum.abs().max()) * position
        error = pytest.raises(ValueError, match="momenta at the start change the constrained dis")
        with error if refused else contextlib.nullcontext():
            off = start._replace(momentum=p)
            adjsim.simulate(dynamics, off, [0.0, 0.1], solver=adjsim.BAOAB(0.1), generator=0)


@pytest.mark.parametrize(
    ("index", "length", "message"),
    [
        ([[0, 1], [1, 0]], 1.0, r"gives the pair \[0, 1\] in the rows \[0, 1\]: give"),
        ([[0, 1], [1, 0]], [1.0, 2.0], r"lengths \[1.0, 2.0\], which contradict each other"),
        ([[0, 0]], 1.0, "names an atom twice"),
        ([[-1, 0]], 1.0, "atoms are counted from 0"),
        ([[0, 1, 2]], 1.0, r"must be \(n, 2\)"),
        ([[0, 1]], 0.0, "length must be positive"),
        ([[0, 1]], [1.0, 1.0], "length must be one number or"),
        (
            [[k, k + d] for d in (1, 140) for k in range(140 * 140)],
            1.0,
            "cluster with atom 0 need a matrix with .* nets have many",
        ),
    ],
)
def test_bad_constraints_have_their_sentence(index, length, message):
    with pytest.raises(ValueError, match=message):
        adjsim.DistanceConstraints(index, length)


def zigzag(rods: int):
    """A chain of rods in a plane, whose constraints are in a random order."""
    position = torch.arange(rods + 1, dtype=torch.float64)
    position = torch.stack([position % 2, position], -1)
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(position.shape, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.arange(rods), torch.arange(1, rods + 1)], -1)
    return held(position, index[torch.randperm(rods)], math.sqrt(2), momentum)


def test_a_long_chain_keeps_its_lengths():
    dynamics, start = zigzag(400)
    # Of a chain the matrix is tridiagonal.
    assert dynamics.constraints.groups == ((0, 400, 400, 3, 0),)
    final = adjsim.simulate(dynamics, start, [0.0, 0.5], solver=adjsim.VelocityVerlet(0.05)).final
    assert float(dynamics.constraints.excess(final.position).abs().max()) < 1e-12
    with pytest.raises(FloatingPointError, match="no multipliers were found"):
        adjsim.simulate(dynamics, start, [0.0, 5.0], solver=adjsim.VelocityVerlet(5.0))


def test_a_singular_band_has_no_solution():
    d, S = torch.ones(2, 1, 4, dtype=torch.float64), torch.zeros(1, 4, 3, dtype=torch.float64)
    assert bool(solve(d, d, S, d[0]).isnan().all())


def test_long_clusters_have_the_multipliers_of_dense_matrices():
    system = LongChain()
    position, mass, index = (*(system.leaves[x] for x in ("position", "mass")), system.index)
    constraints = adjsim.DistanceConstraints(index, system.leaves["length"])
    assert [group.size for group in constraints.groups] == [3, 22]
    assert constraints.groups[1].width < 8
    c = constraints.coefficients(adjsim.Hamiltonian(FREE, mass).masses, position)
    rows = torch.arange(len(index))
    difference = position[index[:, 0]] - position[index[:, 1]]
    G = torch.zeros(len(index), *position.shape, dtype=torch.float64)
    G[rows, index[:, 0]], G[rows, index[:, 1]] = difference, -difference
    G, weight = G.flatten(1), (1 / mass).repeat_interleave(3)
    p = torch.randn(4, *position.shape, generator=torch.Generator().manual_seed(1)).double()
    along = torch.linalg.solve((G * weight) @ G.T, (G * weight) @ p.flatten(1).T)
    projected = constraints.project(c, position.expand_as(p), p)
    expected = p - (along.T @ G).reshape(p.shape)
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-12)
    # A drift adds forces along constraints alone, at its start and its end.
    q = constraints.drift(c, position.expand_as(p), projected, 0.01)[0]
    assert float(constraints.excess(q).abs().max()) < 1e-14
    half = (q - position) / 0.01 * mass[:, None]
    impulse = (half - projected).flatten(1).T
    rest = impulse - G.T @ torch.linalg.lstsq(G.T, impulse).solution
    # Rounding of positions of 20, over the step.
    assert float(rest.abs().max()) < 1e-11


def test_dependent_constraints_are_refused():
    square = tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    pairs = [[i, j] for i in range(4) for j in range(i)]
    lengths = torch.stack([(square[i] - square[j]).norm() for i, j in pairs])
    dynamics = adjsim.Constrained(adjsim.Langevin(FREE), adjsim.DistanceConstraints(pairs, lengths))
    # Six distances in a plane, where four atoms have five apart from rigid motions.
    with pytest.raises(ValueError, match=r"of atoms \[0, 1, 2, 3\] are not independent"):
        dynamics.init(square, generator=0)
    chain = zigzag(40)[0].constraints
    line = torch.stack([torch.arange(41.0), torch.zeros(41)], -1).double()
    rods = torch.cat([chain.index, tensor([[3, 5]]).long()])
    long = adjsim.DistanceConstraints(rods, (line[rods[:, 0]] - line[rods[:, 1]]).norm(dim=-1))
    # A triangle of atoms on a line.
    with pytest.raises(ValueError, match=r"10, 11\] and 29 more are not independent"):
        adjsim.Constrained(adjsim.Langevin(FREE), long).init(line, generator=0)
    fixed = adjsim.Langevin(FREE, tensor([math.inf, math.inf, 1.0, 1.0]))
    pinned = adjsim.Constrained(fixed, adjsim.DistanceConstraints([[0, 1]], 1.0))
    with pytest.raises(ValueError, match="infinite mass"):
        pinned.init(square, generator=0)
    with pytest.raises(ValueError, match=r"names atom 3, and atoms are counted from 0 to 2"):
        dynamics.init(square[:3], generator=0)


def test_a_start_that_undone_steps_do_not_come_back_to_is_refused():
    position, k = tensor([[0.0, 0], [1, 0]]), torch.nn.Parameter(tensor(1.0))
    dynamics, start = held(position, [[0, 1]], 1.0, torch.ones(2, 2), potential=adjsim.Harmonic(k))
    solver = adjsim.VelocityVerlet(0.1)
    for size, adjoint in ((5e-6, adjsim.DirectAdjoint()), (1e-7, adjsim.ReversibleAdjoint())):
        off = start._replace(position=position * (1 + size))
        path = adjsim.simulate(dynamics, off, [0.0, 0.2], solver=solver, adjoint=adjoint)
        path.final.position.sum().backward()
        assert path.stats["reconstruction_error"] in (None, pytest.approx(size / 2, rel=0.3))
    off = start._replace(position=position * (1 + 5e-6))
    with pytest.raises(ValueError, match=r"off its constraints by 2.5e-06 .* tol=1e-06. Make the"):
        adjsim.simulate(
            dynamics, off, [0.0, 0.2], solver=solver, adjoint=adjsim.ReversibleAdjoint()
        )
    with torch.no_grad():
        adjsim.simulate(
            dynamics, off, [0.0, 0.2], solver=solver, adjoint=adjsim.ReversibleAdjoint()
        )


def test_lengths_that_contradict_each_other_have_no_multipliers():
    position = tensor([[0.0, 0], [1, 0], [2, 0.05]])
    constraints = adjsim.DistanceConstraints(TRIANGLE, [1.0, 2.1, 1.0])
    dynamics = adjsim.Constrained(adjsim.Langevin(FREE), constraints)
    with pytest.raises(FloatingPointError, match="contradict each other"):
        dynamics.init(position, generator=0)


def test_a_step_too_long_for_the_rods_is_named():
    position = tensor([[0.0, 0], [1, 0]])
    dynamics, start = held(position, [[0, 1]], 1.0, tensor([[0.0, -1], [0, 1]]))
    with pytest.raises(FloatingPointError, match="distance 1; without them the distance would be"):
        adjsim.simulate(dynamics, start, [0.0, 2.0], solver=adjsim.VelocityVerlet(2.0))


def test_other_dynamics_are_refused_by_name():
    rods = adjsim.DistanceConstraints([[0, 1]], 1.0)
    found = "'D' of Mechanics, ViscousDamping: it does not say how .* of which every term declares"
    with pytest.raises(TypeError, match=found):
        adjsim.Constrained(adjsim.Mechanics(FREE, damping=0.1), rods)
    with pytest.raises(TypeError, match="dynamics with masses or frictions; got ODE"):
        adjsim.Constrained(adjsim.ODE(lambda t, y: -y), rods)
    with pytest.raises(TypeError, match=r"DistanceConstraints\(index, length\)"):
        adjsim.Constrained(adjsim.Langevin(FREE), [[0, 1]])
    with pytest.raises(ValueError, match=r"atoms 0 and 1, .* have the friction 1 and 2, which"):
        adjsim.Constrained(adjsim.Langevin(FREE, friction=[1.0, 2.0]), rods)
    with pytest.raises(ValueError, match="Give all atoms of a molecule one rate"):
        adjsim.Constrained(adjsim.Andersen(FREE, rate=[1.0, 2.0]), rods)
    for made in (adjsim.NoseHooverChain, adjsim.Bussi, adjsim.Berendsen, adjsim.VelocityRescale):
        with pytest.raises(ValueError, match="dof = atoms x dim - constraints"):
            adjsim.Constrained(made(FREE), rods)
    dynamics = adjsim.Constrained(adjsim.NoseHooverChain(FREE, dof=4), rods)
    with pytest.raises(ValueError, match="leave 3 degrees of freedom"):
        dynamics.init(tensor([[0.0, 0], [1, 0]]), generator=0)
    dynamics = adjsim.Constrained(adjsim.Hamiltonian(FREE), rods)
    start = dynamics.init(tensor([[0.0, 0], [1, 0]]), torch.zeros(2, 2))
    with pytest.raises(TypeError, match="box is that of a state at constant pressure"):
        dynamics.init(start.position, start.momentum, box=[2.0, 2.0])
    with pytest.raises(TypeError, match="hold at the ends of RATTLE steps"):
        adjsim.simulate(dynamics, start, [0.0, 1.0], solver=adjsim.ODESolver())


def test_the_density_is_declared_where_only_the_potential_varies():
    k = torch.nn.Parameter(tensor(1.0))
    rods = adjsim.DistanceConstraints([[0, 1]], 1.0)
    dynamics = adjsim.Constrained(adjsim.Langevin(adjsim.Harmonic(k)), rods)
    start = dynamics.init(tensor([[0.0, 0], [1, 0]]), generator=0)
    density = dynamics.stationary_density()
    assert density is not None
    (slope,) = torch.autograd.grad(density.reduced_energy(start), k)
    torch.testing.assert_close(slope, tensor(0.5))
    trained = adjsim.DistanceConstraints([[0, 1]], torch.nn.Parameter(tensor(1.0)))
    with pytest.raises(TypeError, match="the length of Constrained requires grad"):
        adjsim.Constrained(adjsim.Langevin(FREE), trained).stationary_density()
    mass = torch.nn.Parameter(tensor(1.0))
    with pytest.raises(TypeError, match="the mass of Constrained requires grad"):
        adjsim.Constrained(adjsim.Langevin(FREE, mass), rods).stationary_density()


def test_rods_of_an_ideal_gas_press_like_one_particle_each():
    box = tensor([6.0, 7.0, 8.0])
    position = tensor([[0.0, 0, 0], [0, 1.2, 0], [3, 3, 3], [3.6, 3.8, 3]])
    momentum = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    masses = tensor([1.0, 2, 1.5, 3])
    potential = adjsim.SoftSphere(0.0, 1.0, cutoff=2.5, box=box)
    dynamics, start = held(position, [[0, 1], [2, 3]], [1.2, 1.0], momentum, masses, potential)
    # The pull along a rod cancels the rotation: mu |v|^2. The centres of mass remain.
    centres = start.momentum.reshape(2, 2, 3).sum(1)
    expected = (centres.square().sum(-1) / masses.reshape(2, 2).sum(1)).sum() / (3 * box.prod())
    torch.testing.assert_close(adjsim.pressure(dynamics, start), expected, rtol=1e-12, atol=0)


def test_the_stress_is_that_of_all_forces():
    dynamics, start = moving_waters()
    # sum q (dp/dt) is the virial of all forces of a system without walls.
    rates = dynamics.drift(0.0, start)
    virial = dynamics.potential.virial(start.position) + dynamics.constraint_virial(start)
    expected = start.position.mT @ rates.momentum
    torch.testing.assert_close(virial, expected, rtol=1e-10, atol=1e-10)


def test_a_system_does_not_depend_on_its_batch():
    position, index = waters(2)
    constraints = adjsim.DistanceConstraints(index, tensor(WATER_LENGTHS * 2))
    dynamics = adjsim.Constrained(adjsim.Hamiltonian(FREE), constraints)
    momentum = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Faster systems need more iterations.
    momenta = torch.stack([momentum, 3 * momentum, 0.01 * momentum])
    start = dynamics.init(position.expand(3, 6, 3), momenta)
    solver = adjsim.VelocityVerlet(0.05)
    together = adjsim.simulate(dynamics, start, [0.0, 0.5], solver=solver).final
    for k in range(3):
        one = type(start)(start.position[k], start.momentum[k])
        alone = adjsim.simulate(dynamics, one, [0.0, 0.5], solver=solver).final
        assert torch.equal(alone.position, together.position[k])
