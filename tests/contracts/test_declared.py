"""Parameters that potentials declare: the constructor, its documentation and its checks."""

import inspect

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.potentials import PairPotential, declared


class Well(PairPotential):
    """A well.

    Args:
        {parameters}
        cutoff, box, truncation, skin, exclusions: see PairPotential.
    """

    depth: Tensor = declared("depth of the well, energy", depth=True)
    width: Tensor = declared("length", 1.5, positive=True)

    def pair_energy(self, s):
        width = self.pair_parameter("width", s)
        return -self.pair_parameter("depth", s) * torch.exp(-s / width**2)


class Deeper(Well):
    """A well with another number."""

    power: Tensor = declared("a number", 2.0)


class Own(Well):
    """A well with a constructor of its own."""

    def __init__(self, cutoff):
        super().__init__(2.0, cutoff=cutoff)


def test_the_constructor_takes_declared_parameters_in_their_order():
    assert list(inspect.signature(Well).parameters)[:3] == ["depth", "width", "cutoff"]
    assert inspect.signature(Well).parameters["width"].default == 1.5
    found = Well(2.0, cutoff=3.0)
    assert float(found.depth) == 2.0
    assert float(found.width) == 1.5
    assert float(Well(width=0.5, depth=1.0).width) == 0.5
    k = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    assert Well(k).depth is k


def test_a_subclass_adds_parameters_or_writes_its_constructor():
    assert list(Deeper.__declared__) == ["depth", "width", "power"]
    assert float(Deeper(1.0, 2.0, 3.0).power) == 3.0
    assert list(inspect.signature(Own).parameters) == ["cutoff"]
    assert float(Own(2.5).depth) == 2.0


def test_the_docstring_has_their_meaning():
    assert "    depth: depth of the well, energy; a number or ``(atoms, atoms)``" in Well.__doc__
    assert "    width: length; likewise.\n    cutoff" in Well.__doc__
    for name in ("Yukawa", "Morse", "Buckingham", "GaussianCore", "HarmonicBond", "MorseBond"):
        kind = getattr(adjsim, name)
        assert "{parameters}" not in kind.__doc__
        assert all(f"    {parameter}: " in kind.__doc__ for parameter in kind.__declared__)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Well(), TypeError, "Well: missing a required argument: 'depth'"),
        (lambda: Well(1.0, 2.0, 3.0), TypeError, "Well: too many positional arguments"),
        (lambda: Well(1.0, size=2.0), TypeError, "unexpected keyword argument 'size'"),
        (lambda: Well(1.0, width=-2.0), ValueError, "width must be positive"),
        (lambda: Well(-1.0), ValueError, "depth must not be negative"),
        (lambda: Well([1.0, 2.0]), ValueError, "depth has shape"),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
