"""Ids and digests, as all of FIEC computes them (``schemas/src/ids.rs``)."""

from __future__ import annotations

import re
import secrets
import uuid
from pathlib import Path

import blake3

_OWN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def tenant(name: str) -> str:
    """Checks the name of a tenant, which is a part of subjects. Raises ``ValueError``."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ValueError(
            f"tenant {name!r} must be 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'"
        )
    return name


def execution(tenant: str, name: str) -> str:
    """The UUID of an execution, from itself or from the id that its client gave it.

    UUIDv8 of BLAKE3 over ``execution/TENANT/ID/``.
    """
    try:
        return str(uuid.UUID(name))
    except ValueError:
        pass
    if not _OWN.fullmatch(name):
        raise ValueError(
            f"id {name!r} must be 1 to 128 characters of A-Z, a-z, 0-9, '_', '-' and '.', the "
            "first of them no dot"
        )
    made = bytearray(blake3.blake3(f"execution/{tenant}/{name}/".encode()).digest(length=16))
    made[6] = made[6] & 0x0F | 0x80
    made[8] = made[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(made)))


def fresh(program: str) -> str:
    """An id of one's own for a submission without one.

    Sent again, it is the same execution.
    """
    return f"{program.split('@', maxsplit=1)[0]}-{secrets.token_hex(5)}"


def digest(data: bytes) -> str:
    """The digest of these bytes: BLAKE3-256 in hexadecimal digits."""
    return blake3.blake3(data).hexdigest()


def digest_of(path: Path) -> str:
    """The digest of a file."""
    hasher = blake3.blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()
