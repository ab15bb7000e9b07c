"""Refusals: why something cannot do what it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why something cannot do what it is asked: a clause, such as "positions are on cuda"."""

    reason: str
