"""A run as a program sees it."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from . import restore, sigma
from .engine import NOTE_LIMIT, Boundaries
from .errors import Failed, StateError
from .frames import DATA_DIR_ENV, INPUTS_ENV, Message
from .series import value_of
from .tiles import Merge, Tiles, find, read_range
from .values import dumps, encoded, plain, shown, surrogate, whole

T = TypeVar("T")
_NAME_LIMIT = 255
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile("[0-9a-f]{64}")


class State:
    """The named parts of a state as attributes: ``state.w``, ``state.epoch``."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the state has no part {name!r}; it has {', '.join(vars(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    def __repr__(self) -> str:
        return f"State({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


@dataclass(frozen=True)
class Device:
    """A granted device."""

    uuid: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Grant:
    """What the program may use where it runs. It changes the speed, never the bits."""

    substrate: str | None = None
    """The place on the node, e.g. ``cpu0``."""
    threads: int | None = None
    """Threads that may compute at once; ``None``: the program's own choice."""
    cpus: tuple[int, ...] = ()
    """The processors it may run on; empty: any."""
    memory_bytes: int | None = None
    """Memory in bytes; ``None``: not limited."""
    device: Device | None = None
    """A device, if one was granted."""

    @classmethod
    def parse(cls, head: Mapping[str, Any]) -> Grant:
        """Reads a grant as messages carry it; what is not known is left out."""
        device = head.get("device")
        return cls(
            substrate=head.get("substrate"),
            threads=head.get("threads"),
            cpus=tuple(head.get("cpus") or ()),
            memory_bytes=head.get("memory_bytes"),
            device=Device(device["uuid"], device.get("memory_bytes")) if device else None,
        )


def inputs(path: str | os.PathLike[str] = "") -> Path:
    """The path of an input: relative ones are looked up in the node's folder of inputs."""
    folder = os.environ.get(DATA_DIR_ENV) or os.environ.get(INPUTS_ENV) or "."
    found = Path(folder) / path
    if not found.exists():
        raise Failed(f"input {os.fspath(path)!r} does not exist here; looked for {found}")
    return found


@dataclass(frozen=True)
class Reserved:
    """What became of a wish for more; see :meth:`Run.reserve`."""

    answer: str
    """``granted``, ``moves`` or ``refused``."""
    reason: str | None = None
    """Why it is not granted here."""
    grant: Grant | None = None
    """What may be used from the next boundary on, where it is granted."""

    def __bool__(self) -> bool:
        return self.answer == "granted"


@dataclass(frozen=True)
class Surroundings:
    """What is known of where a run is; see :meth:`Run.surroundings`."""

    node: str | None
    """Its node; ``None`` where it runs without one."""
    grant: Grant
    """What it may use."""
    vector: dict[str, Any] | None
    """What its node told last of its hardware (``readings``, ``slots``, …)."""
    offers: list[dict[str, Any]] | None
    """What other nodes could give (``node``, ``free_slots``, ``cores``, ``free_memory_bytes``,
    ``devices``), the freest first; ``None`` where that is not known, which is not nothing."""
    unknown: str | None
    """Why it is not known."""

    @property
    def free_slots(self) -> int | None:
        """Free slots of the nodes that are offered; ``None`` where that is not known."""
        if self.offers is None:
            return None
        return sum(int(offer.get("free_slots") or 0) for offer in self.offers)

    def reading(self, signal: str) -> float | None:
        """A reading of its own node, as ``memory``, from 0 to 1; ``None`` where there is none."""
        for reading in (self.vector or {}).get("readings") or ():
            if reading.get("signal") == signal and reading.get("device") is None:
                value = reading.get("value")
                return None if value is None else float(value)
        return None


class Run:
    """One attempt at an execution: from its last commit, or from its beginning."""

    def __init__(
        self, *, execution: str, epoch: int, program: str, params: Any, grant: Grant, local: bool
    ) -> None:
        self.execution = execution
        """The execution's id, a UUID."""
        self.epoch = epoch
        """How many bindings it has had, this one included."""
        self.program = program
        """``name@version``."""
        self.params: dict[str, Any] = params if isinstance(params, dict) else {"": params}
        """The parameters of the submission."""
        self.grant = grant
        """What may be used here; changes at a boundary, see :meth:`on_reconfigure`."""
        self.local = local
        """True where there is no worker."""
        self._engine: Boundaries
        self._sigma: bytes | None = None
        self._state: Any = None
        self._has_state = False
        self._named = False
        self._merge: Merge | None = None
        self._callbacks: list[Callable[[Grant], object]] = []
        self._limit_callbacks: list[Callable[[float], object]] = []

    # --- state ---------------------------------------------------------------------------------

    @overload
    def state(self, value: T, /) -> T: ...

    @overload
    def state(self, /, **fields: Any) -> State: ...

    def state(self, value: Any = None, /, **fields: Any) -> Any:
        """Declares the state: everything that a later capsule needs. Called once.

        ``run.state(epoch=0, w=w, rng=rng)`` gives an object with these attributes;
        ``run.state(value)`` takes a dataclass instance, a dict, or an object with ``state_dict``,
        and gives it back. In a run that resumes, the values of the last commit are put in place of
        the initial ones: arrays, modules, generators and containers are loaded in place, so that
        other names for them stay good.
        """
        self._engine.check()
        if self._has_state:
            raise StateError("run.state() is called once in a run; put all parts into one call")
        if (value is None) == (not fields):
            raise StateError("run.state() takes one value, or parts by name")
        self._has_state = True
        if self._merge is not None:
            self._merge.expect(fields if fields else value)
        if not fields:
            if self._sigma is not None:
                found = restore.decode(self._sigma, value)
                if found is not value:
                    raise StateError(
                        f"the state cannot be put into this {type(value).__name__}; pass a "
                        "dataclass instance that is not frozen, a dict, a list, or parts by name"
                    )
            self._state, self._sigma = value, None
            return value
        state = State(**fields)
        if self._sigma is not None:
            found = restore.decode(self._sigma, dict(fields))
            if not isinstance(found, dict) or not all(isinstance(k, str) for k in found):
                raise StateError("the state has no named parts; the program has changed")
            missing = fields.keys() - found.keys()
            if missing:
                raise StateError(
                    f"boundary {self.index} has no part {', '.join(sorted(missing))}; it has "
                    f"{', '.join(found)}. A program that has changed needs a new version"
                )
            vars(state).update(found)
        self._state, self._sigma, self._named = vars(state), None, True
        return state

    def _encode(self) -> list[bytes]:
        return sigma.encode(self._state if self._has_state else {})

    @property
    def resumed(self) -> bool:
        """True where a commit is resumed, at boundary :attr:`index` as it was at the start."""
        return self._resumed

    _resumed = False

    # --- boundaries ----------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """Capsules completed: the number of the last boundary."""
        return self._engine.index

    def _ready(self) -> Boundaries:
        engine = self._engine
        engine.check()
        if self._sigma is not None and not self._has_state:
            if restore.decode(self._sigma) != {}:
                raise StateError("the run resumes: call run.state() before the first step")
            self._sigma, self._has_state, self._state = None, True, {}
        return engine

    def steps(self, until: int | None = None) -> Iterator[int]:
        """``for step in run.steps(1000):`` – each turn of the loop is a capsule, and its edge is a
        boundary, the last one included: what follows the loop is a capsule of its own. Counts
        from :attr:`index`, so a run that resumes goes on where it was; without ``until`` it goes
        on until ``break`` or ``return``."""
        engine = self._ready()
        if until is not None:
            engine.of = until = whole(until, "steps: until")
        while until is None or engine.index < until:
            yield engine.index
            engine.edge()
        engine.check()

    def tiles(self, total: int | None = None) -> Tiles:
        """The range of tiles that is to be computed here, for a part of the state: what
        ``params.tiles`` says, ``{"from": 0, "to": 100}``; all of ``total`` where it says nothing.
        """
        given = self.params.get("tiles")
        if given is None and total is not None:
            return Tiles(0, total)
        begin, end = read_range(given, "params.tiles")
        if total is not None and end > total:
            raise Failed(
                f"params.tiles.to: must be at most {total}, the number of tiles, but is {end}"
            )
        return Tiles(begin, end)

    def each(
        self, items: Iterable[T], *, merge: Callable[[Any], object] | None = None
    ) -> Iterator[T]:
        """``for batch in run.each(state.batches):`` – like :meth:`steps`, over something whose
        position is part of the state: :class:`fiec.Batches`, :class:`fiec.Stream`,
        :class:`fiec.Tiles`.

        ``for tile in run.each(state.tiles, merge=take):`` may be spread over several nodes, where
        the submission says so: at a boundary the last half of what is left becomes a part, an
        execution of its own, and later ``take(part)`` is called with the state that it has come
        to, to put what it has found behind what was found here. Tiles are taken back in their
        order, so that appending gives what an undisturbed run has; a sum of floats would not. A
        part ends with the loop; what follows it is done by the whole alone."""
        engine = self._ready()
        if isinstance(items, Tiles):
            if merge is not None:
                find(self._state, items)
            engine.tiles, engine.splits = items, merge is not None
            self._take_back(items, merge)
        for item in items:
            yield item
            engine.edge()
        engine.check()
        if isinstance(items, Tiles):
            engine.tiles_done()
            engine.tiles, engine.splits = None, False

    def _take_back(self, tiles: Tiles, merge: Callable[[Any], object] | None) -> None:
        """Takes up the part that was given to this run to be merged, if one was: a capsule."""
        pending, self._merge = self._merge, None
        if pending is None:
            return
        if merge is None:
            raise Failed("a part is to be taken back, but run.each() was given no merge=")
        if pending.state is None:
            tiles.take_back(pending.given, None)
        else:
            part, theirs = pending.part(self._state, tiles)
            tiles.take_back(pending.given, theirs)
            merge(State(**part) if self._named else part)
        self._engine.edge(merged=True)

    def boundary(self) -> None:
        """A boundary in a loop of another shape. All that a later capsule needs must be in the
        state, the place in the program included."""
        engine = self._ready()
        engine.edge()

    @property
    def should_stop(self) -> bool:
        """Whether a yield, park or cancel is ordered for the next boundary. Never let results
        depend on it."""
        engine = self._engine
        engine.look()
        return engine.wanted() or engine.ended is not None

    # --- what others see -----------------------------------------------------------------------

    def progress(self, note: object = None, *, of: int | None = None, **numbers: Any) -> None:
        """A short word on where it stands, and the boundaries in all where that is known. Shown a
        few times a second at most; costs nothing in between.

        Further names are numbers over time: ``run.progress(loss=0.31, lr=1e-3)``, or
        ``**{"val/loss": 0.29}``. Each is a point of its curve at the boundary that ends this
        capsule. It is kept with that boundary's commit: in SQL (``execution_series``), in
        ``fiec watch`` and in the report. A run has at most 24 names."""
        engine = self._engine
        for name, value in numbers.items():
            engine.numbers.report(name, engine.index + 1, value_of(name, value))
        if note is not None:
            engine.note = shown(str(note)[:NOTE_LIMIT])
        if of is not None:
            engine.of = whole(of, "progress: of")

    def output(self, name: str, data: Any) -> None:
        """Declares an output: bytes, text, or a numpy array (written as ``.npy``). It becomes
        visible with the next commit; a later one of the same name takes its place."""
        self._engine.check()
        if wrong := surrogate(name):
            raise Failed(f"output {name!r}: a name is {wrong}")
        parts = name.split("/")
        if (
            not 0 < len(name.encode()) <= _NAME_LIMIT
            or {"", ".", ".."} & set(parts)
            or "\0" in name
        ):
            raise Failed(
                f"output {name!r}: a name has 1 to {_NAME_LIMIT} bytes and no empty part, "
                "'.' or '..' between slashes"
            )
        self._engine.output(name, _bytes(name, data))

    def emit(self, name: str, data: Any) -> None:
        """Sends a message to the outside: bytes, text, or anything that JSON can say. It is
        published on ``fiec.outbox.<tenant>.<execution>.<name>``, once, after the commit of the
        next boundary, and never without it. ``name`` has 1 to 64 letters, digits, ``_`` or
        ``-``. A capsule may emit 128 messages of 256 KiB in all."""
        self._engine.check()
        if not _NAME.fullmatch(name):
            raise Failed(f"emit: the name {name!r} must have 1 to 64 letters, digits, '_' or '-'")
        if isinstance(data, str):
            data = encoded(data, f"message {name!r}")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            data = dumps(plain(data, f"message {name!r}")).encode()
        self._engine.emit(name, bytes(data))

    # --- what it is given ----------------------------------------------------------------------

    def reserve(
        self, *, memory_bytes: int | None = None, device_memory_bytes: int | None = None
    ) -> Reserved:
        """Asks for so much memory in all, beyond the grant; best at the beginning of a capsule.

        ``granted``: the node has it; the new grant holds from the next boundary on
        (:meth:`on_reconfigure`). ``moves``: this place does not have it; the execution stops at a
        boundary soon and goes on where it is there, or waits, as its submission says
        (``when_unviable``). ``refused``: no place will have it. The answer may change the speed,
        never the bits."""
        self._engine.check()
        wish = {"memory_bytes": memory_bytes, "device_memory_bytes": device_memory_bytes}
        wish = {
            name: whole(bytes, f"reserve: {name}")
            for name, bytes in wish.items()
            if bytes is not None
        }
        if not wish:
            raise Failed("reserve: name memory_bytes, or device_memory_bytes")
        head = self._engine.reserve(wish)
        grant = head.get("grant")
        return Reserved(
            answer=str(head.get("answer")),
            reason=head.get("reason"),
            grant=Grant.parse(grant) if isinstance(grant, dict) else None,
        )

    def surroundings(self) -> Surroundings:
        """What is known of where it runs: its node's last vector, its grant, and what other nodes
        could give. State, outputs and result must not depend on it: it differs from run to run."""
        self._engine.check()
        head = self._engine.surroundings()
        offers = head.get("offers")
        return Surroundings(
            node=head.get("node"),
            grant=Grant.parse(head["grant"]) if head.get("grant") else self.grant,
            vector=head.get("vector"),
            offers=None if offers is None else list(offers.get("nodes") or ()),
            unknown=head.get("unknown"),
        )

    def ask(
        self,
        *,
        threads: int | None = None,
        cpus: Iterable[int] = (),
        memory_bytes: int | None = None,
    ) -> Reserved:
        """Asks its node for another grant: more or fewer threads, other processors, less memory
        (more is :meth:`reserve`). ``granted``: it holds from the next boundary on
        (:meth:`on_reconfigure`). ``refused``: it keeps what it has. The answer may change the
        speed, never the bits."""
        self._engine.check()
        change: Message = {}
        if threads is not None:
            change["threads"] = whole(threads, "ask: threads", 2**32 - 1)
        if processors := [whole(n, "ask: a processor of cpus", 2**32 - 1) for n in cpus]:
            change["cpus"] = processors
        if memory_bytes is not None:
            change["memory_bytes"] = whole(memory_bytes, "ask: memory_bytes")
        if not change:
            raise Failed("ask: name threads, cpus or memory_bytes")
        head = self._engine.ask(change)
        grant = head.get("grant")
        return Reserved(
            answer=str(head.get("answer")),
            reason=head.get("reason"),
            grant=Grant.parse(grant) if isinstance(grant, dict) else None,
        )

    def on_reconfigure(self, callback: Callable[[Grant], T]) -> Callable[[Grant], T]:
        """Calls ``callback(grant)`` at the boundary from which on another grant holds. Also a
        decorator."""
        self._callbacks.append(callback)
        return callback

    def _reconfigure(self, head: Message) -> None:
        self.grant = Grant.parse(head)
        for callback in self._callbacks:
            callback(self.grant)

    def on_limit(self, callback: Callable[[float], T]) -> Callable[[float], T]:
        """Calls ``callback(seconds)`` once, at a boundary, when the submission's
        ``limit.computed_s`` is near: so long it may still compute. Also a decorator. Print or
        :meth:`emit` there; σ must not depend on it."""
        self._limit_callbacks.append(callback)
        return callback

    def _near_limit(self, left: float) -> None:
        for callback in self._limit_callbacks:
            callback(left)

    def inputs(self, path: str | os.PathLike[str] = "") -> Path:
        """The path of an input: relative ones are looked up in the node's folder of inputs."""
        return inputs(path)

    def fetch(self, digest: str, bytes: int = 0) -> bytes:
        """An object by its digest (BLAKE3-256, hex): verified, from the node's cache or the object
        store. ``bytes`` is its size where it is known."""
        self._engine.check()
        if not _DIGEST.fullmatch(digest):
            raise Failed(f"digest {digest!r} must be 64 lower-case hexadecimal digits")
        head, body = self._engine.fetch(digest, bytes)
        if head.get("error"):
            permanent = bool(head.get("permanent"))
            raise Failed(f"object {digest} cannot be had: {head['error']}", permanent=permanent)
        if bytes and len(body) != bytes:
            raise Failed(f"object {digest} has {len(body)} bytes, not {bytes}")
        return body

    def load(self, reference: str | Mapping[str, Any]) -> bytes:
        """The bytes that a parameter names: a path of an input, ``{"file": path}``, or
        ``{"object": digest}``."""
        if isinstance(reference, str):
            reference = {"file": reference}
        match reference:
            case {"file": str(path)}:
                return self.inputs(path).read_bytes()
            case {"object": str(digest)}:
                return self.fetch(digest, int(reference.get("bytes") or 0))
            case _:
                raise Failed(f'{reference!r} must be a path, {{"file": …}} or {{"object": …}}')


def _bytes(name: str, data: Any) -> bytes:
    if isinstance(data, str):
        return encoded(data, f"output {name!r}")
    np = sys.modules.get("numpy")
    if np is not None and isinstance(data, np.ndarray):
        out = io.BytesIO()
        np.save(out, data, allow_pickle=False)
        return out.getvalue()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise Failed(f"output {name!r} is a {type(data).__name__}; give bytes, text or a numpy array")
