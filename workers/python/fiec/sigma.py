"""The bytes of a state: deterministic, self-describing, and never executed when read.

A state is the six bytes ``"fiec" 0x01 0x0a`` and then one value. A value is a tag and what the
tag says; ``n`` is a length as unsigned LEB128, ``v`` a value, ``s`` a text (n and UTF-8 bytes).

=====  ===========================================  =========================================
tag    content                                      Python
=====  ===========================================  =========================================
N T F                                               None, True, False
i      n, little-endian two's complement, shortest  int
d      8 bytes, little-endian IEEE 754              float (NaN bits kept)
c      2 × 8 bytes                                  complex
s      n, UTF-8                                     str
b B    n, bytes                                     bytes, bytearray
l t    n, v…                                        list, tuple
m o    n, (v key, v value)…                         dict, OrderedDict, in their order
q      v maxlen, n, v…                              deque
S Z    n, v… sorted by their bytes                  set, frozenset
a      v dtype, C or F, n dimensions, n…, n, bytes  numpy.ndarray
g      v dtype, n, bytes                            numpy scalar
e      s dtype, n dimensions, n…, n, bytes          torch.Tensor
r      s kind, v                                    random.Random, numpy Generator, RandomState
R      s class, n, (s name, v)…                     dataclass, named tuple
x      s class, v                                   anything with state_dict/load_state_dict
=====  ===========================================  =========================================

Equal states give equal bytes: there is one encoding of each value. The order of a dict is part of
it, since a program can see it. One mutable object at two places is refused, since it would be two
objects after a move. There is no pickle: reading can create values of the types above, instances
of dataclasses and named tuples of modules that the program has imported, and nothing else.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .errors import StateError

MAGIC = b"fiec\x01\n"
# Bytes from which on a piece is not copied into the buffer of small ones.
_LARGE = 4096

_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda v: b"T" if v else b"F",
    float: lambda v: b"d" + struct.pack("<d", v),
    complex: lambda v: b"c" + struct.pack("<dd", v.real, v.imag),
}


def length(n: int) -> bytes:
    """Unsigned LEB128."""
    if n < 0x80:
        return bytes((n,))
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def text(value: str) -> bytes:
    """Length and UTF-8 bytes; lone surrogates, as file names have them, survive."""
    raw = value.encode("utf-8", "surrogatepass")
    return length(len(raw)) + raw


def class_name(cls: type) -> str:
    """How a class is named in a state."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_stateful(value: object) -> bool:
    """Whether it saves and loads itself, as PyTorch's modules and optimizers do."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


class Encoder:
    """Collects the pieces of one state. What it returns shares no memory with the state."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._small = bytearray(MAGIC)
        # Mutable objects met so far, by id; kept so that no id is used twice.
        self._met: dict[int, object] = {}
        # Inside a state_dict the object itself answers for what is shared.
        self._trusted = 0

    def finish(self) -> list[bytes]:
        """The pieces."""
        self._flush()
        return self._pieces

    def _flush(self) -> None:
        if self._small:
            self._pieces.append(bytes(self._small))
            self._small = bytearray()

    def raw(self, data: bytes) -> None:
        """A length and bytes that will not change."""
        self._small += length(len(data))
        if len(data) < _LARGE:
            self._small += data
        else:
            self._flush()
            self._pieces.append(data)

    def put(self, *parts: bytes) -> None:
        """Bytes as they are."""
        for part in parts:
            self._small += part

    def value(self, value: Any) -> None:
        """One value."""
        kind = type(value)
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            self._small += scalar(value)
        elif kind is int:
            size = (value.bit_length() + 8) // 8
            self.put(b"i", length(size), value.to_bytes(size, "little", signed=True))
        elif kind is str:
            self._small += b"s" + text(value)
        elif kind is bytes:
            self._small += b"b"
            self.raw(value)
        elif kind is tuple:
            self._items(b"t", value)
        elif kind in (set, frozenset):
            self._set(b"S" if kind is set else b"Z", value)
        else:
            self._other(kind, value)

    def _other(self, kind: type, value: Any) -> None:
        if not self._trusted:
            if id(value) in self._met:
                raise StateError(
                    f"this {kind.__name__} is also at another place of the state, and would be "
                    "two after a move; copy it, or leave one of the two out"
                )
            self._met[id(value)] = value
        if kind is list:
            self._items(b"l", value)
        elif kind is dict or kind is collections.OrderedDict:
            self._mapping(b"m" if kind is dict else b"o", value)
        elif kind is bytearray:
            self._small += b"B"
            self.raw(bytes(value))
        elif kind is collections.deque:
            self._small += b"q"
            self.value(value.maxlen)
            self._items(b"", value)
        elif kind is random.Random:
            self.put(b"r", text("random.Random"))
            self.value(value.getstate())
        elif not (self._numpy(value) or self._torch(value)):
            self._instance(kind, value)

    def _items(self, tag: bytes, values: Iterable[Any]) -> None:
        values = list(values)
        self.put(tag, length(len(values)))
        for at, item in enumerate(values):
            try:
                self.value(item)
            except StateError as error:
                raise error.within(f"[{at}]")

    def _mapping(self, tag: bytes, values: dict[Any, Any]) -> None:
        self.put(tag, length(len(values)))
        for key, item in values.items():
            try:
                self.value(key)
                self.value(item)
            except StateError as error:
                raise error.within(f"[{key!r}]")

    def _set(self, tag: bytes, values: Iterable[Any]) -> None:
        found = []
        for item in values:
            inner = Encoder()
            inner._small.clear()
            try:
                inner.value(item)
            except StateError as error:
                raise error.within(f"{{{item!r}}}")
            found.append(b"".join(inner.finish()))
        self.put(tag, length(len(found)), *sorted(found))

    def fields(self, fields: dict[str, Any]) -> None:
        """The count of fields, and each with its name."""
        self.put(length(len(fields)))
        for name, item in fields.items():
            self.put(text(name))
            try:
                self.value(item)
            except StateError as error:
                raise error.within(f".{name}")

    def _instance(self, kind: type, value: Any) -> None:
        if is_stateful(value):
            self.put(b"x", text(class_name(kind)))
            self._trusted += 1
            inner = value.state_dict()
            # It lives until the end, so that nothing else gets its id.
            self._met[id(inner)] = inner
            try:
                self.value(inner)
            except StateError as error:
                raise error.within(".state_dict()")
            self._trusted -= 1
        elif dataclasses.is_dataclass(kind):
            self.put(b"R", text(class_name(kind)))
            self.fields({f.name: getattr(value, f.name) for f in dataclasses.fields(kind)})
        elif isinstance(value, tuple) and isinstance(
            names := getattr(value, "_fields", None), tuple
        ):
            self.put(b"R", text(class_name(kind)))
            self.fields(dict(zip(names, value)))
        else:
            raise StateError(
                f"a {class_name(kind)} cannot travel; use plain values, numpy arrays, dataclasses, "
                "or give the class state_dict() and load_state_dict(state)"
            )

    def _numpy(self, value: Any) -> bool:
        np = sys.modules.get("numpy")
        if np is None or not hasattr(np, "random"):
            return False
        if type(value) is np.ndarray or isinstance(value, np.generic):
            dtype = value.dtype
            if dtype.hasobject:
                raise StateError("an array of Python objects cannot travel; use a list")
            if dtype.itemsize > {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize):
                raise StateError(f"{dtype} differs from machine to machine; use float64")
            scalar = isinstance(value, np.generic)
            self.put(b"g" if scalar else b"a")
            self.value(np.lib.format.dtype_to_descr(dtype))
            if not scalar:
                column = value.flags.f_contiguous and not value.flags.c_contiguous
                order = "F" if column else "C"
                self.put(order.encode(), length(value.ndim), *map(length, value.shape))
                self.raw(value.tobytes(order))
            else:
                self.raw(value.tobytes())
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self.put(b"r", text(f"numpy.{type(bits).__name__}"))
            self._trusted += 1
            self.value(bits.state)
            self._trusted -= 1
        elif isinstance(value, np.random.RandomState):
            self.put(b"r", text("numpy.RandomState"))
            self._trusted += 1
            self.value(value.get_state(legacy=False))
            self._trusted -= 1
        else:
            return False
        return True

    def _torch(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return False
        tensor = value.detach()
        if tensor.layout != torch.strided:
            raise StateError(f"a tensor of layout {tensor.layout} cannot travel; make it dense")
        if tensor.is_quantized:
            raise StateError("a quantized tensor cannot travel; use its int_repr()")
        # Conjugates and negatives are lazy: their bytes are not those of the value yet.
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.put(b"e", text(dtype), length(tensor.ndim), *map(length, tensor.shape))
        self.raw(tensor_bytes(torch, flat))
        return True


def tensor_bytes(torch: Any, flat: Any) -> bytes:
    """The bytes of a one-dimensional, contiguous tensor in main memory."""
    if flat.numel() == 0:
        return b""
    raw = flat.view(torch.uint8)
    try:
        return bytes(raw.numpy().tobytes())
    except RuntimeError:  # PyTorch without numpy
        return bytes(raw.tolist())


def encode(value: Any) -> list[bytes]:
    """The bytes of a state, in pieces that together are σ.

    Raises :class:`StateError` with the place in the state where something cannot travel.
    """
    encoder = Encoder()
    try:
        encoder.value(value)
    except RecursionError:
        raise StateError("it is nested too deeply") from None
    return encoder.finish()
