"""What can go wrong between this program and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ClientError(Exception):
    """The base of all errors here.

    Its text says what to do.
    """


class Unreachable(ClientError):
    """A server is not known, or does not answer.

    Executions continue meanwhile.
    """


class Refused(ClientError):
    """A policy service has refused a request, and did nothing.

    ``code`` is the refusal for programs (``schemas/json/api-reply.json``); for a submission,
    ``lines`` has line, field and reason of each refused line.
    """

    def __init__(
        self, words: str, code: str | None = None, lines: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().__init__(words)
        self.code = code
        self.lines = list(lines)


class Missing(ClientError):
    """There is no such execution, output or object."""


class Damaged(ClientError):
    """Bytes that have another digest than they should have."""


class NotCompleted(ClientError):
    """The execution has ended without a result: it failed, is held, or was cancelled."""

    def __init__(self, name: str, phase: str, reason: str) -> None:
        super().__init__(f"{name} {phase}: {reason}" if reason else f"{name} {phase}")
        self.phase = phase
        self.reason = reason
