"""Memory of a device over the course of a step, by phase.

Memory in use comes from XLA's buffer assignment. Instruction times come from the profiler on the
first device; without it, time is the position in the schedule.
"""

import dataclasses
import math
import re
import statistics
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.analysis.compiled import read_memory
from replicax.analysis.hlo import Instruction
from replicax.analysis.memory_use import CONTROL, MemoryUse, compile_with_memory
from replicax.core.data.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError

FORWARD, BACKWARD, REDUCTION, UPDATE = PHASES = ("forward", "backward", "reduction", "update")
IDLE = "idle"
"""The phase of the time between two steps."""
_STEPS = 2
"""Number of steps that `measure_timeline` profiles; a single one could be an outlier."""
LEAST_SEEN = 0.9
"""Share of all result bytes whose instructions the profiler must have recorded for its times to be
used."""

_FILLING = {"bitcast", "broadcast", "constant", "copy", "iota", "parameter", "tuple"}

_SCOPE = re.compile(r"/(gradient|reduction|update)/")
# XLA joins the names of the reductions it combines with colons and parentheses.
_TRANSPOSED = re.compile(r"[/:(]transpose\(")
_DIFFERENTIATED = re.compile(r"[/:(]jvp\(")


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of one instruction."""

    name: str
    start: float
    """Seconds, or positions in the schedule."""
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory of one device, constant between neighbouring edges."""

    edges: np.ndarray
    """float64 `[segments + 1]`, ascending from 0: seconds, or positions in the schedule."""
    bytes: np.ndarray
    """int64 `[segments]`: the step's arguments (the train state and the batch), and all live
    buffers."""
    phase: tuple[str, ...]
    """`[segments]`: one of `PHASES`, or `IDLE`."""
    steps: tuple[float, ...]
    """Start of each step, in the units of `edges`."""
    state_bytes: int
    """Bytes of the train state: parameters, optimizer state, and the rest."""
    reserved_bytes: int
    """Bytes that the step reserves, arguments included: the peak plus gaps between buffers."""
    measured: bool
    """Whether `edges` are measured seconds rather than positions in the schedule."""

    @property
    def peak(self) -> int:
        """Maximum number of bytes in use at any time."""
        return int(self.bytes.max())


def measure_timeline(
    dp: DataParallel, state: TrainState, batch: Batch, folder: Path, *, perfetto: bool = False
) -> tuple[TrainState, Timeline]:
    """Run one warm-up step and two profiled steps, and return their memory over time.

    Every step gets the same `batch`, from `DataParallel.feed`, and consumes `state`. The profiler
    writes to `folder`, which TensorBoard and xprof can display; with `perfetto` it also writes
    `perfetto_trace.json.gz`. Returns the state after three steps, and the timeline.

    Raises:
        ConfigError: the backend does not report its buffers.
    """
    compiled, use = compile_with_memory(dp.lower(state, batch))
    state, *_ = jax.block_until_ready(compiled(state, batch))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down the measured steps
    with jax.profiler.trace(folder, create_perfetto_trace=perfetto, profiler_options=options):
        for _ in range(_STEPS):
            state, *_ = jax.block_until_ready(compiled(state, batch))
    return state, memory_timeline(compiled, use, traced_events(folder, use.name), steps=_STEPS)


def memory_timeline(
    compiled: jax.stages.Compiled,
    use: MemoryUse,
    events: Sequence[Event] = (),
    *,
    steps: int = 1,
) -> Timeline:
    """Return the memory of one device during one or more executions of a compiled step.

    If `events` lack too many instructions (see `LEAST_SEEN`), the timeline follows the schedule
    of `steps` executions instead, and `Timeline.measured` is False.
    """
    measured = _seen(use, events) >= LEAST_SEEN
    if not measured:
        once = list(use.in_order())
        events = [Event(run.name, at, at + 1) for at, run in enumerate(once * steps)]
    runs = _in_schedule_order(use, events)
    if not runs:
        raise ConfigError(f"{use.name} runs 0 instructions; memory over time needs at least 1")
    phases, used = _phase_by_name(use), _bytes_by_name(use, {event.name for event in runs})
    entry = {instruction.name for instruction in use.timed[use.module.entry]}
    first = next((event.name for event in runs if event.name in entry), runs[0].name)
    later = [event for event in runs if event.name == first][1:]
    """The events with which the steps after the first begin."""
    segments: list[tuple[float, int, str]] = []
    end, now = 0.0, FORWARD
    for event in runs:
        if event in later:
            segments.append((min(end, event.start), use.argument_bytes, IDLE))
            end, now = 0.0, FORWARD
        now = phases[event.name] or now
        segments.append((event.start, used[event.name], now))
        end = max(end, event.end)
    starts, size, phase = map(np.asarray, zip(*segments, strict=True))
    edges = np.append(starts, end) - starts[0]
    takes_time = np.diff(edges) > 0  # two events may start at the same moment
    memory = read_memory(compiled)
    assert memory is not None, "XLA has reported its buffers"
    return Timeline(
        np.append(edges[:-1][takes_time], edges[-1]),
        size[takes_time],
        tuple(phase[takes_time].tolist()),
        (0.0, *(event.start - runs[0].start for event in later)),
        _state_bytes(compiled),
        memory.peak,
        measured,
    )


def _in_schedule_order(use: MemoryUse, events: Sequence[Event]) -> list[Event]:
    """Return one event per execution of an instruction, in schedule order, sorted by start.

    An instruction may consist of several kernels; most have one. A CPU runs independent
    instructions concurrently, so within a step, or an iteration of a loop, the n-th time of a
    computation is assigned to its n-th instruction.
    """
    executions: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        executions[event.name].append(event)
    ordered: list[Event] = []
    for instructions in use.timed.values():
        names = [each.name for each in instructions if each.name in executions]
        if not names:
            continue
        turns = statistics.mode(len(executions[name]) for name in names)
        names = [name for name in names if len(executions[name]) % turns == 0]
        for turn in range(turns):
            times = []
            for name in names:
                kernels = len(executions[name]) // turns
                mine = executions[name][turn * kernels : (turn + 1) * kernels]
                times.append((mine[0].start, mine[-1].end))
            ordered += [Event(name, *each) for name, each in zip(names, sorted(times), strict=True)]
    return sorted(ordered, key=lambda event: event.start)


def _bytes_by_name(use: MemoryUse, seen: Collection[str]) -> dict[str, int]:
    """Return the most bytes in use from each seen instruction to the next in its computation."""
    by_name: dict[str, int] = {}
    for instructions in use.timed.values():
        names = [each.name for each in instructions]
        places = [place for place, name in enumerate(names) if name in seen]
        if places:
            used = use.bytes[[use.place[name] for name in names]]
            most = np.maximum.reduceat(used, [0, *places[1:]])  # the first includes those before it
            by_name |= zip((names[place] for place in places), most.tolist(), strict=True)
    return by_name


def traced_events(folder: Path, module: str) -> list[Event]:
    """Return the profiler's events of `module`, such as `jit_step`, on the first device, unordered.

    The newest trace in `folder` is used. The list is empty if the backend reports no events.
    """
    of_device: dict[tuple[bool, str, int], list[Event]] = defaultdict(list)
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb"))[-1:]:
        with warnings.catch_warnings():
            # jaxlib 0.11 creates a type that Python warns about, and aborts if warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                # The host's plane may also contain the launches of GPU kernels.
                on_host = not plane.name.startswith("/device:")
                for event in (event for line in plane.lines for event in line.events):
                    stats: dict[str | None, Any] = dict(event.stats)
                    if stats.get("hlo_module") == module and stats.get("hlo_op"):
                        device = on_host, plane.name, int(stats.get("device_ordinal", 0))
                        start, end = event.start_ns, event.start_ns + event.duration_ns
                        of_device[device].append(
                            Event(str(stats["hlo_op"]), start / 1e9, end / 1e9)
                        )
    return of_device[min(of_device)] if of_device else []


def phase_of(instruction: Instruction, *, fills: bool = False) -> str | None:
    """Return the phase of an instruction from its scope; None if its neighbours decide.

    XLA may schedule instructions that only fill (`fills`) or copy an array long before their use.
    """
    scope = _SCOPE.search(instruction.op_name)
    if fills or scope is None:
        return None
    if scope[1] != "gradient":
        return scope[1]
    if not _TRANSPOSED.search(instruction.op_name):
        return FORWARD if _DIFFERENTIATED.search(instruction.op_name) else None
    reduces = instruction.opcode.startswith(("all-reduce", "reduce-scatter"))
    return REDUCTION if reduces else BACKWARD


def _fills(use: MemoryUse, instruction: Instruction) -> bool:
    if instruction.opcode != "fusion":
        return instruction.opcode in _FILLING
    fused = (each for name in instruction.called for each in use.module.computations[name])
    return all(each.opcode in _FILLING for each in fused)


def _phase_by_name(use: MemoryUse) -> dict[str, str | None]:
    """Return the phase of each instruction.

    If the forward and the backward pass share a computation, XLA runs it once under one of the two
    names; anything a forward instruction reads therefore belongs to the forward pass. Instructions
    that need no activation or no gradient (such as Adam's powers) may run early and have no phase.
    """
    phase: dict[str, str | None] = {}
    for instructions in use.computations.values():
        read_forward: set[str] = set()
        for instruction in reversed(instructions):
            current = phase_of(instruction, fills=_fills(use, instruction))
            if current in (BACKWARD, None) and instruction.name in read_forward:
                current = FORWARD
            phase[instruction.name] = current
            if current == FORWARD:
                read_forward.update(instruction.inputs)
    before: dict[str, set[str | None]] = {}
    """Phases of all dependencies of an entry instruction."""
    for instruction in use.computations[use.module.entry]:
        name = instruction.name
        before[name] = set().union(*(before[operand] for operand in instruction.inputs))
        if (phase[name] == BACKWARD and FORWARD not in before[name]) or (
            phase[name] == UPDATE and not before[name] & {BACKWARD, REDUCTION}
        ):
            phase[name] = None
        before[name].add(phase[name])
        if instruction.opcode in CONTROL:
            inside = (each for called in instruction.called for each in use.in_order(called))
            before[name] |= {phase[each.name] for each in inside}
    return phase


def _seen(use: MemoryUse, events: Sequence[Event]) -> float:
    """Return the share of all result bytes whose instruction is among the events."""
    names = {event.name for event in events}
    every = [each for some in use.timed.values() for each in some]
    seen = sum(each.bytes for each in every if each.name in names)
    return seen / max(sum(each.bytes for each in every), 1)


def _state_bytes(compiled: jax.stages.Compiled) -> int:
    shapes, shardings = compiled.args_info[0][0], compiled.input_shardings[0][0]
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in leaves)
