"""Sends reports: small ones at once, large ones by a thread beside the computation.

Reports leave in the order in which they are given.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from .frames import Link, Message, Pieces

# Up to this size a state is written by the computing thread: cheaper than waking another.
DIRECT_LIMIT = 192 * 1024


class Writer:
    """Writes to a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._jobs: queue.SimpleQueue[tuple[Message, Pieces]] | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None

    def is_busy(self) -> bool:
        """True while a large report is being written."""
        return not self._idle.is_set()

    def settle(self) -> None:
        """Waits for the large report that is being written, if one is."""
        if not self._idle.is_set():
            self._idle.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def report(self, head: Message, body: Pieces = ()) -> None:
        """Writes a report, after those before it."""
        self.settle()
        self._link.write(head, body)

    def boundary(self, head: Message, body: Pieces, size: int) -> None:
        """Writes a boundary; a large one beside what comes next. ``body`` must not change."""
        self.settle()
        if size <= DIRECT_LIMIT:
            self._link.write(head, body)
            return
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(self._jobs,), name="fiec-commit", daemon=True
            ).start()
        self._idle.clear()
        self._jobs.put((head, body))

    def _work(self, jobs: queue.SimpleQueue[Any]) -> None:
        while True:
            head, body = jobs.get()
            try:
                self._link.write(head, body)
            except BaseException as error:
                self._error = error
            del head, body
            self._idle.set()
