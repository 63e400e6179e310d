"""Reads the bytes of a state back, into the objects that the program has made where it can.

See :mod:`fiec.sigma` for the format.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import random
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .errors import StateError
from .sigma import MAGIC, class_name, is_stateful

_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
# Below so many dimensions an array has no order.
_FLAT = 2
_FLOAT = struct.Struct("<d")
MISSING: Any = object()


@dataclasses.dataclass
class _Node:
    """A value that is finished when the object is known that it goes into."""

    tag: str
    name: str
    content: Any
    shape: tuple[int, ...] = ()
    order: str = "C"


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise StateError(f"its bytes end within a value, at byte {len(self._data)}")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _byte(self) -> int:
        at = self._at
        if at >= len(self._data):
            raise StateError(f"its bytes end within a value, at byte {at}")
        self._at = at + 1
        return self._data[at]

    def length(self) -> int:
        byte = self._byte()
        n, shift = byte & 0x7F, 7
        while byte >= 0x80:
            if shift > 63:
                raise StateError(f"a length has too many bytes, at byte {self._at}")
            byte = self._byte()
            n |= (byte & 0x7F) << shift
            shift += 7
        return n

    def text(self) -> str:
        return bytes(self.take(self.length())).decode("utf-8", "surrogatepass")

    def _dims(self) -> tuple[int, ...]:
        return tuple(self.length() for _ in range(self.length()))

    def _items(self) -> list[Any]:
        return [self.value() for _ in range(self.length())]

    def value(self) -> Any:
        read = _READ.get(self._byte())
        if read is None:
            raise StateError(f"byte {self._at - 1} starts no value")
        return read(self)

    def _float(self) -> float:
        (number,) = _FLOAT.unpack_from(self._data, self._at)
        self._at += 8
        return float(number)

    def _mapping(self) -> dict[Any, Any]:
        out = {}
        for _ in range(self.length()):
            key = finish(self.value(), MISSING)
            out[key] = self.value()
        return out

    def _int(self) -> int:
        return int.from_bytes(self.take(self.length()), "little", signed=True)

    def _array(self) -> _Node:
        dtype = finish(self.value(), MISSING)
        order = chr(self.take(1)[0])
        shape = self._dims()
        return _Node("a", "", (dtype, self.take(self.length())), shape, order)

    def _deque(self) -> _Node:
        maxlen = self.value()
        return _Node("q", "", (maxlen, self._items()))

    def _scalar(self) -> Any:
        dtype = finish(self.value(), MISSING)
        np = _numpy()
        raw = self.take(self.length())
        return np.frombuffer(raw, np.lib.format.descr_to_dtype(dtype))[0]

    def _tensor(self) -> _Node:
        name, shape = self.text(), self._dims()
        return _Node("e", name, self.take(self.length()), shape)

    def _record(self) -> _Node:
        name = self.text()
        return _Node("R", name, {self.text(): self.value() for _ in range(self.length())})

    def named(self, tag: str) -> _Node:
        name = self.text()
        return _Node(tag, name, self.value())

    def end(self) -> None:
        if self._at != len(self._data):
            raise StateError(f"{len(self._data) - self._at} bytes follow its value")


_READ: dict[int, Callable[[_Reader], Any]] = {
    ord(tag): read
    for tag, read in {
        "N": lambda r: None,
        "T": lambda r: True,
        "F": lambda r: False,
        "i": _Reader._int,
        "d": _Reader._float,
        "c": lambda r: complex(*struct.unpack("<dd", r.take(16))),
        "s": _Reader.text,
        "b": lambda r: bytes(r.take(r.length())),
        "B": lambda r: bytearray(r.take(r.length())),
        "l": lambda r: _Node("l", "", r._items()),
        "t": lambda r: _Node("t", "", r._items()),
        "m": lambda r: _Node("m", "", r._mapping()),
        "o": lambda r: _Node("o", "", r._mapping()),
        "q": _Reader._deque,
        "S": lambda r: {finish(v, MISSING) for v in r._items()},
        "Z": lambda r: frozenset(finish(v, MISSING) for v in r._items()),
        "a": _Reader._array,
        "g": _Reader._scalar,
        "e": _Reader._tensor,
        "r": lambda r: r.named("r"),
        "R": _Reader._record,
        "x": lambda r: r.named("x"),
    }.items()
}


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        raise StateError("the state has numpy values, but numpy is not installed here") from None


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise StateError("the state has tensors, but PyTorch is not installed here") from None


def _class(name: str) -> Any:
    """A class of a module that the program has imported already; nothing is imported here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or class_name(found) != name:
        raise StateError(
            f"its class {name} is not found; define it at the top level of a module that is "
            "imported before run.state() is called"
        )
    return found


def _inner(value: Any, into: Any, place: str) -> Any:
    try:
        return finish(value, into)
    except StateError as error:
        raise error.within(place)


def finish(value: Any, into: Any) -> Any:
    """Makes a value whole; in the object ``into`` where it is one of the same kind."""
    if not isinstance(value, _Node):
        return value
    content = value.content
    match value.tag:
        case "l" | "t":
            olds = list(into) if isinstance(into, (list, tuple)) else []
            olds += [MISSING] * (len(content) - len(olds))
            items = [_inner(v, olds[n], f"[{n}]") for n, v in enumerate(content)]
            if value.tag == "t":
                return tuple(items)
            if type(into) is list:
                into[:] = items
                return into
            return items
        case "m" | "o":
            kind: Any = dict if value.tag == "m" else collections.OrderedDict
            known = into if isinstance(into, dict) else {}
            made = {k: _inner(v, known.get(k, MISSING), f"[{k!r}]") for k, v in content.items()}
            if type(into) is kind:
                into.clear()
                into.update(made)
                return into
            return kind(made)
        case "q":
            maxlen, items = content
            items = [_inner(v, MISSING, f"[{n}]") for n, v in enumerate(items)]
            if type(into) is collections.deque and into.maxlen == maxlen:
                into.clear()
                into.extend(items)
                return into
            return collections.deque(items, maxlen)
        case "a":
            return _array(value, into)
        case "e":
            return _tensor(value, into)
        case "r":
            return _generator(value.name, finish(content, MISSING), into)
        case "R":
            return _record(value, into)
        case _:
            return _stateful(value, into)


def _order(array: Any) -> str:
    """As the encoder says it: by columns only where it is not by rows, too."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _array(value: _Node, into: Any) -> Any:
    np = _numpy()
    descr, raw = value.content
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise StateError("an array of Python objects cannot be read")
    try:
        found = np.frombuffer(raw, dtype).reshape(value.shape, order=value.order)
    except ValueError as error:
        raise StateError(f"an array does not fit its shape: {error}") from error
    if (
        type(into) is np.ndarray
        and into.flags.writeable
        and (into.dtype, into.shape) == (dtype, value.shape)
        and (into.ndim < _FLAT or _order(into) == value.order)
    ):
        np.copyto(into, found)
        return into
    return np.array(found, order=value.order, copy=True)


def _tensor(value: _Node, into: Any) -> Any:
    torch = _torch()
    dtype = getattr(torch, value.name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"PyTorch here has no type {value.name!r}")
    found = torch.empty(0, dtype=dtype)
    if value.content:
        with warnings.catch_warnings():
            # PyTorch warns of memory that is only read. It is: the tensor is copied at once.
            warnings.simplefilter("ignore", UserWarning)
            raw = torch.frombuffer(value.content, dtype=torch.uint8)
        # Copied as bytes, since numbers there may not lie where they must.
        found = raw.clone().view(dtype)
    found = found.reshape(value.shape)
    if isinstance(into, torch.Tensor) and into.dtype == dtype and into.shape == found.shape:
        with torch.no_grad():
            into.copy_(found)
        return into
    # A tensor of another shape stays on the device of the one that it replaces.
    return found.to(into.device) if isinstance(into, torch.Tensor) else found


def _generator(kind: str, state: Any, into: Any) -> Any:
    if kind == "random.Random":
        made = into if type(into) is random.Random else random.Random()
        made.setstate(state)
        return made
    np = _numpy()
    name = kind.removeprefix("numpy.")
    if name == "RandomState":
        legacy = into if isinstance(into, np.random.RandomState) else np.random.RandomState()
        legacy.set_state(state)
        return legacy
    if name not in _BIT_GENERATORS:
        raise StateError(f"random generator {kind!r} is not known")
    if isinstance(into, np.random.Generator) and type(into.bit_generator).__name__ == name:
        into.bit_generator.state = state
        return into
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)


def _record(value: _Node, into: Any) -> Any:
    cls: Any = type(into)
    if class_name(cls) != value.name:
        cls, into = _class(value.name), MISSING
    made = {
        name: _inner(item, getattr(into, name, MISSING), f".{name}")
        for name, item in value.content.items()
    }
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        if tuple(made) != cls._fields:
            raise StateError(f"its fields are {list(made)}, those of {value.name} are others")
        return cls._make(made.values())
    if not dataclasses.is_dataclass(cls):
        raise StateError(f"its class {value.name} is no dataclass any more")
    kind: Any = cls
    expected = [field.name for field in dataclasses.fields(kind)]
    if sorted(made) != sorted(expected):
        raise StateError(f"its fields are {sorted(made)}, those of {value.name} {sorted(expected)}")
    if into is MISSING or kind.__dataclass_params__.frozen:
        into = object.__new__(kind)
    for name, item in made.items():
        # Neither __init__ nor a __setattr__ of the class: nothing of it is executed.
        object.__setattr__(into, name, item)
    return into


def _stateful(value: _Node, into: Any) -> Any:
    if into is MISSING or not is_stateful(into):
        raise StateError(
            f"a {value.name} loads itself; it must be at this place when run.state() is called"
        )
    state = finish(value.content, MISSING)
    try:
        into.load_state_dict(state)
    except Exception as error:
        raise StateError(f"{value.name}.load_state_dict refuses it: {error}") from error
    return into


def decode(data: bytes, into: Any = MISSING) -> Any:
    """The state that the bytes are; in the object ``into`` where it is of the same kind.

    Raises :class:`StateError` where the bytes are no state, or none that fits.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise StateError("its bytes were not written by this kit, or by another version of it")
    reader = _Reader(data)
    reader.take(len(MAGIC))
    try:
        value = reader.value()
        reader.end()
        return finish(value, into)
    except RecursionError:
        raise StateError("it is nested too deeply") from None
    except (TypeError, ValueError, KeyError, RuntimeError, struct.error) as error:
        raise StateError(f"its bytes are damaged: {error}") from error
