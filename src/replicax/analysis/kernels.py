"""FLOPs and bytes of one run of a compiled program's instruction."""

import functools
import math
import re

from replicax.analysis import hlo
from replicax.analysis.compiled import convolution_flops, product_flops
from replicax.analysis.hlo import Instruction, Module

FREE_CALLS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
)
"""Custom calls that are annotations of the TPU compiler; nothing runs."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\]]*"dimensions":\s*\[([^\]]*)\]')
_SUMMED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":\s*"\w*CAUSAL')
_ATTENTION = "__cudnn$fmha"
_FLASH3 = {"dew_flash3_mha_fwd": "forward", "dew_flash3_mha_bwd": "backward"}
"""Targets of FlashAttention-3's calls. They have no rates, and no bound on a query, of cuDNN's."""
_CAUSAL_FLASH3 = "is_causal = true"
_PRODUCTS = {"forward": 2, "backward": 5}
"""Products of `[tokens, head_dim]` with `[tokens, tokens]` in attention. Forward: scores and
output; backward: the scores again, and two gradients for each of these (Dao et al. 2022,
arXiv:2205.14135)."""


def kernel_flops(module: Module, instruction: Instruction) -> int:
    """Return the FLOPs of one run, including fused operations; 0 for unknown custom calls."""
    if instruction.opcode == "custom-call":
        return _call_flops(instruction)
    if instruction.opcode != "fusion":
        return product_flops(instruction)
    return sum(kernel_flops(module, each) for each in module.inside(instruction))


def product_dtype(module: Module, instruction: Instruction) -> str:
    """Return the HLO dtype of the operands of its products; empty if it has none."""
    if instruction.opcode in ("convolution", "custom-call", "dot") and instruction.operands:
        if not kernel_flops(module, instruction):
            return ""
        dtypes = [hlo.arrays(operand)[0][0] for operand in instruction.operands[:2]]
        return max(dtypes, key=lambda dtype: hlo.shape_bytes(f"{dtype}[8]"))
    if instruction.opcode != "fusion":
        return ""
    inner = (product_dtype(module, each) for each in module.inside(instruction))
    return next(filter(None, inner), "")


def product_dims(module: Module, instruction: Instruction) -> tuple[int, int, int] | None:
    """Return rows, summed elements and columns of its first matrix product; None without one."""
    if instruction.opcode == "fusion":
        inner = (product_dims(module, each) for each in module.inside(instruction))
        return next(filter(None, inner), None)
    if instruction.opcode != "dot" and not call_target(instruction).startswith("__cublas$"):
        return None
    left, right, result = map(_size, (*instruction.operands[:2], instruction.shape))
    if not left * right * result:
        return None
    summed = kernel_flops(module, instruction) // (2 * result)
    return left // summed, summed, right // summed


def attention_pass(instruction: Instruction) -> str:
    """Return `forward` or `backward` for a call of cuDNN's attention; empty for anything else."""
    target = call_target(instruction)
    if not target.startswith(_ATTENTION):
        return ""
    return "backward" if target.endswith("Backward") else "forward"


def call_target(instruction: Instruction) -> str:
    """Return the target of a custom call; empty for any other instruction."""
    match = _TARGET.search(instruction.attributes)
    return match[1] if match and instruction.opcode == "custom-call" else ""


def is_counted(target: str) -> bool:
    """Whether the FLOPs of such calls are known."""
    counted = ("__cublas$", _ATTENTION, "__cudnn$conv", *_FLASH3)
    return target in FREE_CALLS or target.startswith(counted)


def _call_flops(call: Instruction) -> int:
    target = call_target(call)
    if passed := attention_pass(call):
        return _attention_flops(call, _PRODUCTS[passed])
    if target in _FLASH3:
        return _flash3_flops(call, _PRODUCTS[_FLASH3[target]])
    if target.startswith("__cublas$"):
        left, result = (_dims(shape) for shape in (call.operands[0], call.shape))
        summed = _SUMMED.search(call.attributes)
        return 2 * math.prod(result) * math.prod(left[dim] for dim in _integers(summed))
    if target.startswith("__cudnn$conv"):
        first, second, result = (_dims(shape) for shape in (*call.operands[:2], call.shape))
        if target == "__cudnn$convBackwardInput":
            first, result = result, first
        elif target == "__cudnn$convBackwardFilter":
            second, result = result, second
        return convolution_flops(first, second, result, call.attributes)
    return 0


def _attention_flops(call: Instruction, products: int) -> int:
    """FLOPs of cuDNN's fused attention: scores `[rows, heads, tokens, tokens]`, half if causal."""
    scores = math.prod(_integers(_SCORES.search(call.attributes)))
    head_dim = _dims(call.operands[0])[-1]
    flops = 2 * products * scores * head_dim
    return flops // 2 if _CAUSAL.search(call.attributes) else flops


def _flash3_flops(call: Instruction, products: int) -> int:
    """FLOPs of FlashAttention-3: operands `[rows, tokens, heads, head_dim]`, half if causal."""
    first, keys = _dims(call.operands[0]), _dims(call.operands[2])  # values forward: as many
    flops = 2 * products * math.prod(first) * keys[1]
    return flops // 2 if _CAUSAL_FLASH3 in call.attributes else flops


def _dims(shape: str) -> tuple[int, ...]:
    return hlo.arrays(shape)[0][1]


def _size(shape: str) -> int:
    return math.prod(_dims(shape))


def _integers(match: re.Match[str] | None) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", match[1])] if match else []


_SLICES = ("dynamic-slice", "gather", "slice")
_SAME_ELEMENTS = ("bitcast", "convert", "copy", "reshape", "transpose")
_ELEMENTWISE = ("add", "subtract", "multiply", "divide", "select", "maximum", "exponential")
_PASSED_ON = (
    "all-gather",
    "all-reduce",
    "collective-permute",
    "custom-call",
    "reduce-scatter",
    "tuple",
)
"""Inside a fusion, these only forward an array, or move data as part of a collective."""


def kernel_bytes(module: Module, instruction: Instruction) -> int:
    """Return the bytes that one run reads from and writes to the device's main memory.

    Counts operands and results of the instruction, but not values inside a fusion or in a TPU's
    on-chip memory. If a fusion reads or writes only a slice of an array, as loops over stacked
    layers do, only the slice counts.
    """
    if instruction.opcode == "fusion":
        return _of_fusion(module, instruction)
    if instruction.opcode.endswith("-start"):
        return _of_copy(instruction)
    read = [hlo.memory_bytes(operand) for operand in instruction.operands]
    written = hlo.memory_bytes(instruction.shape)
    if instruction.opcode in _SLICES:
        size = hlo.shape_bytes(instruction.shape)
        return min(read[0], size) + sum(read[1:]) + written
    if instruction.opcode == "dynamic-update-slice":
        size = hlo.shape_bytes(instruction.operands[1])
        return sum(read[1:]) + min(written, size)
    if instruction.opcode == "scatter":
        size = hlo.shape_bytes(instruction.operands[-1])
        return sum(read[1:]) + min(read[0], size) + min(written, size)
    if instruction.opcode == "custom-call":
        written -= _scratch(instruction)
    return sum(read) + written


def _of_copy(start: Instruction) -> int:
    """Return the bytes of an asynchronous copy: the copied size, at both ends."""
    shapes = hlo.elements(start.shape)
    source = hlo.memory_bytes(start.operands[0]) if start.operands else 0
    arrived = shapes[0] if start.opcode == "copy-start" else shapes[len(start.operands)]
    return min(source, hlo.shape_bytes(arrived)) + hlo.memory_bytes(arrived)


def _scratch(call: Instruction) -> int:
    """Return the bytes of a library kernel's workspace: the last of several results."""
    *results, last = hlo.elements(call.shape)
    scratch = results and last.startswith(("s8[", "u8["))
    return hlo.memory_bytes(last) if scratch else 0


def _of_fusion(module: Module, fusion: Instruction) -> int:
    inside = _Inside(module, fusion.called[0])
    read = sum(
        hlo.memory_bytes(operand) * inside.share_read(number)
        for number, operand in enumerate(fusion.operands)
    )
    results, written = hlo.elements(fusion.shape), inside.written()
    if len(written) != len(results):
        return round(read) + hlo.memory_bytes(fusion.shape)
    sizes = zip(results, written, strict=True)
    return round(read) + sum(min(hlo.memory_bytes(each), size) for each, size in sizes)


class _Inside:
    """The computation inside a fusion."""

    def __init__(self, module: Module, computation: str) -> None:
        self._module, self._computation = module, computation
        self._instructions = module.computations.get(computation, ())

    def _users(self, value: Instruction) -> list[Instruction]:
        return [each for each in self._instructions if value.name in each.inputs]

    def share_read(self, number: int) -> float:
        for each in self._instructions:
            if each.opcode == "parameter" and each.argument == str(number):
                return self._share(each)
        return 1.0

    def _share(self, value: Instruction) -> float:
        return min(1.0, sum(self._share_of_user(value, user) for user in self._users(value)))

    def _share_of_user(self, value: Instruction, user: Instruction) -> float:
        is_first = user.inputs[0] == value.name
        if user.opcode in _PASSED_ON:
            return 0.0
        if user.opcode in _SLICES and is_first:
            return hlo.elements_in(user.shape) / max(1, hlo.elements_in(value.shape))
        if user.opcode in ("dynamic-update-slice", "scatter") and is_first:
            return 0.0 if self._stays(user) else 1.0
        if user.opcode == "fusion":
            inner = _Inside(self._module, user.called[0])
            places = (at for at, name in enumerate(user.inputs) if name == value.name)
            return min(1.0, sum(map(inner.share_read, places)))
        same = user.opcode in (*_SAME_ELEMENTS, *_ELEMENTWISE)
        if user.opcode == "bitcast" or (same and not user.is_root):
            return self._share(user)
        return 1.0

    def _stays(self, value: Instruction) -> bool:
        """Whether it is itself a result of the fusion, so that it can be updated in place."""
        return value.is_root or all(
            each.opcode in ("tuple", "bitcast") and self._stays(each) for each in self._users(value)
        )

    def written(self) -> list[int]:
        root = self._module.root(self._computation)
        if root is None:
            return []
        if root.opcode != "tuple":
            return self._written(root)
        values = (self._module.find(self._computation, name) for name in root.inputs)
        return [sum(self._written(value)) if value else 0 for value in values]

    def _written(self, value: Instruction) -> list[int]:
        behind = functools.partial(self._module.source, self._computation)
        source = behind(value.name, ("bitcast",)) or value
        if source.opcode == "parameter":
            return [0]
        if source.opcode in ("dynamic-update-slice", "scatter"):
            # In place if the updated array is an operand of the fusion, not computed inside it.
            target = behind(source.inputs[0], ("bitcast", "dynamic-update-slice"))
            if target is not None and target.opcode == "parameter":
                if source.opcode == "scatter":  # it reads, adds and writes
                    return [2 * hlo.shape_bytes(source.operands[-1])]
                return [hlo.shape_bytes(source.operands[1])]
        if source.opcode == "fusion":
            return _Inside(self._module, source.called[0]).written()
        if source.opcode in _PASSED_ON:
            return [0] * len(hlo.elements(source.shape))
        return [hlo.shape_bytes(value.shape)]
