"""A traced function in which `lax.platform_dependent` has been decided for one platform."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant


def for_platform(jaxpr: Jaxpr, platform: str) -> Jaxpr:
    """`jaxpr` with the branches of `platform` in place of every choice by platform.

    Done before differentiation: the derivative of a choice keeps what any of its branches wants.

    Args:
        jaxpr: of a function that is not yet differentiated.
        platform: `cpu`, `cuda`, `tpu`, ...
    """
    equations: list[JaxprEqn] = []
    same: dict[Any, Any] = {}

    def known(variable: Any) -> Any:
        while not isinstance(variable, Constant) and variable in same:
            variable = same[variable]
        return variable

    for equation in jaxpr.eqns:
        branch = branch_for(equation, platform)
        if branch is None:
            params = {name: _inside(value, platform) for name, value in equation.params.items()}
            invars = [known(variable) for variable in equation.invars]
            equations.append(equation.replace(invars=invars, params=params))
            continue
        body = for_platform(branch.jaxpr, platform)
        same.update(zip(body.invars, map(known, equation.invars[1:]), strict=True))
        for inner in body.eqns:
            equations.append(inner.replace(invars=[known(each) for each in inner.invars]))
        same.update(zip(equation.outvars, map(known, body.outvars), strict=True))
    outvars = [known(each) for each in jaxpr.outvars]
    decided: Jaxpr = jaxpr.replace(eqns=equations, outvars=outvars)
    return decided


def branch_for(equation: JaxprEqn, platform: str) -> ClosedJaxpr | None:
    """The branch that `platform` takes; None where `equation` is no choice by platform."""
    platforms = equation.params.get("branches_platforms")
    if equation.primitive.name != "cond" or platforms is None:
        return None
    branches: tuple[ClosedJaxpr, ...] = equation.params["branches"]
    taken = (
        branch
        for branch, names in zip(branches, platforms, strict=True)
        if names is None or platform in names
    )
    return next(taken, branches[-1])


def _inside(value: Any, platform: str) -> Any:
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=for_platform(value.jaxpr, platform))
    if isinstance(value, Jaxpr):
        return for_platform(value, platform)
    if type(value) in (tuple, list):
        return type(value)(_inside(each, platform) for each in value)
    return value


Kind = Literal["cheap", "expensive", "fill", "reduction", "store", "loop", "branches", "other"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    "reshape squeeze expand_dims transpose name copy copy_p stop_gradient optimization_barrier"
    " sharding_constraint mesh_cast pvary pcast random_wrap random_unwrap"
)
FILLS = _names("broadcast_in_dim iota")
CHEAP = _names(
    "add sub mul neg max min abs sign and or not xor eq ne lt le gt ge select_n clamp square"
    " one_minus_square convert_element_type integer_pow is_finite floor ceil round slice"
    " dynamic_slice rev pad concatenate split add_any real imag complex conj population_count"
    " reduce_precision bitcast_convert_type shift_left shift_right_logical shift_right_arithmetic"
    " sin cos"
)
"""Cheap enough that XLA computes them again in every kernel that reads them
(`InstructionFusion::IsExpensive` in xla/service/instruction_fusion.cc of openxla/xla)."""
EXPENSIVE = _names(
    "exp exp2 expm1 log log1p logistic tanh tan asin acos atan atan2 sinh cosh asinh acosh atanh"
    " div rem pow sqrt rsqrt cbrt erf erfc erf_inv lgamma digamma nextafter"
)
"""Computed inside the kernel that reads them, once: with several readers they are kept."""
REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
IN_PLACE = _names("dynamic_update_slice scatter scatter-add scatter_add scatter_mul")


@dataclasses.dataclass
class Operation:
    """One of a program."""

    kind: Kind
    name: str
    inputs: list[int]
    outputs: list[int]
    equation: JaxprEqn | None = None
    """Equation of a loop or of branches."""


class TracedOperations:
    """The operations of a traced function.

    Args:
        jaxpr: what was traced.
        platform: whose branch a choice by platform takes.
    """

    def __init__(self, jaxpr: Jaxpr, platform: str) -> None:
        self.platform = platform
        self.sizes: list[int] = []
        """Bytes of each value."""
        self.elements: list[int] = []
        self.operations: list[Operation] = []
        self.inputs = [self._value(variable.aval) for variable in jaxpr.invars]
        constants = [self._value(variable.aval) for variable in jaxpr.constvars]
        self.outputs = self._inline(jaxpr, [*constants, *self.inputs])

    def read_at_once(self, values: list[int]) -> None:
        """Let these results be read where they are made, instead of staying to the end."""
        self.outputs = [value for value in self.outputs if value not in values]
        ordered: list[Operation] = []
        for each in self.operations:
            ordered.append(each)
            own = [value for value in each.outputs if value in values]
            ordered += [Operation("store", "store", [value], []) for value in own]
        self.operations = ordered

    def _value(self, aval: Any) -> int:
        self.sizes.append(self._bytes(aval))
        self.elements.append(math.prod(getattr(aval, "shape", ())))
        return len(self.sizes) - 1

    def _bytes(self, aval: Any) -> int:
        size = array_bytes(aval)
        wide = self.platform == "cpu" and _is_half(aval)
        return 2 * size if wide else size

    def _renames(self, equation: JaxprEqn) -> bool:
        """Whether the result is the operand, as far as memory goes."""
        if equation.primitive.name != "convert_element_type":
            return equation.primitive.name in VIEWS
        operand: Any = equation.invars[0].aval
        result: Any = equation.outvars[0].aval
        if self.platform != "cpu":
            return bool(operand.dtype == result.dtype)
        # XLA computes 16-bit floats as float32 on a CPU, and may leave out conversions there and
        # back (xla_allow_excess_precision).
        return all(_is_half(each) or each.dtype == jnp.float32 for each in (operand, result))

    def _inline(self, jaxpr: Jaxpr, arguments: list[int]) -> list[int]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

        def read(variable: Any) -> int:
            return self._value(variable.aval) if isinstance(variable, Constant) else known[variable]

        for equation in jaxpr.eqns:
            inputs = [read(each) for each in equation.invars if not isinstance(each, Constant)]
            called = _called(equation)
            if called is not None:
                outputs = self._call(called, [read(each) for each in equation.invars])
            elif self._renames(equation):
                outputs = inputs[: len(equation.outvars)]
            else:
                outputs = []
            if len(outputs) != len(equation.outvars):
                outputs = [self._value(each.aval) for each in equation.outvars]
                kind = _kind(equation)
                keeps = kind in ("loop", "branches")
                every = [read(each) for each in equation.invars] if keeps else inputs
                body = equation if keeps else None
                name = equation.primitive.name
                self.operations.append(Operation(kind, name, every, outputs, body))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(each) for each in jaxpr.outvars]

    def _call(self, called: ClosedJaxpr | Jaxpr, arguments: list[int]) -> list[int]:
        if isinstance(called, Jaxpr):
            return self._inline(called, arguments)
        constants = [self._value(each.aval) for each in called.jaxpr.constvars]
        return self._inline(called.jaxpr, [*constants, *arguments])


def array_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype; 0 of what is none."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return int(math.prod(key.shape)) * int(key.dtype.itemsize)
    if aval.dtype == jax.dtypes.float0:
        return 0
    count: int = math.prod(aval.shape)
    return count * int(aval.dtype.itemsize)


def _kind(equation: JaxprEqn) -> Kind:
    name = equation.primitive.name
    for kind, names in (("fill", FILLS), ("cheap", CHEAP), ("expensive", EXPENSIVE)):
        if name in names:
            return kind  # type: ignore[return-value]
    if name in REDUCTIONS:
        return "reduction"
    return {"scan": "loop", "while": "loop", "cond": "branches"}.get(name, "other")  # type: ignore[return-value]


def _is_half(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (jnp.bfloat16, jnp.float16)


def _called(equation: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """Return the jaxpr that a call calls; None if `equation` is no call."""
    if equation.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = equation.params.get(name)
        if isinstance(called, (ClosedJaxpr, Jaxpr)):
            inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
            if len(inner.invars) == len(equation.invars):
                return called
    return None
