"""The manifest of a checkpoint, `manifest.json`: its contents and the checksums of its files."""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 and others with NumPy
import numpy as np

from replicax.errors import CheckpointError
from replicax.train.files.places import read_bytes, write_whole
from replicax.train.files.sealed import sealed, unsealed

MANIFEST = "manifest.json"
PIECE_BYTES = 64 * 2**20
"""Bytes per checksum; several threads read the pieces of a large file."""
_FORMAT, _MOST_THREADS, _BUFFER_BYTES = 2, 8, 2**18
_LITTER = re.compile(r"\.DS_Store|\._.+|\.nfs[0-9a-f]+")
"""Files that systems leave in any folder: macOS's, and NFS's of deleted open files."""
_STYLE: Any = {"sort_keys": True, "separators": (",", ":")}


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """The dtype and shape of an array."""

    dtype: str
    """Name of a dtype of NumPy or ml_dtypes: `"float32"`, `"bfloat16"`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The size and checksums of a file."""

    bytes: int
    sha256: tuple[str, ...]
    """Digest of each piece of `PIECE_BYTES`, in hexadecimal; an empty file has one piece."""


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of a run."""

    step: int
    """Updates done."""
    epoch: int
    """Counted from 0."""
    rows: int
    """Rows of the epoch that are done: the index of the next example in the epoch's order."""
    evaluated_step: int
    """Step at which an epoch or the run was last closed, after its evaluation."""
    rows_trained: int
    """Rows trained on in the whole run."""
    rows_unrecorded: int
    """Rows since the last record."""
    records: int
    """Lines of `records.jsonl`."""
    bad_steps: int
    """Consecutive skipped steps up to this step."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    position: Position
    token: int
    """Lease token of the start that wrote it."""
    saved_at: float
    """Seconds since the Unix epoch."""
    seed: int
    arrays: dict[str, ArrayEntry]
    """Leaf name -> array."""
    files: dict[str, FileEntry]
    """Path relative to the checkpoint's folder -> file, for all files but `manifest.json`."""
    config: dict[str, Any]
    """The run's configuration, as JSON."""
    extra: dict[str, Any]
    """Additional JSON values."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`; it is on disk when this returns."""
    try:
        data = sealed({"format": _FORMAT, **dataclasses.asdict(manifest)}, **_STYLE)
        _understood(data)
        write_whole(folder / MANIFEST, data)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be written: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be written ({error.strerror})") from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`, without checking its files."""
    try:
        return _understood(read_bytes(folder / MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error


def _understood(data: bytes) -> Manifest:
    try:
        version = json.loads(data)["format"]
        if version == _FORMAT:
            return unsealed(data, Manifest)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged or not a manifest: {error}") from error
    ours = f"this version of Replicax reads formats up to {_FORMAT}"
    raise CheckpointError(f"{MANIFEST} has format {version!r}; {ours}: upgrade it")


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Return path relative to `folder` -> size and checksums, for all files but `manifest.json`."""
    sizes = _sizes(folder)
    digests: dict[str, list[str]] = {path: [] for path in sizes}
    for (path, _, _), digest in _hashed(folder, sizes):
        digests[path].append(digest)
    return {path: FileEntry(sizes[path], tuple(digests[path])) for path in sizes}


def check_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise `CheckpointError` at the first deviation from `files`.

    Names and sizes are checked before any file is opened. A path that leads out of the folder
    counts as missing.
    """
    sizes = _sizes(folder)
    for path in sorted(sizes.keys() | files.keys()):
        if path not in files:
            raise CheckpointError(f"{path} is not in the manifest")
        if path not in sizes:
            raise CheckpointError(f"{path} is missing")
        if sizes[path] != files[path].bytes:
            recorded = f"but the manifest records {files[path].bytes}"
            raise CheckpointError(f"{path} has {sizes[path]} bytes, {recorded}")
    for (path, start, end), digest in _hashed(folder, sizes):
        if digest != files[path].sha256[start // PIECE_BYTES]:
            where = f"bytes {start} to {end}"
            raise CheckpointError(f"{path} differs from its checksum in {where}")


def _sizes(folder: Path) -> dict[str, int]:
    """Return path -> bytes of each file below. Links are rejected: they may leave the folder."""

    def fail(error: OSError) -> None:
        raise CheckpointError(f"{Path(error.filename).name} cannot be read ({error.strerror})")

    sizes = {}
    for above, folders, files in os.walk(folder, onerror=fail):
        for name in (*folders, *files):
            entry = Path(above, name)
            path = entry.relative_to(folder).as_posix()
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                raise CheckpointError(f"{path} is not a regular file")
            if name in files and path != MANIFEST and not _LITTER.fullmatch(name):
                sizes[path] = entry.stat().st_size
    return dict(sorted(sizes.items()))


def _hashed(folder: Path, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, int, int], str]]:
    """Yield path, start and end of each piece, and its SHA-256; pending work stops on close."""
    pieces = [
        (path, start, min(start + PIECE_BYTES, size))
        for path, size in sizes.items()
        for start in range(0, max(1, size), PIECE_BYTES)
    ]
    pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        yield from zip(pieces, pool.map(lambda piece: _digest(folder, *piece), pieces), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(folder: Path, path: str, start: int, end: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - start)))
    try:
        with (folder / path).open("rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                count = file.readinto(buffer[: end - start])
                if not count:
                    raise CheckpointError(f"{path} was truncated while being read: {start} bytes")
                digest.update(buffer[:count])
                start += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()
