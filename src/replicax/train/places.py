"""Where a run is saved, as far as file systems differ: names, whole files, what is on the disk."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write the file at `path`: a reader, or a crash, meets all of it or what was there before.

    It is on the disk once this returns.
    """
    beside = path.with_name(f".{path.name}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk, where a system lets one ask for it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
