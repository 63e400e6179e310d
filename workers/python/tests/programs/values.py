"""Hands values over that JSON has no form for: ``which`` says the value, ``to`` says where."""

from __future__ import annotations

import fiec

CYCLE: list[object] = []
CYCLE.append(CYCLE)
VALUES: dict[str, object] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "big": 2**64,
    "small": -(2**63) - 1,
    "edges": [2**64 - 1, -(2**63), 5e-324, -0.0, "a\0b"],
    "surrogate": "a\udc80",
    "surrogate_key": {"k\udc80": 1},
    "keys": {1: "a", "1": "b"},
    "cycle": CYCLE,
    "bytes": b"x",
    "float": 8e9,
    "negative": -1,
    "boolean": True,
}


def main(run: fiec.Run) -> object:
    value = VALUES.get(run.params.get("which", "params"))
    for _ in run.steps(2):
        match run.params.get("to"):
            case "emit":
                run.emit("m", value if isinstance(value, str) else {"v": value})
            case "note":
                run.progress(value)
            case "of":
                run.progress(of=value)  # type: ignore[arg-type]
            case "number":
                run.progress(loss=value)
            case "output":
                run.output("o", value)
            case "name":
                run.output(str(value), b"")
            case "reserve":
                run.reserve(memory_bytes=value)  # type: ignore[arg-type]
            case "ask":
                run.ask(threads=value)  # type: ignore[arg-type]
            case "fail":
                raise fiec.Failed(f"no file {value}")
            case "crash":
                raise ValueError(f"no file {value}")
    return {"v": value if run.params.get("to") is None else 1}


if __name__ == "__main__":
    fiec.main(main)
