"""Information buffers, which keep the bits that a scale on the lattice would lose.

:mod:`adjsim.dynamics.lattice` describes the scale.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from adjsim.core.state import AnyState, State, detached

# The largest denominator of a fraction that stands for a factor.
LARGEST_DENOMINATOR = 2**26
# The numerator above which a product of two fractions is sought where its error matters.
SIMPLE_NUMERATOR = 2**13
# A buffer of 33 bits is spilled. A scale multiplies it by the denominator, and the product must
# stay below 2^62.
WORD, FULL, LONGEST = 32, 33, 62


@dataclass(frozen=True)
class BufferGrowth:
    """The growth of the buffers, with a check every ``check_every`` steps.

    ``bits`` are those that a step adds, by field; None if they depend on the state. At a check the
    buffers are below ``limit``.
    """

    bits: dict[str, Tensor] | None
    check_every: int
    limit: float

    def mean(self, state: AnyState) -> float | None:
        """Return the mean number of bits that a step adds per degree of freedom."""
        if self.bits is None:
            return None
        bits = (float(x.expand_as(getattr(state, n)).sum()) for n, x in self.bits.items())
        return sum(bits) / state[0].numel()


@dataclass(frozen=True)
class Spill:
    """The low 32 bits of a field's buffers, in systems with a full buffer.

    ``systems`` is a bit for each system, or their numbers (``numbered``), whichever is shorter.
    """

    field: str
    systems: bytes
    numbered: bool
    words: bytes

    @property
    def bits(self) -> int:
        return 8 * (len(self.words) + len(self.systems))


def buffer_name(field: str) -> str:
    return f"{field}_buffer"


def spill(state: State, field: str, systems: int, limit: float) -> tuple[State, Spill | None]:
    """Move the low bits of a field's buffers to a spill, where one is full.

    All buffers of the system are spilled, so they do not depend on the other systems of its batch.
    A buffer at the limit is an OverflowError.
    """
    buffer = getattr(state, buffer_name(field))
    top = int(buffer.amax())
    if top < 2**FULL:
        return state, None
    if top >= limit:
        raise OverflowError(
            f"the information buffer of {field} overflowed: a step scales {field} by less "
            "than a half. Use a smaller dt."
        )
    rows = buffer.reshape(systems, -1).clone()
    full = rows.amax(1) >= 2**FULL
    low = (rows[full] & (2**WORD - 1)) - 2 ** (WORD - 1)
    rows[full] >>= WORD
    mask, numbers = np.packbits(full.cpu().numpy()).tobytes(), _bytes(_rows(full))
    numbered = len(numbers) < len(mask)
    entry = Spill(field, numbers if numbered else mask, numbered, _bytes(low))
    return state._replace(**{buffer_name(field): rows.reshape(buffer.shape)}), entry


def refill(state: State, entry: Spill, systems: int) -> State:
    """Move the bits of a spill back into the buffers."""
    buffer = getattr(state, buffer_name(entry.field))
    rows = buffer.reshape(systems, -1).clone()
    low = torch.frombuffer(bytearray(entry.words), dtype=torch.int32).to(buffer)
    if entry.numbered:
        full = torch.frombuffer(bytearray(entry.systems), dtype=torch.int32).to(buffer)
    else:
        bits = np.unpackbits(np.frombuffer(entry.systems, dtype=np.uint8), count=systems)
        full = _rows(torch.from_numpy(bits).bool().to(buffer.device))
    rows[full] = (rows[full] << WORD) + low.reshape(len(full), -1) + 2 ** (WORD - 1)
    return state._replace(**{buffer_name(entry.field): rows.reshape(buffer.shape)})


def _rows(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _bytes(values: Tensor) -> bytes:
    return values.to(torch.int32).cpu().numpy().tobytes()


def fingerprint(state: AnyState) -> bytes:
    """Hash the state and its buffers to 128 bits."""
    digest = hashlib.blake2b(digest_size=16)
    for value in detached(state):
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.digest()


def rescaled(x: Tensor, buffer: Tensor, n: Tensor | int, d: Tensor | int) -> tuple[Tensor, Tensor]:
    """Compute X n/d and the new buffer."""
    quotient = torch.div(x, d, rounding_mode="floor")
    mixed = _add_multiple(_add_multiple(x, quotient, d, -1), buffer, d)
    kept = torch.div(mixed, n, rounding_mode="floor")
    return _add_multiple(_add_multiple(mixed, kept, n, -1), quotient, n), kept


def _add_multiple(x: Tensor, y: Tensor, factor: Tensor | int, sign: int = 1) -> Tensor:
    """Compute x + sign factor y."""
    if isinstance(factor, int):
        return torch.add(x, y, alpha=sign * factor)
    return torch.addcmul(x, y, factor, value=sign)


def fractions(what: str, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Find fractions n/d, to 1e-7 of each factor and of its distance from 1."""
    values = factor.reshape(-1).tolist()
    known = {value: _fraction(what, value) for value in set(values)}
    pairs = torch.tensor([known[v] for v in values], device=factor.device)
    n, d = pairs.T.reshape(2, *factor.shape)
    return n, d


def simpler_products(factor: Tensor, n: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Replace n/d by products of two fractions with small numbers: n and d, on a first axis of two.

    A product is as near to the factor as a fraction is. The second fraction is 1 where n is small,
    and where no simpler product is found.
    """
    given = zip(factor.flatten().tolist(), n.flatten().tolist(), d.flatten().tolist(), strict=True)
    found = [_product(*x) for x in given]
    pairs = torch.tensor(found, device=factor.device).movedim(0, -1)
    n, d = pairs.reshape(2, 2, *factor.shape).unbind(1)
    return n, d


@lru_cache(2**16)
def _product(factor: float, n: int, d: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Search two fractions near the square root of the factor, of small numerators.

    A scale by a fraction is off by up to its numerator, in units of the lattice.
    """
    allowed = 1e-7 * min(abs(1 - factor), factor)
    for limit in (2**k for k in range(8, (n // 4).bit_length()) if n > SIMPLE_NUMERATOR):
        for j in range(1, 5):
            middle = round(j / (1 - math.sqrt(factor)))
            for first in range(max(j + 1, middle - 8), min(limit, middle + 9)):
                rest = Fraction(1 - factor * first / (first - j)).limit_denominator(limit)
                product = (1 - rest) * Fraction(first - j, first)
                if 0 < rest < 1 and abs(float(product - Fraction(factor))) <= allowed:
                    second = rest.denominator
                    return (first - j, first), (second - rest.numerator, second)
    return (n, d), (1, 1)


def _fraction(what: str, factor: float) -> tuple[int, int]:
    near = simple_fraction(1.0 - factor, 1e-7 * min(abs(1.0 - factor), factor))
    if near is not None:
        return near.denominator - near.numerator, near.denominator
    raise ValueError(
        f"exact=True: {what} is {factor:.17g} a step, too close to {'0' if factor < 0.5 else '1'} "
        f"for a fraction. Use a {'smaller' if factor < 0.5 else 'larger'} dt, or exact=False."
    )


@lru_cache(maxsize=256)
def simple_fraction(value: float, allowed: float) -> Fraction | None:
    """Return a simple fraction below 1 and this close to a value; None if there is none."""
    limits = (2**k for k in range(1, LARGEST_DENOMINATOR.bit_length()))
    found = (Fraction(value).limit_denominator(limit) for limit in limits)
    return next((x for x in found if x < 1 and abs(float(x - Fraction(value))) <= allowed), None)
