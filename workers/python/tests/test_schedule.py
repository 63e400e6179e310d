"""The commit policies; the same cases as those of the Rust kit."""

from __future__ import annotations

import unittest

from fiec.errors import FrameError
from fiec.schedule import (
    COMMIT,
    COMMIT_WHEN_ACKNOWLEDGED,
    NO,
    SMALL,
    WINDOW,
    WINDOW_LARGE,
    Schedule,
)


class Policies(unittest.TestCase):
    def test_every_kth_boundary_is_kept_by_waiting_never_by_skipping(self) -> None:
        for size, window in ((SMALL, WINDOW), (SMALL + 1, WINDOW_LARGE)):
            s = Schedule({"every": 2}, 60.0, 0.0, 10)
            index = 10
            for _ in range(window):
                self.assertEqual(s.gate(), index + 2)
                self.assertEqual(s.boundary(index + 1, 1.0), NO)
                self.assertEqual(s.boundary(index + 2, 1.0), COMMIT)
                index += 2
                s.sent(index, 1.0, 1e-3, size)
            self.assertEqual(s.boundary(index + 2, 1.0), COMMIT_WHEN_ACKNOWLEDGED)
            s.acknowledged(1e-3)
            self.assertFalse(s.is_full())

    def test_a_commit_by_time_is_skipped_while_one_is_unacknowledged(self) -> None:
        s = Schedule({"every_ms": 10}, 0.0, 0.0, 0)
        self.assertEqual(s.boundary(1, 0.009), NO)
        self.assertEqual(s.boundary(2, 0.010), COMMIT)
        s.sent(2, 0.010, 1e-3, 1)
        self.assertEqual(s.boundary(3, 0.030), NO)
        s.acknowledged(1e-3)
        self.assertEqual(s.boundary(4, 0.031), COMMIT)
        s.stretch(0.1)
        self.assertEqual(s.boundary(4, 0.031), NO)

    def test_auto_keeps_commits_under_one_per_cent(self) -> None:
        s = Schedule("auto", 0.0, 0.0, 0)
        self.assertEqual(s.boundary(1, 0.999), NO)
        self.assertEqual(s.boundary(2, 1.0), COMMIT)
        s.sent(2, 1.0, 0.010, 1)
        s.acknowledged(0.040)
        self.assertEqual(s.boundary(3, 5.999), NO)
        self.assertEqual(s.boundary(4, 6.0), COMMIT)

    def test_a_policy_that_is_none_is_refused(self) -> None:
        for bad in ("never", {"every": 0}, {"every": 1, "every_ms": 1}, {"every_ms": "1"}, None):
            with self.subTest(bad=bad), self.assertRaises(FrameError):
                Schedule(bad, 0.0, 0.0, 0)
