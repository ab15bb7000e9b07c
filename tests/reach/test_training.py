"""The training of a protein force field goes on after it was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import adjsim
from tests.reach.ranks import on_ranks

pytest.importorskip("openmm")
DATA = Path(adjsim.__file__).parents[1] / "examples" / "data"


@pytest.fixture
def scripts(monkeypatch):
    """Import the scripts, which print rounded numbers and set no default."""
    monkeypatch.syspath_prepend(str(DATA))
    import gb99dms
    import make_gb99dms

    return gb99dms, make_gb99dms


def peptide(gb99dms, model="FLEXIBLE"):
    """Three alanines, with a made-up target."""
    pdb = gb99dms.app.PDBFile(str(DATA / "trialanine.pdb"))
    mean = 4.0 * (torch.arange(3.0) - torch.arange(3.0).unsqueeze(1)).abs()
    target = torch.stack([mean, torch.full((3, 3), 0.3)])
    return gb99dms.Protein(pdb, target, getattr(gb99dms, model))


@pytest.fixture
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class KilledError(Exception):
    pass


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_numbers(scripts, double, tmp_path, monkeypatch):
    gb99dms, make = scripts
    plan = gb99dms.Plan(4, 0, 2, 2, clip_every=2, compile=False)

    def trained(name):
        options = "clipped path", 2, 0.01, 3, tmp_path / name, "a commit"
        return make.train(peptide(gb99dms), plan, *options)

    whole = trained("whole")
    gradient, calls = gb99dms.Protein.gradient, []

    def killed(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KilledError
        return gradient(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(gb99dms.Protein, "gradient", killed)
        with pytest.raises(KilledError):
            trained("killed")
    assert len(make.read(tmp_path / "killed" / "training-clipped-path.json")["rows"]) == 1
    # The moments of the second iteration were stored.
    assert (tmp_path / "killed" / "clipped-path-1" / "means-1").exists()
    resumed = trained("killed")
    assert resumed["rows"] == whole["rows"] == whole["rows"][:2]
    assert resumed["scales"] == whole["scales"] != [1.0] * len(whole["scales"])
    assert not (tmp_path / "killed" / "clipped-path-1").exists()
    assert (tmp_path / "killed" / "training-clipped-path.png").exists()
    options = "clipped path", 2, 0.02, 3, tmp_path / "killed", "a commit"
    with pytest.raises(ValueError, match="other settings"):
        make.train(peptide(gb99dms), plan, *options)


def averaged():
    """Return the bits of moments and gradients of three replicas, and shares of frames."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(DATA))
        import gb99dms
    protein, plan = peptide(gb99dms), gb99dms.Plan(4, 0, 2, 3, compile=False)
    means = protein.means(plan, 1)
    numbers = [means]
    for kind in ("exact path", "reweighting"):
        found = protein.gradient(kind, plan, means, 1)
        numbers += [found.value, found.grad["scales"], found.grad_stderr["scales"]]
    protein.scale(dict.fromkeys(protein.keys, 1.01))
    return [x.numpy().tobytes() for x in numbers], protein.shares()


@pytest.mark.slow
def test_a_gradient_of_two_processes_has_the_bits_of_one(double):
    """Three replicas, of which one process has two."""
    numbers, shares = averaged()
    assert on_ranks(2, averaged) == [(numbers, shares)] * 2
    assert all(0 < share <= 1 + 1e-12 for share in shares.values())
    assert shares["all"] < 1 - 1e-9
    assert shares["coulomb.charge"] != shares["torsions.k"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "h", "rtol"), [("FLEXIBLE", 1e-4, 1e-5), ("CONSTRAINED", 1e-5, 1e-4)]
)
@pytest.mark.filterwarnings("ignore:init moved an atom")
def test_derivatives_by_scales_are_those_of_the_loss(scripts, double, model, h, rtol):
    """Steps of 4 fs change a distance enough that differences of 1e-4 are not linear. Of smaller
    ones the rounding errors of values near 1e4 are a part of 3e-5.
    """
    gb99dms, _ = scripts
    protein = peptide(gb99dms, model)
    plan = gb99dms.Plan(4, 0, 2, 2, compile=False)
    key = next(key for key in protein.keys if key.startswith("solvent.scale"))
    means = protein.means(plan, 1)
    estimate = protein.gradient("exact path", plan, means, 1)
    found, kinds = estimate.grad["scales"], estimate.grad["kinds"]
    own = sum(x for x, key in zip(found, protein.keys, strict=True) if key.startswith("torsions.k"))
    torch.testing.assert_close(kinds[gb99dms.SIX.index("torsions.k")], own, rtol=1e-12, atol=0.0)
    # With the noise of the estimator's replicas, whose seed is drawn from its generator.
    simulation = protein.simulation(plan)
    noisy = adjsim.Simulation(
        simulation.dynamics, simulation.initial, simulation.ts, solver=adjsim.BAOAB(protein.dt)
    )
    values = []
    for scale in (1 + h, 1 - h):
        protein.scale({key: scale})
        slopes = torch.autograd.grad(
            protein.loss(center := means.mean(0).requires_grad_()), center
        )[0]
        average = adjsim.TimeAverage(
            gb99dms.Slope(protein.moments, slopes), plan.burn_in * protein.dt, plan.every
        )
        estimate = adjsim.Pathwise()(noisy, average, replicas=2, chunks=2, generator=1)
        values.append(estimate.value)
    protein.scale({})
    expected = (values[0] - values[1]) / (2 * h)
    torch.testing.assert_close(found[protein.keys.index(key)], expected, rtol=rtol, atol=0)
