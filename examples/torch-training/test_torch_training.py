"""Both models learn, and cuts do not change a bit of what they learn."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from fiec import testing

HERE = Path(__file__).parent
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "numpy"))
NO_TORCH = "PyTorch or numpy is not installed for this Python"


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


def completed(script: str, params: dict[str, Any], every: int | None = None) -> testing.Outcome:
    program = importlib.import_module(script)
    found = testing.run(program.main, params, yield_every=every)
    assert found.ending == "completed", found.reason
    return found


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Learning(unittest.TestCase):
    def test_letters_are_predicted(self) -> None:
        done = completed("letters", {})
        self.assertGreater(done.result["first_loss"], 2.5)
        self.assertLess(done.result["loss"], 1.2)
        self.assertLess(done.result["averaged_loss"], 1.2)

    def test_shapes_are_told_apart(self) -> None:
        done = completed("shapes", {})
        self.assertGreater(done.result["first_loss"], 1.0)
        self.assertGreater(done.result["accuracy"][-1], 0.9)
        self.assertEqual(len(done.result["accuracy"]), 6)


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Moving(unittest.TestCase):
    def test_cuts_in_memory_give_the_same_weights(self) -> None:
        for script, params in (
            ("letters", {"epochs": 1, "batch": 64}),
            ("shapes", {"epochs": 2, "pictures": 100}),
        ):
            whole = completed(script, params)
            for every in (1, 2, 3, 4, 7):
                with self.subTest(script, cut_at_every=every, seed=0):
                    cut = completed(script, params, every)
                    self.assertEqual((cut.result, cut.outputs), (whole.result, whole.outputs))

    def test_workers_change_no_bit(self) -> None:
        params = {"epochs": 2, "pictures": 100}
        alone = completed("shapes", params)
        helped = completed("shapes", params | {"workers": 2}, 3)
        self.assertEqual((helped.result, helped.outputs), (alone.result, alone.outputs))

    def test_fresh_processes_give_the_same_weights(self) -> None:
        for script, words in (
            ("letters.py", ["epochs=1", "batch=256", "--yield-every", "1"]),
            ("shapes.py", ["epochs=2", "pictures=100", "--yield-every", "2"]),
            ("shapes.py", ["epochs=2", "pictures=100", "workers=2", "--yield-every", "3"]),
        ):
            with self.subTest(script, words=words, seed=0):
                done = checked(script, *words)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("equal bits", done.stdout)


class WithoutTorch(unittest.TestCase):
    def test_the_missing_library_is_named(self) -> None:
        code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
        for script in ("letters.py", "shapes.py"):
            done = subprocess.run(
                [sys.executable, "-B", "-c", code, str(HERE / script)],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 1)
            self.assertIn("needs PyTorch, which is not installed", done.stderr)


if __name__ == "__main__":
    unittest.main()
