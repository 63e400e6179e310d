"""JSON lines over the Unix socket that is named by ``FIEC_SOCKET``: how a program in a container
speaks, since no open socket passes its border. One process, one run; FIEC says when to commit.

See ``workers/CONTRACT.md`` for the messages.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from . import worker
from .engine import Boundaries, Order
from .errors import AgentGone, Cancelled, FrameError, Stop, Yielded
from .frames import Message
from .run import Grant, Run

SOCKET_PATH_ENV = "FIEC_SOCKET"


class Conversation:
    """Lines both ways."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rb")
        os.register_at_fork(after_in_child=self._socket.close)

    def say(self, message: Message) -> None:
        """One message."""
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        try:
            self._socket.sendall(text.encode("utf-8", "replace") + b"\n")
        except ConnectionError as error:
            raise AgentGone(str(error)) from error

    def hear(self) -> Message:
        """The next message."""
        try:
            line = self._lines.readline()
        except ConnectionError as error:
            raise AgentGone(str(error)) from error
        if not line.endswith(b"\n"):
            raise AgentGone("the socket was closed")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise FrameError(f"a line that cannot be read: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("is"), str):
            raise FrameError('a line that cannot be read: no object with an "is"')
        return message


class Lines(Boundaries):
    """Takes one execution from boundary to boundary over JSON lines."""

    def __init__(
        self,
        talk: Conversation,
        order: Message,
        encode: Callable[[], list[bytes]],
        reconfigure: Callable[[Message], None],
    ) -> None:
        super().__init__(order.get("boundary") or 0)
        self._talk = talk
        self._outputs = Path(order["outputs"])
        self._objects = Path(order.get("objects") or "objects")
        self._encode = encode
        self._reconfigure = reconfigure

    def edge(self) -> None:
        self.index += 1
        self.check()
        head: Message = {"is": "boundary"}
        if self.emits:
            head["emit"] = self.lines_emits()
        self._talk.say(self.position(head))
        while True:
            match self._talk.hear():
                case {"is": "go"}:
                    return
                case {"is": "state"}:
                    sigma = base64.b64encode(b"".join(self._encode())).decode()
                    self._talk.say({"is": "state", "state": sigma, "outputs": self.put_outputs()})
                case {"is": "reconfigure", "grant": dict(grant)}:
                    self._reconfigure(grant)
                case {"is": "stop"} as stop:
                    self._end(Yielded(str(stop.get("cause") or "FIEC asked for it")))
                case {"is": "cancel"}:
                    self._end(Cancelled())
                case other:
                    raise FrameError(f"answer {other['is']!r} is not known, or lacks a field")

    def _end(self, stop: Stop) -> NoReturn:
        self.ended = stop
        raise stop

    def look(self) -> None:
        """Nothing can come between two boundaries."""

    def lines_emits(self) -> list[Message]:
        """What was emitted since the last time, as a line has it."""
        return [{"name": emit["name"], "data": emit["data"]} for emit in self.take_emits()]

    def put_outputs(self) -> list[str]:
        """Writes the outputs made since the last time; gives their names."""
        made, self.outputs = self.outputs, {}
        for name, data in made.items():
            path = self._outputs / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return list(made)

    def fetch(self, digest: str, size: int) -> Order:
        try:
            return {"is": "data", "digest": digest}, (self._objects / digest).read_bytes()
        except OSError as error:
            why = f"only objects that params name are here ({error})"
            return {"is": "data", "digest": digest, "error": why, "permanent": True}, b""


def serve(main: worker.Main, prepare: worker.Prepare | None, path: str) -> int:
    """The one run of this process; gives its exit status."""
    try:
        talk = Conversation(path)
    except OSError as error:
        raise FrameError(f"{SOCKET_PATH_ENV} is {path!r}, and cannot be used: {error}") from error
    order = talk.hear()
    run, state = _run(order)
    lines = Lines(talk, order, run._encode, run._reconfigure)
    run._engine = lines
    if state is not None:
        run._sigma, run._resumed = state, True

    def whole(run: Run) -> object:
        if prepare is not None:
            prepare(run.params)
        return main(run)

    end = worker.attempt(whole, run, local=False)
    if end.ending == "completed":
        outputs = lines.put_outputs()
        last: Message = {"is": "completed", "result": end.result, "outputs": outputs}
        if lines.emits:
            last["emit"] = lines.lines_emits()
        talk.say(last)
    elif end.reason is not None:
        talk.say({"is": "failed", "reason": end.reason, "permanent": end.permanent})
    return 0


def _run(order: Message) -> tuple[Run, bytes | None]:
    try:
        if order["is"] != "run":
            raise FrameError(f"the first line is {order['is']!r} and not 'run'")
        text: Any = order["state"]
        run = Run(
            execution=str(order.get("execution") or ""),
            epoch=int(order.get("epoch") or 1),
            program=str(order.get("program") or ""),
            params=order["params"],
            grant=Grant.parse(order.get("grant") or {}),
            local=False,
        )
        Path(order["outputs"])
        return run, None if text is None else base64.b64decode(text, validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise FrameError(f"the first line cannot be read: {error!r}") from error
