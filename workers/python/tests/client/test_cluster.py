"""The client against a real cluster, which ``FIEC_NATS_URL`` and ``FIEC_DATABASE_URL`` name.

``FIEC_BINARY`` is the ``fiec`` command of that cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy

import fiec.client
from fiec.client import aio, names, objects
from fiec.client.package import BadPackage

T = TypeVar("T")
DEADLINE = 120.0
MANY = int(os.environ.get("FIEC_TEST_MANY", "1000"))
NUMPY = {"PYTHONPATH": str(Path(numpy.__file__).parent.parent)}

WALK = """
    import time

    import fiec
    import numpy as np


    def main(run):
        state = run.state(w=np.zeros(4), rng=np.random.default_rng(run.params.get("seed", 0)))
        for step in run.steps(until=run.params.get("steps", 10)):
            time.sleep(run.params.get("sleep", 0.0))
            state.w += state.rng.normal(size=4)
            print(f"step {step} <b>", flush=True)
            run.progress(f"<i>{step}</i>", norm=float(state.w @ state.w))
            if step == run.params.get("fail_at"):
                raise fiec.Failed("no <good>")
        run.output("w.npy", state.w)
        return {"seed": run.params.get("seed", 0), "first": float(state.w[0])}


    if __name__ == "__main__":
        fiec.main(main)
    """


def until(what: str, found: Callable[[], T | None]) -> T:
    """Looks until there is something, also while no service answers."""
    last = time.monotonic() + DEADLINE
    while time.monotonic() < last:
        try:
            value = found()
        except (fiec.client.Unreachable, fiec.client.Missing):  # It has much to do.
            value = None
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {DEADLINE} s")


class WithClient(unittest.TestCase):
    """A client, and the script as a file."""

    def setUp(self) -> None:
        self.client = fiec.client.connect()
        self.addCleanup(self.client.close)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.script = self.folder / "walk.py"
        self.script.write_text(textwrap.dedent(WALK))


class OneJob(WithClient):
    def test_a_script_runs_in_the_cluster_moves_and_gives_back_its_arrays(self) -> None:
        params = {"steps": 40, "sleep": 0.05, "seed": 3}
        job = self.client.run(self.script, params, batch="walks", env=NUMPY)
        lines = job.logs(follow=True)
        first = next(lines)
        self.assertEqual((first.text, first.stream), ("step 0 <b>", "stdout"))
        before = until("it runs", lambda: job.status().node)
        self.assertIn("next boundary", job.move())
        texts = [first.text, *(str(line) for line in lines)]
        self.assertEqual(texts, [f"step {n} <b>" for n in range(40)])
        result = job.result(DEADLINE)
        self.assertEqual(result["seed"], 3)
        array = job.outputs["w.npy"].numpy()
        self.assertEqual(array[0], result["first"])

        # The same without a move has the same bits.
        still = self.client.run(self.script, {**params, "sleep": 0.0}, env=NUMPY)
        self.assertEqual(still.result(DEADLINE), result)
        self.assertEqual(still.outputs["w.npy"].digest, job.outputs["w.npy"].digest)

        moves = until("the move is recorded", job.moves)
        self.assertEqual(moves[0]["from_node"], before)
        self.assertGreater(moves[0]["gap_ms"], 0)
        curve = until(
            "all numbers are recorded",
            lambda: c if (c := job.curves().get("norm")) and len(c) == 40 else None,
        )
        self.assertEqual(curve.boundary, list(range(1, 41)))
        self.assertEqual([row["node"] for row in job.placements()], [before, moves[0]["to_node"]])
        self.assertIn("completed", job.why()["summary"])
        shown = job._repr_html_()
        self.assertIn("<svg", shown)
        self.assertNotIn("<i>", shown)
        self.assertEqual([j.id for j in self.client.batch("walks")], [job.id])
        self.assertEqual(self.client.batch("walks").counts(), {"completed": 1})
        with self.assertRaises(fiec.client.Missing):
            self.client.batch("none")
        path = job.outputs["w.npy"].save(self.folder / "fetched.npy")
        self.assertEqual(names.digest_of(path), job.outputs["w.npy"].digest)
        with self.assertRaises(fiec.client.Missing):
            job.outputs["none"]

    def test_one_that_fails_says_why_and_can_be_retried(self) -> None:
        job = self.client.run(self.script, {"fail_at": 2}, retries=0, env=NUMPY)
        with self.assertRaises(fiec.client.NotCompleted) as caught:
            job.result(DEADLINE)
        self.assertEqual(caught.exception.phase, "failed")
        self.assertIn("no <good>", caught.exception.reason)
        self.assertIn("no &lt;good&gt;", job._repr_html_())
        job.retry(from_boundary=0)
        self.assertEqual(job.wait(DEADLINE).phase, "failed")

    def test_orders_are_carried_out(self) -> None:
        job = self.client.submit("synthetic@1", {"capsules": 100_000, "work_us": 5_000})
        until("it runs", lambda: job.status().phase == "started")
        job.pause()
        until("it is paused", lambda: job.status().phase == "paused")
        job.adjust(priority=7)
        job.resume()
        until("it runs again", lambda: job.status().phase == "started")
        with self.assertRaises(TimeoutError):
            job.wait(0.2)
        job.cancel()
        self.assertEqual(job.wait(DEADLINE).phase, "cancelled")
        again = self.client.job(job.id)
        self.assertEqual(again.uuid, job.uuid)
        with self.assertRaises(fiec.client.NotCompleted) as caught:
            again.result(DEADLINE)
        self.assertIn("@", caught.exception.reason)
        asked = "SELECT what FROM operator_actions WHERE execution = %s"
        until("it is recorded", lambda: len(self.client.rows(asked, (job.uuid,))) >= 4)

    def test_what_is_wrong_is_said(self) -> None:
        with self.assertRaises(fiec.client.Refused) as caught:
            self.client.submit("synthetic@1", {"capsule": 1})
        self.assertEqual(caught.exception.lines[0]["field"], "params.capsule")
        with self.assertRaises(fiec.client.Missing):
            self.client.job("nobody").wait(DEADLINE)
        with self.assertRaises(fiec.client.Missing):
            dict(self.client.job("nobody").outputs)
        with self.assertRaises(fiec.client.Refused):
            self.client.job("nobody").cancel()
        with self.assertRaises(ValueError):
            self.client.job("no such")
        with self.assertRaises(BadPackage):
            self.client.run(self.folder)
        with self.assertRaisesRegex(BadPackage, "looked up in the node's PATH"):
            self.client.run(self.script, python="/usr/bin/python3")
        with self.assertRaises(fiec.client.ClientError) as refused:
            self.client.rows("DELETE FROM executions")
        self.assertIn("read-only", str(refused.exception))
        with self.assertRaises(fiec.client.Unreachable):
            fiec.client.connect("nats://127.0.0.1:1")

    def test_the_same_id_with_the_same_line_is_the_same_execution(self) -> None:
        one = self.client.submit("synthetic@1", {"capsules": 2}, id="only-once")
        two = self.client.submit("synthetic@1", {"capsules": 2}, id="only-once")
        self.assertEqual(one.uuid, two.uuid)
        one.result(DEADLINE)
        with self.assertRaises(fiec.client.Refused):
            self.client.submit("synthetic@1", {"capsules": 3}, id="only-once")


class Data(WithClient):
    def test_objects_are_stored_once_and_checked(self) -> None:
        content = os.urandom(2_000_000)
        path = self.folder / "a.bin"
        path.write_bytes(content)
        stored = self.client.data(path)
        self.assertEqual(stored, self.client.data(content))
        self.assertEqual(self.client.fetch(stored["object"]), content)
        self.assertEqual(self.client.fetch(self.client.data(b"")), b"")
        with self.assertRaises(fiec.client.Missing):
            self.client.fetch("0" * 64)

    def test_of_concurrent_writers_of_one_object_none_breaks_the_others(self) -> None:
        content = os.urandom(3_000_000)

        async def all_at_once() -> None:
            async with await aio.connect() as client:
                stored = await asyncio.gather(*(client.data(content) for _ in range(8)))
                found = await asyncio.gather(*(client.fetch(one["object"]) for one in stored))
                self.assertTrue(all(one == content for one in found))

        asyncio.run(all_at_once())

    def test_an_object_with_other_bytes_is_damaged(self) -> None:
        wrong = names.digest(b"what it should be")

        async def store_and_fetch() -> None:
            async with await aio.connect() as client:
                broker = client._session.broker
                info = await objects._write(
                    broker, names.digest(b"other"), objects.pieces(b"other")
                )
                await objects._describe(broker, {**info, "name": wrong}, 0)
                with self.assertRaises(fiec.client.Damaged):
                    await client.fetch(wrong)
                await broker.js.purge_stream(objects.STREAM, subject=objects._subject(wrong))
                await objects._discard(broker, info["nuid"])

        asyncio.run(store_and_fetch())

    def test_a_folder_has_the_bytes_that_the_command_would_push(self) -> None:
        package = self.folder / "package"
        deep = package / ("folder-" * 12) / ("f" * 100)
        deep.parent.mkdir(parents=True)
        deep.write_bytes(b"x" * 1000)
        run = package / "run.sh"
        run.write_text("#!/bin/sh\nexit 0\n")
        run.chmod(0o755)
        manifest = {"entry": ["./run.sh"], "protocol": "state_dir"}
        (package / "fiec.json").write_text(json.dumps(manifest))
        name = self.client.push(package, "same@1")
        pushed = subprocess.run(
            [os.environ["FIEC_BINARY"], "program", "push", name, str(package), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertTrue(json.loads(pushed.stdout)["existing"])
        run.write_text("#!/bin/sh\nexit 1\n")
        with self.assertRaises(fiec.client.ClientError) as caught:
            self.client.push(package, "same@1")
        self.assertIn("never changes", str(caught.exception))


class Many(WithClient):
    def test_a_sweep_gives_results_in_order_and_a_failed_member_aborts_nothing(self) -> None:
        swept = [{"seed": n, **({"fail_at": 0} if n == 3 else {"fail_at": -1})} for n in range(8)]
        sweep = self.client.map(
            self.script, swept, params={"steps": 3}, batch="study", retries=0, env=NUMPY
        )
        ended = {job.id: job for job in fiec.client.as_completed(sweep, progress=True)}
        self.assertEqual(len(ended), 8)
        self.assertEqual(ended[sweep[3].id].status().phase, "failed")
        results = sweep.results(DEADLINE)
        self.assertIsNone(results[3])
        self.assertEqual([r["seed"] for r in results if r], [0, 1, 2, 4, 5, 6, 7])
        self.assertEqual(sweep[5].params, {"steps": 3, "seed": 5, "fail_at": -1})
        self.assertEqual(sweep.counts(), {"completed": 7, "failed": 1})
        self.assertIn("8 executions", sweep._repr_html_())
        asked = "SELECT phase FROM executions WHERE client_id LIKE %s AND finished_at IS NOT NULL"
        own = (f"{sweep.id}-%",)
        until("the history has all ends", lambda: len(self.client.rows(asked, own)) == 8)
        frame = self.client.sql(asked, own)
        self.assertEqual(sorted(frame["phase"].unique()), ["completed", "failed"])

    def test_every_combination_is_taken(self) -> None:
        over = {"capsules": [1, 2], "work_us": [10, 20, 30]}
        sweep = self.client.map("synthetic@1", over)
        self.assertEqual([r["capsules"] for r in sweep.results(DEADLINE)], [1, 1, 1, 2, 2, 2])
        numbers = self.client.map("synthetic@1", {"capsules": range(2, 12, 3)})
        self.assertEqual([r["capsules"] for r in numbers.results(DEADLINE)], [2, 5, 8, 11])
        again = until(
            "the history has them",
            lambda: a if len(a := self.client.array(numbers.id)) == 4 else None,
        )
        self.assertEqual([job.id for job in again], [job.id for job in numbers])
        self.assertEqual(again[3].params, {"capsules": 11})
        drawn = self.client.map("synthetic@1", {"capsules": numpy.arange(2, 4)})
        self.assertEqual([r["capsules"] for r in drawn.results(DEADLINE)], [2, 3])
        with self.assertRaises(ValueError):
            self.client.submit("synthetic@1", {"capsules": object()})

    def test_very_many_are_one_submission(self) -> None:
        began = time.monotonic()
        later = "2099-01-01T00:00:00Z"
        sweep = self.client.map("synthetic@1", {"capsules": range(1, MANY + 1)}, not_before=later)
        submitted = time.monotonic() - began
        self.assertEqual(sweep[MANY - 1].id, f"{sweep.id}-{MANY}")
        until("all are taken in", lambda: sweep.counts().get("pending") == MANY)
        known = time.monotonic() - began
        self.assertEqual(sweep.cancel(), MANY)
        how = sweep.wait(DEADLINE)
        self.assertEqual([end.phase for end in how], ["cancelled"] * MANY)
        took = time.monotonic() - began
        print(f"{MANY}: submitted {submitted:.1f} s, counted {known:.1f} s, cancelled {took:.1f} s")

    def test_the_examples_of_the_pages_run(self) -> None:
        kit = Path(__file__).parents[2]
        for page, name, expected in (
            (kit / "CLIENT.md", "study.py", ["completed"] * 49),
            (kit.parents[1] / "README.md", "sweep.py", ["1.41421"] * 18),
        ):
            files = re.findall(
                r"<!-- file: (\S+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL
            )
            for file, text in files:
                at = self.folder / file
                at.parent.mkdir(exist_ok=True)
                at.write_text(text)
            ran = subprocess.run(
                [sys.executable, name],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
            self.assertEqual(ran.returncode, 0, ran.stderr)
            found = re.findall("completed|1[.]41421", ran.stdout)
            self.assertEqual(found, expected, ran.stdout)


class Outages(WithClient):
    def test_ctrl_c_ends_the_wait_and_not_the_work(self) -> None:
        job = self.client.submit("synthetic@1", {"capsules": 100_000, "work_us": 5_000})
        until("it runs", lambda: job.status().phase == "started")
        words = (
            "import signal, sys, fiec.client\n"
            # A shell lets what it starts in the background ignore Ctrl-C.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "c = fiec.client.connect()\n"
            "print('waiting', flush=True)\n"
            "try:\n    c.job(sys.argv[1]).wait()\n"
            "except KeyboardInterrupt:\n    print(c.job(sys.argv[1]).status().phase)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", words, job.id], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(child.kill)
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), "waiting\n")
        time.sleep(0.5)  # It waits.
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=DEADLINE)
        self.assertEqual((said, child.returncode), ("started\n", 0))
        job.cancel()
        self.assertEqual(job.wait(DEADLINE).phase, "cancelled")

    def test_a_lost_connection_is_not_an_end(self) -> None:
        proxy = Proxy(os.environ["FIEC_NATS_URL"])
        self.addCleanup(proxy.close)
        client = fiec.client.connect(proxy.url, database=os.environ["FIEC_DATABASE_URL"])
        self.addCleanup(client.close)
        job = client.run(self.script, {"steps": 60, "sleep": 0.05}, env=NUMPY)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(map(str, job.logs(follow=True))))
        reader.start()
        until("it prints", lambda: len(lines) > 3)
        proxy.cut()
        time.sleep(1.5)  # What the program does meanwhile is not heard.
        proxy.mend()
        self.assertTrue(job.wait(DEADLINE).completed)
        reader.join(DEADLINE)
        self.assertEqual(lines, [f"step {n} <b>" for n in range(60)])

    def test_it_works_where_a_loop_runs_already(self) -> None:
        async def cell() -> Any:
            return self.client.submit("synthetic@1", {"capsules": 3}).result(DEADLINE)

        self.assertEqual(asyncio.run(cell())["capsules"], 3)

    def test_an_asynchronous_program_waits_for_many(self) -> None:
        async def main() -> list[str]:
            async with await aio.connect() as client:
                jobs = [await client.submit("synthetic@1", {"capsules": n}) for n in (1, 2, 3)]
                return sorted([job.id async for job in aio.as_completed(jobs)])

        self.assertEqual(len(asyncio.run(main())), 3)


class Proxy:
    """Passes bytes on to the broker, until it is cut."""

    def __init__(self, url: str) -> None:
        login, address = url.removeprefix("nats://").rsplit("@", 1)
        host, port = address.split(":")
        self._to = (host, int(port))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        here = self._server.sockets[0].getsockname()
        self.url = f"nats://{login}@{here[0]}:{here[1]}"

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        their_reader, their_writer = await asyncio.open_connection(*self._to)
        self._writers |= {writer, their_writer}
        await asyncio.gather(self._pass(reader, their_writer), self._pass(their_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def cut(self) -> None:
        """Breaks all connections, and lets none through."""
        self._run(self._cut())

    def mend(self) -> None:
        """Lets connections through again."""
        self._is_cut = False

    def close(self) -> None:
        """Ends it."""
        self._run(self._cut())
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)


if __name__ == "__main__":
    unittest.main()
