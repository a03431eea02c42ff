"""Checksums of all files of a checkpoint, at the speed of the disk."""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from replicax.errors import CheckpointError
from replicax.train.checkpoints.confined import open_file, open_folder, sizes
from replicax.train.checkpoints.manifest import MANIFEST, PIECE_BYTES, FileEntry, piece_count
from replicax.train.checkpoints.strict_json import shown

_MOST_THREADS = 8
_BUFFER_BYTES = 2**18
# Of many small files a thread takes several at once.
_BATCH_PIECES = 32
_BATCH_BYTES = 4 * 2**20
_memory = threading.local()


class _Piece(NamedTuple):
    path: str
    start: int
    end: int


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Path relative to `folder` -> size and checksums of each file below, but `manifest.json`.

    Raises:
        CheckpointError: a file cannot be read, or there is something that is no regular file.
    """
    with open_folder(folder) as root:
        found = dict(sorted(_sizes(root)))
        digests: dict[str, list[str]] = {path: [] for path in found}
        with contextlib.closing(_hashed(root, _pieces(found))) as hashed:
            for piece, digest in hashed:
                digests[piece.path].append(digest)
    return {path: FileEntry(found[path], tuple(digests[path])) for path in found}


def first_difference(folder: Path, files: Mapping[str, FileEntry]) -> str | None:
    """What is not as `files` describe it, in one line; None where all is.

    Kinds and sizes are looked at before any file is opened.
    """
    if difference := first_difference_in_size(folder, files):
        return difference
    recorded = {path: entry.bytes for path, entry in sorted(files.items())}
    try:
        with (
            open_folder(folder) as root,
            contextlib.closing(_hashed(root, _pieces(recorded))) as hashed,
        ):
            for (path, start, end), digest in hashed:
                if digest != files[path].sha256[start // PIECE_BYTES]:
                    return f"{shown(path)} differs from its checksum in bytes {start} to {end}"
    except CheckpointError as error:
        return str(error)
    return None


def first_difference_in_size(folder: Path, files: Mapping[str, FileEntry]) -> str | None:
    """As `first_difference`, without the contents: no file is opened."""
    absent = set(files)
    try:
        with open_folder(folder) as root:
            for path, size in _sizes(root):
                if path not in absent:
                    return f"{shown(path)} is not in the manifest"
                absent.remove(path)
                recorded = files[path].bytes
                if size != recorded:
                    return f"{shown(path)} has {size} bytes, and {recorded} are recorded"
    except CheckpointError as error:
        return str(error)
    return f"{shown(min(absent))} is missing" if absent else None


def _sizes(root: int) -> Iterator[tuple[str, int]]:
    return ((path, size) for path, size in sizes(root) if path != MANIFEST)


def _pieces(files: Mapping[str, int]) -> Iterator[_Piece]:
    for path, size in files.items():
        for start in range(0, piece_count(size) * PIECE_BYTES, PIECE_BYTES):
            yield _Piece(path, start, min(start + PIECE_BYTES, size))


def _hashed(root: int, pieces: Iterable[_Piece]) -> Generator[tuple[_Piece, str], None, None]:
    """Each piece and its SHA-256, in order; what nobody waits for any more is not begun."""
    batches = list(_batches(pieces))
    pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, _cores()))
    try:
        digests = pool.map(functools.partial(_digests, root), batches)
        for batch, each in zip(batches, digests, strict=True):
            yield from zip(batch, each, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    for piece in pieces:
        batch.append(piece)
        size = sum(end - start for _, start, end in batch)
        if len(batch) == _BATCH_PIECES or size >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _digests(root: int, pieces: Sequence[_Piece]) -> list[str]:
    return [_digest(root, piece) for piece in pieces]


def _digest(root: int, piece: _Piece) -> str:
    digest, buffer = hashlib.sha256(), _buffer()
    path, start, end = piece
    with os.fdopen(open_file(root, path), "rb", buffering=0) as file:
        try:
            file.seek(start)
            while start < end:
                count = file.readinto(buffer[: end - start])
                if not count:
                    raise CheckpointError(f"{shown(path)} has become shorter: {start} bytes")
                digest.update(buffer[:count])
                start += count
        except OSError as error:
            raise CheckpointError(
                f"{shown(path)} cannot be read ({error.strerror or error})"
            ) from error
    return digest.hexdigest()


def _buffer() -> memoryview:
    """This thread's own, made once."""
    if not hasattr(_memory, "buffer"):
        _memory.buffer = memoryview(bytearray(_BUFFER_BYTES))
    buffer: memoryview = _memory.buffer
    return buffer


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
