"""Numbers that a program reports by name, until a commit takes them. The same rules as
``schemas/src/series.rs``."""

from __future__ import annotations

import math
import re
from typing import Any

from .errors import Failed

NAMES_LIMIT = 24
POINTS_LIMIT = 48
_NAME = re.compile(r"[A-Za-z0-9_./:@%+-]{1,64}")

# Boundary, mean, lowest, highest, number of reports.
Point = tuple[int, float, float, float, int]


def value_of(name: str, value: Any) -> float:
    """A number that is reported, as a float: also one of numpy or PyTorch."""
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        return float(value)
    except Exception:
        try:
            found = repr(value)[:200]
        except Exception:
            found = f"a {type(value).__name__}"
        raise Failed(f"progress: {name} must be a number, but is {found}") from None


def _with(one: Point, two: Point) -> Point:
    reports = one[4] + two[4]
    share = two[4] / reports
    mean = one[1] if one[1] == two[1] else one[1] * (1.0 - share) + two[1] * share
    return two[0], mean, _least(one[2], two[2]), _most(one[3], two[3]), reports


def _least(a: float, b: float) -> float:
    return b if math.isnan(a) or b < a else a


def _most(a: float, b: float) -> float:
    return b if math.isnan(a) or b > a else a


def _written(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(point: Point) -> list[Any]:
    boundary, mean, lowest, highest, reports = point
    if reports == 1:
        return [boundary, _written(mean)]
    return [boundary, _written(mean), _written(lowest), _written(highest), reports]


class Waiting:
    """At most :data:`NAMES_LIMIT` names over its whole life, and at most :data:`POINTS_LIMIT`
    points at a time: neighbours become one, which keeps their mean, extremes and number."""

    def __init__(self) -> None:
        self._points: dict[str, list[Point]] = {}
        # Reports that a point of a name takes, but for the last one: the same for all, so that no
        # part of a curve is coarser than another.
        self._width: dict[str, int] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def report(self, name: str, boundary: int, value: float) -> None:
        """A report of the capsule that ends in ``boundary``."""
        points = self._points.get(name)
        if points is None:
            points = self._begin(name)
        point = (boundary, value, value, value, 1)
        if points and points[-1][0] == boundary:
            points[-1] = _with(points[-1], point)
            return
        # The last point stays as it is until another one follows.
        if len(points) > 1 and points[-2][4] + points[-1][4] <= self._width[name]:
            points[-2] = _with(points[-2], points[-1])
            points[-1] = point
            return
        points.append(point)
        self._count += 1
        if self._count > POINTS_LIMIT:
            self._fit()

    def _begin(self, name: str) -> list[Point]:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Failed(
                f"progress: the name {name!r} must be 1 to 64 letters, digits and characters of "
                "_ - . / : @ % +"
            )
        if len(self._points) >= NAMES_LIMIT:
            raise Failed(
                f"progress: {name} would be one name more than the {NAMES_LIMIT} that a run may "
                "report: report fewer, or write the others to an output"
            )
        self._width[name] = 1
        return self._points.setdefault(name, [])

    def _fit(self) -> None:
        while self._count > POINTS_LIMIT:
            for name, points in self._points.items():
                if len(points) > 1:
                    self._width[name] *= 2
                    *older, last = points
                    pairs = zip(older[::2], older[1::2])
                    odd = older[-1:] if len(older) % 2 else []
                    points[:] = [_with(*pair) for pair in pairs] + odd + [last]
            self._count = sum(map(len, self._points.values()))

    def take(self, upto: int) -> dict[str, Any]:
        """The points up to a boundary, as a report has them. What was said behind it, as by
        ``on_limit``, waits for the next one."""
        taken: dict[str, Any] = {}
        for name, points in self._points.items():
            if now := [_plain(point) for point in points if point[0] <= upto]:
                taken[name] = now
                self._width[name] = 1
                points[:] = [point for point in points if point[0] > upto]
        self._count = sum(map(len, self._points.values()))
        return taken

    def take_capsule(self) -> dict[str, Any]:
        """The numbers of one capsule, as a line has them."""
        taken = {n: _written(points[-1][1]) for n, points in self._points.items() if points}
        for name, points in self._points.items():
            points.clear()
            self._width[name] = 1
        self._count = 0
        return taken
