"""A stand-in for an object store: flat keys, whole objects, listings that are remembered.

It is `s3://` for fsspec, hence for `etils.epath` and what is built on it. Several processes may
have the same one.
"""

import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem


class Objects(AbstractFileSystem):
    """Objects, each in a file of `root`."""

    protocol = "s3"
    root = Path("nowhere")

    def _file(self, path: str) -> Path:
        return self.root / quote(self._strip_protocol(path), safe="")

    def listed(self) -> list[str]:
        return sorted(unquote(name) for name in os.listdir(self.root) if "~" not in name)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            found = {}
            for key in self.listed():
                name, _, below = key.removeprefix(f"{path}/").partition("/")
                if key == path or key.startswith(f"{path}/"):
                    each = key if key == path else f"{path}/{name}"
                    kind = "directory" if below and key != path else "file"
                    size = 0 if kind == "directory" else self._file(key).stat().st_size
                    found[each] = {"name": each, "size": size, "type": kind}
            if not found:
                raise FileNotFoundError(path)
            self.dircache[path] = list(found.values())
        entries = self.dircache[path]
        return list(entries) if detail else [entry["name"] for entry in entries]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.IOBase:
        if mode == "rb":
            return self._file(path).open("rb")
        assert mode == "wb", f"an object store cannot open in mode {mode}"
        return _Upload(self, self._file(path))

    def changes(self) -> None:
        """Another object is about to be written or removed."""

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        below = f"{self._strip_protocol(path)}/"
        keys = [key for key in self.listed() if key.startswith(below)] if recursive else [path]
        for key in keys:
            self.changes()
            self._file(key).unlink()
        self.invalidate_cache()


class _Upload(io.BytesIO):
    """An object that is there once it is closed."""

    def __init__(self, objects: Objects, file: Path) -> None:
        super().__init__()
        self._objects, self._target = objects, file

    def close(self) -> None:
        if not self.closed:
            beside = self._target.with_name(f"{self._target.name}~{os.getpid()}")
            beside.write_bytes(self.getvalue())
            self._objects.changes()
            beside.replace(self._target)
        super().close()


def register(root: Path, kind: type[Objects] = Objects) -> Objects:
    """Have `s3://` be what is in `root`, from now on in this process."""
    fsspec.register_implementation("s3", kind, clobber=True)
    Objects.root = root
    objects: Objects = fsspec.filesystem("s3")
    objects.invalidate_cache()
    return objects
