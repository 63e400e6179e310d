"""For tests of programs: a run in memory, with a fake preemption wherever one is wanted.

::

    from fiec import testing

    whole = testing.run(main, {"steps": 100})
    cut = testing.run(main, {"steps": 100}, yield_every=7)
    assert cut.result == whole.result and cut.outputs == whole.outputs

    spread = testing.spread(main, {"tiles": {"from": 0, "to": 100}}, seed=1)
    assert spread.result == whole.result

Every cut calls ``main`` anew with the bytes of the last boundary, as a move to another machine
does. What the process itself keeps (module globals) survives such a cut; ``python program.py
--check`` and ``fiec check`` cut in fresh processes.
"""

from __future__ import annotations

import random
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .engine import Start
from .errors import Failed
from .frames import Message, Pieces
from .local import split
from .tiles import Range, Shares, read_range, write_range
from .values import plain
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
    parts: int = 0
    """How many parts of a range were split off, see :func:`spread`."""


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
                answer["error"] = "the test has no such object"
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


def _attempt(main: Main, link: _Memory, start: Start, body: bytes, *orders: Message) -> Server:
    """One call of a program, with these orders before its first boundary."""
    link.orders.clear()
    link.orders.extend((order, b"") for order in orders)
    server = Server(link, main, None, local=True)
    server.run(start, [body])
    return server


def _outcome(server: Server, link: _Memory, runs: int) -> Outcome:
    last = link.reports[-1]
    return Outcome(
        ending=server.ending,
        result=server.result,
        reason=last.get("reason") if last["is"] == "failed" else None,
        capsules=last.get("capsules", link.boundary or 0),
        boundary=link.boundary,
        state=link.state,
        outputs=dict(link.outputs),
        runs=runs,
    )


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
    params = plain(params if params is not None else {}, "params", numbers_only=True)
    runs = 0
    execution = str(uuid.uuid4())
    while True:
        runs += 1
        yield_at = (link.boundary or 0) + yield_every if yield_every else float("inf")
        start = Start(
            execution=execution,
            epoch=runs,
            program="test@1",
            params=params,
            commit=commit,
            boundary=link.boundary,
            grant=grant or {},
            yield_at=yield_at,
        )
        server = _attempt(main, link, start, link.state)
        if server.ending != "yielded" or yield_every is None:
            return _outcome(server, link, runs)


class _Member:
    """One that computes a range, in memory."""

    def __init__(self, given: Range, objects: dict[str, bytes], *, part: bool) -> None:
        self.range = given
        self.part = part
        self.link = _Memory(objects)
        self.parts: list[_Member] = []
        # Nothing is left to it but to take back its last part.
        self.waits = False


class _Spread:
    """A cluster in memory: every leg of a member is a call of the program of its own."""

    def __init__(
        self,
        main: Main,
        params: dict[str, Any],
        seed: int,
        commit: Any,
        objects: dict[str, bytes],
    ) -> None:
        self._main = main
        self._params = params
        self._draw = random.Random(seed)
        self._commit = commit
        self._objects = objects
        self.outputs: dict[str, bytes] = {}
        self.runs = 0
        self.parts = 0

    def play(self, member: _Member) -> Server:
        """Until it has ended, or as a part is given back to its holder."""
        while True:
            server = self._leg(member)
            if server.ending not in ("yielded", "completed"):
                return server
            member.waits = server.ending == "completed" and bool(member.parts)
            returned = member.part and not member.parts and self._draw.random() < 0.2
            if returned or (server.ending == "completed" and not member.parts):
                self._publish(member)
                return server

    def _leg(self, member: _Member) -> Server:
        link, orders, merge = member.link, [], None
        body = link.state
        if member.waits:
            last = member.parts.pop()
            ended = self.play(last)
            if ended.ending not in ("yielded", "completed"):
                member.link.reports.append(last.link.reports[-1])
                return ended
            merge = write_range(last.range)
            if last.link.boundary is not None:
                merge["bytes"] = len(last.link.state)
                body += last.link.state
        elif self._draw.random() < 0.5:
            orders.append({"is": "split"})
        self.runs += 1
        start = Start(
            execution=str(uuid.UUID(int=self.parts)),
            epoch=self.runs,
            program="test@1",
            params={**self._params, "tiles": write_range(member.range)},
            commit=self._commit,
            boundary=link.boundary,
            yield_at=(link.boundary or 0) + self._draw.randint(2, 6),
            shares=Shares(member.part, len(member.parts)),
            merge=merge,
        )
        seen = len(link.reports)
        server = _attempt(self._main, link, start, body, *orders)
        for report in link.reports[seen:]:
            if "split" in report:
                self.parts += 1
                given = read_range(report["split"], "split")
                member.parts.append(_Member(given, self._objects, part=True))
        return server

    def _publish(self, member: _Member) -> None:
        for name, data in member.link.outputs.items():
            if self.outputs.setdefault(name, data) != data:
                raise Failed(
                    f"output {name!r} was made by two of those that share a range, with other bytes"
                )


def spread(
    main: Main,
    params: dict[str, Any],
    *,
    seed: int = 0,
    commit: Any = "auto",
    objects: dict[str, bytes] | None = None,
) -> Outcome:
    """Runs a program over ``params["tiles"]`` in memory, spread as by a cluster: cut at many
    boundaries, its range split again and again, parts taken back when they are done or before.
    ``seed`` says where. Result and outputs must be those of :func:`run`."""
    params = plain(params, "params", numbers_only=True)
    play = _Spread(main, params, seed, commit, objects or {})
    whole = _Member(read_range(params.get("tiles"), "params.tiles"), objects or {}, part=False)
    server = play.play(whole)
    outcome = _outcome(server, whole.link, play.runs)
    outcome.outputs, outcome.parts = play.outputs, play.parts
    return outcome
