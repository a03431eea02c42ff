"""An instruction of a schedule -> the FLOPs of the matrix products and convolutions in it."""

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
"""Custom calls by which a TPU's compiler tells itself something; nothing runs."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\]]*"dimensions":\s*\[([^\]]*)\]')
_SUMMED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":\s*"\w*CAUSAL')
_FORWARD, _BACKWARD = 2, 5
"""Products of `[tokens, head_dim]` with `[tokens, tokens]` in attention: of the scores and of the
output; and for the gradients the scores once more and two for each of the former (Dao et al. 2022,
arXiv:2205.14135)."""


def kernel_flops(module: Module, instruction: Instruction) -> int:
    """FLOPs of one run, whatever is fused into it; 0 for custom calls that are not known."""
    if instruction.opcode == "custom-call":
        return _call_flops(instruction)
    if instruction.opcode != "fusion":
        return product_flops(instruction)
    return sum(
        kernel_flops(module, each)
        for called in instruction.called
        for each in module.computations.get(called, ())
    )


def product_dtype(module: Module, instruction: Instruction) -> str:
    """The dtype that its products multiply, as HLO names it; empty where it has none."""
    if instruction.opcode in ("convolution", "custom-call", "dot") and instruction.operands:
        if not kernel_flops(module, instruction):
            return ""
        dtypes = [hlo.arrays(operand)[0][0] for operand in instruction.operands[:2]]
        return max(dtypes, key=lambda dtype: hlo.shape_bytes(f"{dtype}[8]"))
    inner = (
        product_dtype(module, each)
        for called in (instruction.called if instruction.opcode == "fusion" else ())
        for each in module.computations.get(called, ())
    )
    return next(filter(None, inner), "")


def call_target(instruction: Instruction) -> str:
    """What a custom call calls; empty for any other instruction."""
    found = _TARGET.search(instruction.attributes)
    return found[1] if found and instruction.opcode == "custom-call" else ""


def is_counted(target: str) -> bool:
    """Whether the FLOPs of such calls are known."""
    return target in FREE_CALLS or target.startswith(("__cublas$", "__cudnn$fmha", "__cudnn$conv"))


def _call_flops(call: Instruction) -> int:
    target = call_target(call)
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(call, _BACKWARD if target.endswith("Backward") else _FORWARD)
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
    """Of cuDNN's fused attention: `[rows, heads, tokens, tokens]` scores, half of them masked."""
    scores = math.prod(_integers(_SCORES.search(call.attributes)))
    head_dim = _dims(call.operands[0])[-1]
    flops = 2 * products * scores * head_dim
    return flops // 2 if _CAUSAL.search(call.attributes) else flops


def _dims(shape: str) -> tuple[int, ...]:
    """Of the first array."""
    return hlo.arrays(shape)[0][1]


def _integers(found: re.Match[str] | None) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", found[1])] if found else []
