"""The array types in public signatures.

Shapes are written with jaxtyping: ``*batch`` is any number of replica axes, ``atoms`` and ``dim``
belong to one system. The annotations cost nothing at run time; the tests switch beartype on and
check every call against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Real
from torch import Tensor, nn

Positions = Float[Tensor, "*batch atoms dim"]
Energies = Float[Tensor, "*batch"]
Vectors = Float[Tensor, "*batch n"]
# Converted to a tensor where a tensor is needed.
Array = Tensor | np.ndarray | Sequence[Any]
PositionsLike = Real[Tensor, "*batch atoms dim"] | np.ndarray | Sequence[Any]
Number = float | int | np.generic | nn.Parameter | Array
Times = Sequence[float | int] | np.ndarray | Tensor
# The source of random numbers: a seed, a generator, or torch's default generator.
Seed = int | np.integer | torch.Generator | None
