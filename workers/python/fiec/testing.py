"""For tests of programs: a run in memory, with a fake preemption wherever one is wanted.

::

    from fiec import testing

    whole = testing.run(main, {"steps": 100})
    cut = testing.run(main, {"steps": 100}, yield_every=7)
    assert cut.result == whole.result and cut.outputs == whole.outputs

Every cut calls ``main`` anew with the bytes of the last boundary, as a move to another machine
does. What the process itself keeps (module globals) survives such a cut; ``python program.py
--check`` and ``fiec check`` cut in fresh processes.
"""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .engine import Start
from .frames import Message, Pieces
from .local import split
from .worker import Ending, Main, Server


@dataclass
class Outcome:
    """How a run in memory ended."""

    ending: Ending
    result: Any
    """What the program returned."""
    reason: str | None
    """Why it failed."""
    capsules: int
    boundary: int | None
    """The last commit."""
    state: bytes
    """σ of the last commit."""
    outputs: dict[str, bytes] = field(default_factory=dict)
    """Everything that became visible."""
    runs: int = 1
    """How often the program was called."""


class _Memory:
    def __init__(self, objects: dict[str, bytes]) -> None:
        self.orders: deque[tuple[Message, bytes]] = deque()
        self.reports: list[Message] = []
        self.boundary: int | None = None
        self.state = b""
        self.outputs: dict[str, bytes] = {}
        self._objects = objects

    def has_order(self, timeout: float | None) -> bool:
        return bool(self.orders)

    def read(self) -> tuple[Message, bytes] | None:
        return self.orders.popleft() if self.orders else None

    def write(self, head: Message, body: Pieces = ()) -> None:
        self.reports.append(head)
        if head["is"] in ("boundary", "completed"):
            state, outputs = split(head, body)
            self.outputs.update(outputs)
            if head["is"] == "boundary":
                self.boundary, self.state = head["index"], b"".join(state)
                self.orders.append(({"is": "committed", "index": self.boundary}, b""))
        elif head["is"] == "fetch":
            found = self._objects.get(head["digest"])
            answer: Message = {"is": "data", "digest": head["digest"]}
            if found is None:
                answer["error"] = "no such object was given to the test"
            self.orders.append((answer, found or b""))
        elif head["is"] == "surroundings":
            self.orders.append(({"is": "surroundings", "unknown": "this is a test"}, b""))
        elif head["is"] == "ask":
            granted = {name: value for name, value in head.items() if name != "is"}
            answer = {"is": "asked", "answer": "granted", "grant": granted}
            self.orders.append(({"is": "reconfigure", "grant": granted}, b""))
            self.orders.append((answer, b""))
        elif head["is"] == "reserve":
            granted = {"memory_bytes": head.get("memory_bytes")}
            answer = {"is": "reserved", "answer": "granted", "grant": granted}
            self.orders.append((answer, b""))
            self.orders.append(({"is": "reconfigure", "grant": granted}, b""))


def run(
    main: Main,
    params: dict[str, Any] | None = None,
    *,
    yield_every: int | None = None,
    commit: Any = "auto",
    objects: dict[str, bytes] | None = None,
    grant: dict[str, Any] | None = None,
) -> Outcome:
    """Runs a program in memory, to its end. ``yield_every=k``: thrown away and resumed from its
    state at every k-th boundary."""
    link = _Memory(objects or {})
    runs = 0
    execution = str(uuid.uuid4())
    while True:
        runs += 1
        stop_at = (link.boundary or 0) + yield_every if yield_every else float("inf")
        start = Start(
            execution=execution,
            epoch=runs,
            program="test@1",
            params=params if params is not None else {},
            commit=commit,
            boundary=link.boundary,
            grant=grant or {},
            stop_at=stop_at,
        )
        link.orders.clear()
        server = Server(link, main, None, local=True)
        ending = server.run(start, link.state)
        if ending != "yielded" or yield_every is None:
            last = link.reports[-1]
            return Outcome(
                ending=ending,
                result=server.result,
                reason=last.get("reason") if last["is"] == "failed" else None,
                capsules=last.get("capsules", link.boundary or 0),
                boundary=link.boundary,
                state=link.state,
                outputs=dict(link.outputs),
                runs=runs,
            )
