"""The array types that public signatures speak of.

Shapes are written with jaxtyping: ``*batch`` is any number of replica axes, ``atoms`` and ``dim`` belong to one system.
The annotations cost nothing at run time; the tests switch beartype on and check every call against them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

Positions = Float[Tensor, "*batch atoms dim"]
Energies = Float[Tensor, "*batch"]
Number = float | int | Tensor | nn.Parameter
Times = Sequence[float | int] | np.ndarray | Tensor

__all__ = ["Energies", "Number", "Positions", "Times"]
