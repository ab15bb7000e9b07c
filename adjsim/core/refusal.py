"""Refusals: why something cannot do what it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something cannot do what it is asked.

    Attributes:
        reason: a clause without a full stop, such as "positions are on cuda".
    """

    reason: str
