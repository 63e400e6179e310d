"""A range of tiles that several executions may share: pieces that know nothing of each other."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from . import restore
from .errors import Failed, FrameError, StateError
from .frames import Message

Range = tuple[int, int]
# As the JSON of a range has it: 64 bits without a sign.
_MOST = (1 << 64) - 1


class Tiles:
    """The tiles ``begin … end-1``, handed out in order.

    ``for tile in run.each(state.tiles, merge=take)``: what is left of it may be split off and be
    computed by another execution, a *part*, and come back. The state is three numbers.
    """

    def __init__(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= _MOST:
            raise ValueError(f"the tiles {begin} to {end} are no range")
        self.begin = begin
        """The first tile."""
        self.next = begin
        """The one that is handed out next: those before it are done at a boundary."""
        self.end = end
        """The one behind the last. A split draws it nearer, a merge pushes it away again."""

    @property
    def left(self) -> int:
        """How many are still to be handed out."""
        return self.end - self.next

    def __len__(self) -> int:
        return self.end - self.begin

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next >= self.end:
            raise StopIteration
        tile, self.next = self.next, self.next + 1
        return tile

    def __repr__(self) -> str:
        return f"Tiles({self.begin}, {self.end}, next={self.next})"

    def last_half(self) -> Range | None:
        """The last half of what is left; ``None`` where that is less than two."""
        if self.left < 2:
            return None
        return self.end - self.left // 2, self.end

    def take_back(self, given: Range, part: Tiles | None) -> None:
        """Takes a range that was given away, with what its part has done of it."""
        done = Tiles(*given) if part is None else part
        if self.left > 0 or self.end != given[0]:
            raise Failed(f"merge: {self} is not at its end before tile {given[0]}")
        if (done.begin, done.end) != given:
            raise Failed(f"merge: the part had {given[0]} to {given[1]}, but its state is {done}")
        self.next, self.end = done.next, done.end

    def state_dict(self) -> dict[str, int]:
        """The range, and how far it is done."""
        return {"begin": self.begin, "next": self.next, "end": self.end}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there."""
        begin, at, end = state["begin"], state["next"], state["end"]
        if begin != self.begin:
            raise ValueError(f"its first tile was {begin} and is {self.begin}")
        if not begin <= at <= end <= _MOST:
            raise ValueError(f"tile {at} of {begin} to {end} is none")
        self.next, self.end = at, end


def read_range(value: Any, place: str) -> Range:
    """A range as JSON has it: ``{"from": 0, "to": 100}``."""
    match value:
        case {"from": int(begin), "to": int(end)} if 0 <= begin < end <= _MOST:
            return begin, end
        case _:
            raise Failed(
                f'{place}: must be a range of tiles like {{"from": 0, "to": 100}}, but is {value!r}'
            )


def write_range(given: Range) -> Message:
    """The same in JSON."""
    return {"from": given[0], "to": given[1]}


@dataclasses.dataclass
class Shares:
    """How the range of a run is shared."""

    part: bool = False
    """It is a part itself."""
    parts: int = 0
    """How many of its own are out."""

    @classmethod
    def parse(cls, head: Any) -> Shares | None:
        """Reads it from an order, where it is shared at all."""
        if head is None:
            return None
        try:
            return cls(bool(head.get("part")), int(head.get("parts") or 0))
        except (AttributeError, TypeError, ValueError) as error:
            raise FrameError(f"how a run is shared cannot be read: {error!r}") from error


@dataclasses.dataclass
class Merge:
    """A part that has ended, and is to be merged before anything else is computed."""

    given: Range
    """The tiles that it was given."""
    state: bytes | None
    """σ of its last boundary; ``None`` where it has reached none."""
    template: Any = None
    """The program's state as it begins, to read that σ into."""

    @classmethod
    def parse(cls, head: Any, state: bytes | None) -> Merge:
        """Reads it from an order."""
        try:
            return cls((int(head["from"]), int(head["to"])), state)
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the part to merge cannot be read: {error!r}") from error

    def expect(self, state: Any) -> None:
        """Keeps the state as it begins, which reading the run's own σ changes in place."""
        if self.state is not None:
            self.template = copy.deepcopy(state)

    def part(self, own: Any, tiles: Tiles) -> tuple[Any, Tiles]:
        """The part's state, and the tiles in it. ``own`` has ``tiles`` where the part's state has
        its own."""
        place = find(own, tiles)
        fresh = Tiles(*self.given)
        if isinstance(self.template, dict):
            self.template[place] = fresh
        else:
            setattr(self.template, place, fresh)
        assert self.state is not None
        found = restore.decode(self.state, self.template)
        theirs = found[place] if isinstance(found, dict) else getattr(found, place)
        if not isinstance(theirs, Tiles):
            raise StateError(f"the part has no tiles at {place!r}; the program has changed")
        return found, theirs


def find(state: Any, tiles: Tiles) -> str:
    """Where in a state the tiles are; an error where they are not one of its parts."""
    parts = state if isinstance(state, dict) else getattr(state, "__dict__", {})
    for name, value in parts.items():
        if value is tiles:
            return str(name)
    raise StateError(
        "the tiles of the loop are none of its parts: "
        "run.state(tiles=run.tiles(), …), and run.each(state.tiles)"
    )
