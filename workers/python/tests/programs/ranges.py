"""Hashes the tiles of a range, one a capsule; the range may be spread.

params: tiles, total (20), sleep (s a capsule), mode (``alone``: it cannot be split; ``lost``: takes
nothing back; ``early``: leaves its loop; ``dataclass``; ``hidden``: its tiles are deep in its state;
``same``: all tiles make an output of one name).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time

import fiec


@dataclasses.dataclass
class Found:
    tiles: fiec.Tiles
    made: list[str] = dataclasses.field(default_factory=list)


def digest(made: list[str]) -> str:
    return hashlib.sha256("".join(made).encode()).hexdigest()


def main(run: fiec.Run) -> object:
    mode = run.params.get("mode")
    tiles = run.tiles(run.params.get("total", 20))
    if mode == "dataclass":
        state = run.state(Found(tiles))
    elif mode == "hidden":
        hidden = run.state(deep=Found(tiles))
        state = hidden.deep
    else:
        state = run.state(tiles=tiles, made=[])  # type: ignore[assignment]

    def take(part: Found) -> None:
        if mode != "lost":
            state.made.extend(part.made)

    for tile in run.each(state.tiles, merge=None if mode == "alone" else take):
        time.sleep(run.params.get("sleep", 0))
        if mode == "early" and tile == 3:
            break
        state.made.append(hashlib.sha256(str(tile).encode()).hexdigest()[:8])
        run.output("tile" if mode == "same" else f"tile-{tile:03}", state.made[-1])
    run.output("all", "".join(state.made))
    return {"digest": digest(state.made), "tiles": len(state.made)}


if __name__ == "__main__":
    fiec.main(main)
