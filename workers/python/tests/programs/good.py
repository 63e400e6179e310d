"""Sums; with `forget` a part of its state stays in the process, with `chance` it is random."""

import os

import fiec


def main(run: fiec.Run) -> dict[str, object]:
    state = run.state(total=0)
    hidden = 0
    for step in run.steps(run.params.get("steps", 5)):
        hidden += step
        state.total += hidden if run.params.get("forget") else step
        if run.params.get("chance"):
            state.total += int.from_bytes(os.urandom(4), "little")
        run.output("sum.txt", f"{state.total}\n")
    return {"total": state.total}


if __name__ == "__main__":
    fiec.main(main)
