"""Ranges of tiles that are spread: in memory, and against an agent over frames."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from typing import Any

import fiec
from fiec import testing

from .programs import ranges
from .support import PROGRAMS, Child, Report, environment

PARAMS = {"tiles": {"from": 3, "to": 23}}


def undisturbed(params: dict[str, Any]) -> testing.Outcome:
    return testing.run(ranges.main, params)


class Ranges(unittest.TestCase):
    def test_tiles_are_handed_out_in_order_and_half_of_what_is_left_can_go(self) -> None:
        tiles = fiec.Tiles(4, 9)
        self.assertEqual(tiles.last_half(), (7, 9))
        self.assertEqual((next(tiles), tiles.left, len(tiles)), (4, 4, 5))
        tiles.end = 6
        self.assertIsNone(tiles.last_half())
        self.assertEqual(list(tiles), [5])
        self.assertIn("next=6", repr(tiles))

    def test_what_comes_back_begins_at_the_end_and_is_what_was_given(self) -> None:
        tiles = fiec.Tiles(0, 4)
        with self.assertRaisesRegex(fiec.Failed, "not at its end"):
            tiles.take_back((4, 8), None)
        list(tiles)
        with self.assertRaisesRegex(fiec.Failed, "not at its end before tile 5"):
            tiles.take_back((5, 8), None)
        with self.assertRaisesRegex(fiec.Failed, "the part had 4 to 8, but its state is"):
            tiles.take_back((4, 8), fiec.Tiles(4, 6))
        part = fiec.Tiles(4, 8)
        next(part)
        tiles.take_back((4, 8), part)
        self.assertEqual((tiles.begin, tiles.next, tiles.end), (0, 5, 8))

    def test_a_bad_range_is_refused_with_its_rule(self) -> None:
        for given in ([1, 2], {"from": 2, "to": 2}, {"from": -1, "to": 2}, None, {"from": 1}):
            failed = undisturbed({"tiles": given} if given else {"tiles": 7})
            self.assertEqual(failed.ending, "failed")
            self.assertIn("params.tiles: must be a range of tiles like {", failed.reason or "")
        far = undisturbed({"tiles": {"from": 0, "to": 21}})
        words = "params.tiles.to: must be at most 20, the number of tiles, but is 21"
        self.assertEqual(far.reason, words)
        with self.assertRaises(ValueError):
            fiec.Tiles(2, 1)

    def test_without_a_range_all_are_computed_and_the_state_of_another_is_refused(self) -> None:
        self.assertEqual(undisturbed({}).result["tiles"], 20)
        tiles = fiec.Tiles(1, 4)
        for state in ({"begin": 0, "next": 1, "end": 2}, {"begin": 1, "next": 5, "end": 4}):
            with self.assertRaises(ValueError):
                tiles.load_state_dict(state)


class InMemory(unittest.TestCase):
    def test_however_a_range_is_spread_results_and_outputs_are_those_of_one_run(self) -> None:
        for mode in (None, "dataclass"):
            params = {"tiles": {"from": 0, "to": 20}, "mode": mode}
            whole, parts = undisturbed(params), 0
            for seed in range(40):
                found = testing.spread(ranges.main, params, seed=seed)
                with self.subTest(seed=seed, mode=mode):
                    self.assertEqual(found.ending, "completed", found.reason)
                    self.assertEqual(found.result, whole.result)
                    self.assertEqual(found.outputs, whole.outputs)
                    parts += found.parts
            self.assertGreater(parts, 60)

    def test_the_last_state_of_a_spread_run_is_that_of_an_undisturbed_one(self) -> None:
        params = {"tiles": {"from": 0, "to": 20}}
        every: Any = {"every": 1}
        whole = testing.run(ranges.main, params, commit=every)
        for seed in range(12):
            found = testing.spread(ranges.main, params, seed=seed, commit=every)
            self.assertEqual(found.state, whole.state, f"seed {seed}")

    def test_a_program_that_loses_what_its_parts_found_is_found_out(self) -> None:
        params = {"tiles": {"from": 0, "to": 20}, "mode": "lost"}
        found = testing.spread(ranges.main, params, seed=1)
        self.assertGreater(found.parts, 0)
        self.assertNotEqual(found.result, undisturbed(params).result)

    def test_tiles_that_are_not_a_part_of_the_state_are_an_error_that_says_so(self) -> None:
        failed = undisturbed({"mode": "hidden"})
        self.assertEqual(failed.ending, "failed")
        self.assertIn("run.state(tiles=run.tiles(), …)", failed.reason or "")

    def test_a_shared_range_that_is_left_early_fails_with_the_reason(self) -> None:
        params = {"tiles": {"from": 0, "to": 20}, "mode": "early"}
        self.assertEqual(undisturbed(params).result["tiles"], 3)
        found = testing.spread(ranges.main, params, seed=1)
        self.assertEqual(found.ending, "failed")
        self.assertIn("left early, though the range is shared", found.reason or "")

    def test_a_program_that_takes_nothing_back_is_never_split(self) -> None:
        params = {"tiles": {"from": 0, "to": 20}, "mode": "alone"}
        found = testing.spread(ranges.main, params, seed=1)
        self.assertEqual((found.parts, found.result), (0, undisturbed(params).result))


class AtATerminal(unittest.TestCase):
    def check(self, *words: str) -> subprocess.CompletedProcess[str]:
        tiles = 'tiles={"from": 0, "to": 12}'
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.run(
                [sys.executable, str(PROGRAMS / "ranges.py"), tiles, *words, "--check"],
                cwd=folder,
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
            )

    def test_a_check_spreads_what_has_a_range(self) -> None:
        done = self.check("--yield-every", "4")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, "equal bits, too, when spread 3 times over [1-9]")
        done = self.check("mode=alone", "--yield-every", "4")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("it cannot be spread", done.stdout)

    def test_a_check_finds_a_program_that_loses_what_its_parts_found(self) -> None:
        done = self.check("mode=lost", "--yield-every", "4")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("a spread run differs from a whole one", done.stdout)
        self.assertIn("output all:", done.stdout)

    def test_a_check_names_an_output_that_several_make_with_other_bytes(self) -> None:
        done = self.check("mode=same", "--yield-every", "4")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("output 'tile' was made by two of those that share a range", done.stdout)
        self.assertEqual(done.stderr.count("Traceback"), 0)


class OverFrames(unittest.TestCase):
    def spread(self, child: Child, tiles: tuple[int, int], **more: Any) -> None:
        params = {"tiles": {"from": tiles[0], "to": tiles[1]}, "sleep": more.pop("sleep", 0)}
        child.run(params, spread=more.pop("spread", {}), **more)

    def resumed(self, child: Child, report: Report, tiles: tuple[int, int], **more: Any) -> None:
        """Goes on from a report; ``part``: one that is taken back, with its range."""
        part: Report | None = more.pop("part", None)
        given = more.pop("given")
        merge, body = {"from": given[0], "to": given[1]}, report.state
        if part is not None:
            merge["bytes"], body = len(part.state), body + part.state
        head = {
            "is": "run",
            "execution": "0198c0de-0000-7000-8000-000000000001",
            "epoch": 2,
            "program": "test@1",
            "params": {"tiles": {"from": tiles[0], "to": tiles[1]}},
            "commit": "auto",
            "boundary": report.head["index"],
            "lease_ms": 60_000,
            "spread": more.pop("spread", {}),
            "merge": merge,
        }
        child.order(head, body)

    def end(self, child: Child) -> Report:
        """The boundary with which a shared range ends; the completion behind it has its index."""
        report = child.until("boundary", "failed")
        while report.head.get("reason") != "end":
            child.ack(report)
            report = child.until("boundary", "failed", "completed")
        done = child.next()
        self.assertEqual((done.kind, done.head["capsules"]), ("completed", report.head["index"]))
        self.assertNotIn("outputs", done.head)
        self.assertNotIn("result", done.head)
        return report

    def test_a_split_is_answered_at_the_next_boundary_by_the_range_that_goes(self) -> None:
        with Child("ranges.py") as child:
            self.spread(child, (0, 20), sleep=0.05)
            child.until("began")
            child.order({"is": "split"})
            report = child.until("boundary")
            given = report.head["split"]
            self.assertEqual(given["to"], 20)
            self.assertEqual(report.head["reason"], "commit")
            self.assertEqual(report.head["of"], given["from"])
            child.ack(report)
            # What it has given away is not its own any more.
            end = self.end(child)
            self.assertEqual(end.head["index"], given["from"] + 1)

    def test_what_cannot_be_split_says_so_and_goes_on(self) -> None:
        params = {"tiles": {"from": 0, "to": 4}, "sleep": 0.05}
        for more, shares in (({"mode": "alone"}, {"parts": 0}), ({}, None)):
            with Child("ranges.py") as child:
                child.run({**params, **more}, spread=shares)
                child.until("began")
                child.order({"is": "split"})
                child.until("whole")
                done = child.finish()[-1]
                self.assertEqual(done.head["result"], undisturbed({**params, **more}).result)

    def test_a_part_ends_with_its_state_which_its_holder_takes_back(self) -> None:
        whole = undisturbed({"tiles": {"from": 0, "to": 8}})
        with Child("ranges.py") as child:
            self.spread(child, (0, 8), sleep=0.02)
            child.until("began")
            child.order({"is": "split"})
            report = child.until("boundary")
            cut = report.head["split"]["from"]
            child.ack(report)
            holder = self.end(child)
        with Child("ranges.py") as child:
            self.spread(child, (cut, 8), spread={"part": True})
            part = self.end(child)
            made = [name for name in part.outputs if name != "all"]
            self.assertEqual(len(made), 8 - cut)
            self.assertNotIn("all", part.outputs, "what follows the loop is the whole's")
            # The same process, warm, as the holder again.
            self.resumed(child, holder, (0, 8), given=(cut, 8), part=part)
            merged = child.until("boundary")
            self.assertTrue(merged.head["merged"])
            self.assertEqual(merged.head["index"], holder.head["index"] + 1)
            child.ack(merged)
            done = child.finish()[-1]
        self.assertEqual(done.head["result"], whole.result)
        self.assertEqual(done.outputs, {"all": whole.outputs["all"]})

    def test_a_part_that_has_reached_no_boundary_leaves_all_of_its_range(self) -> None:
        whole = undisturbed({"tiles": {"from": 0, "to": 8}})
        with Child("ranges.py") as child:
            self.spread(child, (0, 4), spread={"parts": 1})
            holder = self.end(child)
            self.resumed(child, holder, (0, 4), given=(4, 8))
            merged = child.until("boundary")
            self.assertEqual((merged.head["merged"], merged.head["of"]), (True, 10))
            child.ack(merged)
            done = child.finish()[-1]
            self.assertEqual(done.head["result"], whole.result)

    def test_a_holder_of_several_parts_ends_again_after_each_but_the_last(self) -> None:
        with Child("ranges.py") as child:
            self.spread(child, (0, 4), spread={"parts": 2})
            holder = self.end(child)
            self.spread(child, (4, 6), spread={"part": True})
            part = self.end(child)
            more = {"given": (4, 6), "part": part, "spread": {"parts": 1}}
            self.resumed(child, holder, (0, 4), **more)
            again = self.end(child)
            self.assertEqual(again.head["index"], holder.head["index"] + 2)

    def test_a_part_that_fits_nothing_fails_for_good_with_the_reason(self) -> None:
        with Child("ranges.py") as child:
            self.spread(child, (0, 4), spread={"parts": 1})
            holder = self.end(child)
            self.resumed(child, holder, (0, 4), given=(5, 8))
            failed = child.finish()[-1]
            self.assertEqual((failed.kind, failed.head["permanent"]), ("failed", True))
            self.assertIn("not at its end before tile 5", failed.head["reason"])

    def test_a_cancel_reaches_a_holder_at_its_end(self) -> None:
        with Child("ranges.py") as child:
            self.spread(child, (0, 2), spread={"parts": 1}, sleep=0.2)
            child.until("began")
            child.order({"is": "cancel"})
            self.assertEqual(child.finish()[-1].kind, "cancelled")

    def test_damaged_orders_of_sharing_end_the_process_with_status_2(self) -> None:
        absent = {"from": 1, "to": 2, "bytes": 9}
        for field, value in (
            ("spread", 7),
            ("merge", 7),
            ("merge", {"from": 1}),
            ("merge", absent),
        ):
            with self.subTest(value=value), Child("ranges.py") as child:
                child.run(PARAMS, **{field: value})  # type: ignore[arg-type]
                self.assertEqual(child.exit_status(), 2)


if __name__ == "__main__":
    unittest.main()
