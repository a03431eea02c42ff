"""A traced function -> the FLOPs of its matrix products and convolutions, whatever the backend.

What a compiler hides in a library's kernel, or splits over devices, is still here: this is the work
that was asked for. What it really does on one device is in `replicax.analysis.compiled`.
"""

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def count_flops(jaxpr: Jaxpr, platform: str) -> int:
    """FLOPs of one execution on all devices, recomputation included.

    The body of a `scan` counts as often as it runs; that of a `while_loop`, which nobody can know,
    once. Of a `cond` the branch with the most counts; of a `lax.platform_dependent` that of
    `platform`, or the default, which also stands for a kernel written for the platform.

    Args:
        jaxpr: `jax.jit(function).trace(...).jaxpr.jaxpr`, say.
        platform: `cpu`, `cuda`, `tpu`, ...
    """
    return sum(_flops(equation, platform) for equation in jaxpr.eqns)


def _flops(equation: JaxprEqn, platform: str) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    inner = [count_flops(each, platform) for each in jaxprs_in_params(params)]
    if not inner:
        return 0
    if name == "cond":
        return _of_branches(inner, params.get("branches_platforms"), platform)
    return _runs(name, params) * sum(inner)


def _runs(name: str, params: dict[str, Any]) -> int:
    """How often all devices together run what is inside."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":  # which `pmap` is, too
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _of_branches(branches: list[int], platforms: Any, platform: str) -> int:
    if platforms is None:
        return max(branches)
    on_cpu = platform == "cpu"
    chosen = [
        flops
        for flops, names in zip(branches, platforms, strict=True)
        if names is None or (on_cpu and platform in names)
    ]
    return chosen[0] if chosen else max(branches)


def _dot_flops(dot: JaxprEqn) -> int:
    """2 for each element of the result and each index summed over."""
    (contracted, _), _ = dot.params["dimension_numbers"]
    left, result = _dims(dot.invars[0]), _dims(dot.outvars[0])
    summed: int = math.prod(left[dim] for dim in contracted)
    return 2 * math.prod(result) * summed


def _convolution_flops(convolution: JaxprEqn) -> int:
    """2 for each element of the result and each kernel element that one output sees."""
    kernel, result = _dims(convolution.invars[1]), _dims(convolution.outvars[0])
    outputs: int = kernel[convolution.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(result) * math.prod(kernel) // outputs


def _dims(variable: Any) -> tuple[int, ...]:
    dims: tuple[int, ...] = variable.aval.shape
    return dims
