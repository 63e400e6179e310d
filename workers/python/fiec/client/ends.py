"""Waits for the ends of executions, through outages.

The ledgers are read once, then heard. What is heard may be lost, so that the ledgers of those that
are left are read again now and then, and those without a ledger are looked for in the history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import TypeVar

from . import history, status
from .broker import Broker, event
from .errors import ClientError, Unreachable
from .status import Status

T = TypeVar("T")

LOOK_S = 10.0
"""Time after which the ledgers are read again, and more where there are many."""
LOOKED_AT = 1_000
"""Ledgers that are read again in a second, on average."""

AGAIN_S = 1.0
"""Pause before another try, where the servers do not answer."""

QUERIED = 10_000
"""Executions that one query names."""


async def of(
    broker: Broker, past: history.History, tenant: str, executions: Iterable[str]
) -> AsyncIterator[tuple[str, Status]]:
    """Each of these executions when it has ended, in the order of their ends."""
    left = dict.fromkeys(executions)
    prefix = f"fiec.ledger.{tenant}."
    while left:
        try:
            async with AsyncExitStack() as stack:
                subject = prefix + (next(iter(left)) if len(left) == 1 else "*")
                news = await stack.enter_async_context(broker.news(subject))
                for one, found in await look(broker, past, tenant, left):
                    if found.ended:
                        del left[one]
                        yield one, found
                until = time.monotonic() + max(LOOK_S, len(left) / LOOKED_AT)
                while left and (wait := until - time.monotonic()) > 0:
                    try:
                        message = await asyncio.wait_for(news.get(), wait)
                    except asyncio.TimeoutError:
                        break
                    heard = event(message)
                    if heard is None or heard["state"].get("execution") not in left:
                        continue
                    one, found = heard["state"]["execution"], status.of_message(heard)
                    if found.ended:
                        del left[one]
                        yield one, found
        except Unreachable:
            await asyncio.sleep(AGAIN_S)


async def within(what: str, work: Awaitable[T], timeout: float | None) -> T:
    """The result of ``work``, or ``TimeoutError`` after ``timeout`` seconds."""
    if timeout is None:
        return await work
    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError:
        raise TimeoutError(f"{what} within {timeout:g} s; what runs goes on") from None


async def look(
    broker: Broker, past: history.History, tenant: str, executions: Iterable[str]
) -> list[tuple[str, Status]]:
    """How these executions stand that have a ledger, or have ended long ago, in the order of their
    last messages.

    Raises :class:`Unreachable`.
    """
    wanted = list(executions)
    prefix = f"fiec.ledger.{tenant}."
    last = await broker.last([prefix + one for one in wanted])
    found = sorted(last.values(), key=lambda message: str(message["state"].get("at", "")))
    known = [(str(m["state"]["execution"]), status.of_message(m)) for m in found]
    missing = [one for one in wanted if prefix + one not in last]
    if missing and past.known:
        known += await recorded(past, missing)
    return known


async def recorded(past: history.History, executions: list[str]) -> list[tuple[str, Status]]:
    """Those of these executions that have ended, as the history has them.

    None without a history.
    """
    found = []
    try:
        for at in range(0, len(executions), QUERIED):
            rows = await past.rows(
                "SELECT id::text, phase, node, boundary_index, result, failure FROM executions "
                "WHERE id = ANY(%s::uuid[])",
                (executions[at : at + QUERIED],),
            )
            for row in rows:
                found.append(
                    (
                        row["id"],
                        Status(
                            row["phase"],
                            row["node"],
                            row["boundary_index"] or 0,
                            reason=row["failure"] or "",
                            result=row["result"],
                        ),
                    )
                )
    except ClientError:
        return []
    return [(one, how) for one, how in found if how.ended]
