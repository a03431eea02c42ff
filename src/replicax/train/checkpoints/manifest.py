"""What a checkpoint is said to hold, in its `manifest.json`.

Nothing in it is trusted: it may come from a failing disk, or from anyone.
"""

import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from replicax.errors import CheckpointError
from replicax.train.checkpoints.confined import MOST_PARTS, open_folder, read
from replicax.train.checkpoints.strict_json import canonical, parse, shown

MANIFEST = "manifest.json"
PIECE_BYTES = 64 * 2**20
"""What one checksum covers: pieces of a large file are read by several threads."""

_FORMAT = 1
_MOST_BYTES = 64 * 2**20
_MOST = 2**63 - 1
_MOST_DIMS = 32
_DIGEST = re.compile("[0-9a-f]{64}")
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array without its contents."""

    dtype: str
    """As NumPy or ml_dtypes name it: `"float32"`, `"bfloat16"`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that its contents take."""
        return math.prod(self.shape) * dtypes()[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file without its contents."""

    bytes: int
    sha256: tuple[str, ...]
    """Of each piece of `PIECE_BYTES`, in hexadecimal; an empty file has one piece."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands."""

    step: int
    """Updates done."""
    epoch: int
    """Counted from 0."""
    rows: int
    """Of the epoch, done: the index in its order of the next example."""
    evaluated_step: int
    """Step of the last evaluation."""
    rows_trained: int
    """In the whole run."""
    rows_unrecorded: int
    """Since the last record."""
    records: int
    """Lines of `records.jsonl`."""
    bad_steps: int
    """Skipped in a row, up to here."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    position: Position
    token: int
    """Of the start that wrote it."""
    saved_at: float
    """Seconds since 1970 began."""
    seed: int
    arrays: dict[str, ArrayEntry]
    """Leaf name -> array."""
    files: dict[str, FileEntry]
    """Path relative to the checkpoint's folder -> file; all but `manifest.json` itself."""
    config: dict[str, Any]
    """The run's configuration, as JSON."""
    extra: dict[str, Any]
    """Further JSON."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())


@functools.cache
def dtypes() -> dict[str, np.dtype]:
    """Name -> dtype of all that an array may have."""
    named = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    found = {name: np.dtype(name) for name in [*named.split(), "complex64", "complex128"]}
    for kind in vars(ml_dtypes).values():
        if isinstance(kind, type) and issubclass(kind, np.generic):
            found[np.dtype(kind).name] = np.dtype(kind)
    return found


def piece_count(size: int) -> int:
    """Pieces of a file of `size` bytes."""
    return max(1, -(-size // PIECE_BYTES))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`; on disk once this returns.

    Raises:
        CheckpointError: it cannot be written, or not be read again.
    """
    try:
        content = {"format": _FORMAT, **dataclasses.asdict(manifest)}
        data = _signed({**content, "saved_at": float(manifest.saved_at)})
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be written: {error}") from error
    _understood(data)
    try:
        _write(folder, data)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be written ({error.strerror})") from error


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint in `folder` is said to hold. Its files are not looked at.

    Raises:
        CheckpointError: the file is not, to the byte, what `write_manifest` writes.
    """
    with open_folder(folder) as root:
        data = read(root, MANIFEST, _MOST_BYTES)
    return _understood(data)


def _write(folder: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(folder / MANIFEST, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)  # the name, which is the folder's
    finally:
        os.close(above)


def _signed(content: dict[str, Any]) -> bytes:
    signed = {**content, "checksum": _checksum(content)}
    return (canonical(signed) + "\n").encode("ascii")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(content).encode("ascii")).hexdigest()


def _understood(data: bytes) -> Manifest:
    if len(data) > _MOST_BYTES:
        raise CheckpointError(f"{MANIFEST} has {len(data)} bytes; at most {_MOST_BYTES} are read")
    content = parse(data, MANIFEST)
    try:
        _check_signature(content, data)
        return _manifest(content)
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{MANIFEST} is nested too deeply") from error


def _check_signature(content: Any, data: bytes) -> None:
    found = content.get("format") if isinstance(content, dict) else None
    if type(found) is not int:
        raise CheckpointError(f"{MANIFEST} has no format number")
    if found != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {shown(str(found))}; this Replicax reads format {_FORMAT}: "
            "upgrade it"
        )
    if content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{MANIFEST} does not match its own checksum")
    if data != _signed(content):
        raise CheckpointError(f"{MANIFEST} says what was written, but in other bytes")


def _manifest(content: dict[str, Any]) -> Manifest:
    fields = [field.name for field in dataclasses.fields(Manifest)]
    _fields(content, ["format", *fields], "the manifest")
    counts = [field.name for field in dataclasses.fields(Position)]
    position = _fields(content["position"], counts, "position")
    return Manifest(
        position=Position(**{name: _count(position[name], f"position.{name}") for name in counts}),
        token=_count(content["token"], "token"),
        saved_at=_seconds(content["saved_at"]),
        seed=_count(content["seed"], "seed"),
        arrays=_each(content["arrays"], "arrays", _array),
        files=_each(content["files"], "files", _file),
        config=_object(content["config"], "config"),
        extra=_object(content["extra"], "extra"),
    )


def _each(value: Any, where: str, entry: Callable[[str, Any], _Value]) -> dict[str, _Value]:
    return {name: entry(name, said) for name, said in _object(value, where).items()}


def _array(name: str, value: Any) -> ArrayEntry:
    where = f"the array {shown(name)}"
    if "/" in name:
        raise _wrong(where, "an array's name is a folder's, without a slash")
    _check_path(name, where)
    _fields(value, ["dtype", "shape"], where)
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in dtypes():
        raise _wrong(where, f"no dtype is named {shown(str(dtype))}")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS:
        raise _wrong(where, f"a shape is a list of at most {_MOST_DIMS} numbers")
    entry = ArrayEntry(dtype, tuple(_count(dim, f"a dim of {where}") for dim in shape))
    if entry.nbytes > _MOST:
        raise _wrong(where, f"{shown(str(entry))} is larger than {_MOST} bytes")
    return entry


def _file(path: str, value: Any) -> FileEntry:
    where = f"the file {shown(path)}"
    _check_path(path, where)
    _fields(value, ["bytes", "sha256"], where)
    size, digests = _count(value["bytes"], where), value["sha256"]
    if not isinstance(digests, list) or len(digests) != piece_count(size):
        raise _wrong(where, f"{size} bytes take {piece_count(size)} checksums, in a list")
    if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
        raise _wrong(where, "a checksum is 64 lower-case hexadecimal digits")
    return FileEntry(size, tuple(digests))


def _check_path(path: str, where: str) -> None:
    parts = path.split("/")
    if path == MANIFEST:
        raise _wrong(where, "a manifest does not describe itself")
    if len(parts) > MOST_PARTS:
        raise _wrong(where, f"a path has at most {MOST_PARTS} parts")
    for part in parts:
        if part in ("", ".", "..") or "\\" in part or "\0" in part:
            raise _wrong(where, "a path is relative, and no part is empty, . or ..")
        try:
            length = len(part.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise _wrong(where, "a path is Unicode") from error
        if length > 255:
            raise _wrong(where, f"a part of a path has at most 255 bytes, not {length}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "it is no JSON object")
    return value


def _fields(value: Any, names: Iterable[str], where: str) -> dict[str, Any]:
    found, wanted = _object(value, where), set(names)
    for name in sorted(wanted - found.keys()):
        raise _wrong(where, f"{name} is missing")
    for name in sorted(found.keys() - wanted):
        raise _wrong(where, f"nothing is known of {shown(name)}")
    return found


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _wrong(where, f"{shown(repr(value))} is no whole number from 0 to {_MOST}")
    return value


def _seconds(value: Any) -> float:
    if type(value) is not float or value < 0:
        raise _wrong("saved_at", f"{shown(repr(value))} is no time in seconds, like 1.5")
    return value


def _wrong(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{MANIFEST}, {where}: {why}")
