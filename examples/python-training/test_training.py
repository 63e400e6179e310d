"""The examples learn, and cuts do not change a bit of what they learn."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fiec import testing

HERE = Path(__file__).parent
HAS_NUMPY = importlib.util.find_spec("numpy") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None and HAS_NUMPY


def checked(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The script's own comparison of whole and cut runs, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-B", str(HERE / script), *words, "--check"],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("FIEC_")},
            capture_output=True,
            text=True,
            check=False,
        )


@unittest.skipUnless(HAS_NUMPY, "numpy is not installed for this Python")
class Numpy(unittest.TestCase):
    def test_the_gradient_is_that_of_the_loss(self) -> None:
        import numpy as np
        import train

        x, arm = train.spirals(1, 20)
        w = train.begin(1, 5)
        _, slopes = train.gradient(w, x, arm)
        rng = np.random.default_rng(0)
        for name, slope in slopes.items():
            at = tuple(rng.integers(0, n) for n in slope.shape)
            h = 1e-6
            values = []
            for sign in (1, -1):
                moved = {k: v.copy() for k, v in w.items()}
                moved[name][at] += sign * h
                values.append(train.gradient(moved, x, arm)[0])
            self.assertAlmostEqual((values[0] - values[1]) / (2 * h), slope[at], places=6)

    def test_it_learns_the_spirals(self) -> None:
        import numpy as np
        import train

        done = testing.run(train.main)
        self.assertEqual(done.ending, "completed", done.reason)
        self.assertGreater(done.result["first_loss"], 0.5)
        self.assertLess(done.result["loss"], 0.02)
        self.assertGreater(done.result["accuracy"], 0.98)
        self.assertEqual(done.capsules, 60 * 15 + 1)
        self.assertEqual(
            sorted(done.outputs),
            ["loss.csv", "weights-0020.npy", "weights-0040.npy", "weights-0060.npy", "weights.npy"],
        )
        self.assertEqual(done.outputs["weights-0060.npy"], done.outputs["weights.npy"])
        self.assertEqual(len(done.outputs["loss.csv"].splitlines()), 60)
        weights = np.load(io.BytesIO(done.outputs["weights.npy"]))
        self.assertEqual(weights.shape, (2 * 32 + 32 + 32 * 32 + 32 + 32 * 3 + 3,))

    def test_moves_in_memory_give_the_same_weights(self) -> None:
        import train

        params = {"epochs": 6, "keep": 2}
        whole = testing.run(train.main, params)
        for every in (1, 7):
            cut = testing.run(train.main, params, yield_every=every)
            self.assertEqual((cut.result, cut.outputs), (whole.result, whole.outputs))

    def test_fresh_processes_give_the_same_weights(self) -> None:
        done = checked("train.py", "epochs=3", "--yield-every", "11")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("equal bits. 46 capsules, whole in 1 process and cut into 5", done.stdout)

    def test_a_bad_rate_is_refused(self) -> None:
        import train

        failed = testing.run(train.main, {"rate": 2})
        self.assertEqual(failed.ending, "failed")
        self.assertIn("params.rate", failed.reason or "")


@unittest.skipUnless(HAS_TORCH, "PyTorch is not installed for this Python")
class Torch(unittest.TestCase):
    def test_it_learns_the_spirals(self) -> None:
        import train_torch

        done = testing.run(train_torch.main)
        self.assertEqual(done.ending, "completed", done.reason)
        self.assertLess(done.result["loss"], 0.05)
        self.assertGreater(done.result["accuracy"], 0.98)

    def test_cuts_give_the_same_weights(self) -> None:
        import train_torch

        params = {"epochs": 3}
        whole = testing.run(train_torch.main, params)
        cut = testing.run(train_torch.main, params, yield_every=4)
        self.assertEqual((cut.result, cut.outputs), (whole.result, whole.outputs))
        done = checked("train_torch.py", "epochs=3", "--yield-every", "20")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class WithoutTorch(unittest.TestCase):
    def test_the_missing_library_is_named(self) -> None:
        code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-B", "-c", code, str(HERE / "train_torch.py")],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("needs PyTorch, which is not installed", done.stderr)


if __name__ == "__main__":
    unittest.main()
