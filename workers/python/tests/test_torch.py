"""A training loop of PyTorch that is cut at its boundaries ends with the bits of a whole one."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import unittest
from typing import Any

import fiec
from fiec import testing
from fiec.restore import decode
from fiec.sigma import encode

from .support import HAS_NUMPY, HAS_TORCH, NO_TORCH

SEED = 20261129


def digest(parts: Any) -> str:
    return hashlib.sha256(b"".join(encode(parts))).hexdigest()


def draw_of_the_process() -> float:
    """From each generator that the process has once."""
    import torch

    drawn = random.random() + float(torch.rand(()))
    if HAS_NUMPY:
        import numpy as np

        drawn += float(np.random.random())
    return drawn


class Noisy:
    """Rows with an augmentation that draws from every generator of the process."""

    def __init__(self, items: int) -> None:
        import torch

        drawn = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(items, 5, generator=drawn)
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row] + 0.1 * draw_of_the_process(), self.y[row]


def equal_when_cut(
    case: unittest.TestCase, main: Any, capsules: int, cuts: tuple[int, ...], params: Any
) -> None:
    """Cut at every k-th boundary, for each k, it ends as a whole run does."""
    whole = testing.run(main, params)
    case.assertEqual(whole.ending, "completed", whole.reason)
    case.assertEqual(whole.capsules, capsules)
    for k in cuts:
        with case.subTest(**params, cut_at_every=k, seed=SEED):
            cut = testing.run(main, params, yield_every=k)
            case.assertEqual(cut.result, whole.result, cut.reason)
            case.assertGreater(cut.runs, 1)


def network() -> Any:
    """With buffers, and with dropout, which draws."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
    )


def schedulers(optimizer: Any) -> dict[str, Any]:
    from torch.optim import lr_scheduler as s

    return {
        "step": lambda: s.StepLR(optimizer, 3, 0.5),
        "lambda": lambda: s.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
        "cosine": lambda: s.CosineAnnealingWarmRestarts(optimizer, 4),
        "cycle": lambda: s.OneCycleLR(optimizer, max_lr=0.1, total_steps=60),
        "sequence": lambda: s.SequentialLR(
            optimizer,
            [s.LinearLR(optimizer, total_iters=4), s.ExponentialLR(optimizer, 0.9)],
            milestones=[4],
        ),
        "plateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
    }


def train(run: fiec.Run) -> dict[str, Any]:
    """An ordinary loop; ``params`` say which parts it has."""
    import torch
    from torch.optim import swa_utils
    from torch.utils.data import DataLoader

    import fiec.torch

    p: dict[str, Any] = {"optimizer": "AdamW", "scheduler": "step", "workers": 0} | run.params
    fiec.torch.deterministic()
    rng = fiec.GlobalRandom(SEED)
    device = fiec.torch.device(run)
    model = network().to(device)
    more = {"momentum": 0.9} if p["optimizer"] in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, p["optimizer"])(model.parameters(), lr=0.02, **more)
    scheduler = schedulers(optimizer)[p["scheduler"]]()
    data: Any = Noisy(23)
    plain: Any = DataLoader(data, batch_size=4, shuffle=True, num_workers=p["workers"])
    loader = fiec.torch.Loader(plain, seed=SEED)
    averages: Any = swa_utils
    average = {} if p.get("swa") else {"multi_avg_fn": averages.get_ema_multi_avg_fn(0.9)}
    state = fiec.torch.state(
        run,
        rng=rng,  # first, where it would be restored too early
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3),
        average=averages.AveragedModel(model, use_buffers=True, **average),
        loader=loader,
        losses=[],
    )
    for _ in range(loader.epoch, 3):
        for x, y in run.each(loader):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(p.get("autocast"))):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            state.scaler.scale(loss).backward()
            state.scaler.step(optimizer)
            state.scaler.update()
            state.average.update_parameters(model)
            if p["scheduler"] != "plateau":
                scheduler.step()
            state.losses.append(loss.item() + draw_of_the_process())
        if p["scheduler"] == "plateau":
            scheduler.step(state.losses[-1])
    names = ("model", "optimizer", "scheduler", "average", "scaler", "rng")
    digests = {name: digest(getattr(state, name)) for name in names}
    return {"losses": list(state.losses), "lr": optimizer.param_groups[0]["lr"]} | digests


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Training(unittest.TestCase):
    def equal(self, every: list[int], **params: Any) -> testing.Outcome:
        """Cut at every k-th boundary, for each k, it is the same."""
        whole = testing.run(train, params)
        self.assertEqual(whole.ending, "completed", whole.reason)
        self.assertEqual(whole.capsules, 3 * 6 + 1)
        for k in every:
            with self.subTest(**params, cut_at_every=k, seed=SEED):
                cut = testing.run(train, params, yield_every=k)
                self.assertEqual(cut.reason, None)
                self.assertEqual(cut.result, whole.result)
        return whole

    def test_a_loop_that_is_cut_anywhere_ends_with_the_same_bits(self) -> None:
        self.equal([1, 2, 3, 4, 5, 6, 7, 11])

    def test_the_same_program_gives_the_same_bits_twice(self) -> None:
        self.assertEqual(self.equal([]).result, self.equal([]).result)

    def test_each_optimizer_goes_on(self) -> None:
        for name in ("SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"):
            self.equal([1, 5], optimizer=name)

    def test_each_scheduler_goes_on(self) -> None:
        for name in schedulers(None):
            self.equal([1, 5], scheduler=name)

    def test_mixed_precision_and_stochastic_averages_go_on(self) -> None:
        self.equal([1, 4], autocast=True, swa=True)

    def test_workers_that_prefetch_change_no_bit(self) -> None:
        alone = self.equal([5])
        self.assertEqual(self.equal([6, 7], workers=2).result, alone.result)
        self.assertEqual(multiprocessing.active_children(), [], "each cut ends its workers")

    def test_the_bits_of_a_state_do_not_depend_on_the_way_to_it(self) -> None:
        every: Any = {"every": 6}
        whole = testing.run(train, commit=every)
        for k in (2, 9):
            cut = testing.run(train, commit=every, yield_every=k)
            self.assertEqual((whole.boundary, cut.boundary), (18, 18))
            self.assertTrue(cut.state == whole.state, f"cut at every {k}, seed {SEED}")

    def test_random_state_is_restored_after_parts_that_draw(self) -> None:
        import fiec.torch

        class Draws:
            """Draws when it is loaded."""

            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                draw_of_the_process()

        def main(run: fiec.Run) -> list[float]:
            state = fiec.torch.state(run, rng=fiec.GlobalRandom(SEED), part=Draws(), seen=[])
            for _ in run.steps(4):
                state.seen.append(draw_of_the_process())
            return list(state.seen)

        whole = testing.run(main)
        self.assertEqual(testing.run(main, yield_every=1).result, whole.result)


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Tensors(unittest.TestCase):
    def test_every_bit_of_every_type_comes_back(self) -> None:
        import torch

        drawn = torch.Generator().manual_seed(SEED)
        raw = torch.randint(0, 256, (16 * 6,), dtype=torch.uint8, generator=drawn)
        names = "float64 float32 float16 bfloat16 complex64 complex128 int64 int32 int16 int8 uint8"
        for name in [*names.split(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]:
            dtype = getattr(torch, name)
            # Any bits at all: also NaN with a payload, infinities and denormals.
            sent = raw.view(dtype).reshape(2, -1)
            for value in (sent, sent.t(), sent[:, ::2], sent[0, 0], sent[:0]):
                got = decode(b"".join(encode({"t": value})))["t"]
                self.assertEqual((got.dtype, got.shape), (dtype, value.shape))
                a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (got, value))
                self.assertTrue(torch.equal(a, b), f"{name}, seed {SEED}")

    def test_lazy_conjugates_and_views_come_back_as_they_read(self) -> None:
        import torch

        z = torch.tensor([1 + 2j, -3 - 4j])
        for value in (z.conj(), z.conj().imag, torch.ones(3, 1).expand(3, 4)):
            got = decode(b"".join(encode(value)))
            self.assertTrue(torch.equal(got, value))

    def test_tied_weights_stay_tied(self) -> None:
        import torch

        def make() -> Any:
            tied: Any = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
            tied[1].weight = tied[0].weight
            return tied

        one, other = make(), make()
        decode(b"".join(encode(one)), other)
        self.assertIs(other[1].weight, other[0].weight)
        self.assertTrue(torch.equal(other[0].weight, one[1].weight))
