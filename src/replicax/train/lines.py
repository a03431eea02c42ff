"""A file that lines are added to, in a folder or in an object store."""

import os
from pathlib import Path
from typing import Any

from replicax.train.places import exists, is_remote, read_bytes, write_whole


class Lines:
    """The lines of the file at `path`; an object has them from the next `sync` on."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, b""
        self._file: Any = None

    def append(self, line: str) -> None:
        """Add a line, on a file system at once visible to a reader."""
        data = line.encode() + b"\n"
        if is_remote(self._path):
            self._waiting += data
            return
        if self._file is None:  # not before: who fails before there is a line leaves the name free
            self._file = self._path.open("ab")
        self._file.write(data)
        self._file.flush()

    def sync(self) -> None:
        """Have all lines where they are kept. Where this fails, the next one tries again."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._waiting:  # nothing can be appended to an object
            before = read_bytes(self._path) if exists(self._path) else b""
            write_whole(self._path, before + self._waiting)
            self._waiting = b""

    def close(self) -> None:
        """Close the file; of an object, what was not synced is lost."""
        if self._file is not None:
            self._file.close()
        self._file, self._waiting = None, b""
