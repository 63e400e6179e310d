"""The client for programs that use ``asyncio``.

:mod:`fiec.client` has the same without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import addresses, arrays, history, names, objects, package, programs
from .broker import Broker
from .errors import ClientError, Missing, Refused
from .job import AsyncJob, AsyncOutput, Session
from .sweep import AsyncSweep, Group, as_completed

if TYPE_CHECKING:
    import pandas

__all__ = ["AsyncClient", "AsyncJob", "AsyncOutput", "AsyncSweep", "as_completed", "connect"]

_REQUEST_BYTES = 640 * 1024


async def connect(
    nats: str | None = None,
    *,
    database: str | None = None,
    credentials: str | None = None,
    tenant: str | None = None,
    who: str | None = None,
) -> AsyncClient:
    """Connects to a cluster: the one given, that of ``FIEC_NATS_URL`` and ``FIEC_DATABASE_URL``, or
    the ``fiec up`` on this machine. The tenant is that of ``FIEC_TENANT``, or ``default``; ``who``
    is the user for the history.

    Raises :class:`fiec.client.Unreachable`.
    """
    where = addresses.find(nats, database, credentials)
    tenant = names.tenant(tenant or os.environ.get("FIEC_TENANT") or "default")
    broker = await Broker.connect(where)
    return AsyncClient(
        Session(broker, history.History(where.database), tenant, who or addresses.who())
    )


class AsyncClient:
    """A connection to a cluster, for one tenant.

    Closing it ends no execution.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection.

        Executions continue.
        """
        await self._session.broker.close()

    async def submit(
        self,
        program: str,
        params: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        **fields: Any,
    ) -> AsyncJob:
        """Submits one execution.

        ``fields`` are those of a submission (``schemas/README.md``): ``batch``, ``requires``,
        ``deadline``, … The same ``id`` with the same line is the same execution.

        Raises :class:`fiec.client.Refused`, :class:`fiec.client.Unreachable`.
        """
        name = id or names.fresh(program)
        line = {"id": name, "program": program, **fields}
        if params:
            line["params"] = dict(params)
        job = AsyncJob(self._session, name, dict(params or {}), submitted=True)
        await self._send([line])
        return job

    async def map(
        self,
        program: str | Path,
        over: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]],
        *,
        params: Mapping[str, Any] | None = None,
        id: str | None = None,
        **fields: Any,
    ) -> AsyncSweep:
        """Submits an execution for each of many parameters, as one array.

        ``program`` is ``NAME@VERSION``, or a script or a folder, which is packed and registered
        as by :meth:`push`. ``over`` has the values of each name, of which every combination is
        taken (``{"seed": range(100), "lr": [0.1, 0.01]}``), or is a list of parameters.
        ``params`` are the same for all. ``fields`` are those of a submission: ``batch``,
        ``at_once``, …

        Raises as :meth:`submit`, and ``ValueError``.
        """
        if isinstance(program, Path) or "@" not in program:
            program = await self.push(program)
        name = id or names.fresh(program)
        fields = {"program": program, **fields}
        cut = list(arrays.cut(name, over, params or {}, fields))
        jobs = [
            AsyncJob(self._session, own, chosen, submitted=True)
            for array in cut
            for own, chosen in zip(array.names, array.params)
        ]
        await self._send([array.line for array in cut])
        return AsyncSweep(self._session, [("array", array.line["id"]) for array in cut], jobs)

    async def run(
        self,
        script: str | Path,
        params: Mapping[str, Any] | None = None,
        *,
        outputs: Iterable[str] = ("*",),
        python: str = "python3",
        id: str | None = None,
        **fields: Any,
    ) -> AsyncJob:
        """Packs a script that uses the kit, or a folder with a ``fiec.json``, and submits it.

        It is registered by its digest. ``outputs`` are names and patterns of a script's outputs,
        ``python`` is its interpreter on the nodes.

        Raises as :meth:`submit`, and :class:`fiec.client.ClientError` for a package with a fault.
        """
        program = await self.push(script, outputs=outputs, python=python)
        return await self.submit(program, params, id=id, **fields)

    async def push(
        self,
        path: str | Path,
        program: str | None = None,
        *,
        outputs: Iterable[str] = ("*",),
        python: str = "python3",
    ) -> str:
        """Registers a script or a folder as ``NAME@VERSION`` and returns that name.

            Without one it is the file's name with its digest.

        Raises :class:`fiec.client.ClientError`.
        """
        at = Path(path).resolve()
        packed = package.of_folder(at) if at.is_dir() else package.of_script(at, outputs, python)
        if program is None:
            stem = "".join(
                c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in at.stem
            )
            program = f"{stem[:64] or 'program'}@{packed.digest[:12]}"
        return await programs.push(self._session.broker, program, packed, self._session.who)

    async def data(self, content: str | Path | bytes) -> dict[str, str]:
        """Stores a file, or bytes, and returns the parameter that names it: ``{"object":
        DIGEST}``."""
        if isinstance(content, bytes):
            digest, pieces = names.digest(content), objects.pieces(content)
        else:
            path = Path(content)
            try:
                digest, pieces = names.digest_of(path), objects.pieces_of(path)
            except OSError as error:
                raise ClientError(f"{path}: {error.strerror or error}") from error
        await objects.put(self._session.broker, digest, pieces)
        return {"object": digest}

    async def fetch(self, object: str | Mapping[str, str]) -> bytes:
        """The bytes of an object, by its digest or as :meth:`data` names it, checked."""
        digest = object if isinstance(object, str) else object["object"]
        return await objects.get(self._session.broker, digest)

    def job(self, id: str) -> AsyncJob:
        """An execution that exists, by the id that its client gave it, or its UUID."""
        return AsyncJob(self._session, id)

    async def batch(self, name: str) -> AsyncSweep:
        """The executions of a batch, as the history knows them.

        Raises :class:`fiec.client.Missing`.
        """
        tenant = self._session.tenant
        rows = await self._session.past.rows(history.OF_BATCH, (tenant, name, name))
        return self._found(("batch", name), rows)

    async def array(self, id: str) -> AsyncSweep:
        """The elements of an array, as the history knows them: that of a ``map`` is ``sweep.id``.

        Raises :class:`fiec.client.Missing`.
        """
        rows = await self._session.past.rows(history.OF_ARRAY, (self._session.tenant, id, id))
        return self._found(("array", id), rows)

    def _found(self, group: Group, rows: Sequence[Mapping[str, Any]]) -> AsyncSweep:
        if not rows:
            raise Missing(f"tenant {self._session.tenant} has no {group[0]} {group[1]}")
        jobs = [
            AsyncJob(self._session, row["client_id"] or row["id"], row["params"], submitted=True)
            for row in rows
        ]
        return AsyncSweep(self._session, [group], jobs)

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as a policy service sees them (``schemas/json/api-reply.json``)."""
        return list((await self._session.broker.ask("fiec.api.nodes", b"")).get("nodes", ()))

    async def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of an SQL query about the history.

        Parameters are ``%s``.
        """
        return await self._session.past.rows(query, parameters)

    async def sql(self, query: str, parameters: Sequence[Any] = ()) -> pandas.DataFrame:
        """The same as a data frame of pandas."""
        return history.frame(await self.rows(query, parameters))

    async def _send(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Submits lines in as few requests as they fit in.

        Raises :class:`Refused` with all faults.
        """
        refused: list[Mapping[str, Any]] = []
        request = b""
        encoded = [arrays.encoded(line) + b"\n" for line in lines]
        for nth, line in enumerate(encoded):
            request += line
            following = encoded[nth + 1] if nth + 1 < len(encoded) else None
            if following is None or len(request) + len(following) > _REQUEST_BYTES:
                subject = f"fiec.api.submit.{self._session.tenant}"
                reply = await self._session.broker.ask(subject, request)
                refused += reply.get("errors", ())
                request = b""
        if refused:
            words = "; ".join(_in_words(fault) for fault in refused[:3])
            more = f" (and {len(refused) - 3} more)" if len(refused) > 3 else ""
            raise Refused(f"the submission is refused: {words}{more}", "invalid", refused)


def _in_words(fault: Mapping[str, Any]) -> str:
    where = fault.get("field")
    return f"{where}: {fault.get('reason')}" if where else str(fault.get("reason"))
