"""Counts without an end, and says how long it may still compute."""

from __future__ import annotations

import time

import fiec


def main(run: fiec.Run) -> None:
    state = run.state(n=0)

    @run.on_limit
    def near(left: float) -> None:
        print(f"{left:.3f} s are left", flush=True)

    for _ in run.steps():
        state.n += 1
        time.sleep(0.005)


if __name__ == "__main__":
    fiec.main(main)
