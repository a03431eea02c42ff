"""Resources of a compiled step: memory, FLOPs, collectives."""

import dataclasses
import math
import re
from collections import defaultdict

import jax

from replicax.analysis import hlo
from replicax.analysis.collectives import first_group, wire_bytes

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
    in_use: int | None = None
    """Peak memory in use, on TPUs only. There `temporaries` also counts buffers that share memory
    at different times."""

    @property
    def peak(self) -> int:
        """Bytes that must be free before the step starts, including its arguments."""
        if self.in_use is not None:
            return self.in_use
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class Collectives:
    """All collectives of one kind in one step, loops unrolled."""

    kind: str
    count: int
    bytes: int
    """Result bytes on one device, summed over the count."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Cost of one execution on each device."""

    memory: Memory | None
    """None if the backend does not report it."""
    flops: int
    """FLOPs of matrix products and convolutions, loops unrolled, including padding. Products inside
    custom calls (cuBLAS on a GPU) are not included."""
    collectives: tuple[Collectives, ...]
    sent_bytes: float = 0.0
    """Bytes sent by each device, assuming a ring over each collective's group."""

    def count(self, kind: str) -> int:
        """Return the number of collectives of a kind, such as `all-reduce`, in one step."""
        return sum(each.count for each in self.collectives if each.kind == kind)


def inspect(compiled: jax.stages.Compiled) -> CompiledStep:
    """Inspect a compiled function, as returned by `DataParallel.lower(...).compile()`."""
    module = hlo.read_module(compiled.as_text() or "")
    count: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    sent = 0.0
    flops = 0
    for instruction, _ in module.running():
        kind = collective_kind(instruction)
        if kind and not instruction.continues:
            moved = Collectives(kind, 1, result_bytes(instruction))
            group = first_group(instruction.attributes)
            count[kind] += instruction.runs
            size[kind] += instruction.runs * moved.bytes
            sent += instruction.runs * wire_bytes(moved, len(group) if group else module.devices)
        flops += instruction.runs * product_flops(instruction)
    collectives = tuple(Collectives(kind, count[kind], size[kind]) for kind in sorted(count))
    return CompiledStep(read_memory(compiled), flops, collectives, sent)


def read_memory(compiled: jax.stages.Compiled) -> Memory | None:
    """Return the memory of a compiled function; None if the backend does not report it."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        in_use=stats.peak_memory_in_bytes if _platform(compiled) == "tpu" else None,
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platform: str = next(iter(shardings[0].device_set)).platform
    return platform


def collective_kind(instruction: hlo.Instruction) -> str:
    """Return which of `COLLECTIVES` an instruction is or starts; empty if none."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


def result_bytes(instruction: hlo.Instruction) -> int:
    """Return the bytes of the result, without operands and context of an asynchronous start."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.bytes
    context = 4 * hlo.arrays(instruction.shape).count(("u32", ()))
    operands = sum(hlo.shape_bytes(operand) for operand in instruction.operands)
    return instruction.bytes - operands - context


def product_flops(instruction: hlo.Instruction) -> int:
    """Return the FLOPs of one run of a matrix product or convolution; 0 for anything else."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    shapes = (*instruction.operands[:2], instruction.shape)
    left, right, result = (hlo.arrays(shape)[0][1] for shape in shapes)
    if instruction.opcode == "convolution":
        return convolution_flops(left, right, result, instruction.attributes)
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    summed = [int(dim) for dim in dims[1].split(",") if dim] if dims else []
    return 2 * math.prod(result) * math.prod(left[dim] for dim in summed)


def convolution_flops(
    image: tuple[int, ...], kernel: tuple[int, ...], result: tuple[int, ...], attributes: str
) -> int:
    """Return 2 FLOPs per element of the result and kernel element applied to it.

    `attributes` are those of the instruction, with `dim_labels` and `window`; the others are dims.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if not labels:
        return 2 * math.prod(result) * math.prod(kernel)
    applied = kernel[labels[2].index("i")]
    window = _window(attributes)
    for number in filter(str.isdigit, labels[2]):
        at = (label.index(number) for label in labels.groups())
        sizes = [dims[place] for dims, place in zip((image, kernel, result), at, strict=True)]
        applied *= _taps(sizes, {name: values[int(number)] for name, values in window.items()})
    return 2 * math.prod(result) * applied


def _window(attributes: str) -> dict[str, list[str]]:
    """Parse `window={size=3x3 stride=2x2}` to `{"size": ["3", "3"], "stride": ["2", "2"]}`."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    settings = (each.partition("=") for each in (match[1].split() if match else ()))
    return {name: values.split("x") for name, _, values in settings}


def _taps(sizes: list[int], window: dict[str, str]) -> int:
    """Return the most kernel positions, in one dim, that one output multiplies with the image.

    `sizes` are those of the image, the kernel and the result.

    Positions on zeros between the image's elements, or outside of it, are free: a TPU expresses
    batched matrix products as such convolutions. Outputs at the image's edges, where some kernel
    positions fall on the padding, count in full.
    """
    image, kernel, outputs = sizes
    stride, dilation, spread = (
        int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(window.get("pad", "0_0").split("_")[0])
    most = 0
    for output in range(outputs):
        places = (output * stride - before + tap * spread for tap in range(kernel))
        most = max(most, sum(p % dilation == 0 and 0 <= p // dilation < image for p in places))
        if most == kernel:
            break
    return most
