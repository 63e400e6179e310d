"""The client for ordinary programs and notebooks.

Each method is that of :mod:`fiec.client.aio`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import aio, page
from .curves import Curve
from .errors import ClientError, Missing
from .job import AsyncJob, AsyncOutput
from .logs import Line
from .loop import Loop
from .status import Status
from .sweep import AsyncSweep
from .sweep import as_completed as each_completed

if TYPE_CHECKING:
    import numpy
    import pandas


def connect(
    nats: str | None = None,
    *,
    database: str | None = None,
    credentials: str | None = None,
    tenant: str | None = None,
    who: str | None = None,
) -> Client:
    """Connects to a cluster: the one given, that of ``FIEC_NATS_URL`` and ``FIEC_DATABASE_URL``, or
    the ``fiec up`` on this machine. The tenant is that of ``FIEC_TENANT``, or ``default``; ``who``
    is the user for the history.

    Raises :class:`fiec.client.Unreachable`.
    """
    loop = Loop()
    try:
        made = aio.connect(nats, database=database, credentials=credentials, tenant=tenant, who=who)
        return Client(loop, loop.run(made))
    except BaseException:
        loop.close()
        raise


class Client:
    """A connection to a cluster, for one tenant.

    Closing it ends no execution.
    """

    def __init__(self, loop: Loop, inner: aio.AsyncClient) -> None:
        self._loop, self._inner = loop, inner

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection.

        Executions continue.
        """
        self._loop.run(self._inner.close())
        self._loop.close()

    def submit(
        self,
        program: str,
        params: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        **fields: Any,
    ) -> Job:
        """Submits one execution.

        ``fields`` are those of a submission (``schemas/README.md``): ``batch``, ``requires``,
        ``deadline``, … The same ``id`` with the same line is the same execution.

        Raises :class:`fiec.client.Refused`, :class:`fiec.client.Unreachable`.
        """
        return self._job(self._loop.run(self._inner.submit(program, params, id=id, **fields)))

    def map(
        self,
        program: str | Path,
        over: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]],
        *,
        params: Mapping[str, Any] | None = None,
        id: str | None = None,
        **fields: Any,
    ) -> Sweep:
        """Submits an execution for each of many parameters, as one array.

        ``program`` is ``NAME@VERSION``, or a script or a folder, which is packed and registered
        as by :meth:`push`. ``over`` has the values of each name, of which every combination is
        taken (``{"seed": range(100), "lr": [0.1, 0.01]}``), or is a list of parameters.
        ``params`` are the same for all. ``fields`` are those of a submission: ``batch``,
        ``at_once``, …

        Raises as :meth:`submit`, and ``ValueError``.
        """
        made = self._inner.map(program, over, params=params, id=id, **fields)
        return Sweep(self._loop, self._loop.run(made))

    def run(
        self,
        script: str | Path,
        params: Mapping[str, Any] | None = None,
        *,
        outputs: Iterable[str] = ("*",),
        python: str = "python3",
        id: str | None = None,
        **fields: Any,
    ) -> Job:
        """Packs a script that uses the kit, or a folder with a ``fiec.json``, and submits it.

        It is registered by its digest. ``outputs`` are names and patterns of a script's outputs,
        ``python`` is its interpreter on the nodes.

        Raises as :meth:`submit`, and :class:`fiec.client.ClientError` for a package with a fault.
        """
        made = self._inner.run(script, params, outputs=outputs, python=python, id=id, **fields)
        return self._job(self._loop.run(made))

    def push(
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
        return self._loop.run(self._inner.push(path, program, outputs=outputs, python=python))

    def data(self, content: str | Path | bytes) -> dict[str, str]:
        """Stores a file, or bytes, and returns the parameter that names it: ``{"object":
        DIGEST}``."""
        return self._loop.run(self._inner.data(content))

    def fetch(self, object: str | Mapping[str, str]) -> bytes:
        """The bytes of an object, by its digest or as :meth:`data` names it, checked."""
        return self._loop.run(self._inner.fetch(object))

    def job(self, id: str) -> Job:
        """An execution that exists, by the id that its client gave it, or its UUID."""
        return self._job(self._inner.job(id))

    def batch(self, name: str) -> Sweep:
        """The executions of a batch, as the history knows them.

        Raises :class:`fiec.client.Missing`.
        """
        return Sweep(self._loop, self._loop.run(self._inner.batch(name)))

    def array(self, id: str) -> Sweep:
        """The elements of an array, as the history knows them: that of a ``map`` is ``sweep.id``.

        Raises :class:`fiec.client.Missing`.
        """
        return Sweep(self._loop, self._loop.run(self._inner.array(id)))

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as a policy service sees them (``schemas/json/api-reply.json``)."""
        return self._loop.run(self._inner.nodes())

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of an SQL query about the history.

        Parameters are ``%s``.
        """
        return self._loop.run(self._inner.rows(query, parameters))

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> pandas.DataFrame:
        """The same as a data frame of pandas."""
        return self._loop.run(self._inner.sql(query, parameters))

    def _job(self, job: AsyncJob) -> Job:
        return Job(self._loop, job)


class Job:
    """An execution.

    It lives in the cluster: nothing here ends it but :meth:`cancel`.
    """

    def __init__(self, loop: Loop, inner: AsyncJob) -> None:
        self._loop, self._inner = loop, inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        """The id that its client gave it, or its UUID."""
        return self._inner.id

    @property
    def uuid(self) -> str:
        """FIEC's name of it."""
        return self._inner.uuid

    @property
    def params(self) -> Any:
        """Its parameters, if this program submitted it."""
        return self._inner.params

    def status(self) -> Status:
        """How it stands now.

        ``queued``: this program has submitted it, and it has no ledger yet.

        Raises :class:`fiec.client.Missing`.
        """
        return self._loop.run(self._inner.status())

    def wait(self, timeout: float | None = None) -> Status:
        """Waits until it has ended, however long the servers are away.

        ``timeout`` is in seconds.     Raises ``TimeoutError``; the execution continues.
        """
        return self._loop.run(self._inner.wait(timeout))

    def result(self, timeout: float | None = None) -> Any:
        """Its result, when it has completed.

        Raises :class:`fiec.client.NotCompleted` if it ended without one, ``TimeoutError``.
        """
        return self._loop.run(self._inner.result(timeout))

    def logs(self, follow: bool = False) -> Iterator[Line]:
        """What it prints.

        With ``follow`` also what comes, until it has ended.
        """
        return self._loop.iterate(self._inner.logs(follow))

    @property
    def outputs(self) -> Outputs:
        """Its outputs so far, by name: ``job.outputs["x.npy"].numpy()``.

        Raises :class:`fiec.client.Missing`.
        """
        return Outputs(self._loop, self._loop.run(self._inner.outputs()))

    def curves(self) -> dict[str, Curve]:
        """The numbers that it has reported, a curve for each name."""
        return self._loop.run(self._inner.curves())

    def why(self) -> dict[str, Any]:
        """Why it is where it is, as ``fiec why`` says it: ``summary`` in words, ``candidates``,
        …"""
        return self._loop.run(self._inner.why())

    def placements(self) -> list[dict[str, Any]]:
        """Where it was and when: a row for each binding, from the history."""
        return self._loop.run(self._inner.placements())

    def moves(self) -> list[dict[str, Any]]:
        """Its moves, with cause, boundary and gap, from the history."""
        return self._loop.run(self._inner.moves())

    def move(self, to: str | None = None) -> str:
        """Orders it to another node at its next boundary; ``to`` names it.

        Returns what was done.
        """
        return self._loop.run(self._inner.move(to))

    def cancel(self) -> str:
        """Ends it.

        Its commits and outputs stay.
        """
        return self._loop.run(self._inner.cancel())

    def pause(self) -> str:
        """Pauses it at its next boundary until it is resumed."""
        return self._loop.run(self._inner.pause())

    def resume(self) -> str:
        """Resumes it."""
        return self._loop.run(self._inner.resume())

    def retry(self, from_boundary: int | None = None, **change: Any) -> str:
        """Starts it again from its last commit, after it failed, is held or was cancelled.

        ``change`` are settings that change with it, as in :meth:`adjust`.
        """
        return self._loop.run(self._inner.retry(from_boundary, **change))

    def adjust(self, **change: Any) -> str:
        """Changes it while it lives: ``priority``, ``memory_bytes``, ``viability``, ``deadline``,
        ``nodes``, ``exclude``, as in ``schemas/json/execution-request.json``."""
        return self._loop.run(self._inner.adjust(**change))

    def _repr_html_(self) -> str:
        return page.of_job(self._loop.run(page.read(self._inner)))


class Output:
    """An output of an execution.

    Its bytes are checked against its digest when they are fetched.
    """

    def __init__(self, loop: Loop, inner: AsyncOutput) -> None:
        self._loop, self._inner = loop, inner
        self.name = inner.name
        self.size = inner.size
        """Its size in bytes."""
        self.digest = inner.digest
        self.boundary = inner.boundary
        """The boundary whose commit made it visible."""

    def __repr__(self) -> str:
        return repr(self._inner)

    def bytes(self) -> bytes:
        """Its bytes.

        Raises :class:`fiec.client.Damaged`, :class:`fiec.client.Missing`.
        """
        return self._loop.run(self._inner.bytes())

    def text(self) -> str:
        """Its bytes as UTF-8."""
        return self._loop.run(self._inner.text())

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """An ``.npy`` file as an array.

        Nothing in it is executed.
        """
        return self._loop.run(self._inner.numpy())

    def save(self, path: str | Path) -> Path:
        """Writes it to a file, which appears complete and checked, or not at all."""
        return self._loop.run(self._inner.save(path))


class Outputs(Mapping[str, Output]):
    """The outputs of an execution at one moment, by name."""

    def __init__(self, loop: Loop, inner: Mapping[str, AsyncOutput]) -> None:
        self._made = {name: Output(loop, output) for name, output in inner.items()}

    def __getitem__(self, name: str) -> Output:
        if name not in self._made:
            raise Missing(
                f"there is no output {name!r}; there are: {', '.join(self._made) or 'none'}"
            )
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __repr__(self) -> str:
        return f"<Outputs {', '.join(self._made) or 'none'}>"


class Sweep(Sequence[Job]):
    """Executions that belong together, as those of a ``map`` in the order of their parameters."""

    def __init__(self, loop: Loop, inner: AsyncSweep) -> None:
        self._loop, self._inner = loop, inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [Job(self._loop, job) for job in self._inner[at]]
        return Job(self._loop, self._inner[at])

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        """The id of its array, the first one if there are several; or the name of its batch."""
        return self._inner.id

    def counts(self) -> dict[str, int]:
        """How many executions are in each phase."""
        return self._loop.run(self._inner.counts())

    def wait(self, timeout: float | None = None) -> list[Status]:
        """Waits until all have ended, and says how, in their order.

        No failure ends the wait.     Raises ``TimeoutError``; the executions continue.
        """
        return self._loop.run(self._inner.wait(timeout))

    def results(self, timeout: float | None = None) -> list[Any]:
        """The results, in the order of the parameters; None for one that ended without a result."""
        return self._loop.run(self._inner.results(timeout))

    def cancel(self) -> int:
        """Ends all that have not ended.

        Returns for how many this was done.
        """
        return self._loop.run(self._inner.cancel())

    def pause(self) -> int:
        """Pauses all at their next boundaries until they are resumed."""
        return self._loop.run(self._inner.pause())

    def resume(self) -> int:
        """Resumes those that are paused."""
        return self._loop.run(self._inner.resume())

    def retry(self) -> int:
        """Starts those again that failed, are held or were cancelled."""
        return self._loop.run(self._inner.retry())

    def _repr_html_(self) -> str:
        return page.of_counts(self._inner.id, self.counts())


def as_completed(jobs: Iterable[Job], progress: bool = False) -> Iterator[Job]:
    """Each of these executions when it has ended, however it has ended.

    ``job.result()`` then returns at once, or raises. ``progress`` draws a bar (by ``tqdm``).
    """
    wanted = list(jobs)
    if not wanted:
        return
    loop = wanted[0]._loop
    if any(job._loop is not loop for job in wanted):
        raise ValueError("as_completed: these executions are of several clients")
    by_uuid = {job.uuid: job for job in wanted}
    each = loop.iterate(each_completed(job._inner for job in by_uuid.values()))
    ended: Iterator[AsyncJob] = _bar(each, len(by_uuid)) if progress else each
    for job in ended:
        yield by_uuid[job.uuid]


def _bar(each: Iterator[AsyncJob], total: int) -> Iterator[AsyncJob]:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ClientError("progress=True needs tqdm: pip install tqdm") from error
    failed = 0
    with tqdm(each, total=total) as bar:
        for job in bar:
            if job.end is not None and not job.end.completed:
                failed += 1
                bar.set_postfix({"not completed": failed})
            yield job
