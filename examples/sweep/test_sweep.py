"""The sweep finds what is known of the epidemic, and spreading it does not change a bit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import sweep

import fiec
from fiec import testing

HERE = Path(__file__).parent
SMALL = {"grid": 24, "steps": 4, "tiles": {"from": 0, "to": 24}}


class Sweep(unittest.TestCase):
    def test_the_best_rates_are_those_that_are_known_of_this_epidemic(self) -> None:
        done = testing.run(sweep.main, {"grid": 100, "steps": 8})
        self.assertEqual(done.ending, "completed", done.reason)
        # Murray, Mathematical Biology I, 10.2: r = 0.00218 for each of 763 boys, a = 0.44 a day.
        self.assertAlmostEqual(done.result["infection"], 763 * 0.00218, delta=0.05)
        self.assertAlmostEqual(done.result["recovery"], 0.44, delta=0.02)
        self.assertLess(done.result["misfit"], 5000)
        lines = done.outputs["misfit.csv"].decode().splitlines()
        self.assertEqual((lines[0], len(lines)), ("infection,recovery,misfit", 101))
        best = min(lines[1:], key=lambda line: float(line.split(",")[2]))
        self.assertEqual(float(best.split(",")[0]), done.result["infection"])

    def test_the_integration_converges_with_its_fourth_order(self) -> None:
        fine = sweep.misfit(1.7, 0.45, 64)
        coarse, half = (abs(sweep.misfit(1.7, 0.45, n) - fine) for n in (2, 4))
        self.assertGreater(coarse / half, 10)
        self.assertLess(coarse / half, 40)

    def test_cuts_in_memory_give_the_same_bits(self) -> None:
        whole = testing.run(sweep.main, SMALL)
        for every in (1, 7):
            cut = testing.run(sweep.main, SMALL, yield_every=every)
            self.assertEqual((cut.result, cut.outputs), (whole.result, whole.outputs))

    def test_however_it_is_spread_the_bits_are_the_same(self) -> None:
        whole = testing.run(sweep.main, SMALL)
        parts = 0
        for seed in range(10):
            spread = testing.spread(sweep.main, SMALL, seed=seed)
            self.assertEqual(spread.ending, "completed", spread.reason)
            self.assertEqual((spread.result, spread.outputs), (whole.result, whole.outputs), seed)
            parts += spread.parts
        self.assertGreater(parts, 10)

    def test_its_own_check_in_fresh_processes_passes(self) -> None:
        words = ["grid=12", "steps=2", 'tiles={"from": 2, "to": 12}', "--check"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("FIEC_")}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-B", str(HERE / "sweep.py"), *words, "--yield-every", "5"],
                cwd=folder,
                env=env | {"PYTHONPATH": str(Path(fiec.__file__).parents[1])},
                capture_output=True,
                text=True,
                check=False,
            )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("equal bits. 11 capsules, whole in 1 process and cut into 3", done.stdout)
        self.assertIn("equal bits, too, when spread 3 times", done.stdout)

    def test_parameters_that_make_no_sense_are_refused_by_name(self) -> None:
        for params, words in (
            ({"grid": 0}, "params.grid: must be from 1 to 100000, but is 0"),
            ({"steps": "many"}, "params.steps: must be from 1"),
            ({"grid": 5, "tiles": {"from": 0, "to": 6}}, "params.tiles.to: must be at most 5"),
        ):
            failed = testing.run(sweep.main, params)
            self.assertEqual(failed.ending, "failed")
            self.assertIn(words, failed.reason or "")


if __name__ == "__main__":
    unittest.main()
