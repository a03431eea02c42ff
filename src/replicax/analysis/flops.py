"""Count the FLOPs of matrix products and convolutions in a traced function, on any backend.

This is the work that was requested, including work that a compiler moves into library kernels or
splits over devices. See `replicax.analysis.compiled` for what one device really executes.
"""

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def count_flops(jaxpr: Jaxpr, platform: str) -> int:
    """Return the FLOPs of one execution on all devices, including recomputation.

    The body of a `scan` counts once per iteration, that of a `while_loop`, whose trip count is
    unknown, once. For a `cond` the most expensive branch counts; for a `lax.platform_dependent` the
    branch of `platform`, or the default, which also stands in for a kernel specific to a platform.

    Args:
        jaxpr: for example `jax.jit(function).trace(...).jaxpr.jaxpr`.
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
    """Return how often all devices together run the body."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":  # `pmap` is one, too
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
    """Return 2 FLOPs per element of the result and index summed over."""
    (contracted, _), _ = dot.params["dimension_numbers"]
    left, result = _dims(dot.invars[0]), _dims(dot.outvars[0])
    summed: int = math.prod(left[dim] for dim in contracted)
    return 2 * math.prod(result) * summed


def _convolution_flops(convolution: JaxprEqn) -> int:
    """Return 2 FLOPs per element of the result and kernel element applied to it."""
    kernel, result = _dims(convolution.invars[1]), _dims(convolution.outvars[0])
    outputs: int = kernel[convolution.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(result) * math.prod(kernel) // outputs


def _dims(variable: Any) -> tuple[int, ...]:
    dims: tuple[int, ...] = variable.aval.shape
    return dims
