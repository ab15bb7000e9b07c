"""The report of a run: its cost, and the errors of its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RunReport:
    """The entries of ``trajectory.stats`` (:class:`~adjsim.Trajectory`) that concern a run."""

    energy_evaluations: int
    reconstruction_error: float | None
    cotangent_growth: float | None
    seed: int
    pairs: dict[str, str] | None
    steps: int | None
    order: int
    rate: float
    step_times: Tensor
    rejected: int
    checkpoint_every: int | None
    checkpoints: int
    compiled_forward: str | None
    compiled_backward: str | None
    compiled_source: list[str]
    compile_seconds: float
    resumed_at: int | None
    buffer_bits: float | None
    buffer_bound: float | None

    def __init__(self) -> None:
        self.energy_evaluations, self.reconstruction_error = 0, None

    def stats(self) -> dict[str, Any]:
        """Return the entries that are set, as one dict, in which later sweeps show too."""
        return vars(self)
