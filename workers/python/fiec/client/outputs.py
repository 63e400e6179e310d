"""The outputs of an execution, by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from . import history
from .broker import Broker, event
from .errors import Missing, Unreachable

_LEDGER = "FIEC_LEDGER"
_SILENCE_S = 10.0


@dataclass(frozen=True)
class Output:
    """An output: its name, size, digest, and the boundary whose commit made it visible."""

    name: str
    bytes: int
    digest: str
    boundary: int


class _Made:
    """The outputs that were made, with those that later ones of their name replaced."""

    def __init__(self) -> None:
        self._all: list[Output] = []
        self.ordinals: set[int] = set()
        self.parts: set[str] = set()
        self.guarded = False

    def add(self, boundary: int, outputs: Any) -> None:
        for made in outputs or ():
            self._all.append(Output(made["name"], int(made["bytes"]), made["digest"], boundary))

    def withdraw(self, beyond: int) -> None:
        self._all = [made for made in self._all if made.boundary <= beyond]

    def by_name(self) -> dict[str, Output]:
        return {made.name: made for made in sorted(self._all, key=lambda made: made.boundary)}

    @property
    def whole(self) -> bool:
        return bool(self.ordinals) and len(self.ordinals) == max(self.ordinals)

    def hear(self, message: Mapping[str, Any]) -> None:
        state = message["state"]
        self.ordinals.add(int(state.get("ordinal", 0)))
        self.guarded = bool(state.get("guarded", False))
        for what in message.get("events", ()):
            match what.get("type"):
                case "boundary":
                    self.add(int(what["index"]), what.get("outputs"))
                case "completed":
                    self.add(int(what["capsules"]), what.get("outputs"))
                case "stepped_back":
                    self.withdraw(int((what.get("to") or {}).get("index", 0)))
                case "split":
                    self.parts.add(str(what["part"]))


async def of(
    broker: Broker, past: history.History, tenant: str, execution: str
) -> dict[str, Output]:
    """The outputs of an execution and its parts, by name.

    Raises :class:`Missing` if there is no such execution, or its outputs wait for a verification.
    """
    found: dict[str, Output] = {}
    left, seen = [execution], {execution}
    while left:
        one = left.pop(0)
        made = _Made()
        await _from_ledger(broker, f"fiec.ledger.{tenant}.{one}", made)
        if not made.whole and past.known:
            await _from_history(past, one, made)
        if one == execution and not made.ordinals:
            raise Missing(f"tenant {tenant} has no execution {execution}")
        if made.guarded:
            raise Missing(
                'its outputs are visible after other nodes have verified them ("verify": "all")'
            )
        found = made.by_name() | found
        left += sorted(made.parts - seen)
        seen |= made.parts
    return dict(sorted(found.items()))


async def _from_ledger(broker: Broker, subject: str, made: _Made) -> None:
    try:
        try:
            last = await broker.js.get_last_msg(_LEDGER, subject)
        except NotFoundError:
            return
        feed = await broker.js.subscribe(
            subject,
            stream=_LEDGER,
            ordered_consumer=True,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, headers_only=True
            ),
        )
        try:
            at = 0
            while at < (last.seq or 0):
                message = await feed.next_msg(_SILENCE_S)
                at = message.metadata.sequence.stream
                heard = event(message)
                if heard is not None:
                    made.hear(heard)
        finally:
            if not broker.nats.is_closed:
                await feed.unsubscribe()
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        raise Unreachable(f"the ledger does not answer: {error}") from error


async def _from_history(past: history.History, execution: str, made: _Made) -> None:
    known = await past.rows(history.ORDINAL, (execution,))
    if not known:
        return
    made.ordinals.update(range(1, int(known[0]["ordinal"]) + 1))
    for row in await past.rows(
        "SELECT part::text FROM spread_splits WHERE holder = %s", (execution,)
    ):
        made.parts.add(row["part"])
    for row in await past.rows(history.OUTPUTS, (execution, execution)):
        outputs = row["outputs"]
        made.add(int(row["index"]), json.loads(outputs) if isinstance(outputs, str) else outputs)
