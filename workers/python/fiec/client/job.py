"""One execution, for programs that use ``asyncio``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ends, history, logs, names, objects, outputs, status
from .broker import Broker
from .curves import Curve, of_rows
from .errors import Missing, NotCompleted, Refused, Unreachable
from .logs import Line
from .outputs import Output
from .status import Status

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Session:
    """What every object of one client shares."""

    broker: Broker
    past: history.History
    tenant: str
    who: str

    async def ask(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request about one execution.

        Raises as :meth:`Broker.ask`.
        """
        request = {"who": self.who, **body}
        subject = f"fiec.api.{verb}.{self.tenant}"
        return await self.broker.ask(subject, json.dumps(request).encode())


class AsyncJob:
    """An execution.

    It lives in the cluster: nothing here ends it but :meth:`cancel`.
    """

    def __init__(
        self, session: Session, name: str, params: Any = None, submitted: bool = False
    ) -> None:
        self._session = session
        self._submitted = submitted
        self.id = name
        """The id that its client gave it, or its UUID."""
        self.uuid = names.execution(session.tenant, name)
        """FIEC's name of it."""
        self.params = params
        """Its parameters, if this program submitted it."""
        self._end: Status | None = None

    def __repr__(self) -> str:
        phase = f" {self._end.phase}" if self._end else ""
        return f"<Job {self.id}{phase}>"

    async def status(self) -> Status:
        """How it stands now.

        ``queued``: this program has submitted it, and it has no ledger yet.

        Raises :class:`Missing`.
        """
        try:
            reply = await self._session.ask("status", {"id": self.id})
        except Refused as error:
            if error.code != "unknown_execution":
                raise
            past = await ends.recorded(self._session.past, [self.uuid])
            if not past and not self._submitted:
                raise Missing(f"tenant {self._session.tenant} has no execution {self.id}") from None
            return past[0][1] if past else Status("queued")
        state = reply.get("state")
        if state is None:
            return Status("queued")
        found = status.of_message({"state": state}, reply.get("progress"))
        if found.ended:
            return await self._ended() or found
        return found

    async def _exists(self) -> None:
        """Raises :class:`Missing` where nobody has submitted it, when that can be known."""
        while True:
            try:
                await self.status()
                return
            except Unreachable:
                await asyncio.sleep(ends.AGAIN_S)

    async def _ended(self) -> Status | None:
        """How it ended, with reason and result, from its ledger or the history."""
        session = self._session
        for _, found in await ends.look(session.broker, session.past, session.tenant, [self.uuid]):
            if found.ended:
                return found
        return None

    @property
    def session(self) -> Session:
        """What it shares with the other objects of its client."""
        return self._session

    @property
    def end(self) -> Status | None:
        """How it ended, if that is known here."""
        return self._end

    def note_end(self, end: Status) -> None:
        """Keeps how it ended, which somebody else has heard."""
        self._end = end

    def forget_end(self) -> None:
        """It may go on."""
        self._end = None

    async def wait(self, timeout: float | None = None) -> Status:
        """Waits until it has ended, however long the servers are away.

        ``timeout`` is in seconds.     Raises ``TimeoutError``; the execution continues.
        """
        if self._end is None:
            self._end = await ends.within(f"{self.id} has not ended", self._wait(), timeout)
        return self._end

    async def _wait(self) -> Status:
        session = self._session
        if not self._submitted:
            await self._exists()
        async for _, found in ends.of(session.broker, session.past, session.tenant, [self.uuid]):
            return found
        raise AssertionError("an execution that is waited for ends or is waited for")

    async def result(self, timeout: float | None = None) -> Any:
        """Its result, when it has completed.

        Raises :class:`NotCompleted` if it ended without one, ``TimeoutError``.
        """
        end = await self.wait(timeout)
        if not end.completed:
            raise NotCompleted(self.id, end.phase, end.reason)
        if end.object is None:
            return end.result
        return json.loads(await objects.get(self._session.broker, end.object["digest"]))

    async def logs(self, follow: bool = False) -> AsyncIterator[Line]:
        """What it prints.

        With ``follow`` also what comes, until it has ended.
        """

        async def ended() -> bool:
            return (await self.status()).ended

        subject = f"fiec.log.{self._session.tenant}.{self.uuid}"
        async for line in logs.lines(self._session.broker, subject, ended if follow else None):
            yield line

    async def outputs(self) -> dict[str, AsyncOutput]:
        """Its outputs so far, by name.

        Raises :class:`Missing` if it is unknown, or its outputs wait for a verification.
        """
        session = self._session
        made = await outputs.of(session.broker, session.past, session.tenant, self.uuid)
        return {name: AsyncOutput(session.broker, output) for name, output in made.items()}

    async def output(self, name: str) -> AsyncOutput:
        """One output.

        Raises :class:`Missing`.
        """
        made = await self.outputs()
        if name not in made:
            raise Missing(
                f"{self.id} has no output {name!r}; its outputs: {', '.join(made) or 'none'}"
            )
        return made[name]

    async def curves(self) -> dict[str, Curve]:
        """The numbers that it has reported, a curve for each name."""
        return of_rows(await self._session.past.rows(history.CURVES, (self.uuid,)))

    async def why(self) -> dict[str, Any]:
        """Why it is where it is, as ``fiec why`` says it: ``summary`` in words, ``candidates``,
        …"""
        return dict((await self._session.ask("why", {"id": self.id})).get("why") or {})

    async def placements(self) -> list[dict[str, Any]]:
        """Where it was and when: a row for each binding, from the history."""
        return await self._session.past.rows(history.PLACEMENTS, (self.uuid,))

    async def moves(self) -> list[dict[str, Any]]:
        """Its moves, with cause, boundary and gap, from the history."""
        return await self._session.past.rows(history.MOVES, (self.uuid,))

    async def move(self, to: str | None = None) -> str:
        """Orders it to another node at its next boundary; ``to`` names it.

        Returns what was done.
        """
        return await self._order("yield", {"to": to} if to else {})

    async def cancel(self) -> str:
        """Ends it.

        Its commits and outputs stay.
        """
        return await self._order("cancel")

    async def pause(self) -> str:
        """Pauses it at its next boundary until it is resumed."""
        return await self._order("pause")

    async def resume(self) -> str:
        """Resumes it."""
        return await self._order("resume")

    async def retry(self, from_boundary: int | None = None, **change: Any) -> str:
        """Starts it again from its last commit, after it failed, is held or was cancelled.

        ``change`` are settings that change with it, as in :meth:`adjust`.
        """
        more: dict[str, Any] = {}
        if from_boundary is not None:
            more["from_boundary"] = from_boundary
        if change:
            more["change"] = change
        self._end = None
        return await self._order("retry", more)

    async def adjust(self, **change: Any) -> str:
        """Changes it while it lives: ``priority``, ``memory_bytes``, ``viability``, ``deadline``,
        ``nodes``, ``exclude``, as in ``schemas/json/execution-request.json``."""
        return await self._order("adjust", {"change": change})

    async def _order(self, verb: str, more: Mapping[str, Any] | None = None) -> str:
        reply = await self._session.ask(verb, {"id": self.id, **(more or {})})
        return str(reply.get("message", ""))


class AsyncOutput:
    """An output of an execution.

    Its bytes are checked against its digest when they are fetched.
    """

    def __init__(self, broker: Broker, made: Output) -> None:
        self._broker = broker
        self.name = made.name
        self.size = made.bytes
        """Its size in bytes."""
        self.digest = made.digest
        self.boundary = made.boundary
        """The boundary whose commit made it visible."""

    def __repr__(self) -> str:
        return f"<Output {self.name} {self.size} bytes {self.digest[:12]}>"

    async def bytes(self) -> bytes:
        """Its bytes.

        Raises :class:`Damaged`, :class:`Missing`.
        """
        return await objects.get(self._broker, self.digest)

    async def text(self) -> str:
        """Its bytes as UTF-8."""
        return (await self.bytes()).decode()

    async def numpy(self) -> numpy.ndarray[Any, Any]:
        """An ``.npy`` file as an array.

        Nothing in it is executed.
        """
        import io

        import numpy

        return numpy.lib.format.read_array(io.BytesIO(await self.bytes()), allow_pickle=False)

    async def save(self, path: str | Path) -> Path:
        """Writes it to a file, which appears complete and checked, or not at all."""
        into = Path(path)
        partial = into.with_name(f".{into.name}.part")
        try:
            with partial.open("wb") as file:
                async for piece in objects.read(self._broker, self.digest):
                    file.write(piece)
            partial.replace(into)
        finally:
            partial.unlink(missing_ok=True)
        return into
