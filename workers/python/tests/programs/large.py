"""A state of ``bytes`` zeros; gives back how many bytes the process has in memory at its end."""

from __future__ import annotations

import os

import fiec


def main(run: fiec.Run) -> object:
    run.state(data=bytearray(run.params["bytes"]))
    for _ in run.steps(until=4):
        pass
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}


if __name__ == "__main__":
    fiec.main(main)
