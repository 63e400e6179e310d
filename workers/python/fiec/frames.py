"""The frames between an agent and this process.

::

    u32 LE length of head | u64 LE length of body | head (JSON) | body

The same format as ``workers/kit/src/frames.rs``, where every message is described.
"""

from __future__ import annotations

import io
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Protocol

from .errors import AgentGone, FrameError

SOCKET_ENV = "FIEC_SOCKET_FD"
DATA_DIR_ENV = "FIEC_DATA_DIR"
INPUTS_ENV = "FIEC_INPUTS"
PREFIX = struct.Struct("<IQ")
HEAD_LIMIT = 1 << 20
BODY_LIMIT = 1 << 33
# As many pieces as one system call takes for sure.
_PIECES = 512
_CHUNK = 1 << 20
# A body of this size or more is read into one block of memory, not joined from parts.
_WHOLE = 1 << 22

Message = dict[str, Any]
Pieces = Sequence[bytes]


class Link(Protocol):
    """The way to whoever gives orders: an agent behind a socket, or a local stand-in."""

    def has_order(self, timeout: float | None) -> bool:
        """Whether an order waits; after ``timeout`` seconds at most, ``None`` for no limit."""

    def read(self) -> tuple[Message, bytes] | None:
        """The next order and its body; ``None`` at the clean end of all orders."""

    def write(self, head: Message, body: Pieces = ()) -> None:
        """Sends a report."""


def now() -> str:
    """The time as messages carry it: RFC 3339, UTC, microseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")[:26] + "Z"


def encode_head(head: Message, body: int) -> bytes:
    """Prefix and head of a frame whose body has ``body`` bytes."""
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "replace"
    )
    _check(len(text), body)
    return PREFIX.pack(len(text), body) + text


def _check(head: int, body: int) -> None:
    for what, found, limit in (("head", head, HEAD_LIMIT), ("body", body, BODY_LIMIT)):
        if found > limit:
            raise FrameError(f"frame with a {what} of {found} bytes, over the limit of {limit}")


def _milliseconds(timeout: float | None) -> float | None:
    return None if timeout is None else timeout * 1000


class SocketLink:
    """A link over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self._buffer = b""
        sock.setblocking(True)
        # Neither a program that this one starts nor a fork of it may hold the agent's socket open.
        sock.set_inheritable(False)
        os.register_at_fork(after_in_child=sock.close)

    def has_order(self, timeout: float | None) -> bool:
        if self._buffer:
            return True
        # The usual case first: it is asked at boundaries.
        ready = self._poll.poll(0) if timeout == 0 else self._poll.poll(_milliseconds(timeout))
        return bool(ready)

    def _exactly(self, count: int, at_start: bool = False) -> bytes | None:
        """So many bytes; ``None`` if the other end closed before the first one, where it may."""
        have = self._buffer
        if len(have) >= count:
            self._buffer = have[count:]
            return have[:count]
        if count >= _WHOLE:
            self._buffer = b""
            return self._large(have, count)
        parts, missing = [have], count - len(have)
        self._buffer = b""
        while missing > 0:
            try:
                # What comes after the missing bytes is kept for the next frame.
                part = self._socket.recv(min(max(missing, 1 << 16), _CHUNK))
            except ConnectionError as error:
                raise AgentGone(str(error)) from error
            if not part:
                if at_start and missing == count:
                    return None
                raise AgentGone("the socket was closed in the middle of a frame")
            if len(part) > missing:
                part, self._buffer = part[:missing], part[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _large(self, have: bytes, count: int) -> bytes:
        """Reads a body of ``count`` bytes into one block of memory. ``have``: its first bytes."""
        whole = io.BytesIO()
        whole.seek(count - 1)
        whole.write(b"\0")
        done = len(have)
        with whole.getbuffer() as view:
            view[:done] = have
            while done < count:
                try:
                    got = self._socket.recv_into(view[done : done + _CHUNK])
                except ConnectionError as error:
                    raise AgentGone(str(error)) from error
                if not got:
                    raise AgentGone("the socket was closed in the middle of a frame")
                done += got
        # No copy: nothing else has a share in it.
        return whole.getvalue()

    def read(self) -> tuple[Message, bytes] | None:
        prefix = self._exactly(PREFIX.size, at_start=True)
        if prefix is None:
            return None
        lengths: tuple[int, int] = PREFIX.unpack(prefix)
        _check(*lengths)
        text = self._exactly(lengths[0]) or b""
        try:
            head = json.loads(text)
        except ValueError as error:
            raise FrameError(f"frame with a head that cannot be read: {error}") from error
        if not isinstance(head, dict) or not isinstance(head.get("is"), str):
            raise FrameError('frame with a head that cannot be read: no object with an "is"')
        return head, self._exactly(lengths[1]) or b""

    def write(self, head: Message, body: Pieces = ()) -> None:
        rest: list[bytes | memoryview] = [p for p in body if p]
        rest.insert(0, encode_head(head, sum(map(len, rest))))
        try:
            while rest:
                sent = self._socket.sendmsg(rest[:_PIECES])
                done = 0
                while done < len(rest) and sent >= len(rest[done]):
                    sent -= len(rest[done])
                    done += 1
                del rest[:done]
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]
        except ConnectionError as error:
            raise AgentGone(str(error)) from error


def from_environment() -> SocketLink | None:
    """The link that an agent made for this process; ``None`` where there is no agent."""
    text = os.environ.pop(SOCKET_ENV, None)
    if text is None:
        return None
    try:
        return SocketLink(socket.socket(fileno=int(text)))
    except (ValueError, OSError) as error:
        raise FrameError(f"{SOCKET_ENV} is {text!r}, which is no open socket: {error}") from error
