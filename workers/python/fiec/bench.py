"""``python -m fiec.bench [--json]``: what a boundary and a commit cost, beside their floors.

With ``--json`` one line a figure, in the form of ``fiec bench --json``. The agent is a process of
its own that acknowledges at once, so that commits are measured without a ledger.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from typing import Any

from . import engine, restore, sigma
from .engine import Engine, Start
from .errors import AgentGone
from .frames import SocketLink
from .run import Grant, Run
from .writer import Writer

_REPEATS = 5


def _figure(
    out: list[dict[str, Any]], case: str, metric: str, unit: str, value: float, floor: float | None
) -> None:
    ratio = value / floor if floor else None
    out.append(
        {
            "bench": "python",
            "case": case,
            "metric": metric,
            "value": value,
            "unit": unit,
            "floor": floor,
            "ratio": ratio,
        }
    )


def _run(link: SocketLink, commit: Any) -> tuple[Run, Engine]:
    start = Start(execution="bench", epoch=1, program="bench@1", params={}, commit=commit)
    run = Run(execution="bench", epoch=1, program="bench@1", params={}, grant=Grant(), local=False)
    at = Engine(link, Writer(link), start, deque(), run._encode, run._reconfigure)
    run._engine = at
    return run, at


def _loop(count: int) -> float:
    """Nanoseconds a turn of the bare loop."""
    began = time.perf_counter_ns()
    for _ in range(count):
        pass
    return (time.perf_counter_ns() - began) / count


def _boundaries(link: SocketLink, count: int, look: float) -> float:
    """Nanoseconds a turn of a loop whose edge is a boundary that is not committed."""
    before, engine.LOOK_INTERVAL = engine.LOOK_INTERVAL, look
    try:
        run, _ = _run(link, {"every_ms": 3_600_000})
        run.state(step=0, total=0.0)
        began = time.perf_counter_ns()
        for _ in run.steps(count):
            pass
        return (time.perf_counter_ns() - began) / count
    finally:
        engine.LOOK_INTERVAL = before


def _commits(link: SocketLink, size: int, seconds: float) -> tuple[int, float]:
    """Commits of every boundary, and the seconds they took."""
    run, at = _run(link, {"every": 1})
    run.state(data=bytearray(os.urandom(size)))
    began = time.perf_counter()
    count = 0
    for _ in run.steps():
        count += 1
        if time.perf_counter() - began >= seconds:
            break
    while at._sent:
        at._wait()
    return count, time.perf_counter() - began


def _copies(ours: socket.socket, size: int, seconds: float) -> tuple[int, float]:
    """The floor of commits: as many bytes there and one back, without a frame or a state."""
    data = os.urandom(size)
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds:
        ours.sendall(data)
        ours.recv(1)
        count += 1
    return count, time.perf_counter() - began


def _agent(sock: socket.socket) -> None:
    """Acknowledges every boundary."""
    link = SocketLink(sock)
    try:
        while (got := link.read()) is not None:
            if got[0]["is"] == "boundary":
                link.write({"is": "committed", "index": got[0]["index"]})
    except AgentGone:
        pass


def _sink(sock: socket.socket, size: int) -> None:
    left = size
    while part := sock.recv(1 << 20):
        left -= len(part)
        if left == 0:
            sock.sendall(b".")
            left = size


def _beside(work: Any, *arguments: Any) -> tuple[socket.socket, int]:
    """A process that works on the other end of a socket."""
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    pid = os.fork()
    if pid == 0:
        ours.close()
        status = 1
        try:
            work(theirs, *arguments)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    return ours, pid


def measure(seconds: float = 0.5) -> list[dict[str, Any]]:
    """All figures."""
    out: list[dict[str, Any]] = []
    ours, pid = _beside(_agent)
    link = SocketLink(ours)
    count = 100_000
    bare = statistics.median(_loop(count) for _ in range(_REPEATS)) / 1e3
    for case, look in (
        ("no commit, as it runs", engine.LOOK_INTERVAL),
        ("no commit, orders looked for each time", 0.0),
    ):
        found = statistics.median(_boundaries(link, count, look) for _ in range(_REPEATS)) / 1e3
        _figure(out, case, "boundary_us", "µs", found - bare, None)
    for size, name in ((32 << 10, "32 KiB"), (24 << 20, "24 MiB")):
        sink, sink_pid = _beside(_sink, size)
        n, took = _copies(sink, size, seconds)
        sink.close()
        os.waitpid(sink_pid, 0)
        floor = n / took
        n, took = _commits(link, size, seconds)
        _figure(out, f"{name} at every boundary", "commits_per_s", "1/s", n / took, floor)
    ours.close()
    os.waitpid(pid, 0)
    state = {"data": os.urandom(32 << 10), "step": 7, "history": [n / 7 for n in range(100)]}
    rounds = 1000
    began = time.perf_counter()
    for _ in range(rounds):
        pieces = sigma.encode(state)
    encoded = time.perf_counter()
    whole = b"".join(pieces)
    for _ in range(rounds):
        restore.decode(whole)
    decoded = time.perf_counter()
    case = "σ of 32 KiB and 100 numbers"
    _figure(out, case, "encode_us", "µs", (encoded - began) / rounds * 1e6, None)
    _figure(out, case, "decode_us", "µs", (decoded - encoded) / rounds * 1e6, None)
    return out


def main() -> None:
    """The command."""
    if set(sys.argv[1:]) - {"--json"}:
        print("usage: python -m fiec.bench [--json]", file=sys.stderr)
        sys.exit(2)
    figures = measure()
    for figure in figures:
        if "--json" in sys.argv:
            print(json.dumps(figure, ensure_ascii=False))
        else:
            floor = "" if figure["floor"] is None else f"   (floor {figure['floor']:,.0f})"
            print(
                f"{figure['case']:<40} {figure['metric']:<20} "
                f"{figure['value']:>10,.2f} {figure['unit']}{floor}"
            )


if __name__ == "__main__":
    main()
