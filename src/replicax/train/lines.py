"""A file that lines are added to, in a folder or in an object store."""

import os
from pathlib import Path

from replicax.train.places import exists, is_remote, read_bytes, write_whole


class Lines:
    """The lines of the file at `path`; an object has them from the next `sync` on."""

    def __init__(self, path: Path) -> None:
        self.path, self._waiting = path, b""

    def append(self, line: str) -> None:
        """Add a line, on a file system at once visible to a reader."""
        data = line.encode() + b"\n"
        if is_remote(self.path):
            self._waiting += data
            return
        with self.path.open("ab") as file:
            file.write(data)

    def sync(self) -> None:
        """Have all lines where they are kept. Where this fails, the next one tries again."""
        if is_remote(self.path):
            if self._waiting:  # nothing can be appended to an object
                before = read_bytes(self.path) if exists(self.path) else b""
                write_whole(self.path, before + self._waiting)
                self._waiting = b""
        elif self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())
