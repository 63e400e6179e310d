"""Gradient descent in Rosenbrock's valley, whose rate decides whether it arrives.

The function is that of H. H. Rosenbrock, "An automatic method for finding the greatest or least
value of a function", 1960. A capsule is 100 steps.
"""

from __future__ import annotations

import math

import fiec


def main(run: fiec.Run) -> dict[str, float]:
    rate = run.params.get("rate", 0.001)
    state = run.state(x=-1.5, y=2.0)
    for step in run.steps(until=run.params.get("capsules", 100)):
        for _ in range(100):
            slope_x = -2 * (1 - state.x) - 400 * state.x * (state.y - state.x**2)
            slope_y = 200 * (state.y - state.x**2)
            state.x -= rate * slope_x
            state.y -= rate * slope_y
            if not math.isfinite(state.x * state.x + state.y) or abs(state.x) > 1e6:
                raise fiec.Failed(f"rate {rate} is too large: it does not descend")
        height = (1 - state.x) ** 2 + 100 * (state.y - state.x**2) ** 2
        run.progress(f"({state.x:.3f}, {state.y:.3f})", height=height)
        if step % 20 == 0:
            print(f"step {100 * step}: height {height:.6f}", flush=True)
    run.output("where.csv", f"x,y\n{state.x},{state.y}\n")
    return {"x": state.x, "y": state.y, "height": height}


if __name__ == "__main__":
    fiec.main(main)
