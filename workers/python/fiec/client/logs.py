"""What programs print, in order, through moves and outages."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from .broker import Broker
from .errors import Unreachable

STREAM = "FIEC_LOG"
QUIET_S = 0.5
"""Time without a message after which it is asked whether the execution has ended."""

AGAIN_S = 1.0
"""Pause before another try, where the broker does not answer."""

_HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class Line:
    """A line that a program printed, without its line feed."""

    text: str
    stream: str
    """``stdout`` or ``stderr``."""

    node: str
    boundary: int
    """The last boundary that the program had reached."""
    at: str
    """When its worker read it, as RFC 3339."""
    missing: int = 0
    """Bytes that are missing before it: they are no longer kept, or were dropped."""

    def __str__(self) -> str:
        return self.text


@dataclass
class _Source:
    """One stream of one binding: where it stands, and its line that has not ended."""

    seen: int = 0
    missing: int = 0
    text: bytearray = field(default_factory=bytearray)
    last: dict[str, Any] = field(default_factory=dict)


class Lines:
    """Joins pieces to lines.

    A worker that is not sure sends a piece again.
    """

    def __init__(self) -> None:
        self._sources: dict[tuple[str, int, str], _Source] = {}

    def add(self, data: bytes) -> list[Line]:
        """The lines that a message ends."""
        try:
            piece: dict[str, Any] = json.loads(data)
            key = (piece["node"], int(piece["epoch"]), piece["stream"])
            raw = piece.get("bytes")
            text = base64.b64decode(raw) if raw is not None else str(piece["line"]).encode()
        except (ValueError, KeyError, TypeError):
            return []
        source = self._sources.setdefault(key, _Source())
        offset, dropped = piece.get("offset"), piece.get("dropped")
        if isinstance(offset, int):
            if offset < source.seen:
                return []
            source.missing += offset - source.seen
            source.seen = offset
        if dropped:
            source.seen += int(dropped.get("bytes", 0))
            source.missing += int(dropped.get("bytes", 0))
            return []
        source.text += text
        source.last = piece
        source.seen += len(text) + (not piece.get("part"))
        return [] if piece.get("part") else [self._take(source)]

    def rest(self) -> list[Line]:
        """The lines that have no line feed at their end."""
        return [self._take(source) for source in self._sources.values() if source.text]

    def _take(self, source: _Source) -> Line:
        # What a carriage return has overwritten is not shown, as on a terminal.
        shown = bytes(source.text).rstrip(b"\r").rsplit(b"\r", 1)[-1]
        piece = source.last
        line = Line(
            shown.decode(errors="backslashreplace"),
            str(piece["stream"]),
            str(piece["node"]),
            int(piece.get("boundary", 0)),
            str(piece.get("at", "")),
            source.missing,
        )
        source.text.clear()
        source.missing = 0
        return line


async def lines(
    broker: Broker,
    subject: str,
    ended: Callable[[], Awaitable[bool]] | None,
) -> AsyncIterator[Line]:
    """The lines that are kept, and with ``ended`` those that come until it says so.

    Raises :class:`Unreachable`, unless it follows: then it waits until the broker answers again.
    """
    joined, next_seq = Lines(), 1
    while True:
        try:
            async for message in _messages(broker, subject, next_seq, ended):
                next_seq = message.metadata.sequence.stream + 1
                for line in joined.add(message.data):
                    yield line
            break
        except (NatsError, OSError, asyncio.TimeoutError) as error:
            if ended is None:
                raise Unreachable(f"the logs do not answer: {error}") from error
            await asyncio.sleep(AGAIN_S)
    for line in joined.rest():
        yield line


async def _messages(
    broker: Broker,
    subject: str,
    first: int,
    ended: Callable[[], Awaitable[bool]] | None,
) -> AsyncIterator[Msg]:
    last = await _last(broker, subject)
    if ended is None and last < first:
        return
    config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=first)
    feed = await broker.js.subscribe(
        subject,
        stream=STREAM,
        ordered_consumer=True,
        config=config,
        idle_heartbeat=_HEARTBEAT_S,
    )
    try:
        at = first - 1
        while ended is not None or at < last:
            try:
                message = await feed.next_msg(QUIET_S if ended else _HEARTBEAT_S)
            except NatsTimeout:
                if ended is None:
                    raise
                # What it printed at its end may come after its end.
                if await ended() and at >= await _last(broker, subject):
                    return
                continue
            at = message.metadata.sequence.stream
            yield message
    finally:
        if not broker.nats.is_closed:
            await feed.unsubscribe()


async def _last(broker: Broker, subject: str) -> int:
    try:
        return int((await broker.js.get_last_msg(STREAM, subject)).seq or 0)
    except NotFoundError:
        return 0
