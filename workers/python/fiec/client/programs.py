"""Registers packages as programs.

A version never changes.
"""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime, timezone

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from . import objects
from .broker import Broker
from .errors import ClientError, Unreachable
from .package import Package

_BUCKET = "FIEC_PROGRAMS"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}@[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


async def push(broker: Broker, program: str, package: Package, who: str) -> str:
    """Stores the package and registers it as ``NAME@VERSION``.

    Does nothing if it is there already. Raises :class:`ClientError` if that version has other
    files, :class:`Unreachable`.
    """
    if not _NAME.fullmatch(program):
        raise ClientError(
            f"{program!r} is no name@version: name of A-Z a-z 0-9 _ -, version also with dots "
            "between"
        )
    key = program.replace("@", ".", 1)
    digest = package.digest
    try:
        bucket = await broker.js.key_value(_BUCKET)
        there = await _find(bucket, key)
        if there is None:
            await objects.put(broker, digest, objects.pieces(package.artifact))
            record = {
                "program": program,
                "manifest": package.manifest,
                "artifact": digest,
                "bytes": len(package.artifact),
                "pushed_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "pushed_by": who,
            }
            # Registered last: an interrupted push has no effect.
            try:
                await bucket.create(key, json.dumps(record).encode())
                return program
            except KeyWrongLastSequenceError:
                there = await _find(bucket, key)
    except NotFoundError as error:
        raise ClientError(f"there is no bucket {_BUCKET}: `fiec setup` makes it") from error
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        raise Unreachable(f"{program} cannot be pushed: {error}") from error
    if there != digest:
        raise ClientError(
            f"{program} is registered with other files (artifact {str(there)[:12]}; yours is "
            f"{digest[:12]}): a version never changes, so push yours under another one"
        )
    return program


async def _find(bucket: KeyValue, key: str) -> str | None:
    """The artifact of a registered version."""
    try:
        return str(json.loads((await bucket.get(key)).value or b"")["artifact"])
    except KeyNotFoundError:
        return None
