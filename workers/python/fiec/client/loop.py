"""A loop of ``asyncio`` on a thread of its own, so that the client works where a loop runs already,
as in Jupyter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """Runs what it is given.

    Ctrl-C ends the call, not the loop, and no execution.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fiec.client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs this and returns what it returns, or raises what it raises."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, work: AsyncIterator[T]) -> Iterator[T]:
        """What an asynchronous iterator yields.

        It is closed when the reader stops.
        """
        try:
            while True:
                try:
                    yield self.run(_next(work))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(work, "aclose", None)
            if close is not None and not self._loop.is_closed():
                self.run(close())

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _next(work: AsyncIterator[T]) -> T:
    return await work.__anext__()
