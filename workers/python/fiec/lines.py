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
from .tiles import Merge, Shares, write_range

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
        super().__init__(order.get("boundary") or 0, Shares.parse(order.get("spread")))
        self._talk = talk
        self._outputs = Path(order["outputs"])
        self._objects = Path(order.get("objects") or "objects")
        self._encode = encode
        self._reconfigure = reconfigure
        # σ with which a range that is shared has ended: somebody goes on from it.
        self.last: str | None = None

    def edge(self, merged: bool = False) -> None:
        self.index += 1
        self.check()
        head: Message = {"is": "boundary"}
        if self.emits:
            head["emit"] = self.lines_emits()
        if self.numbers:
            head["numbers"] = self.numbers.take_capsule()
        if self.names_much():
            head |= {"state": self.sigma(), "outputs": self.put_outputs()}
        self._talk.say(self.position(head))
        while True:
            match self._talk.hear():
                case {"is": "go"} as order:
                    if isinstance(left := order.get("limit_left_ms"), int):
                        self.near_limit(left / 1000)
                    return
                case {"is": "state"}:
                    outputs = self.put_outputs()
                    self._talk.say({"is": "state", "state": self.sigma(), "outputs": outputs})
                case {"is": "split"}:
                    given = self.give_away()
                    self._talk.say(
                        {"is": "whole"} if given is None else {"is": "split", **write_range(given)}
                    )
                case {"is": "reconfigure", "grant": dict(grant)}:
                    self._reconfigure(grant)
                case {"is": "yield"} as order:
                    self._end(Yielded(str(order.get("cause") or "FIEC asked for it")))
                case {"is": "cancel"}:
                    self._end(Cancelled())
                case other:
                    raise FrameError(f"answer {other['is']!r} is not known, or lacks a field")

    def end_of_range(self) -> None:
        self.check()
        self.last = self.sigma()

    def sigma(self) -> str:
        """σ as it stands in a line."""
        return base64.b64encode(b"".join(self._encode())).decode()

    def _converse(self, question: Message, answer: str) -> Message:
        """Says something within a capsule and waits for its answer, which is what comes next."""
        self._talk.say(question)
        told = self._talk.hear()
        if told["is"] != answer:
            raise FrameError(f"{question['is']!r} was answered by {told['is']!r}, not {answer!r}")
        return told

    def reserve(self, wish: Message) -> Message:
        return self._converse({"is": "reserve", **wish}, "reserved")

    def surroundings(self) -> Message:
        return self._converse({"is": "surroundings"}, "surroundings")

    def ask(self, change: Message) -> Message:
        return self._converse({"is": "ask", **change}, "asked")

    def _end(self, end: Stop) -> NoReturn:
        self.ended = end
        raise end

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
    run = _run(order)
    lines = Lines(talk, order, run._encode, run._reconfigure)
    lines.near_limit = run._near_limit
    run._engine = lines

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
        if lines.numbers:
            last["numbers"] = lines.numbers.take_capsule()
        if lines.last is not None:
            last["state"] = lines.last
        talk.say(last)
    elif end.reason is not None:
        talk.say({"is": "failed", "reason": end.reason, "permanent": end.permanent})
    return 0


def _state(text: Any) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _run(order: Message) -> Run:
    try:
        if order["is"] != "run":
            raise FrameError(f"the first line is {order['is']!r} and not 'run'")
        state, merge = _state(order["state"]), order.get("merge")
        run = Run(
            execution=str(order.get("execution") or ""),
            epoch=int(order.get("epoch") or 1),
            program=str(order.get("program") or ""),
            params=order["params"],
            grant=Grant.parse(order.get("grant") or {}),
            local=False,
        )
        run._sigma, run._resumed = state, state is not None
        if merge is not None:
            run._merge = Merge.parse(merge, _state(merge.get("state")))
        Path(order["outputs"])
        return run
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise FrameError(f"the first line cannot be read: {error!r}") from error
