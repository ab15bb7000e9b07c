"""OpenMM's custom forces of several atoms, groups, places and hydrogen bonds: read, run, written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adjsim
from adjsim.io import from_openmm, to_openmm
from adjsim.potentials.base import force_vjp
from tests.bonded import close
from tests.openmm_custom import FORCES, sites, system_with
from tests.openmm_systems import reference


def assert_equal(potential, position, system, positions):
    energy, forces = potential(position).item(), adjsim.force(potential, position).detach()
    expected, expected_forces = reference(system, positions)
    scale = np.abs(expected_forces).max()
    assert energy == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)
    assert np.abs(forces.numpy() - expected_forces).max() <= 1e-9 * scale


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("name", FORCES)
def test_read_and_written(name, periodic):
    """Energies and forces are OpenMM's, also after every number has changed."""
    system, positions = system_with(FORCES[name](periodic)), sites()
    if periodic:
        # Atoms apart by whole boxes. Groups, and Cartesian coordinates, stay where they are.
        positions[0 if name != "centroid" else 7] += (2.0, 0.0, -2.2)
    potential, structure = from_openmm(system, positions)
    assert_equal(potential, structure.position, system, positions)
    with torch.no_grad():
        for key, parameter in potential.named_parameters():
            if not key.endswith(".t"):
                parameter.mul_(1.03)
    written = to_openmm(potential, system)
    assert_equal(potential, structure.position, written, positions)
    again, _ = from_openmm(written, positions)
    assert again(structure.position).item() == potential(structure.position).item()


@pytest.mark.parametrize("name", FORCES)
def test_gradients_against_differences(name):
    potential, structure = from_openmm(system_with(FORCES[name](True)), sites())
    q, v = structure.position, torch.randn_like(structure.position)
    named = {k: x for k, x in potential.named_parameters() if not k.endswith(".t")}
    parameters = list(named.values())
    value, pullback = force_vjp(potential, q, parameters)
    along, rest = pullback(v)
    scale = float(value.norm() * v.norm())

    def slope(change):
        ends = []
        for sign in (1, -1):
            change(sign * 1e-5)
            ends.append(float((adjsim.force(potential, q) * v).sum().detach()))
            change(-sign * 1e-5)
        return (ends[0] - ends[1]) / 2e-5

    moved = torch.randn_like(q)
    with torch.no_grad():
        found = slope(lambda h: q.add_(h * moved))
        assert float((along * moved).sum()) == pytest.approx(found, rel=1e-6, abs=1e-7 * scale)
        for (key, x), grad in zip(named.items(), rest.gradient(parameters), strict=True):
            direction = x * torch.rand_like(x) + 1e-3 * float(x.abs().max())
            found = slope(lambda h, x=x, d=direction: x.add_(h * d))
            mine = 0.0 if grad is None else float((grad * direction).sum())
            assert mine == pytest.approx(found, rel=1e-6, abs=1e-9 * scale), key
