"""MACE through the library's graph, where ``mace-torch`` is installed; nothing is downloaded."""

import copy

import ase
import numpy as np
import pytest
import torch

import adjsim
from adjsim.potentials.learnt.mace import MACEPotential

pytest.importorskip("mace", reason="mace-torch is not installed")
# e3nn reads a file of constants that holds slices, which torch.load refuses by default.
torch.serialization.add_safe_globals([slice])

NUMBERS = [1, 8, 1, 8, 8, 1, 1, 8]
BOXES = {
    "open": None,
    "cube": [6.0, 6.0, 6.0],
    "tilted": [[6.0, 0.0, 0.0], [1.5, 6.0, 0.0], [0.0, 1.0, 6.5]],
    "shorter than the cutoff": [3.9, 6.0, 7.0],
}


@pytest.fixture(scope="module")
def model():
    """A small model with random weights, its forces of about 0.1 eV/angstrom."""
    from e3nn import o3
    from mace import modules

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    blocks = modules.interaction_classes
    made = modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=6,
        max_ell=2,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("4x0e+4x1o"),
        MLP_irreps=o3.Irreps("4x0e"),
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=8.0,
        atomic_numbers=[1, 8],
        correlation=2,
        gate=torch.nn.functional.silu,
        radial_MLP=[8, 8],
        atomic_inter_scale=50.0,
        atomic_inter_shift=0.1,
    )
    torch.set_default_dtype(before)
    return made.eval()


def positions():
    sites = 3.0 * torch.cartesian_prod(*[torch.arange(2, dtype=torch.float64)] * 3)
    generator = torch.Generator().manual_seed(0)
    return sites + 0.3 * torch.randn(8, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", BOXES)
def test_against_its_own_calculator(model, kind):
    from mace.calculators import MACECalculator

    box, q = BOXES[kind], positions()
    atoms = ase.Atoms(numbers=NUMBERS, positions=q.numpy(), cell=box, pbc=box is not None)
    # The calculator freezes the weights of its model.
    atoms.calc = MACECalculator(
        models=[copy.deepcopy(model)], device="cpu", default_dtype="float64"
    )
    potential = MACEPotential(model, NUMBERS, box=box)
    with torch.no_grad():
        energy, force = float(potential(q)), potential.force(q).numpy()
    assert not q.requires_grad
    # Sums in another order.
    assert energy == pytest.approx(atoms.get_potential_energy(), rel=1e-10)
    expected = atoms.get_forces()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(force, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    if box is not None:
        stress = -potential.virial(q).detach().numpy() / atoms.get_volume()
        expected = atoms.get_stress(voigt=False)
        np.testing.assert_allclose(stress, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def end(potential, adjoint, exact=False, steps=50, position=None):
    dynamics = adjsim.Hamiltonian(potential, mass=10.0)
    q = positions() if position is None else position
    p = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = adjsim.simulate(
        dynamics, dynamics.init(q, p), [0.0, steps * 0.05],
        solver=adjsim.Splitting("BAB", 0.05, exact=exact), adjoint=adjoint,
    )  # fmt: skip
    return run.final.position.square().mean(), run.stats


@pytest.mark.slow
def test_gradients_of_its_weights_through_50_steps(model):
    potential = MACEPotential(model, NUMBERS, box=BOXES["cube"])
    named = dict(potential.named_parameters())
    generator = torch.Generator().manual_seed(2)
    along = {k: torch.randn(x.shape, generator=generator) for k, x in named.items()}
    values = []
    for h in (1e-5, -1e-5):
        other = copy.deepcopy(potential)
        with torch.no_grad():
            for k, x in other.named_parameters():
                x.add_(h * along[k])
            values.append(float(end(other, adjsim.DirectAdjoint())[0]))
    difference = (values[0] - values[1]) / 2e-5

    adjoints = {
        "direct": (adjsim.DirectAdjoint(), False),
        "checkpoint": (adjsim.CheckpointAdjoint(), False),
        "reversible": (adjsim.ReversibleAdjoint(), False),
        "exact": (adjsim.ReversibleAdjoint(), True),
    }
    found = {}
    for name, (adjoint, exact) in adjoints.items():
        loss, stats = end(potential, adjoint, exact)
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found[name] = {k: x for k, x in zip(named, grads, strict=True) if x is not None}
        total = sum(float((x * along[k]).sum()) for k, x in found[name].items())
        assert total == pytest.approx(difference, rel=1e-5)
        if exact:
            assert stats["reconstruction_error"] == 0
    for name, close in {"checkpoint": 1e-12, "reversible": 1e-10}.items():
        for k, x in found["direct"].items():
            scale = float(x.abs().max())
            torch.testing.assert_close(found[name][k], x, rtol=0, atol=close * scale)


def test_a_batch_and_float32(model):
    from adjsim.potentials import InPrecision

    potential, q = MACEPotential(model, NUMBERS, box=BOXES["cube"]), positions()
    both = torch.stack([q, q + 0.1 * torch.randn(8, 3, generator=torch.Generator().manual_seed(3))])
    with torch.no_grad():
        energies = potential(both)
        torch.testing.assert_close(energies[0], potential(q), rtol=1e-12, atol=0)
        torch.testing.assert_close(energies[1], potential(both[1]), rtol=1e-12, atol=0)
    single = InPrecision(copy.deepcopy(potential).to(torch.float32))
    # Rounding of float32.
    torch.testing.assert_close(
        single.force(q).detach(), potential.force(q).detach(), rtol=1e-3, atol=1e-4
    )
    loss, stats = end(single, adjsim.ReversibleAdjoint(), exact=True, steps=3)
    loss.backward()
    assert stats["reconstruction_error"] == 0
    assert {x.grad.dtype for x in single.parameters() if x.grad is not None} == {torch.float32}


def test_elements_that_it_does_not_know(model):
    with pytest.raises(ValueError, match=r"does not know atomic numbers \[6\]; it knows \[1, 8\]"):
        MACEPotential(model, [1, 6])
