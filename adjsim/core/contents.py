"""What tensors, tables and objects written in C consist of, for keys that follow it."""

from __future__ import annotations

import random
import sys
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjsim.core.libraries import of_library

# Their states change with every number that is drawn, and no rate may draw one.
_RANDOM = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
)


def sparse_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that a sparse one consists of; none for another layout."""
    if x.layout == torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return ()


def of_table(x: Any) -> Any:
    """Return what a table of pandas consists of; None for anything else."""
    pandas: Any = sys.modules.get("pandas")
    if isinstance(x, getattr(pandas, "Index", ())):
        return x.to_list(), x.names, str(x.dtype)
    if isinstance(x, getattr(pandas, "Series", ())):
        return x.to_numpy(), x.index, x.name, str(x.dtype), x.attrs
    if isinstance(x, getattr(pandas, "DataFrame", ())):
        return [x.iloc[:, i] for i in range(x.shape[1])], x.index, x.columns, x.attrs
    return None


def to_copy(x: Any) -> Any:
    """Return what a copy of an object written in C is made of; None where it has no such rule."""
    kind = type(x)
    own = kind.__reduce__ is not object.__reduce__
    if isinstance(x, _RANDOM) or not (own or kind.__reduce_ex__ is not object.__reduce_ex__):
        return None
    try:
        found = x.__reduce_ex__(2)
    except Exception:
        # Objects that no copy is made of, such as locks, raise errors of any kind.
        return None
    # Further parts are iterators over entries.
    return (*found[1:3], *map(tuple, filter(None, found[3:5]))) if type(found) is tuple else found


@cache
def remembered(kind: type) -> frozenset[str]:
    """Return the names of cached properties of libraries, which objects get as they are used."""
    return frozenset(
        name
        for base in kind.__mro__
        if of_library(base)
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    )


def bytes_of(x: Tensor) -> np.ndarray:
    """Return the contents of a tensor as bytes."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
