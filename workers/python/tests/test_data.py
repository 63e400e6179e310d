"""Positions in the data, random state of the process, inputs and outputs."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any

import fiec
from fiec import testing
from fiec.restore import decode
from fiec.sigma import encode
from fiec.values import plain

from .support import HAS_NUMPY, HAS_TORCH, NO_NUMPY, NO_TORCH


class Positions(unittest.TestCase):
    def test_each_epoch_is_a_new_order_of_all_items(self) -> None:
        batches = fiec.Batches(10, 4, epochs=3, seed=1)
        found = list(batches)
        self.assertEqual([len(b) for b in found], [4, 4, 2] * 3)
        epochs = [sum(found[n : n + 3], []) for n in (0, 3, 6)]
        for epoch in epochs:
            self.assertEqual(sorted(epoch), list(range(10)))
        self.assertEqual(len({tuple(e) for e in epochs}), 3)
        self.assertEqual([len(b) for b in fiec.Batches(10, 4, drop_last=True)], [4, 4])
        self.assertEqual(list(fiec.Batches(3, 2, seed=None)), [[0, 1], [2]])
        self.assertEqual((len(batches), len(fiec.Batches(10, 4, drop_last=True))), (3, 2))

    def test_the_order_is_this_one_on_every_machine(self) -> None:
        self.assertEqual(
            list(fiec.Batches(8, 4, epochs=2, seed=42)),
            ORDER,
        )

    def test_a_position_goes_on_in_the_middle_of_an_epoch(self) -> None:
        whole = list(fiec.Batches(10, 3, epochs=4))
        for taken in range(len(whole) + 1):
            batches = fiec.Batches(10, 3, epochs=4)
            head = list(itertools.islice(batches, taken))
            rest = fiec.Batches(10, 3, epochs=4)
            decode(b"".join(encode(batches)), rest)
            self.assertEqual(head + list(rest), whole)

    def test_a_position_in_other_data_is_refused(self) -> None:
        raw = b"".join(encode(fiec.Batches(10, 3)))
        with self.assertRaisesRegex(fiec.StateError, "size was 3 and is 4"):
            decode(raw, fiec.Batches(10, 4))
        with self.assertRaises(ValueError):
            fiec.Batches(3, 4, drop_last=True)

    def test_a_stream_is_read_on_from_its_position(self) -> None:
        def main(run: fiec.Run) -> list[Any]:
            rows = fiec.Stream(lambda skip: itertools.islice("abcdefg", skip, None))
            state = run.state(rows=rows, seen=[], batches=fiec.Batches(4, 3, epochs=None))
            for row in run.each(state.rows):
                state.seen.append([row, next(state.batches)])
            return list(state.seen)

        whole = testing.run(main)
        self.assertEqual([row for row, _ in whole.result], list("abcdefg"))
        self.assertEqual(testing.run(main, yield_every=2).result, whole.result)


# What `Batches` promises for seed 42; it must never change.
ORDER = [[1, 3, 6, 4], [7, 0, 5, 2], [1, 0, 3, 6], [5, 4, 2, 7]]


def draws() -> list[float]:
    out = [random.random()]
    if HAS_NUMPY:
        import numpy as np

        out.append(float(np.random.standard_normal()))
    if HAS_TORCH:
        import torch

        out.append(float(torch.randn(())))
    return out


class Randomness(unittest.TestCase):
    def test_the_random_state_of_the_process_travels(self) -> None:
        draws()

        def main(run: fiec.Run) -> list[Any]:
            state = run.state(rng=fiec.GlobalRandom(3), seen=[])
            for _ in run.steps(6):
                state.seen.append(draws())
            return list(state.seen)

        whole = testing.run(main)
        self.assertEqual(whole.ending, "completed", whole.reason)
        self.assertEqual(testing.run(main, yield_every=1).result, whole.result)
        self.assertEqual(len({tuple(d) for d in whole.result}), 6)


class Surroundings(unittest.TestCase):
    def test_inputs_are_looked_up_in_the_folder_of_the_node(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "x.csv").write_text("1,2\n")
            before = os.environ.get("FIEC_DATA_DIR")
            os.environ["FIEC_DATA_DIR"] = folder
            try:
                self.assertEqual(fiec.inputs("x.csv").read_text(), "1,2\n")
                got = testing.run(lambda run: [run.load("x.csv").decode(), str(run.inputs())])
                self.assertEqual(got.result, ["1,2\n", folder])
                with self.assertRaisesRegex(fiec.Failed, "'y.csv' does not exist here"):
                    fiec.inputs("y.csv")
            finally:
                os.environ.pop("FIEC_DATA_DIR")
                if before is not None:
                    os.environ["FIEC_DATA_DIR"] = before

    def test_bad_outputs_references_and_digests_are_named(self) -> None:
        def call(what: Any) -> str:
            out = testing.run(what)
            self.assertEqual(out.ending, "failed")
            return out.reason or ""

        for name in ("", "/etc/x", "a/../b", "a//b", ".", "x" * 300, "a\0b"):
            self.assertIn("output ", call(lambda run, n=name: run.output(n, b"")))
        self.assertIn("is a int", call(lambda run: run.output("x", 3)))
        self.assertIn("64 lower-case", call(lambda run: run.fetch("AB")))
        self.assertIn("must be a path", call(lambda run: run.load({"url": "x"})))

    def test_outputs_are_bytes_text_and_anything_like_bytes(self) -> None:
        def main(run: fiec.Run) -> None:
            run.output("a", "grün")
            run.output("b", bytearray(b"1"))
            run.output("d/c", memoryview(b"2"))
            run.output("b", b"later")

        self.assertEqual(
            testing.run(main).outputs, {"a": "grün".encode(), "b": b"later", "d/c": b"2"}
        )

    @unittest.skipUnless(HAS_NUMPY, NO_NUMPY)
    def test_numpy_values_are_outputs_and_results(self) -> None:
        import io

        import numpy as np

        def main(run: fiec.Run) -> Any:
            run.output("w.npy", np.arange(3.0))
            return {"a": np.float64(1.5), "b": np.int32(2), "c": np.array([1.0, np.nan])}

        out = testing.run(main)
        self.assertEqual(np.load(io.BytesIO(out.outputs["w.npy"])).tolist(), [0.0, 1.0, 2.0])
        self.assertEqual(out.result, {"a": 1.5, "b": 2, "c": [1.0, "NaN"]})

    @unittest.skipUnless(HAS_TORCH, NO_TORCH)
    def test_tensors_are_results(self) -> None:
        import torch

        self.assertEqual(plain({"l": torch.tensor(0.5)}), {"l": 0.5})


class Loops(unittest.TestCase):
    def test_boundaries_in_a_nested_loop_go_on_in_its_middle(self) -> None:
        def main(run: fiec.Run) -> list[Any]:
            state = run.state(epoch=0, batches=fiec.Batches(7, 3, epochs=None), seen=[])
            while state.epoch < 3:
                batch = next(state.batches)
                state.seen.append([state.epoch, batch])
                if state.batches.position == state.batches.items:
                    state.epoch += 1
                run.boundary()
            return list(state.seen)

        whole = testing.run(main)
        self.assertEqual((whole.ending, whole.capsules), ("completed", 10), whole.reason)
        self.assertEqual(testing.run(main, yield_every=2).result, whole.result)

    def test_user_code_is_unwound_and_cannot_go_on_after_a_yield(self) -> None:
        events: list[str] = []

        def main(run: fiec.Run) -> None:
            state = run.state(n=0)
            try:
                for _ in run.steps(4):
                    state.n += 1
                    try:
                        run.should_stop
                    except Exception:
                        events.append("an Exception was caught")
            except fiec.Stop:
                events.append("stopped")
                try:
                    run.output("late", b"")
                except BaseException as error:
                    events.append(type(error).__name__)
                    raise
            finally:
                events.append("cleaned up")

        out = testing.run(main, yield_every=3)
        self.assertEqual((out.ending, out.runs, out.outputs), ("completed", 2, {}))
        self.assertEqual(events, ["stopped", "Yielded", "cleaned up", "cleaned up"])
