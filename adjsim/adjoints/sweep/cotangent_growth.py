"""The growth of cotangents in a backward sweep."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.linalg import vector_norm as norm

from adjsim.adjoints.durable.saves import AttributeState
from adjsim.dynamics.cotangents import Cotangents

LARGEST_GROWTH = 1e8
"""The growth above which a sweep warns: half of the digits of float64 are lost in such a path."""


class CotangentGrowth(AttributeState):
    """How much the cotangents of a state grow in one backward sweep.

    Let ``c_i`` be the cotangents that the outputs have given to a field so far: those of the final
    state, of saved frames, and of a recorded function. Without growth the cotangent lambda of the
    field is no larger than the sum of their norms. The growth is the largest
    ``|lambda| / sum_i |c_i|`` of the sweep, for the field in which this ratio is smallest. Fields
    to which the outputs give nothing do not count. So units do not matter, and neither do the
    number of outputs or the length of a time average. ``injected`` has the norms of the cotangents
    that the fields begin with.
    """

    saved_attributes = ("injected", "largest")

    def __init__(self, injected: Mapping[str, Tensor]) -> None:
        self.injected = dict(injected)
        self.largest = dict.fromkeys(injected, 0.0)

    def inject(self, name: str, size: Tensor) -> None:
        """Add the norm of a cotangent that an output gives to a field."""
        self.injected[name] = self.injected[name] + size

    def observe(self, cotangents: Cotangents) -> None:
        """Compare the cotangents of the fields with those that outputs have given to them."""
        for name, injected in self.injected.items():
            size = float(injected)
            if size > 0:
                ratio = float(norm(cotangents[name])) / size
                self.largest[name] = max(self.largest[name], ratio)

    def factor(self) -> float:
        """Return the growth, and warn if it is large."""
        found = [self.largest[name] for name, size in self.injected.items() if size > 0]
        growth = min(found, default=0.0)
        if growth > LARGEST_GROWTH:
            warnings.warn(
                f"the cotangents of the state grew by a factor of {growth:.1e} in the backward "
                "sweep. The gradient is that of one path, which diverges from its neighbours, and "
                "says little about means over paths. Run for a shorter time, or estimate the "
                "gradient of a mean: see docs/choosing_an_estimator.",
                stacklevel=2,
            )
        return growth
