"""Many executions at once, for programs that use ``asyncio``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Literal

from . import ends
from .errors import ClientError
from .job import AsyncJob, Session
from .status import Status

Group = tuple[Literal["array", "batch"], str]
"""How a request names many executions."""

_WITHIN_MS = 1_000
_PAGES = 10_000


class AsyncSweep(Sequence[AsyncJob]):
    """Executions that belong together, as those of a ``map`` in the order of their parameters."""

    def __init__(self, session: Session, groups: Sequence[Group], jobs: Sequence[AsyncJob]) -> None:
        self._session = session
        self._groups = tuple(groups)
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, at: Any) -> Any:
        return self._jobs[at]

    def __repr__(self) -> str:
        return f"<Sweep {', '.join(name for _, name in self._groups)}: {len(self)} executions>"

    @property
    def id(self) -> str:
        """The id of its array, the first one if there are several; or the name of its batch."""
        return self._groups[0][1]

    async def counts(self) -> dict[str, int]:
        """How many executions are in each phase."""
        found: dict[str, int] = {}
        for group in self._groups:
            for phase, count in (await self._all("status", group)).get("phases", {}).items():
                found[phase] = found.get(phase, 0) + int(count)
        known = sum(found.values())
        if known < len(self):
            found["queued"] = len(self) - known
        return found

    async def wait(self, timeout: float | None = None) -> list[Status]:
        """Waits until all have ended, and says how, in their order.

        No failure ends the wait.     Raises ``TimeoutError``; the executions continue.
        """

        async def all_ends() -> None:
            async for _ in as_completed(self):
                pass

        await ends.within(f"{self.id}: not all have ended", all_ends(), timeout)
        return [await job.wait() for job in self._jobs]

    async def results(self, timeout: float | None = None) -> list[Any]:
        """The results, in the order of the parameters; None for one that ended without a result."""
        how = await self.wait(timeout)
        return [await job.result() if end.completed else None for job, end in zip(self._jobs, how)]

    async def cancel(self) -> int:
        """Ends all that have not ended.

        Returns for how many this was done.
        """
        return await self._order("cancel")

    async def pause(self) -> int:
        """Pauses all at their next boundaries until they are resumed."""
        return await self._order("pause")

    async def resume(self) -> int:
        """Resumes those that are paused."""
        return await self._order("resume")

    async def retry(self) -> int:
        """Starts those again that failed, are held or were cancelled."""
        for job in self._jobs:
            job.forget_end()
        return await self._order("retry")

    async def _order(self, verb: str) -> int:
        done = 0
        for group in self._groups:
            reply = await self._all(verb, group)
            done += int(reply.get("done", 0)) + int(reply.get("underway", 0))
        return done

    async def _all(self, verb: str, group: Group) -> dict[str, Any]:
        """Page after page of a request about an array.

        Returns the last answer, with all that was done.
        """
        done, cursor, untaken = 0, None, None
        for _ in range(_PAGES):
            request: dict[str, Any] = {
                group[0]: group[1],
                "who": self._session.who,
                "within_ms": _WITHIN_MS,
            }
            if cursor is not None:
                request["cursor"] = cursor
            if untaken is not None:
                request["untaken"] = untaken
            subject = f"fiec.api.batch.{verb}.{self._session.tenant}"
            reply = await self._session.broker.ask(subject, json.dumps(request).encode())
            done += int(reply.get("done", 0))
            cursor = reply.get("cursor")
            waits = reply.get("untaken") if verb != "status" else None
            untaken = waits["upto"] if waits and cursor is None else None
            if cursor is None and untaken is None and not reply.get("left"):
                return {**reply, "done": done}
        raise ClientError(f"{group[1]}: {verb} did not come to an end; {done} are done")


async def as_completed(jobs: Iterable[AsyncJob]) -> AsyncIterator[AsyncJob]:
    """Each of these executions when it has ended, however it has ended.

    ``await job.result()`` then returns at once, or raises.
    """
    of_session: dict[Session, dict[str, AsyncJob]] = {}
    for job in jobs:
        of_session.setdefault(job.session, {})[job.uuid] = job
    queue: asyncio.Queue[AsyncJob | BaseException] = asyncio.Queue(maxsize=1)

    async def hear(session: Session, named: dict[str, AsyncJob]) -> None:
        try:
            async for one, end in ends.of(session.broker, session.past, session.tenant, named):
                named[one].note_end(end)
                await queue.put(named[one])
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(hear(session, named)) for session, named in of_session.items()]
    try:
        for _ in range(sum(len(named) for named in of_session.values())):
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
