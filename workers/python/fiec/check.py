"""``python program.py --check``: is the state complete, and are the bits the same?

Runs the program whole and cut, every part in a fresh process, and compares results and outputs.
Where its parameters name a range of tiles, that is spread, too.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import testing
from .errors import Failed
from .values import dumps
from .worker import Main

_BOUNDARY = 85
# So often a range is spread, each time in another way.
_SPREADS = 3


def _run(script: str, params: Path, folder: Path, cut: int | None) -> tuple[dict[str, str], int]:
    """Runs to the end; gives digests by name, and the number of processes."""
    command = [sys.executable, script, "--params", str(params), "--folder", str(folder), "--quiet"]
    if cut is not None:
        command += ["--yield-after", str(cut)]
    processes = 0
    while True:
        processes += 1
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            break
        if status != _BOUNDARY:
            raise SystemExit(f"check: the program ended with exit status {status}")
    (home,) = [path.parent for path in folder.glob("*/*/result.json")]
    whole = json.loads((home / "result.json").read_text("utf-8"))
    found = {
        "result": dumps(whole["result"]),
        "capsules": str(whole["capsules"]),
    }
    outputs = home / "outputs"
    for path in sorted(p for p in outputs.rglob("*") if p.is_file()):
        name = path.relative_to(outputs).as_posix()
        found[f"output {name}"] = _digest(path.read_bytes())
    return found, processes


def _differences(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [
        f"  {name}: {a.get(name, 'none')} | {b.get(name, 'none')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _spread(main: Main, params: dict[str, Any], whole: dict[str, str]) -> int:
    """Spreads the range, in this process; prints the verdict, 0 if all is equal."""
    parts = 0
    for seed in range(_SPREADS):
        try:
            found = testing.spread(main, params, seed=seed)
        except Failed as error:
            print(f"check: {error}")
            return 1
        if found.ending != "completed":
            print(f"check: the program {found.ending} when it was spread: {found.reason}")
            return 1
        have = {f"output {name}": _digest(data) for name, data in found.outputs.items()}
        # The capsules are others: splitting costs none, taking back one.
        have |= {"result": dumps(found.result), "capsules": whole["capsules"]}
        if differences := _differences(whole, have):
            print(
                "check: a spread run differs from a whole one: a tile's result depends on other "
                "tiles, or parts are not taken back as if they had been computed here "
                f"(whole | spread over {found.parts} parts)"
            )
            print("\n".join(differences))
            return 1
        parts += found.parts
    if parts:
        print(f"check: equal bits, too, when spread {_SPREADS} times over {parts} parts in all")
    else:
        print("check: it cannot be spread: run.each(tiles) was given no merge=, or few tiles")
    return 0


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check(script: str, main: Main, params: dict[str, Any], every: int) -> int:
    """Prints the verdict; 0 if all is equal."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        file = root / "params.json"
        file.write_text(json.dumps(params))
        whole, _ = _run(script, file, root / "whole", None)
        cut, processes = _run(script, file, root / "cut", every)
        differences = _differences(whole, cut)
        if not differences:
            print(
                f"check: equal bits. {whole['capsules']} capsules, whole in 1 process and cut "
                f"into {processes}; compared: {', '.join(sorted(whole))}"
            )
            return _spread(main, params, whole) if isinstance(params.get("tiles"), dict) else 0
        again, _ = _run(script, file, root / "again", None)
        if _differences(whole, again):
            print("check: two whole runs differ: the program is not deterministic (whole | again)")
            print("\n".join(_differences(whole, again)))
        else:
            print(
                "check: a cut run differs from a whole one: something that a later capsule needs "
                "is not in the state (whole | cut)"
            )
            print("\n".join(differences))
        return 1
