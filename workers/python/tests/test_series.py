"""Numbers over time: in reports, in lines, bounded, and refused in a sentence."""

from __future__ import annotations

import math
import unittest
from typing import Any

from fiec import Failed
from fiec.series import NAMES_LIMIT, POINTS_LIMIT, Waiting, value_of

from .support import HAS_NUMPY, NO_NUMPY, Child, Report


def numbers(reports: list[Report], name: str) -> list[Any]:
    return [p for r in reports for p in r.head.get("numbers", {}).get(name, [])]


class Bounds(unittest.TestCase):
    def test_many_reports_become_few_points_that_keep_mean_and_extremes(self) -> None:
        waiting = Waiting()
        for boundary in range(1, 5_001):
            waiting.report("loss", boundary, float(boundary % 100))
            waiting.report("lr", boundary, 0.1)
        taken = waiting.take(5_000)
        self.assertLessEqual(sum(map(len, taken.values())), POINTS_LIMIT)
        loss = [p if len(p) == 5 else [p[0], p[1], p[1], p[1], 1] for p in taken["loss"]]
        self.assertEqual(sum(p[4] for p in loss), 5_000)
        mean = sum(p[1] * p[4] for p in loss) / 5_000
        self.assertAlmostEqual(mean, 49.5, places=9)
        self.assertEqual((min(p[2] for p in loss), max(p[3] for p in loss)), (0.0, 99.0))
        self.assertEqual(taken["loss"][-1], [5_000, 0.0])
        self.assertEqual([p[0] for p in loss], sorted({p[0] for p in loss}))
        self.assertEqual({p[1] for p in taken["lr"]}, {0.1})
        self.assertFalse(waiting)

    def test_no_part_of_a_curve_is_coarser_than_another(self) -> None:
        for reports in (49, 97, 200, 2_864, 20_000):
            waiting = Waiting()
            for boundary in range(1, reports + 1):
                waiting.report("loss", boundary, 1.0)
            *older, last = waiting.take(reports)["loss"]
            with self.subTest(reports=reports):
                self.assertEqual(last, [reports, 1.0])
                widest = max(point[4] if len(point) == 5 else 1 for point in older)
                self.assertLessEqual(widest, 2 * -(-reports // POINTS_LIMIT))
                self.assertGreater(len(older), POINTS_LIMIT / 3)

    def test_reports_of_one_capsule_are_one_point(self) -> None:
        waiting = Waiting()
        for value in (1.0, 2.0, 6.0):
            waiting.report("loss", 7, value)
        self.assertEqual(waiting.take(7), {"loss": [[7, 3.0, 1.0, 6.0, 3]]})

    def test_a_run_has_so_many_names_and_no_more(self) -> None:
        waiting = Waiting()
        for n in range(NAMES_LIMIT):
            waiting.report(f"n{n}", 1, 0.0)
        waiting.take(1)
        waiting.report("n0", 2, 0.0)
        with self.assertRaisesRegex(Failed, "more would be one name more than the 24"):
            waiting.report("more", 2, 0.0)
        for wrong in ("", "a b", "é", "x" * 65):
            with self.assertRaisesRegex(Failed, "must be 1 to 64 letters"):
                Waiting().report(wrong, 1, 0.0)

    def test_what_is_no_number_is_refused_and_what_is_not_finite_is_kept(self) -> None:
        for wrong in ("0.3", None, [1, 2], 1j, 10**400, 10**5000):
            with self.assertRaisesRegex(Failed, "progress: loss must be a number, but is"):
                value_of("loss", wrong)
        waiting = Waiting()
        for boundary, value in enumerate((math.nan, math.inf, -math.inf), 1):
            waiting.report("loss", boundary, value_of("loss", value))
        expected = [[1, "NaN"], [2, "Infinity"], [3, "-Infinity"]]
        self.assertEqual(waiting.take(3), {"loss": expected})

    @unittest.skipUnless(HAS_NUMPY, NO_NUMPY)
    def test_numpy_scalars_are_numbers(self) -> None:
        import numpy as np

        for value in (np.float32(0.5), np.float64(0.5), np.array(0.5)):
            self.assertEqual(value_of("loss", value), 0.5)
        self.assertEqual(value_of("n", np.int64(3)), 3.0)


class Reports(unittest.TestCase):
    def test_what_is_said_behind_a_boundary_comes_with_the_next_one(self) -> None:
        waiting = Waiting()
        waiting.report("loss", 4, 0.5)
        waiting.report("loss", 5, 0.4)
        self.assertEqual(waiting.take(4), {"loss": [[4, 0.5]]})
        self.assertTrue(waiting)
        self.assertEqual(waiting.take(5), {"loss": [[5, 0.4]]})

    def test_each_boundary_has_its_number_once_with_the_commit_that_covers_it(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 20, "mode": "numbers"}, commit={"every": 5})
            reports = child.finish()
        by_report = [[p[0] for p in r.head.get("numbers", {}).get("step", [])] for r in reports]
        told = [boundaries for boundaries in by_report if boundaries]
        self.assertEqual(told, [[*range(n, n + 5)] for n in (1, 6, 11, 16)] + [[21]])
        self.assertEqual([p[1] for p in numbers(reports, "step")], [*range(20), -1])

    def test_a_moved_run_has_one_curve(self) -> None:
        params = {"steps": 20, "mode": "numbers"}
        with Child("sums.py") as child:
            child.run(params, commit={"every": 1})
            whole = numbers(child.finish(), "step")
        cut: list[Any] = []
        with Child("sums.py") as child:
            child.run(params | {"sleep": 0.05})
            child.order({"is": "yield"})
            first = child.finish()
        self.assertEqual(first[-1].head["reason"], "yield")
        cut += numbers(first, "step")
        with Child("sums.py") as child:
            child.run(params, first[-1])
            cut += numbers(child.finish(), "step")
        self.assertEqual(cut, whole)


if __name__ == "__main__":
    unittest.main()
