"""Parameters that potentials declare: the constructor, its documentation and its checks."""

import inspect

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.core.declared import POSITIVE, setting
from adjsim.potentials import PairPotential, Switched, declared


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


class Powered(Well):
    """A well with a setting, a cutoff that is needed, and the width first.

    Args:
        {parameters}
        cutoff: that is needed.
    """

    power: float = setting("an exponent", POSITIVE, 2.0)
    depth: Tensor = declared("again", depth=True, keyword=True)
    needed_arguments = ("cutoff",)
    omitted_arguments = ("truncation",)


class Passing(Powered):
    """A well whose constructor passes arguments on."""

    def __init__(self, name, *values, flag=False, **options):
        super().__init__(*values, **options)
        self.name, self.flag = name, flag


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


def test_settings_and_arguments_that_are_needed_or_left_out():
    found = inspect.signature(Powered).parameters
    assert list(found) == ["width", "power", "cutoff", "box", "skin", "exclusions", "depth"]
    assert found["cutoff"].default is found["depth"].default is inspect.Parameter.empty
    well = Powered(1.5, 3, depth=1.0, cutoff=2.0)
    assert well.power == 3.0
    assert "power" not in dict(well.named_buffers())
    assert "    width: length; a number or ``(atoms, atoms)``, symmetric.\n" in Powered.__doc__
    assert "    power: an exponent.\n    depth: again; likewise.\n" in Powered.__doc__
    well.power = -1.0
    with pytest.raises(ValueError, match="power must be positive and finite; got -1"):
        well(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="Powered needs a cutoff"):
        Powered(depth=1.0)
    with pytest.raises(TypeError, match="Powered takes no truncation"):
        Powered(depth=1.0, cutoff=2.0, truncation=Switched(1.0))


def test_a_constructor_that_passes_arguments_on_has_those_of_its_base():
    found = inspect.signature(Passing).parameters
    assert list(found)[:4] == ["name", "width", "power", "flag"]
    assert {"depth", "cutoff", "box"} < set(found)
    assert "truncation" not in found
    assert Passing("a", 1.5, 3.0, flag=True, depth=1.0, cutoff=2.0).power == 3.0
