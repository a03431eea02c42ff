"""A traced function as an ordered list of operations, specialized for one platform."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import closed_call_p


def with_equations(value: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return a jaxpr, or a container of jaxprs, with each equation changed, innermost first."""
    if isinstance(value, Jaxpr):  # since jax 0.11 the closed ones too
        return value.replace(eqns=[_changed(equation, change) for equation in value.eqns])
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=with_equations(value.jaxpr, change))
    if type(value) in (tuple, list):
        return type(value)(with_equations(each, change) for each in value)
    return value


def _changed(equation: JaxprEqn, change: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    params = {name: with_equations(each, change) for name, each in equation.params.items()}
    return change(equation.replace(params=params))


def for_platform(jaxpr: Jaxpr, platform: str) -> Jaxpr:
    """Return `jaxpr` with the branch of `platform` in place of every `lax.platform_dependent`.

    Apply before differentiation: the derivative of a `cond` stores residuals of every branch.
    """

    def decided(equation: JaxprEqn) -> JaxprEqn:
        platforms = equation.params.get("branches_platforms")
        if equation.primitive.name != "cond" or platforms is None:
            return equation
        branches: tuple[ClosedJaxpr, ...] = equation.params["branches"]
        pairs = zip(branches, platforms, strict=True)
        taken = (each for each, names in pairs if names is None or platform in names)
        called = {"call_jaxpr": next(taken, branches[-1])}
        call: JaxprEqn = equation.replace(
            primitive=closed_call_p, invars=equation.invars[1:], params=called
        )
        return call

    found: Jaxpr = with_equations(jaxpr, decided)
    return found


_PRIMITIVES = {
    # Results that share the operand's memory.
    "view": "reshape squeeze expand_dims transpose name copy copy_p stop_gradient"
    " optimization_barrier sharding_constraint mesh_cast pvary pcast random_wrap random_unwrap",
    "fill": "broadcast_in_dim iota",
    # Cheap enough that XLA recomputes them in every kernel that reads them
    # (`InstructionFusion::IsExpensive` in xla/service/instruction_fusion.cc of openxla/xla).
    "cheap": "add sub mul neg max min abs sign and or not xor eq ne lt le gt ge select_n clamp"
    " square one_minus_square convert_element_type integer_pow is_finite floor ceil round slice"
    " dynamic_slice rev pad concatenate split add_any real imag complex conj population_count"
    " reduce_precision bitcast_convert_type shift_left shift_right_logical"
    " shift_right_arithmetic sin cos",
    # Fused into their reader if there is only one; stored if there are several.
    "expensive": "exp exp2 expm1 log log1p logistic tanh tan asin acos atan atan2 sinh cosh asinh"
    " acosh atanh div rem pow sqrt rsqrt cbrt erf erfc erf_inv lgamma digamma nextafter",
    "reduction": "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"
    " argmax argmin",
    "loop": "scan while",
    "branches": "cond",
}
_KINDS = {name: kind for kind, names in _PRIMITIVES.items() for name in names.split()}
IN_PLACE = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter_mul")


@dataclasses.dataclass
class Operation:
    """One operation of a program."""

    kind: str
    """Kind as in `_PRIMITIVES`; `store` for a value that leaves the program, or `other`."""
    name: str
    inputs: list[int]
    outputs: list[int]
    equation: JaxprEqn | None = None
    """Equation, for loops and branches only."""


class TracedOperations:
    """The operations of a traced function for a platform."""

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
        """Consume these results where they are computed, instead of keeping them to the end."""
        self.outputs = [value for value in self.outputs if value not in values]
        ordered: list[Operation] = []
        for each in self.operations:
            ordered.append(each)
            own = [value for value in each.outputs if value in values]
            ordered += [Operation("store", "store", [value], []) for value in own]
        self.operations = ordered

    def _value(self, aval: Any) -> int:
        wide = self.platform == "cpu" and _is_half(aval)
        self.sizes.append(array_bytes(aval) * (2 if wide else 1))
        self.elements.append(math.prod(getattr(aval, "shape", ())))
        return len(self.sizes) - 1

    def _renames(self, equation: JaxprEqn) -> bool:
        """Whether the result shares the operand's memory."""
        if equation.primitive.name != "convert_element_type":
            return _KINDS.get(equation.primitive.name) == "view"
        operand: Any = equation.invars[0].aval
        result: Any = equation.outvars[0].aval
        if self.platform != "cpu":
            return bool(operand.dtype == result.dtype)
        # On a CPU, XLA computes 16-bit floats as float32 and may elide the conversions
        # (xla_allow_excess_precision).
        return all(_is_half(each) or each.dtype == jnp.float32 for each in (operand, result))

    def _inline(self, jaxpr: Jaxpr, arguments: list[int]) -> list[int]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

        def read(variable: Any) -> int:
            return self._value(variable.aval) if isinstance(variable, Constant) else known[variable]

        for equation in jaxpr.eqns:
            name = equation.primitive.name
            kind = _KINDS.get(name, "other")
            inputs = [read(each) for each in equation.invars if not isinstance(each, Constant)]
            called = _called(equation)
            outputs: list[int] = []
            if called is not None:
                constants = [self._value(each.aval) for each in called.constvars]
                every = [read(each) for each in equation.invars]
                outputs = self._inline(called, [*constants, *every])
            elif self._renames(equation):
                outputs = inputs[: len(equation.outvars)]
            if len(outputs) != len(equation.outvars):
                outputs = [self._value(each.aval) for each in equation.outvars]
                body = None
                if kind in ("loop", "branches"):
                    body, inputs = equation, [read(each) for each in equation.invars]
                self.operations.append(Operation(kind, name, inputs, outputs, body))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(each) for each in jaxpr.outvars]


def array_bytes(aval: Any) -> int:
    """Return the bytes of an array of this shape and dtype; 0 for anything else."""
    if not hasattr(aval, "shape") or getattr(aval, "dtype", jax.dtypes.float0) == jax.dtypes.float0:
        return 0
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    count: int = math.prod(aval.shape)
    return count * int(aval.dtype.itemsize)


def _is_half(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (jnp.bfloat16, jnp.float16)


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr that `equation` calls; None if it is not a call."""
    if equation.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = equation.params.get(name)
        inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
        if isinstance(inner, Jaxpr) and len(inner.invars) == len(equation.invars):
            return inner
    return None
