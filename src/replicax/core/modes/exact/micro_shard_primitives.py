"""Primitives that combine micro-shards in a step that is traced on one of them.

A step in mode `exact` is traced with the rows and the index of one micro-shard. These primitives
mark where values of one micro-shard are combined with those of the others; `split_trace.py` cuts
the trace there. The trace shows which values depend on rows and so differ between micro-shards.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from replicax.core.ground.precision import to_sum
from replicax.core.jaxprs.jaxpr import CALLS, REMATS, called, evaluate_jaxpr, fixed_point, of_scan
from replicax.core.step.reduction import REDUCTIONS, Wire
from replicax.errors import LossError

own_p = Primitive("of_micro_shard")
"""Identity that marks a value as differing between micro-shards, whatever it depends on."""

sum_p = Primitive("sum_of_micro_shards")
"""The sum of each operand over all micro-shards, in a fixed order; if its entry of `shard_dims`
names a dim, each micro-shard gets one piece of the sum."""
sum_p.multiple_results = True

gather_p = Primitive("gather_of_micro_shards")
"""The operand of all micro-shards, concatenated along `dim` in order."""


def own(value: jax.Array) -> jax.Array:
    """Return `value`, marked as differing between micro-shards."""
    found: jax.Array = own_p.bind(value)
    return found


def sum_all(
    values: Sequence[jax.Array],
    *,
    wire: Wire,
    sent: Sequence[bool],
    shard_dims: Sequence[int | None],
    count: int,
) -> list[jax.Array]:
    """Return the sums of `values` over `count` micro-shards, rounded by `wire` where `sent`.

    For each value, `shard_dims` is the dim of which every micro-shard gets a piece; None for the
    whole sum.
    """
    options = {"wire": wire, "sent": tuple(sent), "shard_dims": tuple(shard_dims), "count": count}
    found: list[jax.Array] = sum_p.bind(*map(own, values), **options)
    return found


def gather_micro_shards(value: jax.Array, *, dim: int, count: int) -> jax.Array:
    """Return `value` of `count` micro-shards, concatenated along `dim`."""
    found: jax.Array = gather_p.bind(own(value), dim=dim, count=count)
    return found


def _sum_avals(*avals: Any, shard_dims: Sequence[int | None], count: int, **_: Any) -> list[Any]:
    return [
        ShapedArray(_scaled(aval.shape, dim, 1 / count), aval.dtype)
        for aval, dim in zip(avals, shard_dims, strict=True)
    ]


def _scaled(shape: tuple[int, ...], dim: int | None, factor: float) -> tuple[int, ...]:
    return tuple(int(size * factor) if at == dim else size for at, size in enumerate(shape))


def _sum_batched(values: Any, at: Any, *, shard_dims: Sequence[int | None], **options: Any) -> Any:
    assert all(dim is None for dim in shard_dims)  # only the built-in step has pieces
    return sum_p.bind(*values, shard_dims=shard_dims, **options), at


def _sum_jvp(values: Any, tangents: Any, **options: Any) -> Any:
    dense = map(ad.instantiate_zeros, tangents)
    return sum_p.bind(*values, **options), sum_p.bind(*dense, **options)


def _sum_transposed(
    cotangents: Any, *values: Any, shard_dims: Sequence[int | None], count: int, **_: Any
) -> list[Any]:
    """Gather the cotangents of the pieces of a sum: the transpose of a reduce-scatter."""
    pieces = zip(map(ad.instantiate_zeros, cotangents), shard_dims, strict=True)
    return [
        gather_micro_shards(cotangent, dim=cast("int", dim), count=count)
        for cotangent, dim in pieces
    ]


def _gather_batched(values: Any, at: Any, *, dim: int, count: int) -> Any:
    found = gather_p.bind(*values, dim=dim if dim < at[0] else dim + 1, count=count)
    return found, at[0]


def _gather_transposed(cotangent: Any, value: Any, *, dim: int, count: int) -> list[Any]:
    """Sum, for the rows of each micro-shard, the cotangents from all micro-shards."""
    if type(cotangent) is ad.Zero:
        return [ad.Zero(value.aval)]
    options: dict[str, Any] = {"wire": REDUCTIONS["float32"], "sent": [False], "shard_dims": [dim]}
    [found] = sum_all([to_sum(cotangent)], **options, count=count)
    return [found.astype(cotangent.dtype)]


own_p.def_abstract_eval(lambda aval: aval)
sum_p.def_abstract_eval(_sum_avals)
gather_p.def_abstract_eval(
    lambda aval, dim, count: ShapedArray(_scaled(aval.shape, dim, count), aval.dtype)
)
mlir.register_lowering(own_p, lambda _context, value: [value])
ad.deflinear2(own_p, lambda cotangent, _: [cotangent])
ad.deflinear2(gather_p, _gather_transposed)
ad.primitive_jvps[sum_p] = _sum_jvp
ad.primitive_transposes[sum_p] = _sum_transposed
batching.primitive_batchers[own_p] = lambda values, at: (own_p.bind(*values), at[0])
batching.primitive_batchers[sum_p] = _sum_batched
batching.primitive_batchers[gather_p] = _gather_batched


def meets(eqn: JaxprEqn) -> bool:
    """Whether an equation, or a function that it calls, combines micro-shards."""
    return eqn.primitive in (sum_p, gather_p) or any(
        meets(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns
    )


def calls_collective(eqn: JaxprEqn) -> bool:
    """Whether an equation only calls a function that combines micro-shards."""
    return eqn.primitive.name in CALLS | REMATS and meets(eqn)


def own_of(eqn: JaxprEqn, own: list[bool]) -> list[bool]:
    """Return which results of an equation differ by micro-shard, given which operands do."""
    primitive = eqn.primitive
    if primitive is own_p:
        return [True]
    if primitive is gather_p:
        return [False]
    if primitive is sum_p:
        return [dim is not None for dim in eqn.params["shard_dims"]]
    if primitive.name == "cond" and not own[0]:
        each = [owned_results(branch, own[1:]) for branch in eqn.params["branches"]]
        return list(map(any, zip(*each, strict=True)))
    if not meets(eqn):
        return [any(own)] * len(eqn.outvars)
    if calls_collective(eqn):
        return owned_results(called(eqn), own)
    if primitive.name == "scan":
        return scanned(eqn, own)[1]
    if primitive.name == "while":
        return turned(eqn, own)
    _refuse(primitive.name == "cond", "lax.cond")
    raise LossError(
        f"rx.value_and_grad or rx.mean was called inside {primitive.name}, where mode='exact' "
        "cannot sum over all rows: call it outside, or in a Python loop, lax.scan or lax.cond"
    )


def scanned(eqn: JaxprEqn, own: list[bool]) -> tuple[list[bool], list[bool]]:
    """Return which arguments of a scan's body, and which results, differ by micro-shard."""
    fixed, carry, over = of_scan(eqn.params, own)
    carry, rest = fixed_point(
        lambda carry: owned_results(eqn.params["jaxpr"], [*fixed, *carry, *over]), carry, any
    )
    return [*fixed, *carry, *over], [*carry, *rest]


def turned(eqn: JaxprEqn, own: list[bool]) -> list[bool]:
    """Return which carried values of a while loop differ by micro-shard."""
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed, carry = own[of_test:][:of_body], own[of_test + of_body :]
    carry, _ = fixed_point(
        lambda carry: owned_results(eqn.params["body_jaxpr"], [*fixed, *carry]), carry, any
    )
    [ends] = owned_results(eqn.params["cond_jaxpr"], [*own[:of_test], *carry])
    _refuse(ends, "lax.while_loop")
    return carry


def owned_results(jaxpr: ClosedJaxpr | Jaxpr, own: list[bool]) -> list[bool]:
    """Return which results of `jaxpr` differ by micro-shard, given which arguments do."""
    return evaluate_jaxpr(jaxpr, own, own_of, lambda _: False)


def _refuse(own: bool, what: str) -> None:
    if own:
        raise LossError(
            f"{what} around rx.value_and_grad or rx.mean depends on rows, which differ between "
            "replicas: make it depend on their rx.mean"
        )
