"""Leaves a forked and a started process behind."""

import os
import subprocess
import time

import fiec


def main(run: fiec.Run) -> dict[str, list[int]]:
    fork = os.fork()
    if fork == 0:
        time.sleep(60)
        os._exit(0)
    return {"pids": [fork, subprocess.Popen(["sleep", "60"]).pid]}


if __name__ == "__main__":
    fiec.main(main)
