"""JSON lines: what a program in a container speaks, against a stand-in for FIEC's side."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from .support import DEADLINE, EXECUTION, PROGRAMS, environment


class Talk:
    """FIEC's side of one run."""

    def __init__(
        self, folder: Path, first: dict[str, Any] | bytes, program: str = "sums.py"
    ) -> None:
        path = folder / "socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(DEADLINE)
            listener.bind(str(path))
            listener.listen(1)
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / program)],
                env=environment(FIEC_SOCKET=str(path), FIEC_INPUTS=str(folder)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self.socket, _ = listener.accept()
        self.socket.settimeout(DEADLINE)
        self._lines = self.socket.makefile("rb")
        if isinstance(first, dict):
            self.tell(**first)
        else:
            self.socket.sendall(first)

    def tell(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            return {"is": "closed"}
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> tuple[int, str]:
        """Exit status, and what was printed."""
        said, _ = self.process.communicate(timeout=DEADLINE)
        self._lines.close()
        self.socket.close()
        return self.process.returncode, said.decode()


class Containers(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fiec-"))
        self.addCleanup(shutil.rmtree, self.folder)
        for name in ("outputs", "objects"):
            (self.folder / name).mkdir()

    def talk(
        self,
        params: dict[str, Any],
        boundary: int | None = None,
        state: str | None = None,
        program: str = "sums.py",
        **more: Any,
    ) -> Talk:
        first = {
            "is": "run",
            "params": params,
            "boundary": boundary,
            "state": state,
            "grant": {"threads": 2},
            "inputs": str(self.folder),
            "objects": str(self.folder / "objects"),
            "outputs": str(self.folder / "outputs"),
            "execution": EXECUTION,
        }
        return Talk(self.folder, first | more, program)

    def whole(self, params: dict[str, Any]) -> dict[str, Any]:
        talk = self.talk(params)
        while (said := talk.hear())["is"] == "boundary":
            talk.tell(**{"is": "go"})
        self.assertEqual(talk.end()[0], 0)
        return said

    def test_a_run_that_is_moved_gives_the_bits_of_one_that_is_not(self) -> None:
        params = {"steps": 9, "output": 1}
        whole = self.whole(params)
        self.assertEqual((whole["is"], whole["outputs"]), ("completed", ["last.txt"]))
        text = (self.folder / "outputs" / "last.txt").read_text()
        state = None
        for boundary in (2, 4, 6, 8):
            talk = self.talk(params, boundary - 2 if state else None, state)
            said = talk.hear()
            self.assertEqual((said["is"], said["of"]), ("boundary", 9))
            self.assertRegex(said["note"], "^total ")
            talk.tell(**{"is": "go"})
            self.assertEqual(talk.hear()["is"], "boundary")
            (self.folder / "outputs" / "last.txt").unlink(missing_ok=True)
            talk.tell(**{"is": "state"})
            answer = talk.hear()
            self.assertEqual((answer["is"], answer["outputs"]), ("state", ["last.txt"]))
            self.assertTrue((self.folder / "outputs" / "last.txt").exists())
            state = answer["state"]
            self.assertTrue(base64.b64decode(state).startswith(b"fiec\x01"))
            talk.tell(**{"is": "yield", "cause": "a test"})
            self.assertEqual(talk.end(), (0, ""))
        talk = self.talk(params, boundary, state)
        self.assertEqual(talk.hear()["is"], "boundary")
        talk.tell(**{"is": "go"})
        said = talk.hear()
        self.assertEqual(talk.end()[0], 0)
        self.assertEqual(said["result"]["total"], whole["result"]["total"])
        self.assertEqual((self.folder / "outputs" / "last.txt").read_text(), text)

    def test_each_line_has_the_numbers_of_its_capsule(self) -> None:
        talk = self.talk({"steps": 3, "mode": "numbers"})
        found = []
        while (said := talk.hear())["is"] == "boundary":
            found.append(said["numbers"])
            talk.tell(**{"is": "go"})
        self.assertEqual(talk.end()[0], 0)
        self.assertEqual([*found, said["numbers"]], [{"step": float(n)} for n in (0, 1, 2, -1)])

    def test_so_many_outputs_come_with_their_boundary_before_a_message_cannot_name_them(self) -> None:
        talk = self.talk({"tiles": {"from": 0, "to": 50}, "total": 50}, program="ranges.py")
        named: list[int] = []
        while (said := talk.hear())["is"] == "boundary":
            named.append(len(said.get("outputs", [])))
            self.assertEqual("state" in said, named[-1] > 0)
            talk.tell(**{"is": "go"})
        self.assertEqual((said["is"], talk.end()[0]), ("completed", 0))
        self.assertEqual(sum(named) + len(said["outputs"]), 51)
        self.assertLessEqual(max(named), 20)

    def test_another_grant_is_told_and_a_cancel_ends_the_run(self) -> None:
        talk = self.talk({"steps": 2})
        talk.hear()
        talk.tell(**{"is": "reconfigure", "grant": {"threads": 6}})
        talk.tell(**{"is": "go"})
        talk.hear()
        talk.tell(**{"is": "go"})
        done = talk.hear()
        self.assertEqual((done["result"]["grants"], done["result"]["threads"]), ([6], 6))
        self.assertEqual(talk.end()[0], 0)
        talk = self.talk({"steps": 5})
        talk.hear()
        talk.tell(**{"is": "cancel"})
        self.assertEqual(talk.end(), (0, ""))

    def test_a_program_is_told_where_it_is_and_what_it_gets(self) -> None:
        talk = self.talk({"mode": "surroundings"})
        self.assertEqual(talk.hear(), {"is": "surroundings"})
        vector = {"readings": [{"signal": "memory", "value": 0.5, "unit": "bytes"}]}
        offers = {"nodes": [{"node": "n2", "free_slots": 2}, {"node": "n3", "free_slots": 1}]}
        known = {"node": "n1", "grant": {}, "vector": vector, "offers": offers}
        talk.tell(**{"is": "surroundings", **known})
        talk.hear()
        talk.tell(**{"is": "surroundings", "node": "n1", "unknown": "nobody answers"})
        self.assertEqual(talk.hear(), {"is": "ask", "threads": 3})
        talk.tell(**{"is": "asked", "answer": "granted", "grant": {"threads": 3}})
        self.assertEqual(talk.hear(), {"is": "ask", "cpus": [0, 1], "memory_bytes": 5})
        talk.tell(**{"is": "asked", "answer": "refused", "reason": "no"})
        result = talk.hear()["result"]
        around = [["n1", 3, 0.5, None], ["n1", None, None, "nobody answers"]]
        self.assertEqual(result["around"], around)
        self.assertEqual(result["asked"], [["granted", 3], ["refused", None]])
        self.assertEqual(talk.end()[0], 0)

    def test_a_wish_for_more_is_answered(self) -> None:
        talk = self.talk({"mode": "reserve"})
        self.assertEqual(talk.hear(), {"is": "reserve", "memory_bytes": 8 << 30})
        grant = {"memory_bytes": 8 << 30}
        talk.tell(**{"is": "reserved", "answer": "granted", "grant": grant})
        self.assertEqual(talk.hear(), {"is": "reserve", "device_memory_bytes": 1})
        talk.tell(**{"is": "reserved", "answer": "moves", "reason": "not here"})
        result = talk.hear()["result"]
        self.assertEqual(result["memory"], 8 << 30)
        answers = [["granted", True, None], ["moves", False, "not here"]]
        self.assertEqual(result["answers"], answers)
        self.assertEqual(talk.end()[0], 0)
        talk = self.talk({"mode": "reserve"})
        talk.hear()
        talk.tell(**{"is": "asked", "answer": "granted", "grant": grant})
        status, said = talk.end()
        self.assertEqual(status, 2)
        self.assertIn("'reserve' was answered by 'asked', not 'reserved'", said)

    def share(self, begin: int, end: int, **more: Any) -> Talk:
        params = {"tiles": {"from": begin, "to": end}}
        return self.talk(params, program="ranges.py", **({"spread": {}} | more))

    def to_the_end(self, talk: Talk) -> dict[str, Any]:
        while (said := talk.hear())["is"] == "boundary":
            talk.tell(**{"is": "go"})
        self.assertEqual(talk.end()[0], 0)
        return said

    def test_a_range_is_split_and_its_part_is_taken_back(self) -> None:
        whole = self.to_the_end(self.share(0, 8))
        talk = self.share(0, 8)
        self.assertEqual(talk.hear()["of"], 8)
        talk.tell(**{"is": "split"})
        self.assertEqual(talk.hear(), {"is": "split", "from": 5, "to": 8})
        talk.tell(**{"is": "state"})
        self.assertEqual(talk.hear()["is"], "state")
        talk.tell(**{"is": "go"})
        self.assertEqual(talk.hear()["of"], 5)
        talk.tell(**{"is": "go"})
        holder = self.to_the_end(talk)
        self.assertEqual((holder["is"], holder["result"]), ("completed", None))
        part = self.to_the_end(self.share(5, 8, spread={"part": True}))
        self.assertEqual(part["outputs"], ["tile-005", "tile-006", "tile-007"])
        merge = {"from": 5, "to": 8, "state": part["state"]}
        talk = self.share(0, 8, boundary=6, state=holder["state"], merge=merge)
        self.assertEqual(talk.hear()["of"], 7)
        talk.tell(**{"is": "go"})
        done = self.to_the_end(talk)
        self.assertEqual(done["result"], whole["result"])
        self.assertNotIn("state", done)

    def test_what_cannot_be_split_says_so_and_a_part_without_a_boundary_left_all(self) -> None:
        whole = self.to_the_end(self.share(0, 4))
        talk = self.share(0, 2, spread={"parts": 1})
        talk.hear()
        talk.tell(**{"is": "split"})
        self.assertEqual(talk.hear(), {"is": "whole"})
        talk.tell(**{"is": "go"})
        holder = self.to_the_end(talk)
        merge = {"from": 2, "to": 4, "state": None}
        done = self.to_the_end(self.share(0, 4, boundary=3, state=holder["state"], merge=merge))
        self.assertEqual(done["result"], whole["result"])

    def test_objects_are_files_and_failures_are_told(self) -> None:
        failed = self.whole({"mode": "fetch"})
        self.assertEqual((failed["is"], failed["permanent"]), ("failed", True))
        self.assertIn("only objects that params name", failed["reason"])
        (self.folder / "objects" / ("ab" * 32)).write_bytes(b"12345")
        (self.folder / "objects" / ("cd" * 32)).write_bytes(b"\x01")
        self.assertEqual(self.whole({"mode": "fetch"})["result"], {"bytes": 5, "load": "01"})
        crashed = self.whole({"mode": "raise", "steps": 9})
        self.assertEqual((crashed["is"], crashed["permanent"]), ("failed", False))
        self.assertIn("a bug at step 3", crashed["reason"])

    def test_bad_lines_end_the_process_with_status_2_and_the_reason(self) -> None:
        for first, words in (
            (b"!\n", "a line that cannot be read"),
            (b"[]\n", "a line that cannot be read"),
            (b'{"is":"go"}\n', "the first line is 'go'"),
            (b'{"is":"run","params":{}}\n', "the first line cannot be read: KeyError('state')"),
            (
                b'{"is":"run","params":{},"state":"?","outputs":"x"}\n',
                "the first line cannot be read",
            ),
        ):
            with self.subTest(words):
                status, said = Talk(self.folder, first).end()
                self.assertEqual(status, 2)
                self.assertIn(words, said)
        talk = self.talk({"steps": 5})
        talk.hear()
        talk.tell(**{"is": "dance"})
        self.assertEqual(talk.end()[0], 2)
        talk = self.talk({"steps": 5})
        talk.hear()
        talk.socket.shutdown(socket.SHUT_RDWR)
        self.assertEqual(talk.end()[0], 3)
