"""Contract suites that a new potential, term or scheme is enrolled in by one row of a table."""

from __future__ import annotations

from dataclasses import replace

import torch

from adjsim._state import State
from adjsim.dynamics.base import Dynamics, Term
from adjsim.dynamics.couplings import At, Forces, Gradients, Map, Scale, Shear
from adjsim.potentials.base import derivative, force, force_vjp


def disturbed(state: State, seed: int = 0) -> State:
    """A generic state near this one: nothing zero, nothing symmetric; directions stay of unit length."""
    generator = torch.Generator().manual_seed(seed)
    shifts = (0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in state)
    state = type(state)(*(x + shift for x, shift in zip(state, shifts, strict=True)))
    if "direction" in state._fields:
        state = state._replace(direction=state.direction / state.direction.norm(dim=(-1, -2), keepdim=True))
    return state


def flow(term: Term, letter: str, state: State, h: float) -> State:
    at = At(0.0, letter, term.coefficients(h, state), None)
    for move in term.moves(h, state):
        state = move.flow(state, replace(at, forces=Forces()))
    return state


def unflow(term: Term, letter: str, state: State, h: float) -> State:
    at = At(0.0, letter, term.coefficients(h, state), None)
    for move in reversed(term.moves(h, state)):
        state = move.inverse(state, replace(at, forces=Forces()))
    return state


class PotentialContract:
    """What every potential promises; subclasses parametrise ``potential`` and ``position``."""

    def test_energy_has_one_number_a_system(self, potential, position):
        batch = torch.stack([position, position + 0.01])
        assert potential(position).shape == ()
        assert potential(batch).shape == (2,)
        torch.testing.assert_close(potential(batch)[0], potential(position), rtol=1e-13, atol=1e-13)

    def test_force_is_minus_the_gradient(self, potential, position):
        torch.testing.assert_close(
            force(potential, position).detach(), -derivative(potential, position).detach(), rtol=1e-11, atol=1e-11
        )

    def test_force_against_central_differences(self, potential, position):
        direction = torch.randn_like(position)
        h = 1e-5
        slope = (potential(position + h * direction) - potential(position - h * direction)) / (2 * h)
        # Truncation h^2 U''' and rounding U eps / h are both below 1e-8 of the energies here.
        torch.testing.assert_close(
            -(force(potential, position) * direction).sum().detach(), slope.detach(), rtol=1e-7, atol=1e-7
        )

    def test_products_equal_automatic_differentiation(self, potential, position):
        parameters = [p for p in potential.parameters() if p.requires_grad]
        v = torch.randn_like(position)
        q = position.clone().requires_grad_()
        through = -derivative(potential, q)
        expected = torch.autograd.grad(through, (q, *parameters), v, allow_unused=True)
        value, pullback = force_vjp(potential, position, parameters)
        along, rest = pullback(v)
        torch.testing.assert_close(value, through.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(along, expected[0], rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(rest, expected[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)

    def test_float32_follows(self, potential, position):
        single = force(potential, position.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.detach().double(), force(potential, position).detach(), rtol=1e-4, atol=1e-4)


class TermContract:
    """What every term promises; subclasses parametrise ``dynamics``, ``letter`` and ``state``."""

    def test_flow_starts_along_the_drift(self, dynamics: Dynamics, letter, state):
        term, h = dynamics.terms[letter], 1e-5
        ahead, behind = flow(term, letter, state, h), flow(term, letter, state, -h)
        drift = term.drift(0.0, state)
        for name in state._fields:
            rate = (getattr(ahead, name) - getattr(behind, name)) / (2 * h)
            expected = drift.get(name, torch.zeros_like(rate))
            # Central difference: h^2 times the third derivative, and rounding 1e-16 / h.
            torch.testing.assert_close(rate, expected.expand_as(rate), rtol=1e-6, atol=1e-8)

    def test_inverse_undoes_the_flow(self, dynamics: Dynamics, letter, state):
        term = dynamics.terms[letter]
        back = unflow(term, letter, flow(term, letter, state, 0.1), 0.1)
        for found, true in zip(back, state, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)

    def test_couplings_do_not_read_what_they_write(self, dynamics: Dynamics, letter, state):
        term = dynamics.terms[letter]
        at = At(0.0, letter, term.coefficients(0.1, state), None)
        for move in term.moves(0.1, state):
            if isinstance(move, Map):
                continue
            other = getattr(state, move.field).clone()
            if move.link is None:
                other += 0.3
            else:
                other[..., move.link, :] += 0.3
            value = move.source.value(state, replace(at, forces=Forces()))
            again = move.source.value(state._replace(**{move.field: other}), replace(at, forces=Forces()))
            assert torch.equal(value, again)

    def test_retreat_is_the_transpose_of_the_flow(self, dynamics: Dynamics, letter, state):
        """Every move's product, and the state it goes back to, against automatic differentiation of its flow."""
        term = dynamics.terms[letter]
        parameters = list(dynamics.trainable().values())
        coefficients = term.coefficients(0.1, state)
        leaves = {name: c.detach().requires_grad_(c.requires_grad) for name, c in coefficients.items()}
        for move in term.moves(0.1, state):
            assert isinstance(move, Shear | Scale | Map)
            before = type(state)(*(x.clone().requires_grad_() for x in state))
            after = move.flow(before, At(0.0, letter, leaves, None))
            cotangents = [torch.randn_like(x) for x in after]
            inputs = [*before, *(c for c in leaves.values() if c.requires_grad), *parameters]
            expected = torch.autograd.grad(list(after), inputs, cotangents, allow_unused=True)
            grads = Gradients(dict(zip(state._fields, cotangents, strict=True)), parameters)
            plain = type(state)(*(x.detach() for x in after))
            found = move.retreat(plain, At(0.0, letter, leaves, None), grads, None)
            grads.settle()
            mine = [grads.state[name] for name in state._fields]
            mine += [grads.coefficient_grads.get((letter, k)) for k, c in leaves.items() if c.requires_grad]
            mine += grads.parameter_grads
            for a, b in zip(mine, expected, strict=True):
                zero = torch.zeros(())
                a, b = (zero if a is None else a), (zero if b is None else b)
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, check_stride=False)
            for a, b in zip(found, state, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
