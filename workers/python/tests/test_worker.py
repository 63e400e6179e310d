"""Every order and every report, against a stand-in for the agent, in real processes."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import unittest
from datetime import datetime
from typing import Any

from .support import DEADLINE, PROGRAMS, Child, Report, environment, frame, until

STEPS = {"steps": 20}
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def undisturbed(params: dict[str, Any]) -> Report:
    with Child("sums.py") as child:
        child.run(params)
        return child.finish()[-1]


class Life(unittest.TestCase):
    def test_a_run_says_ready_began_completed_and_the_process_serves_the_next(self) -> None:
        with Child("sums.py") as child:
            self.assertEqual(child.next().head, {"is": "ready"})
            totals = []
            for call in (1, 2, 3):
                child.run(STEPS | {"sleep": 0.001})
                began = child.next()
                self.assertEqual(began.kind, "began")
                self.assertRegex(began.head["at"], STAMP)
                done = child.finish()[-1]
                self.assertEqual((done.kind, done.head["capsules"]), ("completed", 21))
                self.assertRegex(done.head["computing_since"], STAMP)
                self.assertGreaterEqual(done.head["computed_until"], done.head["computing_since"])
                self.assertEqual(done.head["result"]["calls"], call)
                totals.append(done.head["result"]["total"])
            self.assertEqual(len(set(totals)), 1)
            child.socket.close()
            self.assertEqual(child.exit_status(), 0)

    def test_after_a_brief_run_the_next_says_only_at_its_end_when_it_began(self) -> None:
        with Child("sums.py") as child:
            for _ in range(20):  # on a loaded machine a run may take longer than a millisecond
                child.run({"steps": 1})
                kinds = [r.kind for r in child.finish()]
                if kinds == ["completed"]:
                    break
            self.assertEqual(kinds, ["completed"])

    def test_a_preparation_is_answered_and_its_error_told(self) -> None:
        with Child("sums.py") as child:
            child.next()
            child.order({"is": "prepare", "program": "test@1", "params": {"a": 1}})
            self.assertEqual(child.next().head, {"is": "prepared"})
            child.order({"is": "prepare", "program": "test@1", "params": {"bad": 1}})
            error = child.next().head["error"]
            self.assertIn("params.bad: must not be", error)
            child.run(STEPS)
            self.assertEqual(child.finish()[-1].head["result"]["prepared"], 1)

    def test_a_preparation_that_comes_during_a_run_is_done_after_it(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 200, "sleep": 0.001})
            child.order({"is": "prepare", "program": "test@1", "params": {}})
            self.assertEqual(child.finish()[-1].kind, "completed")
            self.assertEqual(child.next().kind, "prepared")

    def test_orders_that_cross_the_end_of_a_run_mean_nothing(self) -> None:
        with Child("sums.py") as child:
            for order in (
                {"is": "yield", "cause": "pressure"},
                {"is": "cancel"},
                {"is": "committed", "index": 3},
                {"is": "stretch", "interval_ms": 10},
                {"is": "reconfigure", "grant": {}},
                {"is": "data", "digest": "00"},
            ):
                child.order(order)
            child.run(STEPS)
            self.assertEqual(child.finish()[-1].kind, "completed")

    def test_a_program_sees_its_grant_and_its_inputs(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS, grant={"threads": 3, "cpus": [0], "device": {"uuid": "g"}, "new": 1})
            self.assertEqual(child.finish()[-1].head["result"]["threads"], 3)

    def test_what_is_printed_arrives_before_the_report_that_follows_it(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS | {"mode": "print"})
            child.finish()
            self.assertIn("said by the program", child.said())

    def test_progress_is_told_five_times_a_second_at_most(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 80, "sleep": 0.01})
            reports = child.finish()
        told = [r for r in reports if r.kind == "progress"]
        done = reports[-1].head
        since, until = (
            datetime.fromisoformat(done[name].replace("Z", "+00:00"))
            for name in ("computing_since", "computed_until")
        )
        # By the clock of the program: this process may be kept waiting.
        self.assertGreaterEqual((until - since).total_seconds() / 0.2, len(told))
        self.assertGreater(len(told), 1)
        for report in told:
            self.assertEqual(report.head["of"], 80)
            self.assertRegex(report.head["note"], "^total ")


class Commits(unittest.TestCase):
    def test_every_kth_boundary_is_committed_with_its_outputs(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS | {"output": 2}, commit={"every": 5})
            reports = child.finish()
            boundaries = [r for r in reports if r.kind == "boundary"]
            self.assertEqual([r.head["index"] for r in boundaries], [5, 10, 15, 20])
            for report in boundaries:
                self.assertEqual(report.head["reason"], "commit")
                self.assertRegex(report.head["computed_at"], STAMP)
                self.assertGreaterEqual(report.head["compute_us"], 0)
                self.assertEqual(report.head["of"], 20)
                self.assertNotIn("digest", report.head)
            steps = [int(r.outputs["last.txt"].split()[0]) for r in boundaries]
            self.assertEqual(steps, [4, 8, 14, 18])
            self.assertEqual(reports[-1].outputs, {})

    def test_an_output_that_no_commit_took_comes_with_the_end(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS | {"output": 3})
            done = child.finish()[-1]
            self.assertEqual(done.outputs["last.txt"].split()[0], b"18")

    def test_only_a_window_of_commits_is_under_way(self) -> None:
        for pad, window in ((0, 4), (400_000, 2)):
            with self.subTest(pad=pad), Child("sums.py") as child:
                child.run(STEPS | {"pad": pad}, commit={"every": 1})
                first = [child.until("boundary") for _ in range(window)]
                self.assertTrue(child.is_silent(0.3))
                child.ack(first[0])
                self.assertEqual(child.until("boundary").head["index"], window + 1)
                self.assertTrue(child.is_silent(0.2))
                # One word covers all before it.
                child.order({"is": "committed", "index": window + 1})
                self.assertEqual(child.until("boundary").head["index"], window + 2)

    def test_commits_by_time_come_so_far_apart_and_one_at_a_time(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "spin": 1e-4}, commit={"every_ms": 50})
            first = child.until("boundary")
            self.assertGreaterEqual(first.head["compute_us"], 50_000)
            # Unacknowledged: no other follows, but word of where it stands.
            self.assertEqual(child.next().kind, "progress")
            child.ack(first)
            second = child.until("boundary")
            # Counted from when the first was sent, not from when it was due.
            self.assertGreaterEqual(second.head["compute_us"], 40_000)
            child.order({"is": "stretch", "interval_ms": 600})
            child.ack(second)
            self.assertGreaterEqual(child.until("boundary").head["compute_us"], 550_000)

    def test_auto_commits_about_once_a_second(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "spin": 1e-4})
            for _ in range(2):
                report = child.until("boundary")
                self.assertGreaterEqual(report.head["compute_us"], 900_000)
                child.ack(report)

    def test_long_capsules_do_not_make_auto_commits_rarer(self) -> None:
        # Its acknowledgement waits for the end of a capsule: that is not what the commit took.
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "sleep": 0.1})
            child.ack(child.until("boundary"))
            self.assertLess(child.until("boundary").head["compute_us"], 5_000_000)

    def test_a_large_state_is_what_it_was_at_its_boundary_though_the_program_went_on(self) -> None:
        params = {"steps": 40, "pad": 3_000_000}
        with Child("sums.py") as child:
            child.run(params, commit={"every": 7})
            reports = child.finish()
        boundaries = [r for r in reports if r.kind == "boundary"]
        for report in boundaries:
            with Child("sums.py") as child:
                child.run(params, resume=report)
                done = child.finish()[-1]
            self.assertEqual(done.head["result"]["total"], reports[-1].head["result"]["total"])

    def test_without_an_acknowledgement_for_a_lease_it_waits_at_a_boundary(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "spin": 1e-4}, commit={"every_ms": 20}, lease_ms=200)
            report = child.until("boundary")
            until("the program waits", lambda: "waits at a boundary" in child.said())
            while not child.is_silent(0.4):
                self.assertEqual(child.next().kind, "progress")
            child.ack(report)
            self.assertGreater(child.until("boundary").head["index"], report.head["index"])


class Moves(unittest.TestCase):
    def test_a_yield_stops_at_a_boundary_and_a_fresh_process_goes_on_bit_by_bit(self) -> None:
        params = {"steps": 30, "output": 1}
        whole = undisturbed(params)
        report = None
        indices = []
        # At the next boundary, and then at certain ones.
        for at in (None, 7, 8, 15, 29):
            with Child("sums.py") as child:
                child.run(params | {"sleep": 0.002}, resume=report)
                order = {"is": "yield", "cause": "memory pressure", "deadline_ms": 1000}
                child.order(order | ({} if at is None else {"at": at}))
                report = child.finish()[-1]
                self.assertEqual((report.kind, report.head["reason"]), ("boundary", "yield"))
                indices.append(report.head["index"])
                self.assertIn("last.txt", report.outputs)
                # The same process serves another run after it.
                child.run({"steps": 1})
                self.assertEqual(child.finish()[-1].kind, "completed")
        self.assertEqual(indices[1:], [7, 8, 15, 29])
        self.assertLess(indices[0], 7)
        with Child("sums.py") as child:
            child.run(params, resume=report)
            last = child.finish()[-1]
        self.assertEqual(last.head["result"]["total"], whole.head["result"]["total"])
        self.assertEqual(last.head["capsules"], whole.head["capsules"])

    def test_a_run_that_has_resumed_keeps_no_second_copy_of_its_state(self) -> None:
        size = 100 << 20
        resident, report = [], None
        for at in (2, 3):
            with Child("large.py") as child:
                child.run({"bytes": size}, report, commit={"every_ms": 3_600_000})
                resident.append(child.until("completed").head["result"]["resident"])
            with Child("large.py") as child:
                child.run({"bytes": size}, report)
                child.order({"is": "yield", "at": at})
                report = child.finish()[-1]
        self.assertLess(resident[1] - resident[0], size // 2)

    def test_a_yield_for_a_boundary_that_has_passed_stops_at_the_next(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "sleep": 0.001})
            reached = child.until("progress").head["index"]
            child.order({"is": "yield", "at": 2})
            self.assertGreater(child.finish()[-1].head["index"], reached)

    def test_equal_boundaries_have_equal_bytes_whoever_computes_them(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS, commit={"every": 1})
            first = {r.head["index"]: r.state for r in child.finish() if r.kind == "boundary"}
        with Child("sums.py", env={"PYTHONHASHSEED": "7"}) as child:
            child.run(STEPS, commit={"every": 4})
            at_4 = child.until("boundary")
        with Child("sums.py", env={"PYTHONHASHSEED": "8"}) as child:
            child.run(STEPS, resume=at_4, commit={"every": 1})
            second = {r.head["index"]: r.state for r in child.finish() if r.kind == "boundary"}
        self.assertEqual(first[4], at_4.state)
        self.assertEqual(list(second), list(range(5, 21)))
        self.assertEqual({n: first[n] for n in second}, second)

    def test_kill_9_loses_only_what_came_after_the_last_commit(self) -> None:
        params = {"steps": 40, "sleep": 0.005}
        whole = undisturbed(params)
        report = None
        for _ in range(3):
            with Child("sums.py") as child:
                child.run(params, resume=report, commit={"every": 4})
                report = child.until("boundary")
                child.kill()
        self.assertEqual(report and report.head["index"], 12)
        with Child("sums.py") as child:
            child.run(params, resume=report)
            done = child.finish()[-1]
        self.assertEqual(done.head["result"]["total"], whole.head["result"]["total"])
        self.assertTrue(done.head["result"]["resumed"])

    def test_a_cancel_stops_without_a_commit(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "sleep": 0.001})
            child.until("began")
            child.order({"is": "cancel"})
            self.assertEqual(child.finish()[-1].head, {"is": "cancelled"})
            child.run(STEPS)
            self.assertEqual(child.finish()[-1].kind, "completed")

    def test_a_cancel_reaches_a_program_that_waits_for_an_acknowledgement(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6}, commit={"every": 1})
            for _ in range(4):
                child.until("boundary")
            child.order({"is": "cancel"})
            self.assertEqual(child.finish(ack=False)[-1].kind, "cancelled")

    def test_another_grant_is_told_at_a_boundary_and_the_computation_goes_on(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 300, "sleep": 0.001}, grant={"threads": 2})
            child.order({"is": "reconfigure", "grant": {"threads": 5}})
            result = child.finish()[-1].head["result"]
            self.assertEqual((result["grants"], result["threads"]), ([5], 5))

    def test_a_parked_run_waits_with_another_grant_and_goes_on_bit_by_bit(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 300, "sleep": 0.001}, grant={"threads": 2})
            child.until("began")
            child.order({"is": "park", "cause": "others go first", "grant": {"threads": 1}})
            stop = child.until("boundary")
            while stop.head["reason"] != "park":
                stop = child.until("boundary")
            self.assertEqual(child.next().head, {"is": "aside"})
            child.order({"is": "committed", "index": stop.head["index"]})
            child.socket.settimeout(0.3)
            with self.assertRaises(TimeoutError):
                child.next()
            child.socket.settimeout(DEADLINE)
            child.order({"is": "unpark", "grant": {"threads": 5}})
            result = child.finish()[-1].head["result"]
            self.assertEqual((result["grants"], result["threads"]), ([1, 5], 5))
        self.assertEqual(result["total"], undisturbed({"steps": 300}).head["result"]["total"])

    def test_a_parked_run_ends_where_it_stands(self) -> None:
        with Child("sums.py") as child:
            for order in ({"is": "cancel"}, {"is": "yield"}):
                child.run({"steps": 10**6, "sleep": 0.001})
                child.until("began")
                child.order({"is": "park"})
                child.until("aside")
                child.order(order)
                self.assertEqual(child.until("cancelled").kind, "cancelled")
            child.run(STEPS)
            self.assertEqual(child.finish()[-1].kind, "completed")

    def test_a_wish_for_more_is_answered_and_orders_may_come_before(self) -> None:
        with Child("sums.py") as child:
            child.run({"mode": "reserve"})
            asked = child.until("reserve")
            self.assertEqual(asked.head, {"is": "reserve", "memory_bytes": 8 << 30})
            child.order({"is": "stretch", "interval_ms": 10})
            grant = {"memory_bytes": 8 << 30}
            child.order({"is": "reserved", "answer": "granted", "grant": grant})
            self.assertEqual(child.until("reserve").head["device_memory_bytes"], 1)
            child.order({"is": "reserved", "answer": "moves", "reason": "not here"})
            result = child.finish()[-1].head["result"]
            self.assertEqual(result["memory"], 8 << 30)
            self.assertEqual(
                result["answers"], [["granted", True, None], ["moves", False, "not here"]]
            )

    def test_a_program_is_told_where_it_is_and_what_it_gets(self) -> None:
        with Child("sums.py") as child:
            child.run({"mode": "surroundings"})
            child.until("surroundings")
            child.order({"is": "stretch", "interval_ms": 10})
            vector = {"readings": [{"signal": "memory", "value": 0.5, "unit": "bytes"}]}
            offers = {"nodes": [{"node": "n2", "free_slots": 2}, {"node": "n3", "free_slots": 1}]}
            known = {"node": "n1", "grant": {}, "vector": vector, "offers": offers}
            child.order({"is": "surroundings", **known})
            child.until("surroundings")
            child.order({"is": "surroundings", "node": "n1", "unknown": "nobody answers"})
            self.assertEqual(child.until("ask").head, {"is": "ask", "threads": 3})
            child.order({"is": "reconfigure", "grant": {"threads": 3}})
            child.order({"is": "asked", "answer": "granted", "grant": {"threads": 3}})
            asked = child.until("ask").head
            self.assertEqual(asked, {"is": "ask", "cpus": [0, 1], "memory_bytes": 5})
            child.order({"is": "asked", "answer": "refused", "reason": "no"})
            result = child.finish()[-1].head["result"]
            around = [["n1", 3, 0.5, None], ["n1", None, None, "nobody answers"]]
            self.assertEqual(result["around"], around)
            self.assertEqual(result["asked"], [["granted", 3], ["refused", None]])

    def test_what_is_emitted_travels_with_the_next_commit_and_with_the_end(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 5, "emit": 2}, commit={"every": 2})
            ends = [r for r in child.finish() if r.kind in ("boundary", "completed")]
            places = [
                [(e["name"], e["boundary"], e["index"]) for e in r.head.get("emits", [])]
                for r in ends
            ]
            both = [[("total", n, 0), ("more", n, 1)] for n in range(1, 6)]
            self.assertEqual(places, [both[0] + both[1], both[2] + both[3], both[4]])
            text = base64.b64decode(ends[0].head["emits"][0]["data"])
            self.assertEqual(json.loads(text)["step"], 0)

    def test_so_many_messages_are_committed_sooner_and_too_many_are_refused(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10, "emit": 100}, commit={"every": 1000})
            counts = [len(r.head.get("emits", [])) for r in child.finish()]
            self.assertEqual(sum(counts), 1000)
            self.assertLessEqual(max(counts), 256)
        with Child("sums.py") as child:
            child.run({"steps": 10, "emit": 129})
            last = child.finish()[-1]
            self.assertEqual((last.kind, last.head["permanent"]), ("failed", True))
            self.assertIn("more than 128 messages", last.head["reason"])

    def test_so_many_outputs_are_committed_before_the_message_that_names_them_is_full(self) -> None:
        with Child("ranges.py") as child:
            child.run({"tiles": {"from": 0, "to": 100}, "total": 100}, commit={"every": 1000})
            counts = [len(r.head.get("outputs", [])) for r in child.finish()]
            self.assertEqual(sum(counts), 101)
            self.assertLessEqual(max(counts), 20)

    def test_a_program_that_catches_the_stop_has_yielded_all_the_same(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "mode": "swallow", "sleep": 0.001})
            child.order({"is": "yield"})
            last = child.finish()[-1]
            self.assertEqual((last.kind, last.head.get("reason")), ("boundary", "yield"))
            child.run(STEPS)
            self.assertEqual([r.kind for r in child.finish()][-1], "completed")

    def test_a_fetch_is_answered_with_data_and_orders_may_come_before(self) -> None:
        with Child("sums.py") as child:
            child.run({"mode": "fetch"})
            asked = child.until("fetch")
            self.assertEqual(asked.head, {"is": "fetch", "digest": "ab" * 32, "bytes": 5})
            child.order({"is": "stretch", "interval_ms": 10})
            child.order({"is": "data", "digest": "ab" * 32}, b"12345")
            self.assertEqual(child.until("fetch").head["digest"], "cd" * 32)
            child.order({"is": "data", "digest": "cd" * 32}, b"\x01\x02")
            result = child.finish()[-1].head["result"]
            self.assertEqual(result, {"bytes": 5, "load": "0102"})

    def test_a_fetch_that_fails_says_whether_another_attempt_may_help(self) -> None:
        for answer, body, permanent, words in (
            ({"error": "the store is away"}, b"", False, "the store is away"),
            ({"error": "no such object", "permanent": True}, b"", True, "no such object"),
            ({}, b"123", True, "has 3 bytes, not 5"),
        ):
            with self.subTest(words), Child("sums.py") as child:
                child.run({"mode": "fetch"})
                child.until("fetch")
                child.order({"is": "data", "digest": "ab" * 32} | answer, body)
                failed = child.finish()[-1]
                self.assertEqual((failed.kind, failed.head["permanent"]), ("failed", permanent))
                self.assertIn(words, failed.head["reason"])


class Errors(unittest.TestCase):
    def test_an_exception_is_a_failed_attempt_with_its_traceback_and_the_process_ends(self) -> None:
        with Child("sums.py") as child:
            child.run(STEPS | {"mode": "raise"})
            failed = child.finish()[-1]
            self.assertEqual((failed.kind, failed.head["permanent"]), ("failed", False))
            self.assertRegex(
                failed.head["reason"], r"^ValueError: a bug at step 3 \(sums\.py:\d+ in main\)$"
            )
            self.assertEqual(child.exit_status(), 1)
            self.assertIn('raise ValueError("a bug at step 3")', child.said())
            self.assertNotIn("worker.py", child.said())

    def test_a_failure_says_whether_trying_again_is_pointless(self) -> None:
        for mode, permanent, words in (
            ("fail", True, "params.mode: must not be fail"),
            ("transient", False, "the file server is away"),
            ("exit", False, "SystemExit: 0"),
            ("result", True, "result.bad is a object, which JSON cannot say"),
        ):
            with self.subTest(mode), Child("sums.py") as child:
                child.run({"mode": mode})
                failed = child.finish()[-1]
                self.assertEqual((failed.kind, failed.head["permanent"]), ("failed", permanent))
                self.assertIn(words, failed.head["reason"])
                if permanent:
                    child.run(STEPS)
                    self.assertEqual(child.finish()[-1].kind, "completed")

    def test_numbers_that_json_cannot_say_do_not_spoil_a_result(self) -> None:
        with Child("sums.py") as child:
            child.run({"mode": "nan"})
            self.assertEqual(
                child.finish()[-1].head["result"],
                {"loss": "NaN", "best": "-Infinity", "list": [1, 2]},
            )

    def test_a_state_of_another_program_fails_for_good(self) -> None:
        bogus = Report({"is": "boundary", "index": 3, "bytes": 5}, b"other")
        with Child("sums.py") as child:
            child.run(STEPS, resume=bogus)
            failed = child.finish()[-1]
            self.assertEqual((failed.kind, failed.head["permanent"]), ("failed", True))
            self.assertIn("not written by this kit", failed.head["reason"])

    def test_bad_frames_end_the_process_with_status_2_and_the_reason(self) -> None:
        good = frame({"is": "committed", "index": 1})
        for raw, words in (
            (b"\xff\xff\xff\xff" + good[4:], "head of 4294967295 bytes, over the limit"),
            (good[:4] + b"\xff" * 8 + good[12:], "over the limit of 8589934592"),
            (good[:12] + b"!" + good[13:], "head that cannot be read"),
            (frame([1]), "head that cannot be read"),
            (frame({"is": "dance"}), "order 'dance' is not known"),
            (frame({"is": "run", "execution": "x"}), "an order to run"),
            (
                frame(
                    {
                        "is": "run",
                        "execution": "x",
                        "epoch": 1,
                        "program": "p",
                        "params": {},
                        "commit": "never",
                        "lease_ms": 1,
                    }
                ),
                "commit policy 'never' is not known",
            ),
        ):
            with self.subTest(words), Child("sums.py") as child:
                child.next()
                child.socket.sendall(raw)
                self.assertEqual(child.exit_status(), 2)
                self.assertIn(words, child.said())

    def test_when_the_agent_is_gone_nobody_is_computed_for(self) -> None:
        with Child("sums.py") as child:
            child.run({"steps": 10**6, "sleep": 0.001})
            child.until("began")
            child.socket.close()
            self.assertEqual(child.exit_status(), 3)
        with Child("sums.py") as child:
            child.next()
            child.socket.sendall(frame({"is": "cancel"})[:7])
            child.socket.close()
            self.assertEqual(child.exit_status(), 3)

    def test_a_socket_that_is_none_is_named(self) -> None:
        for fd in ("77", "x"):
            done = subprocess.run(
                [sys.executable, str(PROGRAMS / "sums.py")],
                env=environment(FIEC_SOCKET_FD=fd),
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"FIEC_SOCKET_FD is '{fd}'", done.stderr)

    def test_what_the_program_starts_does_not_hold_the_socket_open(self) -> None:
        with Child("forks.py") as child:
            child.run({})
            pids = child.until("completed").head["result"]["pids"]
            child.kill()
            with self.assertRaises(EOFError):
                child.next()
            for pid in pids:
                os.kill(pid, 9)
