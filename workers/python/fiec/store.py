"""Where a program keeps its state when there is no worker: a folder, written atomically.

::

    .fiec/<program>/<key of the parameters>/
        params.json   what it was started with
        state         the last commit: a line of JSON, then σ
        outputs/      what was visible with that commit
        outbox.jsonl  what was emitted with the commits so far
        result.json   what it returned, once it has
        lock          held by the process that computes
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from .errors import Failed
from .values import dumps

FORMAT = 1


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, *pieces: bytes) -> None:
    """Replaces a file as one step that survives a crash of the machine."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    _sync_folder(path.parent)


class Store:
    """The folder of one local execution."""

    def __init__(self, root: Path, program: str, params: Any, *, fresh: bool = False) -> None:
        key = hashlib.sha256(dumps(params).encode()).hexdigest()[:12]
        self.folder = root / program / key
        self.outputs = self.folder / "outputs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "a+")  # noqa: SIM115 - held as long as this lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            pid = self._lock.read().strip() or "another process"
            self._lock.close()
            raise Failed(f"{self.folder} is in use by process {pid}") from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        self.boundary: int | None = None
        self.execution = str(uuid.uuid4())
        self.state = b""
        self._made: dict[str, str] = {}
        if fresh:
            self.forget()
        if not self._load():
            # What an earlier execution left is not this one's.
            self.forget()
            write(self.folder / "params.json", dumps(params).encode())

    def close(self) -> None:
        """Lets another process have the folder."""
        self._lock.close()

    def forget(self) -> None:
        """Removes state, outputs and result."""
        for name in ("state", "state.new", "result.json", "outbox.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.outputs, ignore_errors=True)
        shutil.rmtree(self.folder / "staged", ignore_errors=True)

    def _load(self) -> bool:
        try:
            raw = (self.folder / "state").read_bytes()
        except FileNotFoundError:
            return False
        line, _, state = raw.partition(b"\n")
        try:
            head = json.loads(line)
            good = head["format"] == FORMAT and head["sha256"] == hashlib.sha256(state).hexdigest()
            self.boundary, self.execution = head["boundary"], head["execution"]
            self._made = head["outputs"]
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise Failed(f"{self.folder / 'state'} is damaged; --fresh begins anew")
        self.state = state
        self._publish()
        self.emit(head.get("emits") or [])
        return True

    def _stage(self, outputs: dict[str, bytes]) -> dict[str, str]:
        """Writes outputs beside the visible ones; gives their digests by name."""
        staged = {}
        for name, data in outputs.items():
            digest = hashlib.sha256(data).hexdigest()
            (self.folder / "staged").mkdir(exist_ok=True)
            write(self.folder / "staged" / digest, data)
            staged[name] = digest
        return staged

    def _publish(self) -> None:
        """Makes the outputs of the last commit visible: also those that a crash came before."""
        for name, digest in self._made.items():
            staged = self.folder / "staged" / digest
            if staged.exists():
                path = self.outputs / name
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(path.name + ".new")
                shutil.copyfile(staged, new)
                os.replace(new, path)
        shutil.rmtree(self.folder / "staged", ignore_errors=True)

    def commit(
        self,
        boundary: int,
        state: list[bytes],
        outputs: dict[str, bytes],
        emits: list[dict[str, Any]] | None = None,
    ) -> None:
        """Makes a boundary durable, and its outputs and messages visible."""
        made = self._stage(outputs)
        digest = hashlib.sha256()
        for piece in state:
            digest.update(piece)
        head = {
            "format": FORMAT,
            "execution": self.execution,
            "boundary": boundary,
            "sha256": digest.hexdigest(),
            "outputs": made,
            "emits": emits or [],
        }
        write(self.folder / "state", dumps(head).encode() + b"\n", *state)
        self._made = made
        self._publish()
        self.emit(emits or [])

    def emit(self, emits: list[dict[str, Any]]) -> None:
        """Adds what was emitted to a file, once: in place of a broker."""
        if not emits:
            return
        path = self.folder / "outbox.jsonl"
        last = (0, -1)
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                # A crash may have cut the last line; it is written again.
                with contextlib.suppress(ValueError, KeyError):
                    found = json.loads(line)
                    last = max(last, (found["boundary"], found["index"]))
        with open(path, "ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            for emit in emits:
                if (emit["boundary"], emit["index"]) > last:
                    file.write(dumps(emit).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def complete(self, result: Any, capsules: int, outputs: dict[str, bytes]) -> None:
        """Makes the result durable; the state is not needed any more."""
        self._made = self._stage(outputs)
        self._publish()
        write(
            self.folder / "result.json",
            dumps({"capsules": capsules, "execution": self.execution, "result": result}).encode(),
        )
        (self.folder / "state").unlink(missing_ok=True)
