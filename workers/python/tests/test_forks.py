"""Programs that start processes in a capsule, and one that ends its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import unittest
from pathlib import Path

from .support import DEADLINE, Child, environment, until
from .test_local import Folder


class Pools(Folder):
    def local(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A local run; all its processes are killed if it hangs."""
        process = subprocess.Popen(
            self.command("pools.py", *words),
            cwd=self.cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, said = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"the run hangs; it said: {process.communicate()[1]}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, said)

    def found(self) -> object:
        (file,) = (self.cwd / ".fiec" / "pools").glob("*/result.json")
        return json.loads(file.read_text())["result"]


class Forks(Pools):
    def test_a_pool_that_is_ended_early_does_not_hang_a_local_run(self) -> None:
        done = self.local("steps=5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("yields at the next boundary", done.stderr)
        self.assertEqual(self.found(), {"total": 5, "ends": []})

    def test_a_pool_does_not_hang_under_a_worker_also_while_a_large_state_is_written(self) -> None:
        for pad in (0, 4 << 20):
            with self.subTest(pad=pad), Child("pools.py") as child:
                child.run({"steps": 5, "pad": pad}, commit={"every": 1})
                self.assertEqual(child.finish()[-1].head["result"]["total"], 5)

    def test_sigterm_ends_a_forked_child_and_yields_nothing(self) -> None:
        done = self.local("mode=child", "steps=5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.found(), {"total": 0, "ends": [-signal.SIGTERM] * 5})

    def test_ctrl_c_lets_a_pool_finish_its_capsule_and_yields(self) -> None:
        process = subprocess.Popen(
            self.command("pools.py", "mode=ctrl_c", "steps=100"),
            cwd=self.cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        until("both compute", lambda: all((self.cwd / f"computing-{n}").exists() for n in (1, 2)))
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, said = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"the run hangs; it said: {process.communicate()[1]}")
        self.assertEqual(process.returncode, 85, said)
        self.assertEqual(said.count("yields at the next boundary"), 1, said)

    def test_a_fork_after_the_kit_has_seeded_is_warned_of_once(self) -> None:
        done = self.local("mode=random", "steps=3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("draw equal random numbers"), 1, done.stderr)
        with Child("pools.py") as child:
            child.run({"mode": "random"})
            self.assertEqual(child.finish()[-1].kind, "completed")
            self.assertEqual(child.said().count("draw equal random numbers"), 1, child.said())

    def test_a_fork_without_the_kits_seed_is_not_warned_of(self) -> None:
        done = self.local("mode=own", "steps=3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("random numbers", done.stderr)


class SilentEnds(Pools):
    def test_os_exit_in_a_capsule_is_no_completion_of_a_local_run(self) -> None:
        done = self.local("mode=exit", "steps=5", "--commit", "1")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("os._exit(0) in a capsule is no completion", done.stderr)
        self.assertEqual(list(Path(self.cwd).rglob("result.json")), [])

    def test_check_says_that_the_program_did_not_complete(self) -> None:
        done = self.local("mode=exit", "steps=5", "--check")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the program ended with exit status 1", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_os_exit_in_a_capsule_is_no_completion_under_a_worker(self) -> None:
        with Child("pools.py") as child:
            child.run({"mode": "exit", "steps": 5})
            with self.assertRaises(EOFError):
                child.until("completed", "failed", "cancelled")


if __name__ == "__main__":
    unittest.main()
