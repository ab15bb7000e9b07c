"""Contract suites that a new potential, term or scheme is enrolled in by one row of a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adjsim.core.state import State
from adjsim.dynamics.base import Dynamics
from adjsim.dynamics.bodies import RowShear
from adjsim.dynamics.cotangents import Cotangents
from adjsim.dynamics.forces import ForceEvaluator
from adjsim.dynamics.moves import ColumnShear, Coupling, GeneralFlow, Scale, Shear
from adjsim.dynamics.sources import MoveContext
from adjsim.dynamics.terms import Term
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.products import derivative


def disturbed(state: State, seed: int = 0) -> State:
    """A generic state near this one: nothing zero, nothing symmetric; directions stay of unit
    length.
    """
    generator = torch.Generator().manual_seed(seed)
    shifts = (0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in state)
    state = type(state)(*(x.detach() + shift for x, shift in zip(state, shifts, strict=True)))
    if "direction" in state._fields:
        state = state._replace(
            direction=state.direction / state.direction.norm(dim=(-1, -2), keepdim=True)
        )
    return state


def drawn(term: Term, state: State, seed: int | None = 1) -> tuple[Tensor, ...] | None:
    """Noise for one flow of the term: standard normal, or zero for no seed."""
    if term.draws == 0:
        return None
    *batch, atoms, dim = state.position.shape
    # A bath of a piston draws one more row.
    shape = (term.draws, *batch, atoms + ("strain" in state._fields), dim)
    if seed is None:
        return torch.zeros(shape, dtype=state.position.dtype).unbind(0)
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=state.position.dtype
    ).unbind(0)


def at(
    dynamics: Dynamics, letter: str, coefficients, noise: tuple[Tensor, ...] | None
) -> MoveContext:
    """Where a flow takes place, with the forces of the dynamics' potential and its parameters."""
    return MoveContext(
        0.0,
        letter,
        coefficients,
        noise,
        ForceEvaluator(dynamics.potential, parameters=dynamics.trainable()),
    )


def flow(
    dynamics: Dynamics, letter: str, state: State, h: float, noise: tuple[Tensor, ...] | None
) -> State:
    term = dynamics.terms[letter]
    where = at(dynamics, letter, term.coefficients(h, state), noise)
    for move in term.moves(h, state):
        state = move.flow(state, where)
    return state


def unflow(
    dynamics: Dynamics, letter: str, state: State, h: float, noise: tuple[Tensor, ...] | None
) -> State:
    """The state before a flow, as a sweep finds it."""
    term = dynamics.terms[letter]
    where = at(dynamics, letter, term.coefficients(h, state), noise)
    nothing = Cotangents(
        {name: torch.zeros_like(x) for name, x in state._asdict().items()}, where.forces.parameters
    )
    state = type(state)(*(x.detach() for x in state))
    with torch.no_grad():
        for move in reversed(term.moves(h, state)):
            state = move.backward(state, where, nothing, None)
    return state


def mean_state(one: State, two: State) -> State:
    return type(one)(*((a + b) / 2 for a, b in zip(one, two, strict=True)))


class PotentialContract:
    """What every potential promises; subclasses parametrise ``potential`` and ``position``."""

    def test_energy_has_one_number_a_system(self, potential, position):
        batch = torch.stack([position, position + 0.01])
        assert potential(position).shape == ()
        assert potential(batch).shape == (2,)
        torch.testing.assert_close(potential(batch)[0], potential(position), rtol=1e-13, atol=1e-13)

    def test_force_is_minus_the_gradient(self, potential, position):
        torch.testing.assert_close(
            force(potential, position).detach(),
            -derivative(potential, position).detach(),
            rtol=1e-11,
            atol=1e-11,
        )

    def test_force_against_central_differences(self, potential, position):
        direction = torch.randn_like(position)
        h = 1e-5
        slope = (potential(position + h * direction) - potential(position - h * direction)) / (
            2 * h
        )
        # Truncation h^2 U''' and rounding U eps / h are both below 1e-8 of the energies here.
        torch.testing.assert_close(
            -(force(potential, position) * direction).sum().detach(),
            slope.detach(),
            rtol=1e-7,
            atol=1e-7,
        )

    def test_products_equal_automatic_differentiation(self, potential, position):
        parameters = [p for p in potential.parameters() if p.requires_grad]
        v = torch.randn_like(position)
        q = position.clone().requires_grad_()
        through = -derivative(potential, q)
        expected = torch.autograd.grad(through, (q, *parameters), v, allow_unused=True)
        value, pullback = force_vjp(potential, position, parameters)
        along, rest = pullback(v)
        rest = rest if isinstance(rest, list) else rest.gradient(parameters)
        torch.testing.assert_close(value, through.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(along, expected[0], rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(rest, expected[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)

    def test_float32_follows(self, potential, position):
        single = force(potential, position.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(
            single.detach().double(), force(potential, position).detach(), rtol=1e-4, atol=1e-4
        )


class DriftContract:
    """What a term with a drift promises; subclasses parametrise ``dynamics``, ``letter`` and
    ``state``.
    """

    def test_flow_starts_along_the_drift(self, dynamics: Dynamics, letter, state):
        term, h = dynamics.terms[letter], 1e-5
        # The mean over noise of plus and minus one, which has the mean, the variance and the third
        # moment of a Gaussian. A flow that reads squares of its noise has its drift in the mean.
        plus = minus = still = drawn(term, state, None)
        if still is not None:
            plus, minus = tuple(x + 1 for x in still), tuple(x - 1 for x in still)
        once, twice = (
            mean_state(
                flow(dynamics, letter, state, time, plus),
                flow(dynamics, letter, state, time, minus),
            )
            for time in (h, 2 * h)
        )
        drift = term.drift(0.0, state)
        for name in state._fields:
            # One-sided, since noise has no flow backward in time. Truncation h^2 times a third
            # derivative, rounding 1e-16 / h.
            rate = (4 * getattr(once, name) - getattr(twice, name) - 3 * getattr(state, name)) / (
                2 * h
            )
            expected = drift.get(name, torch.zeros_like(rate))
            torch.testing.assert_close(rate, expected.expand_as(rate), rtol=1e-6, atol=1e-8)


class DiffusionContract:
    """The contract of terms whose fields have independent noise, or none."""

    def test_noise_of_the_flow_is_the_diffusion(self, dynamics: Dynamics, letter, state):
        """Over a short time each field gets variance diffusion^2 h, to first order in h."""
        term, h = dynamics.terms[letter], 1e-6
        still = drawn(term, state, None)
        variance = {name: torch.zeros_like(getattr(state, name)) for name in state._fields}
        if still is not None:
            without = flow(dynamics, letter, state, h, still)
            for i in range(term.draws):
                one = tuple(torch.ones_like(x) if i == j else x for j, x in enumerate(still))
                with_one = flow(dynamics, letter, state, h, one)
                for name in state._fields:
                    variance[name] = (
                        variance[name] + (getattr(with_one, name) - getattr(without, name)) ** 2 / h
                    )
        amplitude = term.diffusion(0.0, state)
        for name, found in variance.items():
            expected = amplitude.get(name, torch.zeros_like(found)).expand_as(found) ** 2
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class FlowContract:
    """What every flow promises; parametrised like the others."""

    def test_inverse_undoes_the_flow(self, dynamics: Dynamics, letter, state):
        term = dynamics.terms[letter]
        noise = drawn(term, state)
        after = flow(dynamics, letter, state, 0.1, noise)
        if not all(move.invertible for move in term.moves(0.1, state)):
            with pytest.raises(TypeError, match="has no inverse"):
                unflow(dynamics, letter, after, 0.1, noise)
            return
        back = unflow(dynamics, letter, after, 0.1, noise)
        for found, true in zip(back, state, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)

    def test_couplings_do_not_read_what_they_write(self, dynamics: Dynamics, letter, state):
        term = dynamics.terms[letter]
        coefficients, noise = term.coefficients(0.1, state), drawn(term, state)
        for move in term.moves(0.1, state):
            if not isinstance(move, Coupling):
                continue
            other = getattr(state, move.field).clone()
            if move.link is None:
                other += 0.3
            else:
                other.select(-3, move.link).add_(0.3)
            value = move.source.value(state, at(dynamics, letter, coefficients, noise))
            again = move.source.value(
                state._replace(**{move.field: other}), at(dynamics, letter, coefficients, noise)
            )
            assert torch.equal(value, again)

    def test_backward_is_the_transpose_of_the_flow(self, dynamics: Dynamics, letter, state):
        """Every move's product, and the state it goes back to, against automatic differentiation of
        its flow.
        """
        term, parameters = dynamics.terms[letter], dynamics.trainable()
        coefficients = term.coefficients(0.1, state)
        leaves = {
            name: c.detach().requires_grad_(c.requires_grad) for name, c in coefficients.items()
        }
        for move in term.moves(0.1, state):
            assert isinstance(move, Shear | Scale | ColumnShear | RowShear | GeneralFlow)
            before = type(state)(*(x.clone().requires_grad_() for x in state))
            noise = drawn(term, state)
            after = move.flow(before, at(dynamics, letter, leaves, noise))
            given = [torch.randn_like(x) for x in after]
            inputs = [
                *before,
                *(c for c in leaves.values() if c.requires_grad),
                *parameters.values(),
            ]
            expected = torch.autograd.grad(list(after), inputs, given, allow_unused=True)
            sums = Cotangents(dict(zip(state._fields, given, strict=True)), parameters)
            plain = type(state)(*(x.detach() for x in after))
            # A move without an inverse is given the state before it.
            known = None if move.invertible else state
            found = move.backward(plain, at(dynamics, letter, leaves, noise), sums, known)
            sums.complete()
            mine = [sums[name] for name in state._fields]
            mine += [
                sums.coefficient_sums.get((letter, k)) for k, c in leaves.items() if c.requires_grad
            ]
            mine += [sums.parameter_sums.get(name) for name in parameters]
            for a, b in zip(mine, expected, strict=True):
                zero = torch.zeros_like(next((x for x in (a, b) if x is not None), torch.zeros(())))
                a, b = (zero if a is None else a), (zero if b is None else b)
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, check_stride=False)
            for a, b in zip(found, state, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class TermContract(DriftContract, DiffusionContract, FlowContract):
    """What a term of a differential equation promises; subclasses parametrise ``dynamics``,
    ``letter`` and ``state``.
    """
