"""Looks at the buffers of exact runs in compiled loops, which end where one has to be spilled.

Buffers are looked at every few steps, since a factor may fill them fast, but are rarely full.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjsim.adjoints.sweep.stepper import Stepper
from adjsim.core.state import AnyState


def steps_between_looks(stepper: Stepper, device: torch.device) -> tuple[Tensor, ...]:
    """Return their number, if loops end where a buffer is full.

    A GPU has to know the number of iterations before, and its loops end at each look.
    """
    growth, lattice = stepper.buffer_growth, stepper.plan.lattice
    if growth is None or lattice is None or not lattice.buffered or device.type != "cpu":
        return ()
    return (torch.tensor(growth.check_every),)


def ends_full(stepper: Stepper, looks: tuple[Tensor, ...], state: AnyState, step: int) -> bool:
    """Return whether a loop with these looks ends after a step since a buffer is full."""
    lattice = stepper.plan.lattice
    if lattice is None or not looks or (stepper.clock.before + step) % int(looks[0]):
        return False
    return bool(lattice.is_full(state))
