"""What happens at a boundary: orders, commits, progress. The same rules as the Rust kit's child.

The computing thread reads its orders itself, by looking at the link at a boundary, at most every
:data:`LOOK_INTERVAL`. Between two looks a boundary costs one reading of the clock.
"""

from __future__ import annotations

import base64
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .errors import AgentGone, Cancelled, Done, Failed, FrameError, Stop, Yielded
from .frames import Link, Message, now
from .schedule import COMMIT_WHEN_ACKNOWLEDGED, NO, Schedule
from .series import Waiting
from .tiles import Merge, Range, Shares, Tiles, write_range
from .writer import Writer

LOOK_INTERVAL = 100e-6
PROGRESS_INTERVAL = 0.2
NOTE_LIMIT = 200
# Messages that one capsule may emit, and their bytes.
EMITS_LIMIT = 128
EMIT_BYTES_LIMIT = 256 * 1024
# A commit's message has 8 KiB for the names of outputs: so many bytes make a commit due, and so
# many are taken by an output beside its name.
NAMED_BYTES = 2048
OUTPUT_BYTES = 110
# A run that ends sooner says only at its end when it began.
BRIEF = 1e-3

Order = tuple[Message, bytes]


@dataclass(frozen=True)
class Start:
    """The order ``run``, checked."""

    execution: str
    epoch: int
    program: str
    params: Any
    commit: Any = "auto"
    boundary: int | None = None
    lease: float = 60.0
    interval: float = 0.0
    grant: Message = field(default_factory=dict)
    shares: Shares | None = None
    # What is taken back first; how many bytes of the body are its σ.
    merge: Message | None = None
    # Local runs and tests only: the boundary at which to yield.
    yield_at: float = math.inf

    @classmethod
    def parse(cls, head: Message) -> Start:
        """Reads the order's head."""
        try:
            boundary, merge = head.get("boundary"), head.get("merge")
            return cls(
                execution=str(head["execution"]),
                epoch=int(head["epoch"]),
                program=str(head["program"]),
                params=head["params"],
                commit=head["commit"],
                boundary=None if boundary is None else int(boundary),
                lease=max(int(head["lease_ms"]), 1) / 1000,
                interval=int(head.get("interval_ms") or 0) / 1000,
                grant=dict(head.get("grant") or {}),
                shares=Shares.parse(head.get("spread")),
                merge=None if merge is None else dict(merge),
            )
        except KeyError as error:
            raise FrameError(f"an order to run has no field {error}") from error
        except (TypeError, ValueError) as error:
            raise FrameError(f"an order to run cannot be read: {error}") from error

    def bodies(self, body: bytes) -> tuple[bytes | None, Merge | None]:
        """Its own σ, and the part that is taken back with that one's."""
        merge, own = None, len(body)
        if self.merge is not None:
            size = self.merge.get("bytes")
            if size is not None:
                if not isinstance(size, int) or not 0 <= size <= own:
                    raise FrameError(f"a part's σ of {size!r} bytes did not come along")
                own -= size
            merge = Merge.parse(self.merge, None if size is None else body[own:])
        return (None if self.boundary is None else body[:own]), merge


class Boundaries:
    """What a run needs of whoever takes it from boundary to boundary."""

    def __init__(self, index: int, shares: Shares | None = None) -> None:
        self.index = index
        self.shares = shares
        # The range that a loop goes over, and whether parts of it may be given away.
        self.tiles: Tiles | None = None
        self.splits = False
        self.of: int | None = None
        self.note: str | None = None
        self.outputs: dict[str, bytes] = {}
        self.emits: list[Message] = []
        self._emitted = (0, 0, 0)
        self.numbers = Waiting()
        # Cause of an order to yield that the next boundary carries out.
        self.yield_cause: str | None = None
        self.cancel = False
        self.ended: Stop | None = None
        # Called with the seconds that are left when the limit of computing is near.
        self.near_limit: Callable[[float], None] = lambda left: None

    def wanted(self) -> bool:
        """Whether a yield, park or cancel is ordered for the next boundary."""
        return self.yield_cause is not None or self.cancel

    def check(self) -> None:
        """Raises again what has ended the run, where a program has caught it."""
        if self.ended is not None:
            raise self.ended

    def emit(self, name: str, data: bytes) -> None:
        """A message that is published after the commit of the next boundary."""
        boundary, count, size = self._emitted
        if boundary != self.index + 1:
            boundary, count, size = self.index + 1, 0, 0
        size += len(data)
        if count >= EMITS_LIMIT or size > EMIT_BYTES_LIMIT:
            raise Failed(
                f"emit: the capsule before boundary {boundary} emits more than {EMITS_LIMIT} "
                f"messages or {EMIT_BYTES_LIMIT} bytes; make shorter capsules, or outputs, and "
                "emit their names"
            )
        text = base64.b64encode(data).decode()
        self.emits.append({"name": name, "boundary": boundary, "index": count, "data": text})
        self._emitted = (boundary, count + 1, size)

    def output(self, name: str, data: bytes) -> None:
        """An output, for the next commit."""
        self.outputs[name] = data

    def names_much(self) -> bool:
        """Whether so many outputs wait to be named that a commit is due."""
        named = sum(len(name.encode()) + OUTPUT_BYTES for name in self.outputs)
        return named >= NAMED_BYTES

    def take_emits(self) -> list[Message]:
        """The messages emitted since the last report."""
        made, self.emits = self.emits, []
        return made

    def capsules(self) -> int:
        """Capsules in all, once the program has returned: what it did last is one, too."""
        return self.index if isinstance(self.ended, Done) else self.index + 1

    def give_away(self) -> Range | None:
        """Splits what is left; ``None`` where that cannot be."""
        if self.tiles is None or self.shares is None or not self.splits:
            return None
        given = self.tiles.last_half()
        if given is not None:
            self.tiles.end = given[0]
            self.shares.parts += 1
        return given

    def is_shared(self) -> bool:
        """Whether it is not the whole: a part, or one that has parts out."""
        return self.shares is not None and (self.shares.part or self.shares.parts > 0)

    def tiles_done(self) -> None:
        """Nothing is left of the loop's tiles. Does not return where it is not the whole."""
        if self.is_shared():
            self.index += 1
            self.end_of_range()
            self.ended = Done()
            raise self.ended

    def end_of_range(self) -> None:
        """What is said with the end of a range that is shared."""

    def position(self, head: Message) -> Message:
        """The head, with what people are told of where it stands."""
        if self.tiles is not None:
            head["of"] = self.index + self.tiles.left
        elif self.of is not None:
            head["of"] = self.of
        if self.note is not None:
            head["note"] = self.note
        return head

    def edge(self, merged: bool = False) -> None:
        """A boundary is reached: σ is complete. ``merged``: a part was taken back."""
        raise NotImplementedError

    def look(self) -> None:
        """Takes the orders that have arrived."""
        raise NotImplementedError

    def fetch(self, digest: str, size: int) -> Order:
        """Asks for data by digest and waits for it; other orders are taken meanwhile."""
        raise NotImplementedError

    def reserve(self, wish: Message) -> Message:
        """Asks for more than the grant and waits for the answer."""
        raise NotImplementedError

    def surroundings(self) -> Message:
        """Asks what there is around it and waits for the answer."""
        raise NotImplementedError

    def ask(self, change: Message) -> Message:
        """Asks for another grant of its node and waits for the answer."""
        raise NotImplementedError


class Engine(Boundaries):
    """Takes one execution from boundary to boundary over frames."""

    def __init__(
        self,
        link: Link,
        writer: Writer,
        start: Start,
        kept: deque[Order],
        encode: Callable[[], list[bytes]],
        reconfigure: Callable[[Message], None],
    ) -> None:
        self._link = link
        self._writer = writer
        self._start = start
        self._kept = kept
        self._encode = encode
        self._reconfigure = reconfigure
        self._clock = time.perf_counter
        begun = self._clock()
        # When it was last seen that there is no order.
        self._empty_at = begun
        self.began = begun
        self.began_at = now()
        super().__init__(start.boundary or 0, start.shares)
        self._schedule = Schedule(start.commit, start.interval, begun, self.index)
        self._sent: deque[tuple[int, float]] = deque()
        self._mark = self._told = begun
        # A boundary does nothing before this time, and before this index.
        self._at_time = 0.0
        self._gate = 0.0
        # A yield that waits for a certain boundary.
        self._yield_at, self._cause = start.yield_at, "it was asked to yield here"
        self._set_gate()
        self._grant: Message | None = None
        # Seconds that the run may still compute, if its limit is near and it does not know yet.
        self._limit_left: float | None = None
        # An order to park that waits for the next boundary, and whether it may go on again.
        self._parks: Message | None = None
        self._goes_on = False
        # An order to split that waits for the next boundary.
        self._asked_to_split = False
        self._answers: deque[Message] = deque()
        self._data: deque[Order] = deque()
        # So much was emitted, or so many outputs were made, that a commit is due.
        self._much = False

    def emit(self, name: str, data: bytes) -> None:
        super().emit(name, data)
        if not self._much:
            size = sum(len(emit["data"]) for emit in self.emits)
            self._much = len(self.emits) >= EMITS_LIMIT or size >= EMIT_BYTES_LIMIT
            if self._much:
                self._at_time = 0.0

    def output(self, name: str, data: bytes) -> None:
        super().output(name, data)
        if not self._much and self.names_much():
            self._much = True
            self._at_time = 0.0

    def _set_gate(self) -> None:
        self._gate = min(self._schedule.gate(), self._yield_at)

    def edge(self, merged: bool = False) -> None:
        self.index += 1
        if merged or self.index >= self._gate or self._clock() >= self._at_time:
            self._boundary(merged)

    def _boundary(self, merged: bool) -> None:
        self.check()
        at = self._clock()
        self._at_time = at + LOOK_INTERVAL
        self.look()
        if self._sent and at - self._sent[0][1] > self._start.lease:
            self._park()
        if self._limit_left is not None:
            # Before the commit, so that what it emits goes along.
            left, self._limit_left = self._limit_left, None
            self.near_limit(left)
        due = self._schedule.boundary(self.index, at)
        if due == NO and (self._much or merged or self._asked_to_split):
            due = COMMIT_WHEN_ACKNOWLEDGED
        if self.index >= self._yield_at and self.yield_cause is None:
            self.yield_cause = self._cause
        if due != NO or self.wanted():
            computed_at = now()
            if due == COMMIT_WHEN_ACKNOWLEDGED:
                while self._schedule.is_full() and not self.wanted():
                    self._wait()
            if self.cancel:
                self._end(Cancelled(), {"is": "cancelled"})
            parks, self._parks = self._parks, None
            more: Message = {"merged": True} if merged else {}
            if self.yield_cause is not None:
                self._commit(at, computed_at, "yield", more)
                self._end(Yielded(self.yield_cause))
            if self._asked_to_split and parks is None:
                self._asked_to_split = False
                if (given := self.give_away()) is None:
                    self._writer.report({"is": "whole"})
                else:
                    more["split"] = write_range(given)
            self._commit(at, computed_at, "commit" if parks is None else "park", more)
            if parks is not None:
                self._stand(parks)
            self._told = at
        elif at - self._told >= PROGRESS_INTERVAL and not self._writer.is_busy():
            self._told = at
            self._writer.report(self.position({"is": "progress", "index": self.index}))
        if self._grant is not None:
            grant, self._grant = self._grant, None
            self._reconfigure(grant)

    def _end(self, end: Stop, report: Message | None = None) -> NoReturn:
        self.ended = end
        if report is not None:
            self._writer.report(report)
        raise end

    def take_outputs(self) -> tuple[list[Message], list[bytes]]:
        """The outputs made since the last report, described, and their bytes."""
        made, self.outputs = self.outputs, {}
        return [{"name": n, "bytes": len(b)} for n, b in made.items()], list(made.values())

    def end_of_range(self) -> None:
        self.check()
        self.look()
        if self.cancel:
            self._end(Cancelled(), {"is": "cancelled"})
        self._commit(self._clock(), now(), "end", {})

    def _commit(self, at: float, computed_at: str, reason: str, more: Message) -> None:
        self._writer.settle()
        before = self._clock()
        pieces = self._encode()
        sent = self._clock()
        size = sum(map(len, pieces))
        head = {
            "is": "boundary",
            "index": self.index,
            "bytes": size,
            "computed_at": computed_at,
            "compute_us": max(0, int((at - self._mark) * 1e6)),
            "reason": reason,
            **more,
        }
        outputs, bodies = self.take_outputs()
        if outputs:
            head["outputs"] = outputs
            pieces += bodies
        if self.emits:
            head["emits"] = self.take_emits()
        if self.numbers:
            head["numbers"] = self.numbers.take(self.index)
        self._much = False
        whole = sum(map(len, pieces))
        self._writer.boundary(self.position(head), pieces, whole)
        self._schedule.sent(self.index, sent, sent - before, size)
        self._sent.append((self.index, sent))
        self._mark = self._clock()
        self._set_gate()
        if reason != "commit":
            self._writer.settle()

    def wanted(self) -> bool:
        return super().wanted() or self._parks is not None

    def _stand(self, order: Message) -> None:
        """Waits at the boundary that was just committed, with what may be kept meanwhile."""
        aside = order.get("grant")
        if isinstance(aside, dict):
            self._reconfigure(aside)
        self._writer.report({"is": "aside"})
        self._goes_on = False
        # One order at a time: what follows the one to go on is for the capsules after that.
        while not self._goes_on and self.yield_cause is None and not self.cancel:
            self._take_order()
            self._parks = None  # it is parked already
        if self.yield_cause is not None or self.cancel:
            self._end(Cancelled(), {"is": "cancelled"})
        self._mark = self._clock()

    def look(self) -> None:
        while self._link.has_order(0):
            self._take_order()
        self._empty_at = self._clock()

    def _wait(self) -> None:
        if not self._link.has_order(0):
            self._link.has_order(3600.0)
            self._empty_at = self._clock()
        self.look()

    def _park(self) -> None:
        """No commit was possible for a lease: waits until one is, or for a yield or cancel."""
        print(
            f"fiec: boundary not acknowledged within {self._start.lease * 1000:.0f} ms; "
            f"{self._start.execution} waits at a boundary",
            file=sys.stderr,
            flush=True,
        )
        while self._sent and not self.cancel and self.yield_cause is None:
            self._wait()

    def _take_order(self) -> None:
        got = self._link.read()
        if got is None:
            raise AgentGone("the socket was closed")
        head, body = got
        match head:
            case {"is": "yield"}:
                cause = str(head.get("cause") or "FIEC asked for it")
                at = head.get("at")
                if isinstance(at, int) and at > self.index:
                    self._yield_at, self._cause = at, cause
                    self._set_gate()
                else:
                    self.yield_cause = cause
            case {"is": "cancel"}:
                self.cancel = True
            case {"is": "committed", "index": int(index)}:
                while self._sent and self._sent[0][0] <= index:
                    _, at = self._sent.popleft()
                    # Not until now: it may have lain there for most of a long capsule, which is
                    # no time that the commit took.
                    self._schedule.acknowledged(max(0.0, self._empty_at - at))
            case {"is": "stretch", "interval_ms": int(ms)}:
                self._schedule.stretch(ms / 1000)
            case {"is": "reconfigure", "grant": dict(grant)}:
                self._grant = grant
            case {"is": "limit", "left_ms": int(left)}:
                self._limit_left = left / 1000
            case {"is": "park"}:
                if self.yield_cause is None:
                    self._parks, self._goes_on = head, False
            case {"is": "unpark"}:
                self._parks, self._goes_on = None, True
                again = head.get("grant")
                if isinstance(again, dict):
                    self._grant = again
            case {"is": "split"}:
                self._asked_to_split = True
            case {"is": "reserved" | "surroundings" | "asked"}:
                self._answers.append(head)
            case {"is": "data"}:
                self._data.append((head, body))
            case {"is": "prepare" | "run"}:
                # For later: a preparation while something runs.
                self._kept.append((head, body))
            case _:
                raise FrameError(f"order {head['is']!r} is not known, or lacks a field")
        news = self._grant is not None or self._limit_left is not None
        if self.wanted() or news or self._asked_to_split:
            # The next boundary acts on it at once.
            self._at_time = 0.0

    def fetch(self, digest: str, size: int) -> Order:
        self._writer.report({"is": "fetch", "digest": digest, "bytes": size})
        while True:
            while self._data:
                head, body = self._data.popleft()
                if head.get("digest") == digest:
                    return head, body
            self._take_order()

    def reserve(self, wish: Message) -> Message:
        return self._converse({"is": "reserve", **wish})

    def surroundings(self) -> Message:
        return self._converse({"is": "surroundings"})

    def ask(self, change: Message) -> Message:
        return self._converse({"is": "ask", **change})

    def _converse(self, head: Message) -> Message:
        """Says something and waits for its answer; other orders are taken meanwhile."""
        self._writer.report(head)
        while not self._answers:
            self._take_order()
        return self._answers.popleft()

    def complete(self, result: Any) -> None:
        """The program has returned."""
        outputs, bodies = self.take_outputs()
        head: Message = {"is": "completed", "capsules": self.capsules()}
        if result is not None:
            head["result"] = result
        head["computing_since"] = self.began_at
        head["computed_until"] = now()
        if outputs:
            head["outputs"] = outputs
        if self.emits:
            head["emits"] = self.take_emits()
        if self.numbers:
            head["numbers"] = self.numbers.take(self.capsules())
        self._writer.report(head, bodies)

    def is_brief(self) -> bool:
        """Whether it has run for less than a millisecond."""
        return self._clock() - self.began < BRIEF
