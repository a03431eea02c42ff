"""A compiled step -> the memory of a device over time, by phase.

Which buffers live when is what XLA assigned: from the instruction that defines one to the last that
reads it. When instructions ran is what the profiler saw on the first device; without it, time is
the place in the schedule.
"""

import bisect
import dataclasses
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.analysis.compiled import inspect
from replicax.bench.buffers import Buffer, Instruction, Module, read_module
from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.update import TrainState
from replicax.errors import ConfigError

FORWARD, BACKWARD, REDUCTION, UPDATE = PHASES = ("forward", "backward", "reduction", "update")
IDLE = "idle"
"""The phase of the time between two steps."""
STEPS = 2
"""How many `measure_timeline` looks at: one could be an exception."""
LEAST_SEEN = 0.9
"""Share of the bytes of all buffers for which the profiler must have seen an instruction, for its
times to be used."""

_SCOPE = re.compile(r"/(gradient|reduction|update)/")
# XLA joins the names of reductions that it combines with colons and parentheses.
_TRANSPOSED = re.compile(r"[/:(]transpose\(")
_DIFFERENTIATED = re.compile(r"[/:(]jvp\(")


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of one instruction."""

    name: str
    start: float
    """Seconds, or places in the schedule."""
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory of one device, constant between neighbouring edges."""

    edges: np.ndarray
    """float64 `[segments + 1]`, ascending from 0: seconds, or places in the schedule."""
    bytes: np.ndarray
    """int64 `[segments]`: the step's arguments (the train state and the batch), and all buffers
    that are alive."""
    phase: tuple[str, ...]
    """`[segments]`: one of `PHASES`, or `IDLE`."""
    steps: tuple[float, ...]
    """Where each step starts, on the scale of the edges."""
    state_bytes: int
    """Of the train state: parameters, optimizer, and the rest."""
    reserved_bytes: int
    """What the step asks for, its arguments included: the peak, and gaps between buffers."""
    measured: bool
    """Whether the edges are seconds that were measured; else they are places in the schedule."""

    @property
    def peak(self) -> int:
        """Most bytes that are in use at any time."""
        return int(self.bytes.max())


def memory_timeline(
    compiled: jax.stages.Compiled, events: Sequence[Event] | None = None, *, steps: int = 1
) -> Timeline:
    """The memory of one device through a compiled step.

    Args:
        compiled: as `DataParallel.lower(...).compile()` gives it.
        events: of one or more executions, as `traced_events` finds them. Without them, or where
            they leave out too many instructions (see `LEAST_SEEN`), the timeline follows the
            schedule, and `Timeline.measured` is False.
        steps: executions to show where the timeline follows the schedule.

    Raises:
        ConfigError: the backend does not tell its buffers, or no step of Replicax was compiled.
    """
    module = read_module(compiled)
    memory = inspect(compiled).memory
    assert memory is not None  # read_module has refused
    measured = events is not None and _seen(module, events) >= LEAST_SEEN
    if not measured:
        once = list(module.in_order())
        events = [Event(each.name, at, at + 1) for at, each in enumerate(once * steps)]
    assert events is not None
    if not events:
        raise ConfigError(f"{module.name} runs 0 instructions; memory over time needs at least 1")
    known = sorted((each for each in events if each.name in module.place), key=lambda e: e.start)
    origin = known[0].start
    known = [Event(each.name, each.start - origin, each.end - origin) for each in known]
    times = _Times(module, known)
    edges, size, phase = _curve(module, known, times)
    return Timeline(
        edges,
        size,
        phase,
        times.starts(module.entry),
        _state_bytes(compiled),
        memory.peak,
        measured,
    )


def measure_timeline(
    dp: DataParallel, state: TrainState, batch: Batch, folder: Path, *, perfetto: bool = False
) -> tuple[TrainState, Timeline]:
    """Run a step to warm up and two under the profiler, and say what memory these two took when.

    Args:
        dp: whose step it is.
        state: consumed as by `DataParallel.step`.
        batch: from `DataParallel.feed`; every step gets the same.
        folder: where the profiler writes; TensorBoard and xprof can show it too.
        perfetto: whether it writes a `perfetto_trace.json.gz` there as well.

    Returns:
        The state after three steps, and the timeline.

    Raises:
        ConfigError: the backend does not tell its buffers.
    """
    compiled = dp.lower(state, batch).compile()
    state, _ = jax.block_until_ready(compiled(state, batch))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    with jax.profiler.trace(folder, create_perfetto_trace=perfetto, profiler_options=options):
        for _ in range(STEPS):
            state, _ = jax.block_until_ready(compiled(state, batch))
    events = traced_events(folder, read_module(compiled).name)
    return state, memory_timeline(compiled, events, steps=STEPS)


def traced_events(folder: Path, module: str) -> list[Event]:
    """What the profiler saw of `module`, by name of instruction, on the first device it saw.

    Args:
        folder: that was given to `jax.profiler.trace`; of several traces, the newest counts.
        module: `jit_step`, say.

    Returns:
        Events in seconds since some time, in no order; none where the backend reports none.
    """
    traces = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not traces:
        return []
    newest = [path for path in traces if path.parent == traces[-1].parent]
    found: dict[tuple[bool, str, int], list[Event]] = defaultdict(list)
    with warnings.catch_warnings():
        # jaxlib 0.11 makes a type that Python warns of, and aborts where warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane, event in (pair for path in newest for pair in _trace(path)):
            # The host's plane may also show how a GPU's kernels were launched.
            on_host = not plane.startswith("/device:")
            stats: dict[str | None, Any] = dict(event.stats)
            if stats.get("hlo_module") == module and stats.get("hlo_op"):
                device = (on_host, plane, int(stats.get("device_ordinal", 0)))
                start, end = event.start_ns, event.start_ns + event.duration_ns
                found[device].append(Event(str(stats["hlo_op"]), start / 1e9, end / 1e9))
    return found[min(found)] if found else []


def _trace(path: Path) -> Iterator[tuple[str, Any]]:
    """The events in a file of the profiler, each with the name of its plane."""
    data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        for line in plane.lines:
            yield from ((plane.name, event) for event in line.events)


def phase_of(instruction: Instruction) -> str | None:
    """The phase that an instruction belongs to; None where its neighbours decide.

    Args:
        instruction: traced under the scopes `gradient`, `reduction` and `update`.
    """
    scope = _SCOPE.search(instruction.op_name)
    if instruction.fills or scope is None:
        return None  # XLA moves fills far ahead of what they are for
    if scope[1] != "gradient":
        return scope[1]
    if not _TRANSPOSED.search(instruction.op_name):
        return FORWARD if _DIFFERENTIATED.search(instruction.op_name) else None
    reduces = instruction.opcode.startswith(("all-reduce", "reduce-scatter"))
    return REDUCTION if reduces else BACKWARD


def _phase_by_name(module: Module) -> dict[str, str | None]:
    """The phase of each instruction.

    Where the forward and the backward pass compute the same, XLA does it once and keeps one of the
    two names. What a forward instruction reads belongs to the forward pass, whatever its name. And
    XLA runs ahead what needs no activation, or no gradient (Adam's powers, say): that has no phase.
    """
    phase: dict[str, str | None] = {}
    for instructions in module.computations.values():
        read_forward: set[str] = set()
        for instruction in reversed(instructions):
            own = phase_of(instruction)
            if own in (BACKWARD, None) and instruction.name in read_forward:
                own = FORWARD
            phase[instruction.name] = own
            if own == FORWARD:
                read_forward.update(instruction.operands)
    before: dict[str, set[str | None]] = {}
    """Phases of all that an instruction of the entry depends on."""
    for instruction in module.computations[module.entry]:
        name = instruction.name
        before[name] = {each for operand in instruction.operands for each in before[operand]}
        if (phase[name] == BACKWARD and FORWARD not in before[name]) or (
            phase[name] == UPDATE and not before[name] & {BACKWARD, REDUCTION}
        ):
            phase[name] = None
        before[name].add(phase[name])
        for called in instruction.called:
            before[name] |= {
                phase[each.name]
                for inner, path in module.path.items()
                if called in path
                for each in module.computations[inner]
            }
    return phase


def _seen(module: Module, events: Iterable[Event]) -> float:
    """Share of the bytes of all buffers of which some instruction is among the events."""
    names = {event.name for event in events}
    every = sum(buffer.size for buffer in module.buffers)
    seen = sum(buffer.size for buffer in module.buffers if buffer.touched & names)
    return seen / every if every else float(bool(names))


class _Times:
    """When each execution of each computation ran: of the entry each step, of a loop each turn."""

    def __init__(self, module: Module, events: Sequence[Event]) -> None:
        self._module = module
        self.of: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.of[event.name].append(event)
        self._starts: dict[int, list[float]] = {}
        inside: dict[int, list[list[Event]]] = defaultdict(list)
        for name, executions in self.of.items():
            inside[module.place[name]].append(executions)
        for computation, each in inside.items():
            # An instruction may be several kernels; most are one.
            turns, _ = Counter(len(executions) for executions in each).most_common(1)[0]
            whole = [e[:: len(e) // turns] for e in each if len(e) % turns == 0]
            self._starts[computation] = [
                min(executions[turn].start for executions in whole) for turn in range(turns)
            ]
        self.ends = [0.0] * len(self.starts(module.entry))
        for event in events:
            step = self.step(event.start)
            self.ends[step] = max(self.ends[step], event.end)

    def starts(self, computation: int) -> tuple[float, ...]:
        """When the executions of a computation, or of the nearest one around it, start."""
        around = self._module.path[computation]
        found = next((self._starts[each] for each in reversed(around) if each in self._starts), [])
        return tuple(found) or (0.0,)

    def step(self, time: float) -> int:
        """The step that runs at a time."""
        return max(0, bisect.bisect_right(self.starts(self._module.entry), time) - 1)

    def lives(self, buffer: Buffer) -> list[tuple[float, float]]:
        """From when to when a buffer is used, once for each time that its part of the step runs."""
        touched = [name for name in buffer.touched if name in self.of]
        paths = [self._module.path[self._module.place[name]] for name in touched]
        if not paths:
            return []
        shared = [level[0] for level in zip(*paths, strict=False) if len(set(level)) == 1]
        starts = self.starts(shared[-1])
        spans: dict[int, tuple[float, float]] = {}
        for event in (event for name in touched for event in self.of[name]):
            turn = bisect.bisect_right(starts, event.start)
            first, last = spans.get(turn, (event.start, event.end))
            spans[turn] = min(first, event.start), max(last, event.end)
        if buffer.is_output:
            return [(first, self.ends[self.step(first)]) for first, _ in spans.values()]
        return list(spans.values())


@dataclasses.dataclass
class _Life:
    buffer: Buffer
    start: float
    end: float


def _curve(
    module: Module, events: Sequence[Event], times: _Times
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Edges, and the bytes and phases between them."""
    lives = _without_overlaps(
        _Life(buffer, *span) for buffer in module.buffers for span in times.lives(buffer)
    )
    turns = _phases(module, events, times)
    edges = np.unique(
        [0.0, *(t for life in lives for t in (life.start, life.end)), *(at for at, _ in turns)]
    )
    change = np.zeros(len(edges), np.int64)
    sizes = np.asarray([life.buffer.size for life in lives], np.int64)
    np.add.at(change, np.searchsorted(edges, [life.start for life in lives]), sizes)
    np.subtract.at(change, np.searchsorted(edges, [life.end for life in lives]), sizes)
    size = module.argument_bytes + np.cumsum(change)[:-1]
    beginnings = [at for at, _ in turns]
    phase = tuple(turns[bisect.bisect_right(beginnings, edge) - 1][1] for edge in edges[:-1])
    return edges, size, phase


def _without_overlaps(lives: Iterable[_Life]) -> list[_Life]:
    """Lives with no byte counted twice: what is written in place of its operand ends it."""
    ordered = sorted(lives, key=lambda life: (life.start, life.end))
    alive: dict[int, list[_Life]] = defaultdict(list)
    for life in ordered:
        mine = life.buffer
        still = [other for other in alive[mine.allocation] if other.end > life.start]
        for other in still:
            theirs = other.buffer
            apart = (
                theirs.offset + theirs.size <= mine.offset
                or mine.offset + mine.size <= theirs.offset
            )
            if not apart:
                other.end = life.start
        alive[mine.allocation] = [*(other for other in still if other.end > life.start), life]
    return ordered


def _phases(module: Module, events: Sequence[Event], times: _Times) -> list[tuple[float, str]]:
    """When which phase begins, from 0 to the end of the last step."""
    own = _phase_by_name(module)
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        steps[times.step(event.start)].append(event)
    turns: list[tuple[float, str]] = []
    for step, start in enumerate(times.starts(module.entry)):
        turns.append((start if step else 0.0, FORWARD))
        for event in steps[step]:
            phase = own[event.name]
            if phase is not None and phase != turns[-1][1]:
                turns.append((event.start, phase))
        turns.append((times.ends[step], IDLE))
    return turns


def _state_bytes(compiled: jax.stages.Compiled) -> int:
    """Of the first argument, on one device."""
    leaves = zip(
        jax.tree.leaves(compiled.args_info[0][0]),
        jax.tree.leaves(compiled.input_shardings[0][0]),
        strict=True,
    )
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, sharding in leaves
    )
