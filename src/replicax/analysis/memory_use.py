"""Compile a lowered step, and read the memory in use while each instruction runs.

On request, XLA dumps its buffer assignment: the live range of each buffer in the schedule, and its
address. This module only reads that dump.
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
_SILENT = (*CONTROL, *hlo.SILENT)
"""Instructions that take no time themselves: they run others, or name part of a buffer."""

_HEADER = re.compile(r"HloModule ([\w.\-]+)")
_PLACE = re.compile(r"^ +(\d+):(.+)$", re.MULTILINE)
_RANGE = re.compile(r"^ +([^\s{]+)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{]+)(\{[\d,]*\})?.*?\(size=(\d+),offset=(\d+)\)")
_ELSEWHERE = re.compile(r"constant|thread-local")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory of one value. Other values may use its addresses at other times."""

    instruction: str
    """Name of the instruction that defines it."""
    allocation: int
    offset: int
    """Offset in its allocation, in bytes."""
    size: int
    first: int
    """Place in the schedule where it is written."""
    last: int
    """Place where it is last read."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Buffers of one execution on one device, and its schedule."""

    name: str
    """Name of the module, such as `jit_step`."""
    module: hlo.Module
    place: Mapping[str, int]
    """Place in the schedule by instruction name, with loops and branches unrolled once."""
    buffers: tuple[Buffer, ...]
    """Temporaries, and outputs that do not reuse an argument's memory."""
    argument_bytes: int
    """Bytes of arguments, live during the whole step."""

    @cached_property
    def bytes(self) -> np.ndarray:
        """int64 `[places]`: bytes in use at each instruction's place, including arguments."""
        starting: dict[int, list[Buffer]] = defaultdict(list)
        ending: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in self.buffers:
            starting[buffer.first].append(buffer)
            ending[buffer.last + 1].append(buffer)
        alive: dict[int, list[Buffer]] = defaultdict(list)
        used: dict[int, int] = {}
        in_use = np.zeros(max(self.place.values(), default=-1) + 1, np.int64)
        for place in range(len(in_use)):
            for buffer in starting[place]:
                alive[buffer.allocation].append(buffer)
            for buffer in ending[place]:
                alive[buffer.allocation].remove(buffer)
            for allocation in {buffer.allocation for buffer in starting[place] + ending[place]}:
                used[allocation] = _covered(alive[allocation])
            in_use[place] = self.argument_bytes + sum(used.values())
        return in_use

    @cached_property
    def computations(self) -> dict[str, tuple[hlo.Instruction, ...]]:
        """Computations that run sequentially, by name, the entry first."""
        running = {self.module.entry: self.module.computations[self.module.entry]}
        pending = [self.module.entry]
        while pending:
            for instruction in running[pending.pop()]:
                if instruction.opcode in CONTROL:
                    new = [called for called in instruction.called if called not in running]
                    running |= {called: self.module.computations[called] for called in new}
                    pending += new
        return running

    @cached_property
    def timed(self) -> dict[str, tuple[hlo.Instruction, ...]]:
        """Instructions of each computation that take time."""
        return {
            name: tuple(e for e in each if e.opcode not in _SILENT and e.name in self.place)
            for name, each in self.computations.items()
        }

    def in_order(self, computation: str | None = None) -> Iterator[hlo.Instruction]:
        """Yield the instructions that take time in one execution, loops unrolled."""
        name = self.module.entry if computation is None else computation
        for instruction in self.computations[name]:
            if instruction.opcode not in _SILENT:
                yield instruction
            elif instruction.opcode in CONTROL:
                is_loop = instruction.opcode == "while"
                for _ in range(self.module.trips(instruction, name) if is_loop else 1):
                    for called in instruction.called:
                        yield from self.in_order(called)


def compile_with_memory(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, MemoryUse]:
    """Compile a step, and read its memory use over time.

    Raises:
        ConfigError: the backend does not report its buffers.
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
            f"{jax.default_backend()} reports no buffer assignment, which memory over time is "
            "read from: use a CPU or a GPU"
        )
    return compiled, read_memory_use(name, text, *written)


def read_memory_use(name: str, text: str, live_range: str, assignment: str) -> MemoryUse:
    """Read XLA's dump: the module, the live ranges of its values, and their addresses."""
    sequence, _, ranges = live_range.partition("BufferLiveRange:")
    lives = {
        match[1] + match[2]: (int(match[3]), int(match[4])) for match in _RANGE.finditer(ranges)
    }
    place = {match[2]: int(match[1]) for match in _PLACE.finditer(sequence)}
    buffers: list[Buffer] = []
    argument_bytes, allocation = 0, None
    for line in assignment.splitlines():
        if match := _ALLOCATION.match(line):
            is_argument = match[3].startswith("parameter")
            argument_bytes += is_argument * int(match[2])
            allocation = None if is_argument or _ELSEWHERE.match(match[3]) else int(match[1])
        elif allocation is not None and (match := _VALUE.match(line)):
            life = lives.get(match[1] + (match[2] or "{}"))
            if life is not None:
                buffers.append(Buffer(match[1], allocation, int(match[4]), int(match[3]), *life))
    return MemoryUse(name, hlo.read_module(text), place, tuple(buffers), argument_bytes)


def _covered(buffers: Sequence[Buffer]) -> int:
    """Return the bytes of an allocation covered by the buffers, counting in-place writes once.

    Buffers that a loop carries have several names at the same address.
    """
    covered = end = 0
    for start, size in sorted((each.offset, each.size) for each in buffers):
        covered += max(start + size - max(start, end), 0)
        end = max(end, start + size)
    return covered


@contextlib.contextmanager
def _compiled_anew() -> Generator[None]:
    """Bypass JAX's compilation cache: on a cache hit XLA would dump nothing."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
