"""Energies as text: the expressions of OpenMM's custom forces, as functions of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set as AbstractSet
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(.))")
# The precedence of operators with two operands, of which a power binds from the right.
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 4}
NEGATION = 3
FUNCTIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    **{
        name: (1, getattr(torch, name))
        for name in (
            *("sqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"),
            *("tanh", "erf", "erfc", "abs", "floor", "ceil", "square"),
        )
    },
    "sec": (1, lambda x: 1 / torch.cos(x)),
    "csc": (1, lambda x: 1 / torch.sin(x)),
    "cot": (1, lambda x: 1 / torch.tan(x)),
    "step": (1, lambda x: (x >= 0).to(x)),
    "delta": (1, lambda x: (x == 0).to(x)),
    "cube": (1, lambda x: x * x * x),
    "recip": (1, lambda x: 1 / x),
    "atan2": (2, torch.atan2),
    "min": (2, torch.minimum),
    "max": (2, torch.maximum),
    "select": (3, lambda x, y, z: torch.where(x != 0, y, z)),
}


COUNTS = {name: count for name, (count, _) in FUNCTIONS.items()}
# Coordinates of points, with the number of points.
COORDINATES = {"distance": 2, "angle": 3, "dihedral": 4}


class Call(NamedTuple):
    """A function, or an operator, and its arguments: calls, names and numbers."""

    function: str
    arguments: tuple[Call | str | float, ...]


class Expression:
    """A function of named numbers, written as in OpenMM's custom forces.

    The text is a formula, and definitions of names that it uses: ``"k*d^2; d=abs(r-r0)"``. A
    definition holds for the formula and for the definitions before it, as in OpenMM. The text has
    numbers, names, ``+ - * / ^``, brackets, and the functions sqrt, exp, log, sin, cos, tan, sec,
    csc, cot, asin, acos, atan, atan2, sinh, cosh, tanh, erf, erfc, abs, floor, ceil, min, max,
    square, cube, recip, step(x) (one from zero on), delta(x) (one at zero) and select(x, y, z) (z
    where x is zero, and y elsewhere). Both y and z are evaluated: a derivative of either that is
    not finite, as of ``sqrt(r-1)`` below one, makes forces NaN where the other one is taken.

    Args:
        text: the expression.
        points: names of points. Coordinates of points, ``distance(p1,p2)``, ``angle(p1,p2,p3)`` and
            ``dihedral(p1,p2,p3,p4)``, are then names, written without spaces.
        functions: how many arguments further functions have, by name. They are given with the
            values.

    Attributes:
        names: the names that are neither functions nor defined.

    Raises:
        ValueError: text that cannot be read, with its place.
    """

    def __init__(
        self, text: str, points: Sequence[str] = (), functions: Mapping[str, int] | None = None
    ) -> None:
        self.text = text
        self._points, self._counts = tuple(points), {**COUNTS, **(functions or {})}
        first, *rest = _pieces(text)
        self.definitions: dict[str, Call | str | float] = {}
        scope: dict[str, str] = {}
        for begin, end in reversed(rest):
            name, equals, _ = text[begin:end].partition("=")
            if not equals or not re.fullmatch(r"\s*[A-Za-z_]\w*\s*", name):
                _refuse(text, begin, "a definition, name=expression, is expected")
            found = self._read(begin + len(name) + 1, end)
            # One name may have several definitions; no name has a semicolon.
            key = f"{name.strip()};{len(self.definitions)}"
            self.definitions[key] = _within(scope, found)
            scope[name.strip()] = key
        self.formula = _within(scope, self._read(*first))
        parts = self._parts(self.formula)
        self.names: AbstractSet[str] = frozenset(x for x in parts if isinstance(x, str))

    def __call__(
        self,
        values: Mapping[str, Tensor],
        functions: Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> Tensor:
        """Evaluate it for the values of all names, which broadcast against each other."""
        further = functions or {}
        known: dict[str, Any] = {}
        like = next(iter(values.values()))

        def value(node: Call | str | float) -> Any:
            if isinstance(node, float | int):
                return node
            if isinstance(node, str):
                if node not in self.definitions:
                    return values[node]
                if node not in known:
                    known[node] = value(self.definitions[node])
                return known[node]
            arguments = [value(x) for x in node.arguments]
            if node.function in OPERATORS:
                return OPERATORS[node.function](*arguments)
            # A number in torch.where or minimum would be of the default dtype.
            tensors = [torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in arguments]
            if node.function in further:
                return further[node.function](*tensors)
            return FUNCTIONS[node.function][1](*tensors)

        found = value(self.formula)
        return found if isinstance(found, Tensor) else like.new_full((), found)

    def refuse_names(self, known: Collection[str], given: str) -> None:
        """Refuse names that are not known, with the place of the first one."""
        left = sorted(self.names - set(known), key=lambda name: place_of(name, self.text))
        if left:
            raise ValueError(
                f"the expression {self.text!r} has the names {', '.join(left)} (the first at place "
                f"{place_of(left[0], self.text)}), and {given}."
            )

    def _read(self, begin: int, end: int) -> Call | str | float:
        return _Reader(self.text, begin, end, self._points, self._counts).read()

    def _parts(self, node: Call | str | float) -> Iterator[Call | str | float]:
        """Yield the calls, and the names and numbers of their arguments."""
        if isinstance(node, str) and node in self.definitions:
            yield from self._parts(self.definitions[node])
            return
        yield node
        if isinstance(node, Call):
            for x in node.arguments:
                yield from self._parts(x)


def _within(scope: Mapping[str, str], node: Call | str | float) -> Call | str | float:
    """Replace the names that are defined by the keys of their definitions."""
    if isinstance(node, Call):
        return Call(node.function, tuple(_within(scope, x) for x in node.arguments))
    return scope.get(node, node) if isinstance(node, str) else node


def _power(x: Any, y: Any) -> Any:
    # Whole powers have derivatives at zero, and no logarithm.
    return x ** int(y) if isinstance(y, float) and y.is_integer() else x**y


OPERATORS: dict[str, Callable[..., Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "^": _power,
    "negative": lambda x: -x,
}


class _Reader:
    """Reads a formula between two places of a text, by the precedence of its operators."""

    def __init__(
        self, text: str, begin: int, end: int, points: Sequence[str], counts: Mapping[str, int]
    ) -> None:
        self.text, self.end, self.tokens = text, end, list[tuple[int, Any]]()
        self.points, self.counts = points, counts
        if points:
            self.counts = {**counts, **COORDINATES}
        while begin < end and text[begin:end].strip():
            found = TOKEN.match(text, begin, end)
            assert found is not None
            number, name, sign = found.groups()
            place = found.end() - len(number or name or sign)
            self.tokens.append((place, float(number) if number else name or sign))
            begin = found.end()
        self.next = 0

    def read(self) -> Call | str | float:
        found = self._sum(0)
        if self.next < len(self.tokens):
            self._refuse("an operator is expected")
        return found

    def _sum(self, least: int) -> Call | str | float:
        """Read operands as long as operators between them bind at least so tightly."""
        found = self._operand()
        while (sign := self._token()) in BINDS and BINDS[sign] >= least:
            self.next += 1
            other = self._sum(BINDS[sign] + (sign != "^"))
            found = Call(sign, (found, other))
        return found

    def _operand(self) -> Call | str | float:
        token = self._token()
        if token == "-":
            self.next += 1
            return Call("negative", (self._sum(NEGATION),))
        if token == "(":
            self.next += 1
            found = self._sum(0)
            self._expect(")")
            return found
        if isinstance(token, float):
            self.next += 1
            return token
        if not isinstance(token, str) or not (token[0].isalpha() or token[0] == "_"):
            self._refuse("a number, a name or a bracket is expected")
        self.next += 1
        if self._token() != "(":
            return token
        if token not in self.counts:
            self.next -= 1
            self._refuse(f"{token} is no function that can be read")
        begin = self.next = self.next + 1
        arguments = [self._sum(0)]
        while self._token() == ",":
            self.next += 1
            arguments.append(self._sum(0))
        self._expect(")")
        if len(arguments) != self.counts[token]:
            self._refuse(f"{token} takes {self.counts[token]} arguments, not {len(arguments)}")
        if self.points and token in COORDINATES:
            if not set(arguments) <= set(self.points):
                self.next = begin
                self._refuse(f"{token} takes points, {' '.join(self.points)}")
            return f"{token}({','.join(map(str, arguments))})"
        return Call(token, tuple(arguments))

    def _token(self) -> Any:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else None

    def _expect(self, sign: str) -> None:
        if self._token() != sign:
            self._refuse(f"{sign!r} is expected")
        self.next += 1

    def _refuse(self, why: str) -> NoReturn:
        at = self.tokens[self.next][0] if self.next < len(self.tokens) else self.end
        _refuse(self.text, at, why)


def place_of(name: str, text: str) -> int:
    """Return where a name begins in a text; the end of the text if it is not there."""
    found = re.search(rf"\b{re.escape(name)}(?!\w)", text)
    return len(text) if found is None else found.start()


def _pieces(text: str) -> list[tuple[int, int]]:
    """Return begin and end of the formula and of each definition."""
    found: list[tuple[int, int]] = []
    begin = 0
    for piece in text.split(";"):
        if piece.strip() or not found:
            found.append((begin, begin + len(piece)))
        begin += len(piece) + 1
    return found


def _refuse(text: str, at: int, why: str) -> NoReturn:
    raise ValueError(f"the expression {text!r} cannot be read at place {at}: {why}.")
