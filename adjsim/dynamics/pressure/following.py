"""The check that the parts of a potential follow a box that moves, at the start of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adjsim.core.box import rows_of
from adjsim.core.strain import Strain
from adjsim.potentials.base import Potential
from adjsim.potentials.evaluated import Evaluated
from adjsim.potentials.strained import has_box, strained_energy, strained_force

# A part that keeps its box, or a value that follows from it, is off by about half of each row for
# an atom that is moved by these numbers of rows at this strain. All rows take part: the energy of
# atoms in a plane may stay the same as one of them moves in it.
TRIAL, ROWS = 0.02, (25, 23, 27)
# The share by which rounding may change an energy, also where a part of it is in float32.
ROUNDING = 1e-5


@torch.no_grad()
def refuse_unfollowing(
    potential: nn.Module, box: Tensor, position: Tensor, strain: Tensor, kT: float
) -> None:
    """Refuse parts that hold atoms at points in space, or that keep a box of their own.

    Args:
        position, strain: of one system.
        kT: the scale of energies: differences below a thousandth of it an atom do not count.
    """
    parts = [potential]
    if isinstance(potential, Evaluated):
        # An atom that is moved by rows of the box would leave its virtual sites on the way.
        parts, position = potential.evaluated_parts(position)
    given = Strain.of(box, strain)
    resting = given.dilated(position, torch.exp(-strain))
    none, trial = (given._replace(value=e) for e in (torch.zeros_like(strain), strain + TRIAL))
    moved = given.dilated(resting, torch.exp(trial.value))
    rows, stretched_rows = (
        rows_of(e.stretched(box).squeeze(-2)).to(position) for e in (none, trial)
    )
    own = rows[0]
    small = 1e-3 * kT * len(position)
    # No force vanishes by symmetry, as in a perfect crystal, with an atom off its place.
    shaken = resting.clone()
    shaken[:1] += 0.02 * own / len(position) ** (1 / len(own))
    for part in parts:
        name = type(part).__name__
        before = strained_energy(part, position, given)
        elsewhere = strained_energy(part, position + 0.37 * own.roll(1) + 0.23 * own, given)
        # A mesh changes an energy by about 1e-5.
        if _differ(before, elsewhere, 1e-3, small):
            raise ValueError(
                f"the energy of {name} depends on where all atoms are, so it holds them at points "
                "in space, which a box that moves does not keep. Hold them at other atoms, or run "
                "at constant volume."
            )
        _refuse_own_force(part, shaken, none)
        if not _is_periodic(part, resting, none, rows):
            continue
        if not has_box(part):
            raise ValueError(
                f"the energy of {name} has the period of the box, and it has no box that a state "
                "could stretch: register the box as a buffer with the name 'box', and read it "
                "there."
            )
        if not _is_periodic(part, moved, trial, stretched_rows):
            raise ValueError(
                f"{name} keeps a box, or a value that follows from it, as its box is stretched: "
                "compute what follows from the buffer 'box' in each evaluation."
            )


def _refuse_own_force(part: nn.Module, position: Tensor, strain: Strain) -> None:
    """Refuse a force of the user's own that is not minus the derivative of the energy."""
    if not isinstance(part, Potential) or not has_box(part):
        return
    owner = next(kind for kind in type(part).__mro__ if "force" in vars(kind))
    if owner.__module__.startswith("adjsim."):
        return
    force, _ = strained_force(part, position, strain)
    own = part.force(position)
    if bool((own - force).abs().max() > 10 * ROUNDING * own.abs().max()):
        raise TypeError(
            f"{type(part).__name__}.force is not minus the derivative of its energy, from which "
            "the pressure follows. Write the energy of this force."
        )


def _is_periodic(part: nn.Module, position: Tensor, strain: Strain, rows: Tensor) -> bool:
    """Return whether an energy stays the same as the most pulled atom moves by some rows."""
    force, _ = strained_force(part, position, strain)
    moved, size = position.clone(), force.norm(dim=-1)
    moved[size.argmax()] += rows.new_tensor(ROWS[: len(rows)]) @ rows
    here, there = (strained_energy(part, q, strain) for q in (position, moved))
    # The place of the moved atom is rounded, and the energy follows.
    small = ROUNDING * float(size.max() * moved.abs().max())
    return bool((force != 0).any()) and not _differ(here, there, ROUNDING, small)


def _differ(one: Tensor, other: Tensor, share: float, small: float) -> bool:
    allowed = torch.maximum(one.abs(), other.abs()) * share
    return bool((one - other).abs() > allowed.clamp(min=small))
