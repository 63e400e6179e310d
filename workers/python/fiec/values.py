"""Values that leave the program as JSON. The rules are the same with and without a worker, and for
programs in any language: ``workers/CONTRACT.md`` has them under "Values"."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from typing import Any

from .errors import Failed

_LEAST, _MOST = -(2**63), 2**64 - 1
# FIEC's readers refuse JSON of more than 128 levels, and put some around a value.
_DEPTH_LIMIT = 100
_NOT_FINITE = {float("inf"): "Infinity", float("-inf"): "-Infinity"}


def surrogate(text: str) -> str | None:
    """Says that a text is none, because of its first lone surrogate; ``None`` for a good text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        return f"no text, since it has the lone surrogate {found} at position {error.start}"
    return None


def encoded(text: str, place: str) -> bytes:
    """A text in UTF-8."""
    if wrong := surrogate(text):
        raise Failed(f"{place}: {wrong}")
    return text.encode()


def shown(text: str) -> str:
    """A text for people: lone surrogates as ``\\udc80``."""
    return text.encode("utf-8", "backslashreplace").decode()


def whole(value: Any, place: str, most: int = _MOST) -> int:
    """A whole number from 0 on, also a numpy one."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise Failed(f"{place} must be a whole number from 0 to {most}, but is {value!r}")
    return number


def plain(value: Any, place: str = "result", *, numbers_only: bool = False) -> Any:
    """A value as JSON has it: numpy and PyTorch values become numbers and lists, and what is no
    number the texts ``NaN``, ``Infinity``, ``-Infinity``; with ``numbers_only`` it is refused."""
    return _plain(value, place, numbers_only, 0)


def _plain(value: Any, place: str, numbers_only: bool, depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise Failed(f"{place[:40]}… is nested more than {_DEPTH_LIMIT} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        encoded(value, place)
        return value
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise Failed(
                f"{place}: an integer has 64 bits at most, but this is {_digits(value)}; "
                "make it a text, or a float"
            )
        return value
    if isinstance(value, float):
        name = "NaN" if value != value else _NOT_FINITE.get(value)
        if name is not None and numbers_only:
            raise Failed(f"{place}: {name} is no JSON; leave it out, or make it a text")
        return value if name is None else name
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            name = str(key)
            if wrong := surrogate(name):
                raise Failed(f"{place}: a key is {wrong}")
            if name in found:
                raise Failed(f"{place}: the key {name!r} is there twice, as a text and as another")
            found[name] = _plain(item, f"{place}.{name}", numbers_only, depth + 1)
        return found
    if isinstance(value, (list, tuple)):
        return [
            _plain(item, f"{place}[{n}]", numbers_only, depth + 1) for n, item in enumerate(value)
        ]
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist(), place, numbers_only, depth + 1)
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value), place, numbers_only, depth + 1)
    raise Failed(f"{place} is a {type(value).__name__}, which JSON cannot say; use run.output()")


def _digits(value: int) -> str:
    return str(value) if value.bit_length() <= 256 else f"one of {value.bit_length()} bits"


def dumps(value: Any) -> str:
    """One canonical JSON text: sorted keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
