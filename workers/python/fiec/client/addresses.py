"""Where the servers are: given, in the environment, or those of the ``fiec up`` on this machine."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from .errors import Unreachable


@dataclass(frozen=True)
class Addresses:
    """URLs with their passwords, which no ``repr`` shows."""

    nats: str = field(repr=False)
    """URL of NATS, or several, separated by commas."""

    database: str | None = field(repr=False, default=None)
    """URL of PostgreSQL, of a role that reads.

    None: there is no history.
    """

    credentials: str | None = None
    """File with the credentials for NATS."""


def find(
    nats: str | None = None, database: str | None = None, credentials: str | None = None
) -> Addresses:
    """The servers that a command of ``fiec`` would use."""
    up = _running() if nats is None or database is None else {}
    nats = nats or os.environ.get("FIEC_NATS_URL") or up.get("nats")
    if nats is None:
        raise Unreachable(
            "no NATS server is known: start a cluster with `fiec up`, or give nats=URL or "
            "FIEC_NATS_URL"
        )
    # The history of another cluster would not have the executions of this one.
    same = up.get("nats") == nats
    database = (
        database or os.environ.get("FIEC_DATABASE_URL") or (up.get("database") if same else None)
    )
    return Addresses(nats, database, credentials or os.environ.get("FIEC_NATS_CREDS"))


def who() -> str:
    """The user for the history: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _running() -> dict[str, str]:
    """What the ``fiec up`` of this user has written, if it still runs."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME")
    path = Path(folder) if folder else Path.home() / ".cache"
    try:
        up = json.loads((path / "fiec" / "up.json").read_bytes())
        os.kill(int(up["pid"]), 0)
        return {name: str(up[name]) for name in ("nats", "database")}
    except PermissionError:  # It runs, as another user.
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
