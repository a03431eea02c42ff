"""Read the schedule of a compiled step: what one device computes and sends, in order.

The text of a scheduled module lists instructions in execution order.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from replicax.analysis import hlo
from replicax.analysis.collectives import axes_of_group, first_group
from replicax.analysis.compiled import collective_kind, result_bytes
from replicax.analysis.hlo import Instruction, Module
from replicax.analysis.kernels import (
    FREE_CALLS,
    attention_pass,
    call_target,
    is_counted,
    kernel_bytes,
    kernel_flops,
    product_dims,
    product_dtype,
)

_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclass(frozen=True)
class Kernel:
    """One instruction that computes or copies."""

    name: str
    flops: int
    """FLOPs of its matrix products and convolutions, in one run."""
    bytes: int
    """Bytes that it reads from the device's memory and writes to it, in one run."""
    runs: int
    """Runs in one step."""
    op_name: str
    """Name scope in which it was traced, such as `jit(step)/update/mul`; empty if from XLA."""
    dtype: str = ""
    """HLO dtype of the operands of its products, such as `f32` or `bf16`; empty if it has none."""
    share: float = 1.0
    """Share of its loop's iterations in which it runs; `runs` counts those."""
    product: tuple[int, int, int] | None = None
    """Rows, summed elements and columns of its first matrix product; None if it has none."""
    attends: str = ""
    """`forward` or `backward` if it is a pass of cuDNN's attention."""
    query: int = 0
    """Elements of the query of such a pass, in one run."""


@dataclass(frozen=True)
class Collective:
    """One collective operation, at its start in the schedule."""

    name: str
    kind: str
    """One of `analysis.compiled.COLLECTIVES`."""
    bytes: int
    """Bytes of the result on one device, in one run."""
    runs: int
    """Runs in one step."""
    asynchronous: bool
    """Whether the device may compute until the result is needed."""
    devices: int | None
    """Devices in each group; None for all devices."""
    op_name: str
    shapes: tuple[str, ...]
    """Shapes of the results, such as `f32[50257,768]`."""
    axes: tuple[str, ...] | None = None
    """Mesh axes that it runs over; None for all of them."""
    between: tuple[Kernel, ...] = field(default=(), repr=False)
    """Kernels between its start and the use of its result, in each of its runs."""
    share: float = 1.0
    """See `Kernel`."""


@dataclass(frozen=True)
class Wait:
    """The point in the schedule where the result of a collective is needed."""

    collective: str
    """Name of the collective."""


@dataclass(frozen=True)
class WhileLoop:
    """A loop with its trip count and body."""

    trips: int
    steps: "tuple[Step, ...]"


Step = Kernel | Collective | Wait | WhileLoop


@dataclass(frozen=True)
class Schedule:
    """The work of one device in one step."""

    steps: tuple[Step, ...]
    unknown_calls: tuple[str, ...] = ()
    """Names of library kernels whose FLOPs are not counted."""

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels; those in loops appear once, with their runs."""
        return tuple(each for each in _flat(self.steps) if isinstance(each, Kernel))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives; those in loops appear once, with their runs."""
        return tuple(each for each in _flat(self.steps) if isinstance(each, Collective))

    @property
    def flops(self) -> int:
        """FLOPs of one device in one step."""
        return sum(kernel.runs * kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that one device reads from and writes to its memory in one step."""
        return sum(kernel.runs * kernel.bytes for kernel in self.kernels)


def read_schedule(
    text: str,
    sizes: Mapping[str, int] | None = None,
    working: Mapping[int, int] | None = None,
) -> Schedule:
    """Read a compiled module from `compiled.as_text()`.

    Loop bodies with an unknown trip count count once. For a conditional, the branch with the most
    FLOPs counts, or with the most bytes if there are none: the update of a good step, and in a
    pipeline the working stage, for which the others wait.

    `sizes` are the axis sizes of the mesh that it was compiled for. `working` maps the trip count
    of a loop to the trips in which its conditionals do work: the ticks of a pipeline.
    """
    reader = _Reader(hlo.read_module(text), sizes or {}, working or {})
    steps = reader.steps(reader.module.entry, 1)
    return Schedule(steps, tuple(sorted(reader.unknown)))


class _Reader:
    def __init__(
        self, module: Module, sizes: Mapping[str, int], working: Mapping[int, int]
    ) -> None:
        self.module, self.sizes, self.working = module, sizes, working
        self.shares: dict[str, float] = {}
        """Share of a loop body's trips in which its conditionals do work."""
        self.unknown: set[str] = set()

    def steps(self, computation: str, runs: int) -> tuple[Step, ...]:
        """Return a computation's steps, asynchronous collectives with the kernels they overlap."""
        steps: list[Step] = []
        for instruction in self.module.computations.get(computation, ()):
            steps += self._steps_of(instruction, computation, runs)
        return tuple(_with_what_runs_between(steps))

    def _steps_of(self, instruction: Instruction, around: str, runs: int) -> Iterable[Step]:
        opcode = instruction.opcode
        if opcode in hlo.SILENT or call_target(instruction) in FREE_CALLS:
            return []
        if opcode.endswith("-done"):
            return [Wait(name) for name in instruction.inputs[:1]]
        if opcode == "while":
            return self._loop(instruction, around, runs)
        if opcode == "conditional":
            branches = (self.steps(called, runs) for called in instruction.called)
            dearest = max(branches, key=_size, default=())
            return [_sometimes(step, self.shares.get(around, 1.0)) for step in dearest]
        if collective_kind(instruction):
            asynchronous = opcode.endswith("-start") and not _is_synchronous(instruction)
            collective = self._collective(instruction, instruction.name, runs, asynchronous)
            return [collective] if asynchronous else [collective, Wait(instruction.name)]
        if opcode in ("call", "async-start"):
            return self._called(instruction, runs)
        if opcode == "fusion":
            return self._fusion(instruction, runs)
        return [self._kernel(instruction, runs)]

    def _loop(self, instruction: Instruction, around: str, runs: int) -> list[Step]:
        trips = self.module.trips(instruction, around)
        if trips in self.working:
            share = self.working[trips] / trips
            self.shares.update(dict.fromkeys(instruction.called, share))
        inside = (self.steps(called, runs * trips) for called in instruction.called)
        return [WhileLoop(trips, tuple(itertools.chain.from_iterable(inside)))]

    def _called(self, instruction: Instruction, runs: int) -> list[Step]:
        """Return the steps of a call, named after the call if it is an asynchronous collective."""
        steps: list[Step] = []
        for called in instruction.called:
            for inner in self.module.computations.get(called, ()):
                if instruction.opcode == "async-start" and collective_kind(inner):
                    asynchronous = not _is_synchronous(instruction)
                    steps.append(self._collective(inner, instruction.name, runs, asynchronous))
                else:
                    steps += self._steps_of(inner, called, runs)
        return steps

    def _fusion(self, fusion: Instruction, runs: int) -> list[Step]:
        """Return a kernel and the collectives that a TPU starts, continues or ends in it."""
        inside = list(self.module.inside(fusion))
        carried = [each for each in inside if collective_kind(each)]
        targets = {call_target(each) for each in inside}
        steps: list[Step] = []
        for inner in carried:
            name = _channel(inner)
            if "AsyncCollectiveDone" in targets:
                steps.append(Wait(name))
            elif not inner.continues:
                asynchronous = "AsyncCollectiveStart" in targets
                started = self._collective(inner, name, runs, asynchronous)
                steps += [started] if asynchronous else [_scattered(started, fusion), Wait(name)]
        kernel = self._kernel(fusion, runs)
        return steps if carried and not (kernel.flops or kernel.bytes) else [*steps, kernel]

    def _collective(
        self, instruction: Instruction, name: str, runs: int, asynchronous: bool
    ) -> Collective:
        shapes = hlo.elements(instruction.shape)
        if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
            shapes = shapes[len(instruction.operands) :][: len(instruction.operands)]
        group = first_group(instruction.attributes)
        return Collective(
            name,
            collective_kind(instruction),
            result_bytes(instruction),
            runs,
            asynchronous,
            None if group is None else len(group),
            instruction.op_name,
            tuple(shape.partition("{")[0] for shape in shapes),
            axes_of_group(group, self.sizes) if self.sizes else None,
        )

    def _kernel(self, instruction: Instruction, runs: int) -> Kernel:
        target = call_target(instruction)
        if target and not is_counted(target):
            self.unknown.add(target)
        attends = attention_pass(instruction)
        return Kernel(
            instruction.name,
            kernel_flops(self.module, instruction),
            kernel_bytes(self.module, instruction),
            runs,
            instruction.op_name,
            product_dtype(self.module, instruction),
            product=product_dims(self.module, instruction),
            attends=attends,
            query=hlo.elements_in(instruction.operands[0]) if attends else 0,
        )


def _size(steps: tuple[Step, ...]) -> tuple[int, int]:
    schedule = Schedule(steps)
    return schedule.flops, schedule.bytes


def _sometimes(step: Step, share: float) -> Step:
    if isinstance(step, WhileLoop):
        return replace(step, steps=tuple(_sometimes(each, share) for each in step.steps))
    if isinstance(step, Wait):
        return step
    return replace(step, runs=round(step.runs * share), share=step.share * share)


def _scattered(collective: Collective, fusion: Instruction) -> Collective:
    """Convert an all-reduce of which each device keeps a shard: a TPU runs it as reduce-scatter."""
    size = fusion.bytes
    if collective.kind != "all-reduce" or size >= collective.bytes:
        return collective
    shapes = tuple(shape.partition("{")[0] for shape in hlo.elements(fusion.shape))
    return replace(collective, kind="reduce-scatter", bytes=size, shapes=shapes)


def _with_what_runs_between(steps: list[Step]) -> list[Step]:
    """Attach overlapping kernels to collectives; one without a wait ends with the computation."""
    started = {step.name for step in steps if isinstance(step, Collective)}
    ends: dict[str, int] = {}
    for at, step in enumerate(steps):
        if isinstance(step, Wait) and step.collective in started:
            ends.setdefault(step.collective, at)
    kept: list[Step] = []
    for at, step in enumerate(steps):
        if isinstance(step, Collective):
            inside = _flat(steps[at : ends.get(step.name, len(steps))])
            between = tuple(kernel for kernel in inside if isinstance(kernel, Kernel))
            kept.append(replace(step, between=between))
        elif not isinstance(step, Wait) or ends.get(step.collective) == at:
            kept.append(step)
    return kept + [Wait(name) for name in sorted(started - ends.keys())]


def _flat(steps: Iterable[Step]) -> Iterator[Kernel | Collective]:
    for step in steps:
        if isinstance(step, WhileLoop):
            yield from _flat(step.steps)
        elif not isinstance(step, Wait):
            yield step


def _channel(instruction: Instruction) -> str:
    match = _CHANNEL.search(instruction.attributes)
    return f"channel {match[1]}" if match else instruction.name


def _is_synchronous(instruction: Instruction) -> bool:
    """Whether XLA's GPU backend runs a start and its end synchronously."""
    return '"is_sync":true' in instruction.attributes
