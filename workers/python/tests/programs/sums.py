"""Adds up random numbers of three generators: plain values, so that it runs without numpy.

params: steps, sleep (s a capsule), spin (s of computing), pad (bytes of state), output (every
k-th), mode (see below).
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time

import fiec

CALLS = 0
PREPARED: list[object] = []


@dataclasses.dataclass
class Part:
    total: float = 0.0
    seen: list[float] = dataclasses.field(default_factory=list)


def prepare(params: dict[str, object]) -> None:
    if params.get("bad"):
        raise fiec.Failed("params.bad: must not be")
    PREPARED.append(params)


def main(run: fiec.Run) -> object:
    global CALLS
    CALLS += 1
    params = run.params
    mode = params.get("mode")
    if mode == "fail":
        raise fiec.Failed("params.mode: must not be fail")
    if mode == "transient":
        raise fiec.Failed("the file server is away", permanent=False)
    if mode == "exit":
        sys.exit(0)
    if mode == "result":
        return {"bad": object()}
    if mode == "nan":
        return {"loss": float("nan"), "best": float("-inf"), "list": (1, 2)}
    state = run.state(
        part=Part(),
        rng=random.Random(params.get("seed", 0)),
        batches=fiec.Batches(10, 3, epochs=None, seed=5),
        pad=bytearray(params.get("pad", 0)),
        grants=[],
    )
    run.on_reconfigure(lambda grant: state.grants.append(grant.threads))
    if mode == "reserve":
        answers = [run.reserve(memory_bytes=8 << 30), run.reserve(device_memory_bytes=1)]
        memory = answers[0].grant.memory_bytes if answers[0].grant else None
        return {"answers": [(a.answer, bool(a), a.reason) for a in answers], "memory": memory}
    if mode == "surroundings":
        around = [run.surroundings(), run.surroundings()]
        asked = [run.ask(threads=3), run.ask(cpus=[0, 1], memory_bytes=5)]
        return {
            "around": [(a.node, a.free_slots, a.reading("memory"), a.unknown) for a in around],
            "asked": [(a.answer, a.grant.threads if a.grant else None) for a in asked],
        }
    if mode == "fetch":
        return {
            "bytes": len(run.fetch("ab" * 32, 5)),
            "load": run.load({"object": "cd" * 32}).hex(),
        }
    if mode == "print":
        print("said by the program", flush=run.local)
    for step in run.steps(params.get("steps", 20)):
        if mode == "raise" and step == 3:
            raise ValueError("a bug at step 3")
        if mode == "swallow":
            try:
                run.boundary()
            except BaseException:
                return {"swallowed": True}
        batch = next(state.batches)
        x = state.rng.gauss(0.0, 1.0) + sum(batch)
        state.part.total += x
        state.part.seen.append(x)
        if state.pad:
            state.pad[step % len(state.pad)] ^= step & 0xFF
        time.sleep(params.get("sleep", 0))
        end = time.perf_counter() + params.get("spin", 0)
        while time.perf_counter() < end:
            pass
        run.progress(f"total {state.part.total:.3f}")
        if mode == "numbers":
            run.progress(step=step)
        if params.get("emit"):
            run.emit("total", {"step": step, "total": state.part.total.hex()})
            for _ in range(params["emit"] - 1):
                run.emit("more", b"x")
        every = params.get("output")
        if every and step % every == 0:
            run.output("last.txt", f"{step} {state.part.total!r}\n")
    if mode == "numbers":
        run.progress(step=-1)
    if params.get("quiet"):
        return {"total": state.part.total.hex()}
    return {
        "total": state.part.total.hex(),
        "grants": state.grants,
        "calls": CALLS,
        "prepared": len(PREPARED),
        "resumed": run.resumed,
        "threads": run.grant.threads,
    }


if __name__ == "__main__":
    fiec.main(main, prepare=prepare)
