"""Positions in the data that travel with the state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Batches:
    """Shuffled batches of the indices ``0 … items-1``, epoch after epoch.

    ``for rows in run.each(state.batches): x[rows]``. The state is two numbers: epoch and position.
    The order of an epoch follows from ``seed`` and the epoch's number alone (Fisher-Yates over
    ``random.Random``, whose ``random()`` is the same in every version of Python).
    """

    def __init__(
        self,
        items: int,
        size: int,
        *,
        epochs: int | None = 1,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        """``epochs=None``: endless. ``seed=None``: in order. ``drop_last``: without the batch that
        is smaller than ``size``."""
        for name, number in (("items", items), ("size", size)):
            if not isinstance(number, int):
                raise TypeError(f"Batches: {name} is a number, but is a {type(number).__name__}")
        if items < 1 or size < 1 or (drop_last and size > items):
            raise ValueError(f"{items} items in batches of {size} make no batch")
        self.items, self.size, self.epochs = items, size, epochs
        self.seed, self.drop_last = seed, drop_last
        self.epoch = 0
        """The epoch of the last batch."""
        self.position = 0
        """Items of the epoch that were handed out."""
        self._order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.items // self.size if self.drop_last else -(-self.items // self.size)

    def _ordered(self) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            order = list(range(self.items))
            if self.seed is not None:
                draw = random.Random(f"{self.seed}/{self.epoch}").random
                for i in range(self.items - 1, 0, -1):
                    j = int(draw() * (i + 1))
                    order[i], order[j] = order[j], order[i]
            self._order = (self.epoch, order)
        return self._order[1]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        left = self.items - self.position
        if left < (self.size if self.drop_last else 1):
            if self.epochs is not None and self.epoch + 1 >= self.epochs:
                raise StopIteration
            self.epoch, self.position = self.epoch + 1, 0
        batch = self._ordered()[self.position : self.position + self.size]
        self.position += len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {
            "items": self.items,
            "size": self.size,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        for name in ("items", "size", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(f"{name} was {state[name]} and is {getattr(self, name)}")
        self.epoch, self.position = state["epoch"], state["position"]


class Stream(Generic[T]):
    """Any data that can be read from its n-th item on.

    ``fiec.Stream(lambda skip: itertools.islice(read_rows(path), skip, None))``: ``source`` is
    called with the number of items that were handed out already. The state is that number.
    """

    def __init__(self, source: Callable[[int], Iterable[T]]) -> None:
        self._source = source
        self._items: Iterator[T] | None = None
        self.position = 0
        """Items that were handed out."""

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            self._items = iter(self._source(self.position))
        item = next(self._items)
        self.position += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self.position, self._items = state["position"], None
