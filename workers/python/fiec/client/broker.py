"""The connection to NATS: requests to policy services, and the last messages of ledgers.

Traded off: the last messages of many ledgers are a direct get with ``multi_last`` (NATS ADR-31),
which any copy of the stream answers. One that lags behind has an older message. An end is final, so
what reads here waits for an end and is at worst told of it later.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from .addresses import Addresses
from .errors import ClientError, Refused, Unreachable

CONNECT_S = 5.0
ANSWER_S = 10.0
PATIENCE_S = 10.0
"""Longest time for which a request is made again while the service does nothing for it."""

ABSENCE_S = 3.0
"""Longest time for which no policy service need be there: it may be starting."""

QUEUED_S = 60.0
"""Longest wait for a submission to be taken in."""

PAUSE_S = 0.1
TOGETHER = 500
"""Ledgers in one request."""

_MOMENTARY = {"busy", "loading", "ending"}
_EVENT = "Fiec-Event"


class Broker:
    """A connection.

    It goes on through outages of the servers.
    """

    def __init__(self, connection: Nats) -> None:
        self.nats = connection
        self.js: JetStreamContext = connection.jetstream(timeout=ANSWER_S)

    @classmethod
    async def connect(cls, addresses: Addresses) -> Broker:
        """Connects within :data:`CONNECT_S`.

        Raises :class:`Unreachable`.
        """
        options: dict[str, Any] = {}
        if addresses.credentials:
            options["user_credentials"] = addresses.credentials
        connection = Nats()
        urls = [url.strip() for url in addresses.nats.split(",")]
        try:
            await asyncio.wait_for(
                connection.connect(
                    urls,
                    name="fiec.client",
                    error_cb=_quiet,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    **options,
                ),
                CONNECT_S,
            )
        except (NatsError, OSError, asyncio.TimeoutError) as error:
            servers = ", ".join(url.rsplit("@", 1)[-1] for url in urls)
            raise Unreachable(
                f"NATS at {servers} does not answer ({str(error) or 'no answer in time'}): "
                "start it, or correct FIEC_NATS_URL"
            ) from error
        return cls(connection)

    async def close(self) -> None:
        """Closes the connection.

        Executions continue.
        """
        await self.nats.close()

    async def ask(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Asks a policy service until it does or refuses what is asked for.

        Raises :class:`Unreachable` if none answers, :class:`Refused` with its words.
        """
        since = time.monotonic()
        while True:
            reply = await self._once(subject, body, dict(headers or {}))
            waited = time.monotonic() - since
            if reply is None:
                if waited >= ABSENCE_S:
                    raise Unreachable(
                        "no policy service answers: start one with `fiec policy` (or everything "
                        "with `fiec up`)"
                    )
                await asyncio.sleep(PAUSE_S)
                continue
            code = reply.get("refusal")
            queued = code == "not_taken_in" and waited < QUEUED_S
            if queued or (code in _MOMENTARY and waited < PATIENCE_S):
                await asyncio.sleep(PAUSE_S)
                continue
            if "error" in reply:
                raise Refused(reply["error"], code)
            return reply

    async def _once(
        self, subject: str, body: bytes, headers: dict[str, str]
    ) -> dict[str, Any] | None:
        try:
            reply = await self.nats.request(
                subject, body, timeout=ANSWER_S, headers=headers or None
            )
        except NoRespondersError:
            return None
        except (NatsError, OSError, asyncio.TimeoutError) as error:
            raise Unreachable(f"no answer on {subject} within {ANSWER_S:g} s: {error}") from error
        if not reply.data and reply.headers and "Nats-Service-Error" in reply.headers:
            raise ClientError(f"{subject}: {reply.headers['Nats-Service-Error']}")
        try:
            found = json.loads(reply.data)
        except ValueError as error:
            raise ClientError(f"the answer on {subject} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ClientError(f"the answer on {subject} is no object")
        return found

    async def last(self, subjects: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The last message of each of these ledgers that exists, as some copy has it, by subject.

        Raises :class:`Unreachable`.
        """
        found: dict[str, dict[str, Any]] = {}
        for at in range(0, len(subjects), TOGETHER):
            waiting = list(subjects[at : at + TOGETHER])
            while waiting:
                messages, cut = await self._together(waiting)
                found |= messages
                # A copy that was cut short has sent some; the rest is asked for again.
                waiting = [s for s in waiting if s not in messages] if cut and messages else []
        return found

    async def _together(self, subjects: list[str]) -> tuple[dict[str, dict[str, Any]], bool]:
        inbox = self.nats.new_inbox()
        answers = await self.nats.subscribe(inbox)
        found: dict[str, dict[str, Any]] = {}
        try:
            request = json.dumps({"batch": len(subjects), "multi_last": subjects}).encode()
            await self.nats.publish("$JS.API.DIRECT.GET.FIEC_LEDGER", request, reply=inbox)
            while True:
                answer = await answers.next_msg(ANSWER_S)
                headers = answer.headers or {}
                status = headers.get("Status")
                if status is None:
                    message = event(answer)
                    if message is not None:
                        found[headers["Nats-Subject"]] = message
                elif status == "404":
                    return found, False
                elif status == "204":
                    return found, headers.get("Nats-Num-Pending", "0") != "0"
                else:
                    raise ClientError(f"the ledgers cannot be read: {status} {headers}")
        except (NatsError, NatsTimeout, OSError) as error:
            raise Unreachable(f"the ledgers do not answer: {error}") from error
        finally:
            if not self.nats.is_closed:
                await answers.unsubscribe()

    @asynccontextmanager
    async def news(self, subject: str) -> AsyncIterator[asyncio.Queue[Msg]]:
        """The headers of what is appended to these ledgers from now on.

        An outage can lose some. The reader therefore also reads the ledgers from time to time.
        """
        queue: asyncio.Queue[Msg] = asyncio.Queue(maxsize=65536)

        async def take(message: Msg) -> None:
            await queue.put(message)

        inbox = self.nats.new_inbox()
        subscription = await self.nats.subscribe(inbox, cb=take)
        try:
            try:
                await self.js.add_consumer(
                    "FIEC_LEDGER",
                    ConsumerConfig(
                        deliver_subject=inbox,
                        deliver_policy=DeliverPolicy.NEW,
                        ack_policy=AckPolicy.NONE,
                        filter_subject=subject,
                        headers_only=True,
                        inactive_threshold=60.0,
                        mem_storage=True,
                        num_replicas=1,
                    ),
                )
            except (NatsError, asyncio.TimeoutError) as error:
                raise Unreachable(f"the ledgers do not answer: {error}") from error
            yield queue
        finally:
            if not self.nats.is_closed:
                await subscription.unsubscribe()


def event(message: Msg) -> dict[str, Any] | None:
    """The ledger message in a header.

    None if there is none.
    """
    text = (message.headers or {}).get(_EVENT)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "state" in found else None


async def _quiet(_: Exception) -> None:
    """Errors are raised where they matter; the connection mends itself."""
