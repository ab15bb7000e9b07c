"""The refusal of second derivatives, where a gradient has no graph of its own."""

from __future__ import annotations

import torch


def refuse_second_derivative(gradient: str, remedy: str = "") -> None:
    """Refuse a backward pass with create_graph; ``gradient`` says why there is no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{gradient} and has no graph of its own, so it cannot be differentiated again "
            f"(create_graph=True, double backward, torch.func).{remedy and ' '}{remedy}"
        )
