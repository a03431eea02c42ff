"""A lowered step -> what it compiles to, and the memory in use while each instruction runs.

XLA writes down, on request, which buffers it assigned: from where to where in the schedule each of
them lives, and at which addresses. Nothing of that is computed here.
"""

import contextlib
import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from replicax.analysis import hlo
from replicax.errors import ConfigError

CONTROL = ("while", "conditional", "call", "async-start")
"""Instructions that run others."""
SILENT = (*CONTROL, *hlo.SILENT)
"""Instructions that take no time of their own: they run others, or name a part of a buffer."""

_HEADER = re.compile(r"HloModule ([\w.\-]+)")
_PLACE = re.compile(r"^ +(\d+):(.+)$", re.MULTILINE)
_RANGE = re.compile(r"^ +([^\s{]+)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{]+)(\{[\d,]*\})?.*?\(size=(\d+),offset=(\d+)\)")
_ELSEWHERE = re.compile(r"constant|thread-local")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of memory for one value. At other times its addresses may serve others."""

    instruction: str
    """Name of the one that defines it."""
    allocation: int
    offset: int
    """In its allocation, in bytes."""
    size: int
    first: int
    """Place in the schedule where it is written."""
    last: int
    """Place where it is read for the last time."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Buffers of one execution on one device, and the schedule that they live through."""

    name: str
    """Name of the module: `jit_step`, say."""
    module: hlo.Module
    place: Mapping[str, int]
    """In the schedule, loops and branches unrolled once, by name of instruction."""
    buffers: tuple[Buffer, ...]
    """Temporaries, and outputs that reuse no argument's memory."""
    argument_bytes: int
    """Kept during the whole step."""

    @cached_property
    def bytes(self) -> np.ndarray:
        """int64 `[places]`: in use while the instruction at each place runs, arguments included."""
        starting: dict[int, list[Buffer]] = defaultdict(list)
        ending: dict[int, list[Buffer]] = defaultdict(list)
        for each in self.buffers:
            starting[each.first].append(each)
            ending[each.last + 1].append(each)
        alive: dict[int, list[Buffer]] = defaultdict(list)
        used: dict[int, int] = {}
        found = np.zeros(max(self.place.values(), default=-1) + 1, np.int64)
        for place in range(len(found)):
            for each in starting[place]:
                alive[each.allocation].append(each)
            for each in ending[place]:
                alive[each.allocation].remove(each)
            for allocation in {each.allocation for each in starting[place] + ending[place]}:
                used[allocation] = _covered(alive[allocation])
            found[place] = self.argument_bytes + sum(used.values())
        return found

    @cached_property
    def computations(self) -> dict[str, tuple[hlo.Instruction, ...]]:
        """Computations that run one instruction after the other, by name, the entry first."""
        found = {self.module.entry: self.module.computations[self.module.entry]}
        pending = [self.module.entry]
        while pending:
            for instruction in found[pending.pop()]:
                if instruction.opcode in CONTROL:
                    new = [each for each in instruction.called if each not in found]
                    found |= {each: self.module.computations[each] for each in new}
                    pending += new
        return found

    @cached_property
    def timed(self) -> dict[str, tuple[hlo.Instruction, ...]]:
        """Instructions of each computation that take time."""
        return {
            name: tuple(e for e in each if e.opcode not in SILENT and e.name in self.place)
            for name, each in self.computations.items()
        }

    def in_order(self, computation: str | None = None) -> Iterator[hlo.Instruction]:
        """Yield the instructions that take time in one execution, loops unrolled."""
        name = self.module.entry if computation is None else computation
        for instruction in self.computations[name]:
            if instruction.opcode not in SILENT:
                yield instruction
            elif instruction.opcode in CONTROL:
                is_loop = instruction.opcode == "while"
                for _ in range(self.module.trips(instruction, name) if is_loop else 1):
                    for called in instruction.called:
                        yield from self.in_order(called)


def compile_with_memory(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, MemoryUse]:
    """Compile a step, and read what memory it uses when.

    Raises:
        ConfigError: the backend does not tell its buffers.
    """
    with tempfile.TemporaryDirectory() as folder, _compiled_anew():
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        text = compiled.as_text() or ""
        header = _HEADER.match(text)
        name = header[1] if header else ""
        written = [
            "\n".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}.*{kind}")))
            for kind in ("-live-range.txt", "-buffer-assignment.txt")
        ]
    if not all(written):
        raise ConfigError(
            f"{jax.default_backend()} writes 0 lines on the buffers of this step, and memory over "
            "time is read from them: use a CPU or a GPU"
        )
    return compiled, read_memory_use(name, text, *written)


def read_memory_use(name: str, text: str, live_range: str, assignment: str) -> MemoryUse:
    """Read what XLA has written: the module, the lives of its values, and their addresses."""
    sequence, _, ranges = live_range.partition("BufferLiveRange:")
    lives = {
        found[1] + found[2]: (int(found[3]), int(found[4])) for found in _RANGE.finditer(ranges)
    }
    place = {found[2]: int(found[1]) for found in _PLACE.finditer(sequence)}
    buffers: list[Buffer] = []
    argument_bytes, allocation = 0, None
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            is_argument = found[3].startswith("parameter")
            argument_bytes += is_argument * int(found[2])
            allocation = None if is_argument or _ELSEWHERE.match(found[3]) else int(found[1])
        elif allocation is not None and (found := _VALUE.match(line)):
            life = lives.get(found[1] + (found[2] or "{}"))
            if life is not None:
                buffers.append(Buffer(found[1], allocation, int(found[4]), int(found[3]), *life))
    return MemoryUse(name, hlo.read_module(text), place, tuple(buffers), argument_bytes)


def _covered(buffers: Sequence[Buffer]) -> int:
    """Bytes of an allocation that lie in any of the buffers: what is written in place counts once.

    The buffers that a loop carries have several names, and lie at the same address.
    """
    covered = end = 0
    for start, size in sorted((each.offset, each.size) for each in buffers):
        covered += max(start + size - max(start, end), 0)
        end = max(end, start + size)
    return covered


@contextlib.contextmanager
def _compiled_anew() -> Generator[None]:
    """XLA compiles in here, whatever JAX has in its cache; else it would write nothing."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
