"""Without a worker: a folder keeps the state, whatever happens to the process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fiec import testing
from fiec.store import Store

from .programs import sums
from .support import PROGRAMS, environment, until


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        temp = tempfile.TemporaryDirectory()
        self.addCleanup(temp.cleanup)
        self.cwd = Path(temp.name)

    def command(self, program: str, *words: str) -> list[str]:
        return [sys.executable, str(PROGRAMS / program), *words]

    def run_it(
        self, *words: str, program: str = "sums.py", hash_seed: str = "0"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(program, *words),
            cwd=self.cwd,
            env=environment(PYTHONHASHSEED=hash_seed),
            capture_output=True,
            text=True,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command("sums.py", *words),
            cwd=self.cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def home(self) -> Path:
        found = list((self.cwd / ".fiec" / "sums").glob("*"))
        self.assertLessEqual(len(found), 1)
        return found[0] if found else self.cwd / "none"

    def result(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.home() / "result.json").read_text())
        return found

    def boundary(self) -> int:
        """The boundary of the last commit; -1 for none."""
        try:
            line = (self.home() / "state").read_bytes().partition(b"\n")[0]
        except (OSError, ValueError):
            return -1
        return int(json.loads(line)["boundary"])


class LocalRuns(Folder):
    def test_a_run_ends_with_its_result_and_its_outputs_in_the_folder(self) -> None:
        done = self.run_it("steps=8", "output=3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["capsules"], 9)
        self.assertTrue((self.home() / "outputs" / "last.txt").read_text().startswith("6 "))
        self.assertFalse((self.home() / "state").exists())
        self.assertIn("completed", done.stderr)
        self.assertEqual(json.loads((self.home() / "params.json").read_text())["steps"], 8)

    def test_kill_9_at_any_time_and_a_new_start_goes_on_to_the_same_bits(self) -> None:
        words = ("steps=400", "sleep=0.005", "output=1")
        done = self.run_it(*words)
        self.assertEqual(done.returncode, 0, done.stderr)
        whole = self.result()
        output = (self.home() / "outputs" / "last.txt").read_bytes()
        last = -1
        self.assertEqual(self.run_it(*words, "--fresh", "--yield-after", "1").returncode, 85)
        for _ in range(4):
            process = self.start(*words, "--commit", "1")
            until("another commit", lambda: self.boundary() > last + 5)
            process.send_signal(signal.SIGKILL)
            process.wait()
            last = self.boundary()
        self.assertGreater(last, 20)
        done = self.run_it(*words)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"continues from boundary {last}", done.stderr)
        again = self.result()
        for name in ("capsules", "execution"):
            self.assertEqual(name in again, True)
        self.assertEqual(again["capsules"], whole["capsules"])
        self.assertEqual(self.total(again), self.total(whole))
        self.assertEqual((self.home() / "outputs" / "last.txt").read_bytes(), output)

    def total(self, result: dict[str, object]) -> object:
        inner = result["result"]
        assert isinstance(inner, dict)
        return inner["total"]

    def test_ctrl_c_and_sigterm_yield_at_a_boundary_that_is_kept(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                before = self.boundary()
                process = self.start("steps=100000", "sleep=0.002", "--commit", "100ms")
                until("a commit", lambda: self.boundary() > before)
                before = self.boundary()
                process.send_signal(number)
                _, said = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 85)
                self.assertIn(b"yields at the next boundary", said)
                self.assertGreater(self.boundary(), before)

    def test_a_second_ctrl_c_stops_at_once_and_the_last_commit_is_kept(self) -> None:
        process = self.start("steps=100000", "spin=30", "mode=print")
        assert process.stdout is not None and process.stderr is not None
        self.assertIn(b"said by the program", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        self.assertIn(b"yields at the next boundary", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130)

    def test_other_parameters_are_another_execution_and_fresh_begins_anew(self) -> None:
        self.assertEqual(self.run_it("steps=9", "--yield-after", "4").returncode, 85)
        self.assertEqual(self.boundary(), 4)
        self.assertEqual(self.run_it("steps=10", "--yield-after", "4").returncode, 85)
        self.assertEqual(len(list((self.cwd / ".fiec" / "sums").iterdir())), 2)
        done = self.run_it("steps=9", "--fresh")
        self.assertNotIn("continues from", done.stderr)
        file = self.cwd / "p.json"
        file.write_text('{"steps": 10}')
        self.assertIn("continues from boundary 4", self.run_it("--params", str(file)).stderr)

    def test_a_second_process_is_refused_while_one_computes(self) -> None:
        words = ("steps=100000", "sleep=0.01", "mode=print")
        process = self.start(*words)
        assert process.stdout is not None
        self.assertIn(b"said by the program", process.stdout.readline())
        done = self.run_it(*words)
        self.assertEqual(done.returncode, 65)
        self.assertIn(f"in use by process {process.pid}", done.stderr)

    def test_a_damaged_state_is_named_and_not_used(self) -> None:
        self.run_it("--yield-after", "2")
        path = self.home() / "state"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        done = self.run_it()
        self.assertEqual(done.returncode, 65)
        self.assertIn("state is damaged; --fresh begins anew", done.stderr)
        self.assertEqual(self.run_it("--fresh").returncode, 0)

    def test_exit_statuses_and_bad_command_lines(self) -> None:
        for words, status, said in (
            (("mode=raise",), 1, "a bug at step 3"),
            (("mode=fail",), 65, "params.mode: must not be fail"),
            (("mode=fetch",), 1, "a local run has no worker"),
            (("steps",), 2, "'steps' is no name=value"),
            (("--yield-after", "0"), 2, "whole number above 0"),
            (("--commit", "never"), 2, "must be auto"),
            (("--params", "nothing.json"), 2, "nothing.json"),
        ):
            with self.subTest(words=words):
                done = self.run_it(*words)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(said, done.stderr)

    def test_a_state_that_cannot_travel_is_said_however_short_the_run_is(self) -> None:
        program = self.cwd / "twice.py"
        program.write_text(
            "import fiec\n"
            "def main(run):\n"
            "    one = [1]\n"
            "    run.state(a=one, b=one)\n"
            "    return [step for step in run.steps(until=2)]\n"
            "if __name__ == '__main__':\n"
            "    fiec.main(main)\n"
        )
        done = self.run_it(program=str(program))
        self.assertEqual(done.returncode, 65, done.stderr)
        self.assertIn("state['b']", done.stderr)

    def test_an_object_is_read_from_the_local_folder_of_data(self) -> None:
        data = self.cwd / ".fiec" / "data"
        data.mkdir(parents=True)
        (data / ("ab" * 32)).write_bytes(b"12345")
        (data / ("cd" * 32)).write_bytes(b"\x05")
        done = self.run_it("mode=fetch")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.result()["result"], {"bytes": 5, "load": "05"})


class Keeping(Folder):
    def test_outputs_become_visible_with_their_commit_also_after_a_crash_between(self) -> None:
        store = Store(self.cwd, "p", {})
        staged = store._stage({"a/b.txt": b"new"})
        self.assertFalse(store.outputs.exists())
        head = {
            "format": 1,
            "execution": store.execution,
            "boundary": 3,
            "sha256": hashlib.sha256(b"s").hexdigest(),
            "outputs": staged,
        }
        # A crash came after the commit and before its outputs were moved into place.
        (store.folder / "state").write_bytes(json.dumps(head).encode() + b"\ns")
        store.close()
        store = Store(self.cwd, "p", {})
        self.assertEqual((store.boundary, store.state), (3, b"s"))
        self.assertEqual((store.outputs / "a" / "b.txt").read_bytes(), b"new")
        store._stage({"c.txt": b"never committed"})
        store.close()
        store = Store(self.cwd, "p", {})
        self.assertEqual(os.listdir(store.outputs), ["a"])
        store.close()


class Checks(Folder):
    def test_a_complete_program_has_equal_bits(self) -> None:
        done = self.run_it(
            "steps=7", "output=2", "--check", "--yield-every", "2", program="good.py"
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("equal bits. 8 capsules, whole in 1 process and cut into 4", done.stdout)
        self.assertIn("output sum.txt", done.stdout)

    def test_a_program_with_an_incomplete_state_is_found_out(self) -> None:
        done = self.run_it("forget=true", "--check", program="good.py")
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not in the state", done.stdout)
        self.assertIn("result:", done.stdout)

    def test_a_program_that_is_not_deterministic_is_told_apart(self) -> None:
        done = self.run_it("chance=true", "--check", program="good.py")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not deterministic", done.stdout)


class InMemory(unittest.TestCase):
    def test_a_cut_run_in_memory_equals_a_whole_one(self) -> None:
        params = {"steps": 17, "output": 2}
        whole = testing.run(sums.main, params)
        self.assertEqual((whole.ending, whole.capsules, whole.runs), ("completed", 18, 1))
        for every in (1, 2, 5):
            cut = testing.run(sums.main, params, yield_every=every)
            self.assertEqual(cut.result["total"], whole.result["total"])
            self.assertEqual(cut.outputs, whole.outputs)
            self.assertEqual(cut.capsules, 18)
            self.assertGreater(cut.runs, 17 // every - 1)

    def test_a_loop_that_is_left_early_counts_its_last_capsule(self) -> None:
        def main(run: object) -> int:
            import fiec

            assert isinstance(run, fiec.Run)
            state = run.state(n=0)
            for _ in run.steps():
                state.n += 1
                if state.n == 5:
                    break
            return int(state.n)

        self.assertEqual(testing.run(main).capsules, 5)
        self.assertEqual(testing.run(main, yield_every=1).capsules, 5)
        self.assertEqual(testing.run(lambda run: None).capsules, 1)

    def test_a_failure_and_an_object_are_seen_by_the_test(self) -> None:
        failed = testing.run(sums.main, {"mode": "fail"})
        self.assertEqual(
            (failed.ending, failed.reason), ("failed", "params.mode: must not be fail")
        )
        got = testing.run(
            sums.main, {"mode": "fetch"}, objects={"ab" * 32: b"12345", "cd" * 32: b"x"}
        )
        self.assertEqual(got.result, {"bytes": 5, "load": "78"})
