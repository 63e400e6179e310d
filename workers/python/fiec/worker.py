"""The run time of a process: takes orders and calls the program, one run after the other."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from .engine import Engine, Order, Start
from .errors import AgentGone, Done, Failed, FrameError, Stop, Yielded
from .frames import Link
from .run import Grant, Run
from .values import dumps, plain, shown
from .writer import Writer

Main = Callable[[Run], object]
Prepare = Callable[[dict[str, Any]], object]
Ending = Literal["completed", "yielded", "cancelled", "failed", "crashed"]

REASON_LIMIT = 2000
RESULT_LIMIT = 256 * 1024


def words(error: BaseException) -> str:
    """An exception in one line, with the line of the program that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_HERE)]
    if own:
        file = own[-1].filename.removeprefix(_PROGRAM_FOLDER)
        text += f" ({file}:{own[-1].lineno} in {own[-1].name})"
    return shown(text)[:REASON_LIMIT]


_HERE = __file__.rsplit("/", 1)[0] + "/"
# The folder of a package has another path on each node: reasons leave it out.
_PROGRAM_FOLDER = os.path.dirname(os.path.abspath(sys.argv[0])) + "/"


def show(error: BaseException) -> None:
    """The traceback on stderr, without the frames of this kit around the program."""
    trace: TracebackType | None = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    flush()


def flush() -> None:
    """What was printed leaves before a report does."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Server:
    """Serves runs of one program over a link."""

    def __init__(self, link: Link, main: Main, prepare: Prepare | None, local: bool) -> None:
        self.link = link
        self.writer = Writer(link)
        self.kept: deque[Order] = deque()
        self.result: Any = None
        self.ending: Ending = "crashed"
        self._main = main
        self._prepare = prepare
        self._local = local
        self._brief = False

    def serve(self) -> int:
        """Until the other end closes the socket. Gives the exit status of the process."""
        self.writer.report({"is": "ready"})
        while True:
            got = self.kept.popleft() if self.kept else self.link.read()
            if got is None:
                return 0
            head, body = got
            match head["is"]:
                case "prepare":
                    self._prepare_for(head)
                case "run":
                    # Only the run holds σ: it may be large, and is dropped once it is restored.
                    held = [body]
                    del got, body
                    if self.run(Start.parse(head), held) == "crashed":
                        # What the program left in this process is not trusted again.
                        return 1
                case "yield" | "cancel" | "committed" | "stretch" | "reconfigure" | "data":
                    pass  # crossed with the end of the run that they were meant for
                case "park" | "unpark" | "split" | "reserved" | "surroundings" | "asked":
                    pass  # crossed with the end of the run that they were meant for
                case other:
                    raise FrameError(f"order {other!r} is not known")

    def _prepare_for(self, head: dict[str, Any]) -> None:
        report = {"is": "prepared"}
        if self._prepare is not None:
            try:
                self._prepare(head.get("params") or {})
            except Exception as error:
                report["error"] = words(error)
        self.writer.report(report)

    def run(self, start: Start, held: list[bytes]) -> Ending:
        """One run; says how it ended, here as to the link. Takes the body of its order out of
        ``held``."""
        run = Run(
            execution=start.execution,
            epoch=start.epoch,
            program=start.program,
            params=start.params,
            grant=Grant.parse(start.grant),
            local=self._local,
        )
        run._sigma, run._merge = start.bodies(held.pop())
        run._resumed = start.boundary is not None
        engine = Engine(self.link, self.writer, start, self.kept, run._encode, run._reconfigure)
        engine.near_limit = run._near_limit
        run._engine = engine
        brief, self._brief = self._brief, False
        if not brief or start.boundary is not None:
            knows = {"parks": True, "limits": True}
            self.writer.report({"is": "began", "at": engine.began_at, **knows})
        end = attempt(self._main, run, self._local)
        self.result, self.ending = end.result, end.ending
        # Run and engine know each other. Without this the state lives until the next collection:
        # the memory of a device, too, and processes that its parts have started.
        run._state = None
        if end.ending == "completed":
            engine.complete(end.result)
            self._brief = engine.is_brief()
        elif end.reason is not None:
            self.writer.report({"is": "failed", "permanent": end.permanent, "reason": end.reason})
        return end.ending


@dataclass
class End:
    """How a call of a program ended."""

    ending: Ending
    result: Any = None
    reason: str | None = None
    permanent: bool = False


def attempt(main: Main, run: Run, local: bool) -> End:
    """Calls a program, and tells apart what may come of it."""
    engine = run._engine
    try:
        result = main(run)
        engine.check()  # a program that caught a Stop has not completed
        run._ready()
        if local:
            # A short run commits nothing: what could not travel is said all the same.
            run._encode()
        if run._merge is not None:
            raise Failed("a part is to be taken back, but the program has no run.each(tiles)")
        if engine.is_shared():
            raise Failed("the loop over its tiles was left early, though the range is shared")
        result = plain(result)
        if len(dumps(result).encode()) > RESULT_LIMIT:
            raise Failed(f"the result is over {RESULT_LIMIT} bytes; make it an output")
        return End("completed", result)
    except (AgentGone, FrameError):
        raise
    except BaseException as error:
        # While a Stop unwinds it, a program may raise something else.
        if engine.ended is not None:
            if not isinstance(error, Stop):
                show(error)
            if isinstance(engine.ended, Done):
                return End("completed")
            return End("yielded" if isinstance(engine.ended, Yielded) else "cancelled")
        if isinstance(error, Failed):
            if not error.permanent:
                show(error)
            ending: Ending = "failed" if error.permanent else "crashed"
            reason = shown(error.reason)[:REASON_LIMIT] or "failed without a reason"
            return End(ending, reason=reason, permanent=error.permanent)
        if isinstance(error, KeyboardInterrupt) and local:
            raise
        show(error)
        return End("crashed", reason=words(error))
    finally:
        flush()
