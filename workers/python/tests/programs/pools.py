"""Starts processes in its capsules.

params: steps, pad (bytes of state), mode (``first``: takes the first answer of a pool and ends the
pool; ``random``: forks after ``fiec.GlobalRandom`` was made; ``own``: forks with a generator of its
own; ``exit``: ``os._exit(0)`` in capsule 3; ``child``: a forked child gets SIGTERM; ``ctrl_c``: a
pool computes while the terminal sends SIGINT to all processes).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import fiec

FORK = multiprocessing.get_context("fork")


def square(n: int) -> int:
    time.sleep(0.01)
    return n * n


def slow(n: int) -> int:
    Path(f"computing-{n}").touch()
    time.sleep(1)
    return n


def forked() -> int:
    """Starts a child that sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def main(run: fiec.Run) -> object:
    mode = run.params.get("mode", "first")
    state = run.state(total=0, pad=bytearray(run.params.get("pad", 0)))
    if mode == "random":
        fiec.GlobalRandom(seed=1)
    generator = random.Random(1)
    ends = []
    for step in run.steps(run.params.get("steps", 3)):
        if mode == "first":
            with FORK.Pool(2) as pool:
                state.total += next(iter(pool.imap(square, range(1, 20))))
        elif mode in ("random", "own"):
            with FORK.Pool(2) as pool:
                state.total += sum(pool.map(square, [1, 2])) + (generator.random() > 2)
        elif mode == "exit" and step == 2:
            os._exit(0)
        elif mode == "child":
            pid = forked()
            os.kill(pid, signal.SIGTERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        elif mode == "ctrl_c":
            with FORK.Pool(2) as pool:
                state.total += sum(pool.map(slow, [1, 2], chunksize=1))
        if state.pad:
            state.pad[step % len(state.pad)] ^= 1
    return {"total": state.total, "ends": ends}


if __name__ == "__main__":
    fiec.main(main)
