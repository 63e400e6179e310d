"""``fiec.main``: the same script under a worker and at a terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from . import lines, worker
from .errors import AgentGone, Failed, FrameError
from .frames import from_environment
from .schedule import Schedule
from .values import plain

COMPLETED, CRASHED, USAGE, GONE, FAILED, BOUNDARY = 0, 1, 2, 3, 65, 85
_EXIT = {
    "completed": COMPLETED,
    "yielded": BOUNDARY,
    "cancelled": CRASHED,
    "failed": FAILED,
    "crashed": CRASHED,
}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _commit(text: str) -> Any:
    """``auto``, ``5`` (every fifth boundary), ``200ms``."""
    policy: Any = text
    if text.isdigit():
        policy = {"every": int(text)}
    elif text.endswith("ms") and text[:-2].isdigit():
        policy = {"every_ms": int(text[:-2])}
    try:
        Schedule(policy, 0, 0, 0)
    except FrameError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be auto, a number of boundaries, or a time like 200ms"
        ) from None
    return policy


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def parser(program: str) -> argparse.ArgumentParser:
    """The command line of a program that runs without a worker."""
    p = argparse.ArgumentParser(
        prog=program,
        description="Runs here, without a worker. Interrupt it and run it again: it continues.",
        epilog="exit status: 0 completed, 1 crashed, 65 failed permanently, 85 yielded",
    )
    p.add_argument("param", nargs="*", help="name=value; the value is JSON or else a text")
    p.add_argument("--params", metavar="FILE", help="a JSON file of parameters")
    p.add_argument("--fresh", action="store_true", help="begin anew")
    p.add_argument("--yield-after", type=_number, metavar="K", help="yield at the K-th boundary")
    p.add_argument(
        "--commit", type=_commit, default="auto", metavar="WHEN", help="auto, 5, or 200ms"
    )
    p.add_argument("--check", action="store_true", help="compare whole and cut runs, bit by bit")
    p.add_argument(
        "--yield-every", type=_number, default=1, metavar="K", help="with --check: where to cut (1)"
    )
    p.add_argument("--folder", default=".fiec", help="where the state is kept (.fiec)")
    p.add_argument("--quiet", action="store_true", help="say nothing")
    return p


def _params(given: argparse.Namespace, p: argparse.ArgumentParser) -> dict[str, Any]:
    params: Any = {}
    if given.params:
        try:
            params = json.loads(Path(given.params).read_text("utf-8"))
        except (OSError, ValueError) as error:
            p.error(f"--params {given.params}: {error}")
        if not isinstance(params, dict):
            p.error(f"--params {given.params}: must be a JSON object")
    for pair in given.param:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            p.error(f"{pair!r} is no name=value")
        try:
            # UTF-8 whatever the locale.
            name, text = (os.fsencode(part).decode() for part in (name, text))
        except UnicodeDecodeError:
            p.error(f"{pair!r} is not UTF-8")
        params[name] = _value(text)
    return dict(params)


def _serve(main: worker.Main, prepare: worker.Prepare | None) -> int | None:
    """Serves an agent; ``None`` where there is none."""
    try:
        link = from_environment()
        path = os.environ.pop(lines.SOCKET_PATH_ENV, None)
        if link is None and path is None:
            return None
        # A line that was printed is seen at once, and before the report that follows it.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if link is None:
            return lines.serve(main, prepare, str(path))
        return worker.Server(link, main, prepare, local=False).serve()
    except AgentGone:
        return GONE
    except FrameError as error:
        print(f"fiec: {error}", file=sys.stderr)
        return USAGE


def main(
    program: worker.Main,
    *,
    prepare: worker.Prepare | None = None,
    params: dict[str, Any] | None = None,
    name: str | None = None,
) -> NoReturn:
    """Runs ``program(run)``: under a worker for as long as it gives work, else once, here.

    ``prepare(params)`` is called ahead of a run where time allows, to load what the run will need
    into module globals or caches. ``params`` are the parameters of a local run; without them they
    are read from the command line, with the other options of a local run. ``name`` names the
    folder of a local run; by default it is that of the script.
    """
    status = _serve(program, prepare)
    if status is None:
        status = _here(program, params, name or Path(sys.argv[0] or "program").stem)
    worker.flush()
    sys.exit(status)


def _here(program: worker.Main, params: dict[str, Any] | None, name: str) -> int:
    from . import check, local  # a worker's child starts without them

    p = parser(name)
    given = p.parse_args([] if params is not None else None)
    params = _params(given, p) if params is None else params
    try:
        params = plain(params, "params", numbers_only=True)
        if given.check:
            return check.check(sys.argv[0], program, params, given.yield_every)
        ending, _ = local.run(
            program,
            name,
            params,
            root=Path(given.folder),
            fresh=given.fresh,
            yield_after=given.yield_after,
            commit=given.commit,
            quiet=given.quiet,
        )
        return _EXIT[ending]
    except Failed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED if error.permanent else CRASHED
    except KeyboardInterrupt:
        print(f"{name}: stopped; the last commit is kept", file=sys.stderr)
        return 130
