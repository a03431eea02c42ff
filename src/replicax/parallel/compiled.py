"""A compiled step -> what it takes: memory, FLOPs, collectives."""

import dataclasses
import math
import re
from collections import defaultdict

import jax

from replicax.parallel import hlo

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    arguments: int
    outputs: int
    aliased: int
    """Arguments whose memory the outputs reuse."""
    temporaries: int

    @property
    def peak(self) -> int:
        """What must be free before the step starts, its arguments included."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Collectives:
    """All collectives of one kind in one step, loops multiplied out."""

    kind: str
    count: int
    bytes: int
    """Result bytes on one device, summed over the count."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one execution takes on each device."""

    memory: Memory | None
    """None where the backend does not tell."""
    flops: int
    """Of matrix products and convolutions, loops multiplied out, padding included. Products that a
    backend hides in custom calls (cuBLAS on a GPU) are not among them."""
    collectives: tuple[Collectives, ...]

    def count(self, kind: str) -> int:
        """Collectives of one kind, `all-reduce` say, in one step."""
        return sum(each.count for each in self.collectives if each.kind == kind)


def inspect(compiled: jax.stages.Compiled) -> CompiledStep:
    """Read a compiled function, as `DataParallel.lower(...).compile()` gives it."""
    text = compiled.as_text() or ""
    count: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    flops = 0
    for instruction in hlo.instructions(text):
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            count[kind] += instruction.runs
            size[kind] += instruction.runs * _result_bytes(instruction)
        elif kind == "dot":
            flops += instruction.runs * _dot_flops(instruction)
        elif kind == "convolution":
            flops += instruction.runs * _convolution_flops(instruction)
    collectives = tuple(Collectives(kind, count[kind], size[kind]) for kind in sorted(count))
    return CompiledStep(_memory(compiled), flops, collectives)


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


def _result_bytes(instruction: hlo.Instruction) -> int:
    """Bytes of the result, without the operands and context of an asynchronous start."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.bytes
    context = 4 * hlo.arrays(instruction.shape).count(("u32", ()))
    operands = sum(hlo.shape_bytes(operand) for operand in instruction.operands)
    return instruction.bytes - operands - context


def _dot_flops(dot: hlo.Instruction) -> int:
    """2 FLOPs for each element of the result and each index summed over."""
    ((_, result),) = hlo.arrays(dot.shape)
    ((_, left),) = hlo.arrays(dot.operands[0])
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    summed = [int(dim) for dim in dims[1].split(",") if dim] if dims else []
    return 2 * math.prod(result) * math.prod(left[dim] for dim in summed)


def _convolution_flops(convolution: hlo.Instruction) -> int:
    """2 FLOPs for each element of the result and each kernel element that one output sees."""
    ((_, result),) = hlo.arrays(convolution.shape)
    ((_, kernel),) = hlo.arrays(convolution.operands[1])
    labels = re.search(r"dim_labels=\w+_(\w+)->", convolution.attributes)
    outputs = kernel[labels[1].index("o")] if labels else 1
    return 2 * math.prod(result) * math.prod(kernel) // outputs
