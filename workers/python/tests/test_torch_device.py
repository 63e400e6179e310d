"""Tensors leave the device of a parked run and return; no test here has a CUDA device."""

from __future__ import annotations

import contextlib
import unittest
from typing import Any
from unittest import mock

import fiec
from fiec import testing
from fiec.run import Grant

from .support import HAS_TORCH, NO_TORCH
from .test_torch import SEED, digest, draw_of_the_process, network

DEVICE = {"uuid": "GPU-1", "memory_bytes": 1 << 30}


def run_with(grant: dict[str, Any], *, local: bool = False) -> Any:
    return fiec.Run(
        execution="e", epoch=1, program="t@1", params={}, grant=Grant.parse(grant), local=local
    )


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Moves(unittest.TestCase):
    def test_tensors_that_share_memory_share_it_afterwards(self) -> None:
        import torch

        from fiec.torch.devices import move

        base = torch.arange(12.0)
        parts = [base, base[2:8], base.view(3, 4).t()[1:], torch.zeros(0)]
        before = [part.clone() for part in parts]
        others = list(parts)
        address = base.data_ptr()
        move(parts, torch.device("cpu"))
        self.assertNotEqual(base.data_ptr(), address)
        for part, other, old in zip(parts, others, before):
            self.assertIs(part, other)
            self.assertTrue(torch.equal(part, old))
        base[3] = 99.0
        self.assertEqual((parts[1][1].item(), parts[2].max().item()), (99.0, 99.0))

    def test_a_loop_goes_on_after_its_tensors_have_left_and_returned(self) -> None:
        import torch

        import fiec.torch
        from fiec.torch import devices

        found: list[Any] = []

        def main(run: fiec.Run) -> dict[str, str]:
            fiec.torch.deterministic()
            rng = fiec.GlobalRandom(SEED)
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            constant = torch.randn(6, 5)  # not in the state
            state = fiec.torch.state(run, model=model, optimizer=optimizer, rng=rng)
            for _ in run.steps(6):
                loss = model(constant * torch.rand(6, 1)).square().sum()
                loss.backward()
                optimizer.step()
                if run.params.get("parks"):
                    # Gradients stay: they are those of the next capsule, too.
                    grads = [p.grad for p in model.parameters()]
                    moments = [t for s in optimizer.state.values() for t in s.values()]
                    found[:] = [*model.state_dict(keep_vars=True).values(), *grads, *moments]
                    found.append(constant)
                    places = {id(t): t.data_ptr() for t in found if t.numel()}
                    run._reconfigure({"threads": 1})
                    self.assertTrue(all(places[id(t)] != t.data_ptr() for t in found if t.numel()))
                    run._reconfigure({"threads": 1, "device": DEVICE})
            return {name: digest(getattr(state, name)) for name in ("model", "optimizer")}

        whole = testing.run(main)
        self.assertEqual(whole.ending, "completed", whole.reason)
        with mock.patch.object(devices, "on_device", lambda: found):
            parked = testing.run(main, {"parks": True}, grant={"device": DEVICE})
        self.assertEqual(parked.result, whole.result, parked.reason)

    def test_a_run_without_a_granted_device_keeps_its_tensors_where_they_are(self) -> None:
        import fiec.torch
        from fiec.torch import devices

        def main(run: fiec.Run) -> None:
            fiec.torch.state(run, x=1)
            for _ in run.steps(3):
                run.ask(threads=1)

        with mock.patch.object(devices, "on_device", side_effect=AssertionError):
            done = testing.run(main)
        self.assertEqual((done.ending, done.capsules), ("completed", 4), done.reason)

    def test_a_tensor_returns_to_the_device_that_it_left(self) -> None:
        import torch

        from fiec.torch.devices import Aside

        aside = Aside()
        moved: list[tuple[int, torch.device]] = []
        one = torch.zeros(2, device="meta")
        with mock.patch(
            "fiec.torch.devices.move", lambda tensors, target: moved.append((len(tensors), target))
        ):
            aside.leave([one])
            aside.follow(Grant.parse({"device": DEVICE}))
            aside.follow(Grant.parse({"device": DEVICE}))
        self.assertEqual(moved, [(1, torch.device("cpu")), (1, torch.device("meta"))])

    def test_nothing_is_on_a_device_here(self) -> None:
        import torch

        import fiec.torch

        if torch.cuda.is_available():
            self.skipTest("this machine has a CUDA device")
        keep = torch.zeros(3)
        self.assertEqual((fiec.torch.on_device(), len(keep)), ([], 3))


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Granted(unittest.TestCase):
    def test_the_device_is_the_granted_one_or_the_cpu(self) -> None:
        import torch

        from fiec.torch import device

        for available, grant, local, expected in (
            (True, {"device": DEVICE}, False, "cuda:0"),
            (True, {}, False, "cpu"),
            (False, {}, False, "cpu"),
            (True, {}, True, "cuda:0"),
            (False, {}, True, "cpu"),
        ):
            with mock.patch.object(torch.cuda, "is_available", lambda a=available: a):
                self.assertEqual(str(device(run_with(grant, local=local))), expected)

    def test_a_granted_device_that_pytorch_does_not_see_is_named(self) -> None:
        import torch

        from fiec.torch import device

        with (
            mock.patch.object(torch.cuda, "is_available", lambda: False),
            self.assertRaisesRegex(fiec.Failed, "device GPU-1 is granted") as raised,
        ):
            device(run_with({"device": DEVICE}))
        self.assertFalse(raised.exception.permanent)


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Generators(unittest.TestCase):
    def test_the_generator_of_each_device_travels(self) -> None:
        import torch

        states = [torch.tensor([n], dtype=torch.uint8) for n in (7, 8)]
        there: dict[int, Any] = {}
        cuda = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "get_rng_state_all": lambda: states,
            "device_count": lambda: 2,
            "set_rng_state": lambda state, number: there.__setitem__(number, state),
        }
        with contextlib.ExitStack() as stack:
            for name, stand_in in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
            sent = fiec.GlobalRandom(SEED).state_dict()
            fiec.GlobalRandom(SEED).load_state_dict(sent)
        self.assertEqual(there, dict(enumerate(states)))
        # A node without CUDA passes them on.
        if not torch.cuda.is_available():
            passing = fiec.GlobalRandom(SEED)
            passing.load_state_dict(sent)
            self.assertEqual(passing.state_dict()["cuda"], states)
        draw_of_the_process()
