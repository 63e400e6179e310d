"""A stand-in for the agent: gives the orders and keeps the commits of a local run."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from .engine import Start
from .errors import Failed
from .frames import Message, Pieces
from .schedule import WINDOW
from .store import Store
from .values import dumps
from .worker import Ending, Main, Server

# Where nobody watches, a line this often.
_QUIET = 10.0


def split(head: Message, body: Pieces) -> tuple[list[bytes], dict[str, bytes]]:
    """σ and the outputs of a report, from its body."""
    made = head.get("outputs") or []
    cut = len(body) - len(made)
    return list(body[:cut]), {o["name"]: data for o, data in zip(made, body[cut:])}


class Terminal:
    """One line that says where a run stands."""

    def __init__(self, program: str, quiet: bool) -> None:
        self._out = sys.stderr
        self._live = not quiet and self._out.isatty()
        self._quiet = quiet
        self._program = program
        self._start = self._said = time.monotonic()
        self._first: int | None = None
        self._shown = False
        self._numbers: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.clear()
            print(f"{self._program}: {text}", file=self._out, flush=True)

    def clear(self) -> None:
        """Takes the line away, so that something else can be printed."""
        if self._shown:
            self._shown = False
            self._out.write("\r\x1b[K")
            self._out.flush()

    def at(self, head: Message, committed: int | None) -> None:
        """Shows a position."""
        index, of = head["index"], head.get("of")
        for name, points in (head.get("numbers") or {}).items():
            self._numbers[name] = points[-1][1]
        now = time.monotonic()
        if self._first is None:
            self._first, self._start = index, now
        if self._quiet or not (self._live or now - self._said >= _QUIET):
            return
        self._said = now
        rate = (index - self._first) / max(now - self._start, 1e-9)
        parts = [f"{index}/{of}" if of else str(index)]
        if rate > 0:
            parts.append(f"{rate:,.1f}/s")
            if of:
                parts.append(f"{max(0, of - index) / rate:,.0f} s left")
        if head.get("note"):
            parts.append(str(head["note"]))
        for name, value in self._numbers.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        if committed is not None:
            parts.append(f"committed {committed}")
        line = " · ".join(parts)
        if self._live:
            self._out.write(f"\r\x1b[K{self._program}: {line}"[:200])
            self._out.flush()
            self._shown = True
        else:
            self.say(line)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What the program prints does not run into the line."""
        if not (self._live and sys.stdout.isatty()):
            yield
            return
        before = sys.stdout
        sys.stdout = _Clearing(before, self.clear)
        try:
            yield
        finally:
            sys.stdout = before
            self.clear()


class _Clearing:
    def __init__(self, out: TextIO, clear: Callable[[], None]) -> None:
        self._out, self._clear = out, clear

    def write(self, text: str) -> int:
        self._clear()
        return self._out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class LocalLink:
    """Orders and commits of a run without a worker; commits are written by a thread."""

    def __init__(self, store: Store, terminal: Terminal, data: Path) -> None:
        self._store = store
        self._terminal = terminal
        self._data = data
        self._orders: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self._next: tuple[Message, bytes] | None = None
        self._jobs: queue.Queue[tuple[Message, Pieces]] = queue.Queue(WINDOW)
        self._error: BaseException | None = None
        self.committed = store.boundary
        threading.Thread(target=self._keep, name="fiec-store", daemon=True).start()

    def order(self, head: Message, body: bytes = b"") -> None:
        """Gives an order; safe in a signal handler."""
        self._orders.put((head, body))

    def has_order(self, timeout: float | None) -> bool:
        self._check()
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                if timeout == 0:
                    self._next = self._orders.get_nowait()
                else:
                    # In short steps, so that a failed disk is noticed.
                    self._next = self._orders.get(timeout=min(timeout or 1.0, 1.0))
        return self._next is not None

    def read(self) -> tuple[Message, bytes] | None:
        while not self.has_order(1.0):
            pass
        order, self._next = self._next, None
        return order

    def _check(self) -> None:
        if self._error is not None:
            raise Failed(f"cannot keep the state: {self._error}", permanent=False)

    def _keep(self) -> None:
        while True:
            head, body = self._jobs.get()
            try:
                state, outputs = split(head, body)
                self._store.commit(head["index"], state, outputs, head.get("emits"))
                self.committed = head["index"]
                self.order({"is": "committed", "index": head["index"]})
            except BaseException as error:
                self._error = error
            finally:
                self._jobs.task_done()

    def write(self, head: Message, body: Pieces = ()) -> None:
        match head["is"]:
            case "boundary":
                self._jobs.put((head, body))
                self._terminal.at(head, self.committed)
                if head["reason"] == "yield":
                    self._jobs.join()
                    self._check()
            case "progress":
                self._terminal.at(head, self.committed)
            case "completed":
                self._jobs.join()
                self._check()
                _, outputs = split(head, body)
                self._store.emit(head.get("emits") or [])
                self._store.complete(head.get("result"), head["capsules"], outputs)
            case "failed":
                self._terminal.clear()
                again = "" if head["permanent"] else " (run it again to continue)"
                print(f"failed: {head['reason']}{again}", file=sys.stderr, flush=True)
            case "fetch":
                self._fetch(head["digest"])
            case "surroundings":
                self.order({"is": "surroundings", "unknown": "this run has no node"})
            case "ask":
                asked = {name: value for name, value in head.items() if name != "is"}
                self.order({"is": "reconfigure", "grant": asked})
                self.order({"is": "asked", "answer": "granted", "grant": asked})
            case "reserve":
                # Nothing here counts what others use.
                granted = {"memory_bytes": head.get("memory_bytes")}
                self.order({"is": "reserved", "answer": "granted", "grant": granted})
                self.order({"is": "reconfigure", "grant": granted})

    def _fetch(self, digest: str) -> None:
        head: Message = {"is": "data", "digest": digest}
        try:
            body = (self._data / digest).read_bytes()
        except OSError as error:
            body = b""
            head["error"] = f"a local run has no worker; put it at {self._data / digest} ({error})"
        self.order(head, body)


class _Inherited:
    """What a forked child does not inherit of a local run: its handler for SIGTERM. Else the child
    could not be ended, and ``multiprocessing.Pool.terminate()`` would wait for it for ever."""

    def __init__(self) -> None:
        self.before: Any = None
        self._mask: set[int] = set()
        os.register_at_fork(before=self._hold, after_in_child=self._drop, after_in_parent=self._go)

    def _hold(self) -> None:
        # A SIGTERM that comes right after the fork waits until the child has its own handler.
        if self.before is not None:
            self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def _drop(self) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
            self._go()
            self.before = None

    def _go(self) -> None:
        if self.before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


_inherited = _Inherited()


@contextlib.contextmanager
def _yield_on_signals(link: LocalLink, terminal: Terminal) -> Iterator[None]:
    """Ctrl-C and SIGTERM yield at the next boundary; a second Ctrl-C ends the run at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, owner = False, os.getpid()

    def handler(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        # A terminal sends SIGINT to forked children, too: they finish the capsule.
        if os.getpid() == owner:
            terminal.say("yields at the next boundary (press Ctrl-C again to end now)")
            link.order({"is": "yield", "cause": signal.Signals(number).name})

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    _inherited.before = before[signal.SIGTERM]
    try:
        yield
    finally:
        _inherited.before = None
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _no_silent_exit(program: str) -> Iterator[None]:
    """``os._exit(0)`` ends the process without a word. It must not pass for a completion."""
    real, owner = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:
            print(
                f"{program}: os._exit(0) in a capsule is no completion; run it again "
                "to continue from the last commit",
                file=sys.stderr,
                flush=True,
            )
            status = 1
        real(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = real


def run(
    main: Main,
    program: str,
    params: dict[str, Any],
    *,
    root: Path,
    fresh: bool = False,
    yield_after: int | None = None,
    commit: Any = "auto",
    quiet: bool = False,
) -> tuple[Ending, Any]:
    """Runs a program here, from where it was; says how it ended, and its result."""
    store = Store(root, program, params, fresh=fresh)
    terminal = Terminal(program, quiet)
    link = LocalLink(store, terminal, root / "data")
    if store.boundary is not None:
        terminal.say(f"continues from boundary {store.boundary} in {store.folder} (--fresh: anew)")
    start = Start(
        execution=store.execution,
        epoch=1,
        program=program,
        params=params,
        commit=commit,
        boundary=store.boundary,
    )
    if yield_after is not None:
        start = Start(**{**vars(start), "yield_at": (store.boundary or 0) + yield_after})
    server = Server(link, main, None, local=True)
    try:
        with (
            _yield_on_signals(link, terminal),
            _no_silent_exit(program),
            terminal.beside(),
        ):
            ending = server.run(start, [store.state])
        if ending == "completed":
            text = "" if server.result is None else f": {dumps(server.result)}"
            terminal.say(f"completed{text}")
            if store.outputs.exists():
                terminal.say(f"outputs in {store.outputs}")
        elif ending == "yielded":
            terminal.say(f"yielded at boundary {link.committed}; run it again to continue")
        return ending, server.result
    finally:
        store.close()
