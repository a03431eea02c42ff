"""Checksums of all files of a checkpoint, at the speed of the disk."""

import concurrent.futures
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from replicax.errors import CheckpointError
from replicax.train.checkpoints.manifest import MANIFEST, PIECE_BYTES, FileEntry

_MOST_THREADS = 8
_BUFFER_BYTES = 2**18


class _Piece(NamedTuple):
    path: str
    start: int
    end: int


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Path relative to `folder` -> size and checksums of each file below, but `manifest.json`.

    Raises:
        CheckpointError: a file cannot be read, or there is something that is no regular file.
    """
    sizes = _sizes(folder)
    digests: dict[str, list[str]] = {path: [] for path in sizes}
    for piece, digest in _hashed(folder, sizes):
        digests[piece.path].append(digest)
    return {path: FileEntry(sizes[path], tuple(digests[path])) for path in sizes}


def first_difference(folder: Path, files: Mapping[str, FileEntry]) -> str | None:
    """What is not as `files` describe it, in one line; None where all is.

    Names and sizes are looked at before any file is opened. A path that leaves the folder is none
    that is found there, so it is missing.
    """
    try:
        sizes = _sizes(folder)
        for path in sorted(sizes.keys() | files.keys()):
            if path not in files:
                return f"{path} is not in the manifest"
            if path not in sizes:
                return f"{path} is missing"
            if sizes[path] != files[path].bytes:
                return f"{path} has {sizes[path]} bytes, and {files[path].bytes} are recorded"
        for (path, start, end), digest in _hashed(folder, sizes):
            if digest != files[path].sha256[start // PIECE_BYTES]:
                return f"{path} differs from its checksum in bytes {start} to {end}"
    except CheckpointError as error:
        return str(error)
    return None


def _sizes(folder: Path) -> dict[str, int]:
    """Path -> bytes of each file below. A link is refused, as it may lead out of the folder."""

    def fail(error: OSError) -> None:
        raise CheckpointError(f"{Path(error.filename).name} cannot be read ({error.strerror})")

    found = {}
    for above, folders, files in os.walk(folder, onerror=fail):
        for name in (*folders, *files):
            each = Path(above, name)
            path = each.relative_to(folder).as_posix()
            if each.is_symlink() or not (each.is_file() or each.is_dir()):
                raise CheckpointError(f"{path} is no regular file")
            if name in files and path != MANIFEST:
                found[path] = each.stat().st_size
    return dict(sorted(found.items()))


def _hashed(folder: Path, sizes: Mapping[str, int]) -> Iterator[tuple[_Piece, str]]:
    """Each piece and its SHA-256, in order; what nobody waits for any more is not begun."""
    pieces = list(_pieces(sizes))
    pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        yield from zip(pieces, pool.map(lambda piece: _digest(folder, piece), pieces), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(sizes: Mapping[str, int]) -> Iterable[_Piece]:
    for path, size in sizes.items():
        for start in range(0, max(1, size), PIECE_BYTES):
            yield _Piece(path, start, min(start + PIECE_BYTES, size))


def _digest(folder: Path, piece: _Piece) -> str:
    digest, (path, start, end) = hashlib.sha256(), piece
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - start)))
    try:
        with (folder / path).open("rb", buffering=0) as file:
            file.seek(start)
            while start < end:
                count = file.readinto(buffer[: end - start])
                if not count:
                    raise CheckpointError(f"{path} has become shorter: {start} bytes")
                digest.update(buffer[:count])
                start += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()
