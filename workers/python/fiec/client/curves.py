"""Numbers over time: what a program reported by name, by boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy


@dataclass
class Curve:
    """The points of one name.

    Where several reports were drawn together, ``value`` is their mean.
    """

    name: str
    boundary: list[int] = field(default_factory=list, repr=False)
    value: list[float] = field(default_factory=list, repr=False)
    lowest: list[float] = field(default_factory=list, repr=False)
    highest: list[float] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.boundary)

    @property
    def last(self) -> float:
        """The value of the last boundary."""
        return self.value[-1]

    def numpy(self) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
        """Boundaries and values as arrays: ``plt.plot(*curve.numpy())``."""
        import numpy

        return numpy.asarray(self.boundary), numpy.asarray(self.value)


def of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Curves by name, of rows that are in the order of their boundaries."""
    found: dict[str, Curve] = {}
    for row in rows:
        curve = found.setdefault(row["name"], Curve(row["name"]))
        curve.boundary.append(row["boundary"])
        curve.value.append(row["value"])
        curve.lowest.append(row["lowest"])
        curve.highest.append(row["highest"])
    return found
