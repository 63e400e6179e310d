"""Loaders of PyTorch go on behind the last batch that was handed out."""

from __future__ import annotations

import itertools
import multiprocessing
import unittest
import warnings
from importlib.util import find_spec
from typing import Any

import fiec
from fiec import testing
from fiec.restore import decode
from fiec.sigma import encode

from .support import HAS_TORCH, NO_TORCH
from .test_torch import SEED, Noisy, draw_of_the_process

HAS_TORCHDATA = HAS_TORCH and find_spec("torchdata") is not None
NO_TORCHDATA = "torchdata is not installed for this Python"


class Rows:
    """Its items are their numbers."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, row: int) -> Any:
        return row


class Drawn(Rows):
    """Its items are drawn."""

    def __getitem__(self, row: int) -> Any:
        import torch

        return torch.rand(())


def loader(data: Any = None, *, seed: int = SEED, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    from fiec.torch import Loader

    plain: Any = DataLoader
    return Loader(
        plain(data or Rows(10), **{"batch_size": 3, "shuffle": True} | options), seed=seed
    )


def moved(old: Any, new: Any) -> Any:
    """The new one, with the state of the old one."""
    decode(b"".join(encode(old)), new)
    return new


def as_lists(batches: Any) -> list[Any]:
    return [b.tolist() if hasattr(b, "tolist") else [part.tolist() for part in b] for b in batches]


def flat(batches: list[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Positions(unittest.TestCase):
    def test_each_loop_is_an_epoch_of_all_items_in_a_new_order(self) -> None:
        one = loader()
        epochs = [as_lists(one) for _ in range(3)]
        for epoch in epochs:
            self.assertEqual([len(b) for b in epoch], [3, 3, 3, 1])
            self.assertEqual(sorted(flat(epoch)), list(range(10)))
        self.assertEqual(len({str(e) for e in epochs}), 3)
        self.assertEqual((one.epoch, one.position, len(one)), (3, 0, 4))

    def test_an_epoch_goes_on_where_it_was_interrupted(self) -> None:
        cases: list[dict[str, Any]] = [
            {},
            {"num_workers": 2},
            {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
            {"drop_last": True},
            {"shuffle": False},
        ]
        for options in cases:
            one = loader(Noisy(10), **options)
            whole = [as_lists(one) for _ in range(2)]
            for taken in range(0, len(whole[0]) + 1, 2 if "num_workers" in options else 1):
                with self.subTest(options=options, taken=taken, seed=SEED):
                    one = loader(Noisy(10), **options)
                    items = iter(one)
                    head = as_lists(itertools.islice(items, taken))
                    other = moved(one, loader(Noisy(10), **options))
                    del items
                    self.assertEqual((other.epoch, other.position), (0, taken))
                    self.assertEqual(head + as_lists(other), whole[0])
                    self.assertEqual(as_lists(other), whole[1])

    def test_batches_that_workers_have_prefetched_are_not_counted(self) -> None:
        one = loader(num_workers=2, prefetch_factor=4)
        next(iter(one))
        self.assertEqual(one.state_dict()["position"], 1)

    def test_a_broken_loop_goes_on_in_the_same_process(self) -> None:
        for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
            whole = as_lists(loader(**options))
            one = loader(**options)
            head = []
            for batch in one:
                head.append(batch.tolist())
                if len(head) == 2:
                    break
            self.assertEqual(head + as_lists(one), whole, options)

    def test_samplers_with_epochs_weights_or_generators_go_on(self) -> None:
        import torch
        from torch.utils import data

        def make(name: str) -> Any:
            rows: Any = Rows(10)
            drawn = torch.Generator().manual_seed(1)
            kinds: dict[str, Any] = {
                "distributed": data.DistributedSampler(rows, num_replicas=2, rank=1),
                "weighted": data.WeightedRandomSampler([1.0, 2.0] * 5, 10, generator=drawn),
                "subset": data.SubsetRandomSampler(range(7)),
                "replacement": data.RandomSampler(rows, replacement=True, generator=drawn),
            }
            return loader(rows, shuffle=False, sampler=kinds[name])

        for name in ("distributed", "weighted", "subset", "replacement"):
            one = make(name)
            whole = [as_lists(one) for _ in range(3)]
            self.assertEqual(len({str(e) for e in whole}), 3, f"{name}: each epoch has its order")
            one = make(name)
            as_lists(one)
            items = iter(one)
            head = as_lists(itertools.islice(items, 1))
            other = moved(one, make(name))
            self.assertEqual(head + as_lists(other), whole[1], name)
            self.assertEqual(as_lists(other), whole[2], name)

    def test_nothing_is_drawn_from_the_generators_of_the_process(self) -> None:
        for workers in (0, 1):
            fiec.GlobalRandom(SEED)
            expected = draw_of_the_process()
            fiec.GlobalRandom(SEED)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # nor is a fork warned of
                as_lists(loader(Noisy(10), num_workers=workers))
            self.assertEqual(draw_of_the_process(), expected)

    def test_a_worker_draws_other_numbers_for_each_batch(self) -> None:
        drawn = flat(as_lists(loader(Drawn(10), num_workers=2)))
        self.assertEqual(len(set(drawn)), 10)
        self.assertEqual(flat(as_lists(loader(Drawn(10)))), drawn)

    def test_workers_that_are_not_forked_read_the_same(self) -> None:
        spawned = loader(Drawn(10), num_workers=1, multiprocessing_context="spawn")
        self.assertEqual(as_lists(spawned), as_lists(loader(Drawn(10))))

    def test_a_position_in_other_data_is_refused(self) -> None:
        raw = b"".join(encode(loader()))
        for other, expected in (
            (loader(Rows(11)), "items was 10 and is 11"),
            (loader(batch_size=4), "batches was 4 and is 3"),
            (loader(seed=1), f"seed was {SEED} and is 1"),
        ):
            with self.assertRaisesRegex(fiec.StateError, expected):
                decode(raw, other)

    def test_loaders_without_a_position_are_refused(self) -> None:
        from torch.utils.data import DataLoader, IterableDataset

        from fiec.torch import Loader, StatefulLoader

        plain: Any = DataLoader
        endless: Any = type("Endless", (Counted, IterableDataset), {})(3)
        with self.assertRaisesRegex(TypeError, "StatefulDataLoader"):
            Loader(plain(endless))
        with self.assertRaisesRegex(TypeError, "give batch_size"):
            loader(batch_size=None, shuffle=False)
        with self.assertRaisesRegex(TypeError, r"fiec\.torch\.Loader"):
            StatefulLoader(plain(Rows(3)))


class Counted:
    """A stream with a position of its own, as torchdata asks for; read without workers."""

    def __init__(self, items: int) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Any:
        while self.at < self.items:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stateful(kind: str, workers: int) -> Any:
    import torch
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    plain: Any = StatefulDataLoader
    if kind == "stream":
        stream: Any = type("Stream", (Counted, IterableDataset), {})(10)
        return plain(stream, batch_size=3, num_workers=workers)
    drawn = torch.Generator().manual_seed(SEED) if kind == "generator" else None
    data: Any = Noisy(10) if workers == 0 else Rows(10)
    return plain(data, batch_size=3, shuffle=True, num_workers=workers, generator=drawn)


def read(run: fiec.Run) -> list[Any]:
    """Three epochs, and what is drawn beside them."""
    import fiec.torch

    rng = fiec.GlobalRandom(SEED)
    data = fiec.torch.StatefulLoader(stateful(run.params["kind"], run.params["workers"]))
    state = fiec.torch.state(run, data=data, rng=rng, seen=[])
    for _ in run.steps(2):  # commits before there is an iterator
        state.seen.append(draw_of_the_process())
    for _ in range(data.epoch, 3):
        for batch in run.each(data):
            state.seen.append([as_lists([batch]), draw_of_the_process()])
        state.seen.append(draw_of_the_process())
        run.boundary()  # between two epochs
    return list(state.seen)


@unittest.skipUnless(HAS_TORCHDATA, NO_TORCHDATA)
class Stateful(unittest.TestCase):
    def check(self, kind: str, workers: int, cuts: tuple[int, ...]) -> None:
        params = {"kind": kind, "workers": workers}
        whole = testing.run(read, params)
        self.assertEqual(whole.ending, "completed", whole.reason)
        for every in cuts:
            with self.subTest(**params, cut_at_every=every, seed=SEED):
                cut = testing.run(read, params, yield_every=every)
                self.assertEqual((cut.ending, cut.result), ("completed", whole.result), cut.reason)
        with self.subTest(**params, commits="at each boundary"):
            often = testing.run(read, params, commit={"every": 1})
            self.assertEqual(often.result, whole.result)

    def test_torchdatas_loader_goes_on_and_draws_nothing_more(self) -> None:
        for kind in ("plain", "generator", "stream"):
            self.check(kind, 0, (1, 3, 4))

    def test_it_goes_on_with_workers(self) -> None:
        self.check("plain", 2, (3, 5))
        self.assertEqual(multiprocessing.active_children(), [], "each cut ends its workers")
