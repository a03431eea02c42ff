"""A step -> the memory of a device over time, by phase.

What is in use while an instruction runs is what XLA assigned. When instructions ran is what the
profiler saw on the first device; without it, time is the place in the schedule.
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
"""Share of the bytes of all results of which the profiler must have seen the instruction, for its
times to be used."""

_FILLING = {"bitcast", "broadcast", "constant", "copy", "iota", "parameter", "tuple"}

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
    """Bytes of the train state: parameters, optimizer, and the rest."""
    reserved_bytes: int
    """Bytes that the step asks for, its arguments included: the peak, and gaps between buffers."""
    measured: bool
    """Whether the edges are seconds that were measured; else they are places in the schedule."""

    @property
    def peak(self) -> int:
        """Most bytes that are in use at any time."""
        return int(self.bytes.max())


def measure_timeline(
    dp: DataParallel, state: TrainState, batch: Batch, folder: Path, *, perfetto: bool = False
) -> tuple[TrainState, Timeline]:
    """Run a step to warm up and two under the profiler, and say what memory these two took when.

    Every step gets the same `batch`, from `DataParallel.feed`, and consumes the `state`. The
    profiler writes to `folder`, which TensorBoard and xprof can show too, with `perfetto` also a
    `perfetto_trace.json.gz`. Returns the state after three steps, and the timeline.

    Raises:
        ConfigError: the backend does not tell its buffers.
    """
    compiled, use = compile_with_memory(dp.lower(state, batch))
    state, _ = jax.block_until_ready(compiled(state, batch))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    with jax.profiler.trace(folder, create_perfetto_trace=perfetto, profiler_options=options):
        for _ in range(STEPS):
            state, _ = jax.block_until_ready(compiled(state, batch))
    return state, memory_timeline(compiled, use, traced_events(folder, use.name), steps=STEPS)


def memory_timeline(
    compiled: jax.stages.Compiled,
    use: MemoryUse,
    events: Sequence[Event] = (),
    *,
    steps: int = 1,
) -> Timeline:
    """The memory of one device through one or more executions of a compiled step.

    Where `events` leave out too many instructions (see `LEAST_SEEN`), the timeline follows the
    schedule of `steps` executions instead, and `Timeline.measured` is False.
    """
    measured = _seen(use, events) >= LEAST_SEEN
    if not measured:
        once = list(use.in_order())
        events = [Event(each.name, at, at + 1) for at, each in enumerate(once * steps)]
    runs = _in_schedule_order(use, events)
    if not runs:
        raise ConfigError(f"{use.name} runs 0 instructions; memory over time needs at least 1")
    phases, used = _phase_by_name(use), _bytes_by_name(use, {each.name for each in runs})
    entry = {each.name for each in use.timed[use.module.entry]}
    first = next((each.name for each in runs if each.name in entry), runs[0].name)
    later = [each for each in runs if each.name == first][1:]
    """With which the steps after the first begin."""
    segments: list[tuple[float, int, str]] = []
    end, now = 0.0, FORWARD
    for each in runs:
        if each in later:
            segments.append((min(end, each.start), use.argument_bytes, IDLE))
            end, now = 0.0, FORWARD
        now = phases[each.name] or now
        segments.append((each.start, used[each.name], now))
        end = max(end, each.end)
    starts, size, phase = map(np.asarray, zip(*segments, strict=True))
    edges = np.append(starts, end) - starts[0]
    takes_time = np.diff(edges) > 0  # two events may start at the same moment
    memory = read_memory(compiled)
    assert memory is not None, "XLA has told its buffers"
    return Timeline(
        np.append(edges[:-1][takes_time], edges[-1]),
        size[takes_time],
        tuple(phase[takes_time].tolist()),
        (0.0, *(each.start - runs[0].start for each in later)),
        _state_bytes(compiled),
        memory.peak,
        measured,
    )


def _in_schedule_order(use: MemoryUse, events: Sequence[Event]) -> list[Event]:
    """One event for each execution of an instruction, in the order of the schedule, by start.

    An instruction may be several kernels; most are one. And a CPU runs side by side what does not
    depend on each other: at the n-th time of those that a computation took in a step, or in a turn
    of a loop, stands the n-th of its instructions.
    """
    executions: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        executions[event.name].append(event)
    found: list[Event] = []
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
                own = executions[name][turn * kernels : (turn + 1) * kernels]
                times.append((own[0].start, own[-1].end))
            found += [Event(name, *each) for name, each in zip(names, sorted(times), strict=True)]
    return sorted(found, key=lambda event: event.start)


def _bytes_by_name(use: MemoryUse, seen: Collection[str]) -> dict[str, int]:
    """Most bytes in use from each seen instruction to the next one of its computation."""
    found: dict[str, int] = {}
    for instructions in use.timed.values():
        names = [each.name for each in instructions]
        places = [place for place, name in enumerate(names) if name in seen]
        if places:
            used = use.bytes[[use.place[name] for name in names]]
            most = np.maximum.reduceat(used, [0, *places[1:]])  # the first with what is before it
            found |= zip((names[place] for place in places), most.tolist(), strict=True)
    return found


def traced_events(folder: Path, module: str) -> list[Event]:
    """Return what the profiler saw of `module` (`jit_step`, say) on the first device, in no order.

    Of several traces in `folder` the newest counts. There are none where the backend reports none.
    """
    found: dict[tuple[bool, str, int], list[Event]] = defaultdict(list)
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb"))[-1:]:
        with warnings.catch_warnings():
            # jaxlib 0.11 makes a type that Python warns of, and aborts where warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                # The host's plane may also show how a GPU's kernels were launched.
                on_host = not plane.name.startswith("/device:")
                for event in (event for line in plane.lines for event in line.events):
                    stats: dict[str | None, Any] = dict(event.stats)
                    if stats.get("hlo_module") == module and stats.get("hlo_op"):
                        device = on_host, plane.name, int(stats.get("device_ordinal", 0))
                        start, end = event.start_ns, event.start_ns + event.duration_ns
                        found[device].append(Event(str(stats["hlo_op"]), start / 1e9, end / 1e9))
    return found[min(found)] if found else []


def phase_of(instruction: Instruction, *, fills: bool = False) -> str | None:
    """The phase that an instruction belongs to, by its scope; None where its neighbours decide.

    They do for what `fills` or copies an array alone: XLA moves that far ahead of what it is for.
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
    """The phase of each instruction.

    Where the forward and the backward pass compute the same, XLA does it once and keeps one of the
    two names. What a forward instruction reads belongs to the forward pass, whatever its name. And
    XLA runs ahead what needs no activation, or no gradient (Adam's powers, say): that has no phase.
    """
    phase: dict[str, str | None] = {}
    for instructions in use.computations.values():
        read_forward: set[str] = set()
        for instruction in reversed(instructions):
            own = phase_of(instruction, fills=_fills(use, instruction))
            if own in (BACKWARD, None) and instruction.name in read_forward:
                own = FORWARD
            phase[instruction.name] = own
            if own == FORWARD:
                read_forward.update(instruction.inputs)
    before: dict[str, set[str | None]] = {}
    """Phases of all that an instruction of the entry depends on."""
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
    """Share of the bytes of all results of which the instruction is among the events."""
    names = {event.name for event in events}
    every = [each for some in use.timed.values() for each in some]
    seen = sum(each.bytes for each in every if each.name in names)
    return seen / max(sum(each.bytes for each in every), 1)


def _state_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of the first argument, on one device."""
    shapes, shardings = compiled.args_info[0][0], compiled.input_shardings[0][0]
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in leaves)
