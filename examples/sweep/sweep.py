"""Fits a model of an epidemic to what was counted, by trying every point of a grid.

A tile is one rate of infection, tried with every rate of recovery. Tiles know nothing of each
other, so their range may be spread over several nodes: see README.md. params: tiles (which rates of
infection, of 1 to `grid`), grid (points along an axis, 120), steps (of the integration, a day: 24).
"""

from __future__ import annotations

import fiec

# Influenza in a boarding school of 763 boys, 22 January to 4 February 1978: how many were in bed
# (Br Med J 1978;1:587).
BOYS = 763.0
IN_BED = (3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4)
# The rates that are tried, a day: up to these.
INFECTION, RECOVERY = 3.0, 1.0


def misfit(infection: float, recovery: float, steps: int) -> float:
    """Squares of what the model says less what was counted, summed up: S' = -βSI/N,
    I' = βSI/N - γI, by the classical Runge-Kutta scheme. Sums and products only: the same bits
    everywhere."""
    h = 1.0 / steps
    rate = infection / BOYS
    well, ill = BOYS - IN_BED[0], float(IN_BED[0])
    total = 0.0
    for counted in IN_BED[1:]:
        for _ in range(steps):
            new = rate * well * ill
            s1, i1 = -new, new - recovery * ill
            s, i = well + 0.5 * h * s1, ill + 0.5 * h * i1
            new = rate * s * i
            s2, i2 = -new, new - recovery * i
            s, i = well + 0.5 * h * s2, ill + 0.5 * h * i2
            new = rate * s * i
            s3, i3 = -new, new - recovery * i
            s, i = well + h * s3, ill + h * i3
            new = rate * s * i
            well += h / 6.0 * (s1 + 2.0 * s2 + 2.0 * s3 - new)
            ill += h / 6.0 * (i1 + 2.0 * i2 + 2.0 * i3 + new - recovery * i)
        total += (ill - counted) * (ill - counted)
    return total


def whole(params: dict[str, object], name: str, default: int) -> int:
    """A parameter that is a whole number above 0."""
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 100_000:
        raise fiec.Failed(f"params.{name}: must be from 1 to 100000, but is {value!r}")
    return value


def main(run: fiec.Run) -> dict[str, float]:
    grid, steps = whole(run.params, "grid", 120), whole(run.params, "steps", 24)
    # Of each tile the best recovery and its misfit.
    state = run.state(tiles=run.tiles(grid), recoveries=[], misfits=[])

    def take(part: fiec.State) -> None:
        """A part's tiles come behind those that are here."""
        state.recoveries += part.recoveries
        state.misfits += part.misfits

    for tile in run.each(state.tiles, merge=take):
        infection = INFECTION * (tile + 1) / grid
        tried = (RECOVERY * (n + 1) / grid for n in range(grid))
        found, recovery = min((misfit(infection, r, steps), r) for r in tried)
        state.recoveries.append(recovery)
        state.misfits.append(found)
        run.progress(f"best {min(state.misfits):.0f}")

    # Behind the loop there is only the whole: no part comes here.
    first = state.tiles.begin
    best = min(range(len(state.misfits)), key=state.misfits.__getitem__)
    rows = [
        f"{INFECTION * (first + n + 1) / grid!r},{recovery!r},{found!r}\n"
        for n, (recovery, found) in enumerate(zip(state.recoveries, state.misfits))
    ]
    run.output("misfit.csv", "infection,recovery,misfit\n" + "".join(rows))
    return {
        "infection": INFECTION * (first + best + 1) / grid,
        "recovery": state.recoveries[best],
        "misfit": state.misfits[best],
        "tiles": len(state.misfits),
    }


if __name__ == "__main__":
    fiec.main(main)
