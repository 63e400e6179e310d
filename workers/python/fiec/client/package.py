"""Packages: a folder with a ``fiec.json``, or a script with the kit beside it, as a tar.

The bytes are those of ``fiec program push`` (``services/fiec/src/package.rs``): the same files are
the same version, whoever pushes them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import names
from .errors import ClientError

MANIFEST = "fiec.json"
_WORKING = {".fiec", "__pycache__"}
_PROTOCOLS = {"frames", "json_lines", "state_dir"}
_BLOCK = 512
_NAME = 100
_KIT = Path(__file__).resolve().parent.parent


class BadPackage(ClientError):
    """A file or a manifest that cannot be in a package."""


@dataclass(frozen=True)
class Package:
    """A package, ready to be pushed."""

    manifest: Mapping[str, Any]
    artifact: bytes
    files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Its digest."""
        return names.digest(self.artifact)


@dataclass(frozen=True)
class _File:
    data: bytes
    executable: bool


def of_folder(folder: Path) -> Package:
    """The package of a folder that has a manifest.

    Raises :class:`BadPackage`.
    """
    files = dict(_files(folder, ""))
    if MANIFEST not in files:
        raise BadPackage(
            f'{folder / MANIFEST}: is missing; it says how the program starts, e.g. {{"entry": '
            '["python3", "-B", "main.py"], "protocol": "frames"}'
        )
    return _pack(folder / MANIFEST, files)


def of_script(script: Path, outputs: Iterable[str], python: str) -> Package:
    """The package of a Python script that uses this kit: the script and the kit.

    Raises :class:`BadPackage`.
    """
    manifest = {"entry": [python, "-B", script.name], "protocol": "frames"}
    if patterns := list(outputs):
        manifest["outputs"] = patterns
    files = dict(_files(_KIT, "fiec/", leave={"client"}))
    files[script.name] = _read(script)
    files[MANIFEST] = _File(json.dumps(manifest, indent=2).encode(), False)
    return _pack(script, files)


def _files(folder: Path, prefix: str, leave: Iterable[str] = ()) -> Iterable[tuple[str, _File]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise BadPackage(f"{folder}: {error.strerror or error}") from error
    for path in entries:
        if path.name in _WORKING or path.name in leave:
            continue
        name = prefix + path.name
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            what = "a link" if path.is_symlink() else "no regular file"
            raise BadPackage(
                f"{path}: is {what}; a package holds regular files only: put a copy in its place"
            )
        if path.is_dir():
            yield from _files(path, name + "/")
        else:
            yield name, _read(path)


def _read(path: Path) -> _File:
    try:
        executable = bool(stat.S_IMODE(os.stat(path).st_mode) & 0o111)
        return _File(path.read_bytes(), executable)
    except OSError as error:
        raise BadPackage(f"{path}: {error.strerror or error}") from error


def _pack(path: Path, files: Mapping[str, _File]) -> Package:
    try:
        manifest = json.loads(files[MANIFEST].data)
    except ValueError as error:
        raise BadPackage(f"{path}: is no JSON: {error}") from error
    entry = manifest.get("entry") if isinstance(manifest, dict) else None
    if not (isinstance(entry, list) and entry and all(isinstance(word, str) for word in entry)):
        raise BadPackage(
            f"{path}: field entry: must be a list of texts, the command of the program"
        )
    command = entry[0]
    if command.startswith("/") or ("/" in command and ".." in command.split("/")):
        raise BadPackage(
            f"{path}: field entry: {command!r} must stay inside the package's folder; a command "
            "without / is looked up in the node's PATH"
        )
    if manifest.get("protocol") not in _PROTOCOLS:
        raise BadPackage(f"{path}: field protocol: must be one of {', '.join(sorted(_PROTOCOLS))}")
    tar = bytearray()
    for name in sorted(files, key=str.encode):
        file = files[name]
        encoded = name.encode()
        if len(encoded) > _NAME:
            tar += _header(b"././@LongLink", len(encoded) + 1, 0o644, b"L")
            tar += _padded(encoded + b"\0")
        tar += _header(encoded[:_NAME], len(file.data), 0o755 if file.executable else 0o644, b"0")
        tar += _padded(file.data)
    tar += bytes(2 * _BLOCK)
    return Package(manifest, bytes(tar), tuple(sorted(files)))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _BLOCK)


def _header(name: bytes, size: int, mode: int, kind: bytes) -> bytes:
    """A header of GNU tar, with owner and time 0.

    https://www.gnu.org/software/tar/manual/html_node/Standard.html
    """

    def octal(number: int, width: int) -> bytes:
        return b"%0*o\0" % (width - 1, number)

    header = bytearray(_BLOCK)
    header[0 : len(name)] = name
    header[100:108] = octal(mode, 8)
    header[108:116] = octal(0, 8)
    header[116:124] = octal(0, 8)
    header[124:136] = octal(size, 12)
    header[136:148] = octal(0, 12)
    header[148:156] = b" " * 8
    header[156:157] = kind
    header[257:265] = b"ustar  \0"
    header[148:156] = octal(sum(header), 8)
    return bytes(header)
