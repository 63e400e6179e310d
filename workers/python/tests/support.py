"""A stand-in for the agent, with its own reading and writing of frames, and what tests share."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
HAS_NUMPY = importlib.util.find_spec("numpy") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
NO_NUMPY = "numpy is not installed for this Python"
NO_TORCH = "PyTorch is not installed for this Python"
DEADLINE = 60.0
EXECUTION = "0198c0de-0000-7000-8000-000000000001"


def environment(**more: str) -> dict[str, str]:
    """The environment of a program: the kit on its path, and nothing of a worker."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FIEC_")}
    env["PYTHONPATH"] = str(HERE.parent)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env | more


def frame(head: Any, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    text = json.dumps(head).encode()
    return struct.pack("<IQ", len(text), len(body)) + text + body


class Report:
    """A report of a program, with its body."""

    def __init__(self, head: dict[str, Any], body: bytes) -> None:
        self.head, self.body = head, body

    @property
    def kind(self) -> str:
        return str(self.head["is"])

    @property
    def state(self) -> bytes:
        """σ of a boundary."""
        return self.body[: self.head["bytes"]]

    @property
    def outputs(self) -> dict[str, bytes]:
        """The outputs behind σ."""
        at, found = self.head.get("bytes", 0), {}
        for made in self.head.get("outputs", []):
            found[made["name"]] = self.body[at : at + made["bytes"]]
            at += made["bytes"]
        assert at == len(self.body), "the lengths of σ and outputs are those of the body"
        return found

    def __repr__(self) -> str:
        return f"{self.head} + {len(self.body)} bytes"


class Child:
    """A program in a process of its own, and the agent's end of its socket."""

    def __init__(self, program: str, *, env: dict[str, str] | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE)
        self._log = tempfile.TemporaryFile()
        fd = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / program)],
            env=environment(FIEC_SOCKET_FD=str(fd), **(env or {})),
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if error is not None:
            print(f"--- the program said:\n{self.said()}", file=sys.stderr)
        self.socket.close()
        self._log.close()

    def said(self) -> str:
        """What it has printed."""
        self._log.seek(0)
        return self._log.read().decode()

    def order(self, head: dict[str, Any], body: bytes = b"") -> None:
        self.socket.sendall(frame(head, body))

    def run(
        self, params: dict[str, Any] | None = None, resume: Report | None = None, **more: Any
    ) -> None:
        """Orders a run; from the boundary of a report where there is one."""
        head = {
            "is": "run",
            "execution": EXECUTION,
            "epoch": 1,
            "program": "test@1",
            "params": params or {},
            "commit": "auto",
            "boundary": resume.head["index"] if resume else None,
            "lease_ms": 60_000,
        }
        self.order(head | more, resume.state if resume else b"")

    def ack(self, report: Report) -> None:
        self.order({"is": "committed", "index": report.head["index"]})

    def _exactly(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            part = self.socket.recv(min(count - len(out), 1 << 20))
            if not part:
                raise EOFError(f"the program closed its socket; it said:\n{self.said()}")
            out += part
        return bytes(out)

    def next(self) -> Report:
        """The next report, whatever it is."""
        head, body = struct.unpack("<IQ", self._exactly(12))
        return Report(json.loads(self._exactly(head)), self._exactly(body))

    def until(self, *kinds: str) -> Report:
        """The next report of one of these kinds; others before it are passed over."""
        while (report := self.next()).kind not in kinds:
            pass
        return report

    def finish(self, ack: bool = True) -> list[Report]:
        """All reports to the end of the run, the last one included; boundaries are acknowledged."""
        found = []
        while True:
            report = self.next()
            found.append(report)
            if report.kind in ("completed", "failed", "cancelled"):
                return found
            if report.kind == "boundary":
                if report.head["reason"] == "yield":
                    return found
                if ack:
                    self.ack(report)

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        self.socket.settimeout(seconds)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(DEADLINE)

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def exit_status(self) -> int:
        """How it ended by itself."""
        return self.process.wait(DEADLINE)


def until(what: str, condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE} s: {what}")
        time.sleep(0.01)
