"""How an execution stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal[
    "queued",
    "pending",
    "bound",
    "started",
    "paused",
    "held",
    "verifying",
    "completed",
    "failed",
    "cancelled",
    "returned",
]

ENDED = frozenset({"completed", "failed", "cancelled", "returned", "held"})
"""Phases after which nothing follows, unless somebody retries it."""


@dataclass(frozen=True)
class Status:
    """How an execution stands.

    ``phase`` is ``queued`` before it has a ledger.
    """

    phase: str
    node: str | None = None
    """Its node, if it is bound to one."""

    boundary: int = 0
    """The last boundary that is known, also one that is not committed."""

    of: int | None = None
    """The number of its last boundary, if the program says so."""

    note: str = ""
    """What the program says of its progress."""

    reason: str = ""
    """Why it failed, is held or was cancelled."""

    result: Any = field(default=None, repr=False)
    object: Mapping[str, Any] | None = field(default=None, repr=False)
    """Digest and size of a result that is stored beside the ledger."""

    @property
    def ended(self) -> bool:
        """True if nothing follows, unless somebody retries it."""
        return self.phase in ENDED

    @property
    def completed(self) -> bool:
        """True if it has a result."""
        return self.phase == "completed"


def of_message(message: Mapping[str, Any], progress: Mapping[str, Any] | None = None) -> Status:
    """From a message of its ledger, and what its node says beyond the last commit."""
    state = message["state"]
    phase = state.get("phase", {})
    at, of, note = 0, None, ""
    for known in (state.get("boundary"), progress):
        if known:
            at = max(at, int(known.get("boundary", known.get("index", 0))))
            of = known.get("of", of)
            note = known.get("note") or note
    result, stored, reason = None, None, str(phase.get("reason", ""))
    for event in message.get("events", ()):
        match event.get("type"):
            case "completed":
                result, stored = event.get("result"), event.get("object")
                at = max(at, int(event.get("capsules", 0)))
            case "failed" | "held":
                reason = str(event.get("reason", ""))
            case "cancelled":
                reason = f"by {event.get('who') or 'somebody'}"
    node = phase.get("node")
    return Status(str(phase.get("is", "")), node, at, of, note, reason, result, stored)
