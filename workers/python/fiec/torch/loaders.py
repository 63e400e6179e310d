"""Positions in the data of PyTorch's loaders, counted in batches that were handed out."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..rng import children_are_seeded
from ..sigma import is_stateful

# Imported now: a first import within a batch would find numpy's generator unseeded.
_np: Any = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """The generators of the process are afterwards as they were before."""
    python, ours = random.getstate(), torch.get_rng_state()
    numpy = _np.random.get_state() if _np is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(ours)
        if _np is not None:
            _np.random.set_state(numpy)


@contextlib.contextmanager
def seeded(*place: int) -> Iterator[None]:
    """Within, the generators of the process follow from these numbers alone."""
    with preserved():
        seed = number(*place)
        random.seed(seed)
        # Not `torch.manual_seed`: that reseeds the devices, too.
        torch.default_generator.manual_seed(seed)
        if _np is not None:
            _np.random.seed(seed % 2**32)
        yield


def number(*place: int) -> int:
    """A seed of 63 bits that follows from these numbers."""
    text = "/".join(map(str, place)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class _Plan:
    """The batch sampler of the inner loader: the rest of an epoch."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, Any]] = []

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Seeded:
    """A data set whose random numbers follow from the batch, in whatever process it is read."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, batch: tuple[int, int, Any]) -> Any:
        epoch, at, rows = batch
        with seeded(self._seed, epoch, at):
            read = getattr(self._dataset, "__getitems__", None)
            items = read(rows) if read is not None else [self._dataset[row] for row in rows]
            return self._collate(items)


def _nothing() -> None:
    """For a loader without workers."""


def _as_it_is(batch: Any) -> Any:
    return batch


class Loader:
    """A ``DataLoader`` with a position that travels.

    ``loader = Loader(DataLoader(data, batch_size=32, shuffle=True, num_workers=2), seed=0)``, then
    ``for x, y in run.each(loader)``: each loop is one epoch, or the rest of an interrupted one. The
    position counts batches that were handed out, not batches that workers have prefetched.

    The order of an epoch follows from ``seed`` and the epoch. What the data set and ``collate_fn``
    draw from ``random``, ``numpy.random`` and ``torch`` follows from ``seed``, the epoch and the
    batch's number. So both are the same with any number of workers, and the loader draws nothing
    from the generators of the process. A generator of the data set's own does not travel.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        if is_stateful(loader):
            raise TypeError("this loader has a position of its own; use fiec.torch.StatefulLoader")
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "a DataLoader over an IterableDataset has no position; use torchdata's "
                "StatefulDataLoader with fiec.torch.StatefulLoader"
            )
        if loader.batch_sampler is None:
            raise TypeError("a DataLoader with batch_size=None makes no batches; give batch_size")
        self._source = loader
        self._seed = seed
        self._plan = _Plan()
        plain: Any = DataLoader
        workers = loader.num_workers
        more = {"prefetch_factor": loader.prefetch_factor} if workers else {}
        # Batches come in their order, whatever `in_order` of the given loader says.
        self._inner = plain(
            _Seeded(loader.dataset, loader.collate_fn, seed),
            batch_sampler=self._plan,
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            # So that the seed of the workers is not drawn from the generator of the process.
            generator=torch.Generator(),
            **more,
        )
        self.epoch = 0
        """Epochs that have ended."""
        self.position = 0
        """Batches of the present epoch that were handed out."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._source)

    def _batches(self) -> list[Any]:
        """The rows of each batch of the present epoch."""
        batches: Any = self._source.batch_sampler
        sampler: Any
        for sampler in (batches, getattr(batches, "sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
                own.manual_seed(number(self._seed, self.epoch))
        with seeded(self._seed, self.epoch):
            return [list(rows) for rows in batches]

    def __iter__(self) -> Iterator[Any]:
        rows = list(enumerate(self._batches()))
        self._plan.batches = [(self.epoch, at, batch) for at, batch in rows[self.position :]]
        # An epoch that was interrupted behind its last batch starts no workers.
        if self._plan.batches:
            with children_are_seeded():
                items = iter(self._inner)
            for batch in items:
                self.position += 1
                yield batch
        self.end_epoch()

    def end_epoch(self) -> None:
        """Begins the next epoch, wherever this one stands."""
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {
            "items": len(self._source.dataset),
            "batches": len(self),
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        here = self.state_dict()
        for name in ("items", "batches", "seed"):
            if state[name] != here[name]:
                raise ValueError(f"{name} was {state[name]} and is {here[name]}")
        self.epoch, self.position = state["epoch"], state["position"]


class StatefulLoader:
    """A loader that keeps its own position, such as torchdata's ``StatefulDataLoader``. With this
    around it, it draws nothing from the generators of the process when a run resumes.

    Each loop is one epoch, or the rest of an interrupted one. Two things do not travel: what its
    workers draw, and the order of a sampler that has no ``state_dict`` and draws from the
    generators of the process. For these use :class:`Loader`. Read an ``IterableDataset`` with
    ``num_workers=0``: torchdata's workers may repeat the end of one that is cut.
    """

    def __init__(self, loader: Any) -> None:
        if not is_stateful(loader):
            raise TypeError("this loader has no state_dict(); use fiec.torch.Loader")
        self._loader = loader
        self._generator: torch.Tensor | None = None
        self.epoch = 0
        """Epochs that have ended."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # A new iterator draws a seed for workers, and would draw it again when a run resumes.
        with preserved(), children_are_seeded():
            if self._generator is not None:
                # This makes the iterator that goes on. If that one is at its end, the next one
                # draws from the generator.
                self._loader.state_dict()
                self._loader.generator.set_state(self._generator)
                self._generator = None
            items = iter(self._loader)
        try:
            yield from items
        finally:
            # Workers end with the loop: a run that has yielded leaves no process behind.
            if not getattr(self._loader, "persistent_workers", False):
                getattr(items, "_shutdown_workers", _nothing)()
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, and the state of its generator."""
        with preserved(), children_are_seeded():
            inner = self._loader.state_dict()
        own = getattr(self._loader, "generator", None)
        drawn = self._generator  # not yet in use, if this run has resumed before its first batch
        if drawn is None and own is not None:
            drawn = own.get_state()
        return {"epoch": self.epoch, "loader": inner, "generator": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self.epoch, self._generator = state["epoch"], state["generator"]
        self._loader.load_state_dict(state["loader"])
