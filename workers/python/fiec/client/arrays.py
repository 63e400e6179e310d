"""Lines of submissions for many parameters at once: arrays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LINE_BYTES = 480 * 1024
"""A submission is one line of at most 512 KiB."""

ELEMENTS = 100_000
"""Most elements of an array."""

_INDEX = (1 << 32) - 1


@dataclass(frozen=True)
class Array:
    """A line that becomes many executions, and their parameters in the order of their indices."""

    line: Mapping[str, Any]
    names: Sequence[str]
    params: Sequence[Mapping[str, Any]]


class _Ranged(Sequence[Mapping[str, Any]]):
    """Parameters of which one takes the numbers of a range."""

    def __init__(self, fixed: Mapping[str, Any], name: str, numbers: range) -> None:
        self._fixed, self._name, self._numbers = fixed, name, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return {**self._fixed, self._name: self._numbers[at]}


def encoded(line: Any) -> bytes:
    """A line as JSON, with numbers of numpy as numbers.

    Raises ``ValueError`` for what has no form in JSON.
    """

    def plain(value: Any) -> Any:
        item = getattr(value, "tolist", None)
        if item is not None:
            return item()
        raise ValueError(f"{value!r} is a {type(value).__name__}, which JSON has no form for")

    return json.dumps(line, allow_nan=False, default=plain).encode()


def combinations(
    over: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Every combination of some values for each name, the last name changing fastest; or the list
    as it is."""
    if not isinstance(over, Mapping):
        return [dict(params) for params in over]
    for name, values in over.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise ValueError(
                f"map: {name} is {values!r}, which is no list of values; "
                f"what is the same for all belongs into params"
            )
    names = list(over)
    return [dict(zip(names, chosen)) for chosen in itertools.product(*over.values())]


def cut(
    id: str,
    over: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]],
    fixed: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Iterator[Array]:
    """The arrays for these parameters: one, unless they are too many or too long for a line.

    One array has the id ``id``, several have ``id.0``, ``id.1``, …; an element has its array's id
    with ``-INDEX``. Raises ``ValueError``.
    """
    ranged = _as_range(over)
    if ranged is not None:
        name, numbers = ranged
        line = {**fields, "id": id, "params": {**fixed, name: "{index}"}, "array": _range(numbers)}
        yield Array(line, [f"{id}-{n}" for n in numbers], _Ranged(fixed, name, numbers))
        return
    swept = combinations(over)
    if not swept:
        raise ValueError("map: there are no parameters to map over")
    names = list(swept[0])
    if any(set(params) != set(names) for params in swept):
        raise ValueError(
            "map: all parameters must have the same names; the fixed ones are `params`"
        )
    params = {**fixed, **{name: f"{{value.{name}}}" for name in names}}
    parts = list(_parts(swept))
    for nth, part in enumerate(parts):
        own = id if len(parts) == 1 else f"{id}.{nth}"
        line = {**fields, "id": own, "params": params, "array": {"values": part}}
        ids = [f"{own}-{index}" for index in range(len(part))]
        yield Array(line, ids, [{**fixed, **chosen} for chosen in part])


def _as_range(
    over: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]],
) -> tuple[str, range] | None:
    """The only name, if its values are indices of one array."""
    if not isinstance(over, Mapping) or len(over) != 1:
        return None
    name, numbers = next(iter(over.items()))
    if not isinstance(numbers, range) or numbers.step < 1:
        return None
    if not 0 < len(numbers) <= ELEMENTS or numbers[0] < 0 or numbers[-1] > _INDEX:
        return None
    return name, numbers


def _range(numbers: range) -> dict[str, int]:
    if numbers.start == 0 and numbers.step == 1:
        return {"count": len(numbers)}
    found = {"from": numbers[0], "to": numbers[-1]}
    return found if numbers.step == 1 else found | {"step": numbers.step}


def _parts(swept: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    part: list[dict[str, Any]] = []
    room = LINE_BYTES
    for params in swept:
        size = len(encoded(params)) + 1
        if part and (size > room or len(part) == ELEMENTS):
            yield part
            part, room = [], LINE_BYTES
        part.append(params)
        room -= size
    yield part
