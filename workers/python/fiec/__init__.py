"""Write programs for FIEC: computations that pause, move and resume at the edge of their loop.

::

    import fiec

    def main(run: fiec.Run) -> dict[str, float]:
        state = run.state(total=0.0)
        for step in run.steps(until=run.params["steps"]):
            state.total += 1 / (step + 1) ** 2    # one capsule
        return {"total": state.total}

    if __name__ == "__main__":
        fiec.main(main)

Run by a worker it is moved at its boundaries; run at a terminal it keeps its state in ``.fiec`` and
goes on there after Ctrl-C. ``fiec.testing`` runs it in memory, for tests. What holds for programs
in any language stands in ``workers/CONTRACT.md``.
"""

import os as _os
import sys as _sys

if {"FIEC_SOCKET_FD", "FIEC_SOCKET"} & _os.environ.keys():
    # A package's folder is shared by all its processes, and never written to.
    _sys.dont_write_bytecode = True

from .cli import main
from .data import Batches, Stream
from .errors import Cancelled, Failed, StateError, Stop, Yielded
from .rng import GlobalRandom
from .run import Device, Grant, Reserved, Run, State, Surroundings, inputs
from .tiles import Tiles

__all__ = [
    "Batches",
    "Cancelled",
    "Device",
    "Failed",
    "GlobalRandom",
    "Grant",
    "Reserved",
    "Run",
    "State",
    "StateError",
    "Stop",
    "Stream",
    "Surroundings",
    "Tiles",
    "Yielded",
    "inputs",
    "main",
]
__version__ = "0.1.0"
