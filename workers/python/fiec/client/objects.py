"""Objects by the digest of their bytes, in the object store ``FIEC_DATA``.

The format is that of NATS (ADR-20). The store's own ``put`` would replace an object and remove the
chunks that others are reading, so the first writer wins here, by compare-and-set, as in ``broker-
config/src/objects.rs``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NotFoundError

from .broker import Broker
from .errors import ClientError, Damaged, Missing, Unreachable

BUCKET = "FIEC_DATA"
STREAM = f"OBJ_{BUCKET}"
CHUNK = 768 * 1024
SILENCE_S = 20.0
"""Longest pause of the broker while it sends an object."""

TRIES = 5
_WRONG_SEQUENCE = 10071


@dataclass(frozen=True)
class _Described:
    seq: int
    nuid: str
    chunks: int
    size: int
    deleted: bool
    info: dict[str, Any]


def pieces(data: bytes) -> Iterator[bytes]:
    """Bytes in chunks."""
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file in chunks."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


async def put(broker: Broker, digest: str, chunks: Iterator[bytes]) -> None:
    """Stores these bytes under their digest, unless they are there.

    Raises :class:`Unreachable`, :class:`ClientError` if the store refuses them.
    """
    written: dict[str, Any] | None = None
    try:
        for _ in range(TRIES):
            found = await _described(broker, digest)
            if found and not found.deleted and await _is_whole(broker, found):
                if written:
                    await _discard(broker, written["nuid"])
                # Told again, it is younger than the collector's grace.
                await _describe(broker, found.info, found.seq)
                return
            if written is None:
                written = await _write(broker, digest, chunks)
            if await _describe(broker, written, found.seq if found else 0):
                if found and not found.deleted:
                    await _discard(broker, found.nuid)
                return
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        raise Unreachable(f"{digest[:12]} cannot be stored: {error}") from error
    if written:
        await _discard(broker, written["nuid"])
    raise ClientError(
        f"{digest[:12]}: others stored and removed it at the same time, {TRIES} times"
    )


async def read(broker: Broker, digest: str) -> AsyncIterator[bytes]:
    """The bytes of an object in pieces.

    Their digest is checked at the end. Raises :class:`Missing`, :class:`Damaged`,
    :class:`Unreachable`.
    """
    try:
        found = await _described(broker, digest)
        if found is None or found.deleted:
            raise Missing(f"the object store has no object {digest}")
        hasher = blake3.blake3()
        if found.size:
            messages = await broker.js.subscribe(
                f"$O.{BUCKET}.C.{found.nuid}", stream=STREAM, ordered_consumer=True
            )
            try:
                for _ in range(found.chunks):
                    piece = (await messages.next_msg(SILENCE_S)).data
                    hasher.update(piece)
                    yield piece
            finally:
                if not broker.nats.is_closed:
                    await messages.unsubscribe()
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        raise Unreachable(f"object {digest[:12]} does not arrive: {error}") from error
    if hasher.hexdigest() != digest:
        raise Damaged(f"object {digest[:12]} has other bytes: their digest is {hasher.hexdigest()}")


async def get(broker: Broker, digest: str) -> bytes:
    """The bytes of an object, checked.

    Raises as :func:`read`.
    """
    return b"".join([piece async for piece in read(broker, digest)])


def _subject(digest: str) -> str:
    return f"$O.{BUCKET}.M.{base64.urlsafe_b64encode(digest.encode()).decode()}"


async def _described(broker: Broker, digest: str) -> _Described | None:
    try:
        last = await broker.js.get_last_msg(STREAM, _subject(digest))
    except NotFoundError:
        return None
    try:
        info = json.loads(last.data or b"")
        return _Described(
            int(last.seq or 0),
            str(info.get("nuid", "")),
            int(info.get("chunks", 0)),
            int(info.get("size", 0)),
            bool(info.get("deleted", False)),
            info,
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise ClientError(f"the description of object {digest[:12]} is damaged: {error}") from error


async def _is_whole(broker: Broker, found: _Described) -> bool:
    subject = f"$O.{BUCKET}.C.{found.nuid}"
    info = await broker.js.stream_info(STREAM, subjects_filter=subject)
    return (info.state.subjects or {}).get(subject, 0) == found.chunks


async def _write(broker: Broker, digest: str, chunks: Iterator[bytes]) -> dict[str, Any]:
    nuid = uuid.uuid4().hex
    count = size = 0
    checked, hasher = hashlib.sha256(), blake3.blake3()
    try:
        for piece in chunks:
            await broker.js.publish(f"$O.{BUCKET}.C.{nuid}", piece)
            checked.update(piece)
            hasher.update(piece)
            count, size = count + 1, size + len(piece)
        if hasher.hexdigest() != digest:
            raise ClientError(f"{digest[:12]}: the file changed while it was being sent")
    except BaseException:
        await _discard(broker, nuid)
        raise
    return {
        "name": digest,
        "bucket": BUCKET,
        "nuid": nuid,
        "size": size,
        "chunks": count,
        "digest": "SHA-256=" + base64.urlsafe_b64encode(checked.digest()).decode(),
        "options": {"max_chunk_size": CHUNK},
        "deleted": False,
    }


async def _describe(broker: Broker, info: dict[str, Any], expected: int) -> bool:
    """Makes a written object visible.

    False if somebody else was first.
    """
    headers = {"Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": str(expected)}
    try:
        await broker.js.publish(_subject(info["name"]), json.dumps(info).encode(), headers=headers)
        return True
    except APIError as error:
        if error.err_code == _WRONG_SEQUENCE:
            return False
        raise


async def _discard(broker: Broker, nuid: str) -> None:
    """Removes chunks that nobody sees.

    The recorder collects what is left.
    """
    try:
        await broker.js.purge_stream(STREAM, subject=f"$O.{BUCKET}.C.{nuid}")
    except (NatsError, OSError, asyncio.TimeoutError):
        pass
