"""Compiled steps that are kept in the user's cache folder, so that a second plan is quick."""

import dataclasses
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jax

from replicax.analysis.compiled import Memory
from replicax.analysis.host import host_processor
from replicax.plan.compilation import Compilation, Compiler, Description, TooLarge
from replicax.plan.exported import ExportedStep
from replicax.text.cache_folder import cache_folder, make_private, prune, read_entry, write_entry
from replicax.text.wording import counted, first_line, size_text

_MOST_BYTES = 2**28
"""Limit on all entries; beyond it those not used for longest are removed."""
_FORMAT = 2
"""Changes with the meaning of an entry."""


class KeepingCompiler:
    """A `Compiler` that compiles a program once and keeps the answer, its errors excluded.

    An entry is named after all that determines it: the program's bytes, the described devices and
    the versions of the compiler. It begins with a checksum of name and content, so one that is
    damaged or of another program is compiled again; it is written whole or not at all, so
    concurrent plans do not disturb each other. Without a name, the compiler is started to tell it.
    """

    def __init__(
        self, start: Callable[[], Compiler], description: Description, name: str | None = None
    ) -> None:
        self._start = start
        self.name = self._compiler.name if name is None else name
        self._folder = cache_folder() / "plans"
        host = host_processor() if description.platform == "cpu" else ""  # its features are used
        about = repr((_FORMAT, description, host, self.name, _versions()))
        self._devices = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._asked, self._found, self._refused = 0, 0, ""
        try:
            make_private(self._folder)
        except OSError as error:
            self._refused = first_line(error)
        if not any(self._folder.glob(f"{self._devices}-*")):
            _ = self._compiler  # raises now if it cannot describe them

    @cached_property
    def _compiler(self) -> Compiler:
        """Started for the first program of which no answer is kept."""
        return self._start()

    @property
    def note(self) -> str:
        """See `Compiler`."""
        if self._refused:
            return f"compiled steps are not kept for the next plan: {self._refused}"
        if not self._found:
            return ""
        return (
            f"{self._found} of {counted(self._asked, 'compiled step')} from an earlier plan, kept "
            f"in {self._folder} (up to {size_text(_MOST_BYTES)})"
        )

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """See `Compiler`."""
        self._asked += 1
        if self._refused:
            return self._compiler.compile(program)
        path = self._folder / self._key(program)
        answer = _read(path)
        if answer is not None:
            self._found += 1
            return answer
        answer = self._compiler.compile(program)
        try:
            write_entry(path, zlib.compress(json.dumps(dataclasses.asdict(answer)).encode()))
            prune(self._folder.iterdir(), _MOST_BYTES)
        except OSError as error:
            self._refused = first_line(error)
        return answer

    def _key(self, program: ExportedStep) -> str:
        about = repr((program.donated, dict(program.sizes), dict(program.options))).encode()
        return self._devices + "-" + hashlib.sha256(about + b"\0" + program.module).hexdigest()


def _versions() -> tuple[str, str]:
    return jax.__version__, importlib.metadata.version("jaxlib")


def _read(path: Path) -> Compilation | TooLarge | None:
    """Return the answer in a file; None if there is none, or it is damaged."""
    content = read_entry(path)
    if content is None:
        return None
    plain = json.loads(zlib.decompress(content))
    if "memory" not in plain:
        return TooLarge(**plain)
    return Compilation(**{**plain, "memory": Memory(**plain["memory"])})
