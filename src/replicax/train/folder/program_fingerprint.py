"""Digests of the computation of a step; the same program has the same digests on any machine."""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from replicax.core.custom.custom_step import keep
from replicax.core.data.batch import Batch
from replicax.core.data.per_row import RowsOfState, map_rows_of_state, real_rows, resized
from replicax.core.data.rows import opened
from replicax.core.data.sources import PerProcessSource, Source
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.leaves import PyTree, kind, numbers, shapes_by_path
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.program import Program
from replicax.core.step.accumulate import Sequential

ROWS = 64
"""Rows of the traced batch, independent of batch size, number of devices and padding."""
_DIGITS = 12
_NO_PART = frozenset(("name", "name_and_src_info", "debug_info", "metadata", "ctx_mesh"))
"""Parameters of an operation that only hold names or source locations."""
_LOOKS_ON = frozenset(("debug_print", "debug_callback"))


def program_fingerprint(
    dp: DataParallel, state: TrainState, batch: PyTree, size: int | None = None, traced: str = ""
) -> dict[str, str]:
    """Return a digest for each user-defined part of `dp`'s step.

    The digests depend on the operations that JAX traces and the values of all constants, but not on
    names, comments, devices, mode, layout, micro-batches or padding. Python code that runs during
    the step (callbacks) and unused results are ignored. The loss and the optimizer are traced once,
    on shapes; nothing is compiled or run. 12 hex digits each:

    - `model`: paths, shapes and dtypes of its arrays;
    - `loss`: with its gradient and metrics;
    - `optimizer`: omitted if it refers to a mesh axis by name;
    - `step`: a custom step, instead of loss and optimizer.

    Args:
        dp: has the step.
        state: from `dp.init`.
        batch: one or more rows.
        size: rows of a global batch, by default those of `batch`.
        traced: `batch` of an earlier start of the run. Batches of a loader may vary in shape, and
            another shape is another trace.

    Returns:
        The digests, and `batch`: dtypes and shapes of the batch that was traced.
    """
    program = dp.program(state)
    inner = dp.configuration.between.inner_shapes(program.shapes)
    plain = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        dataclasses.replace(inner, losses=(), reduction=()),
    )
    digests = {"model": _digest(_described(real_rows((plain.params, plain.extras))))}
    rows = opened(batch.whole().data if isinstance(batch, Batch) else batch)
    # A loss may require the number of rows of a batch.
    sizes = ROWS, dp.split.padded(size or rows.count)
    tries = [rows.described(count) for count in sizes]
    tries = [*_with_shapes(tries[0], traced), *tries]
    for attempt in tries[:-1]:
        with contextlib.suppress(Exception):
            return digests | _known(program, plain, attempt)
    return digests | _known(program, plain, tries[-1])


def _known(program: Program, state: TrainState, batch: Batch) -> dict[str, str]:
    """Return `_traced`; the next run of the same program, which does not trace it either, has it.

    As a compiled step is, it is of the values that the loss had when it was traced.
    """
    key = program_fingerprint, jax.tree.structure(batch), _shapes(batch)
    known: dict[str, str] | None = program.derived.get(key)
    if known is None:
        known = program.derived[key] = _traced(program, state, batch)
    return known


def _shapes(batch: Batch) -> str:
    return " ".join(map(kind, jax.tree.leaves(batch)))


def _with_shapes(batch: Batch, shapes: str) -> list[Batch]:
    """Return `batch` with these shapes if it has their dtypes and numbers of dims, else nothing."""
    leaves, structure = jax.tree.flatten(batch)
    given = [
        jax.ShapeDtypeStruct([int(dim) for dim in dims.split(", ") if dim], dtype)
        for dtype, dims in re.findall(r"(\w+)\[([\d, ]*)\]", shapes)
    ]
    fits = len(given) == len(leaves) and all(
        (one.dtype, one.ndim) == (other.dtype, other.ndim)
        for one, other in zip(given, leaves, strict=True)
    )
    return [jax.tree.unflatten(structure, given)] if fits else []


def some_rows(source: Source) -> PyTree | None:
    """Return one or more rows of `source`; None for an iterable, which this would consume."""
    if source.batches is None:  # the same in all processes
        return None
    own = source.own if isinstance(source, PerProcessSource) else source
    assert own.batches is not None
    data, *_ = next(own.epoch(0, np.zeros(1, np.int64), own.batches - 1))
    return data


def _traced(program: Program, state: TrainState, batch: Batch) -> dict[str, str]:
    state = map_rows_of_state(
        lambda rows: RowsOfState(resized(rows.value, batch.size), batch.size), state
    )
    objective, updater = program.objective, program.updater
    digests = {"batch": _shapes(batch)}

    def step(state: TrainState, batch: Batch) -> Any:
        after, metrics, rows = program.custom_step(
            *(state, batch, None),
            accumulator=Sequential(),
            reduce=lambda sums, reduction_state, _: (sums, reduction_state),
            apply=keep,
        )
        return (after.params, metrics, rows) if rows else (after.params, metrics)

    def sums(params: PyTree, extras: PyTree, batch: Batch, seed: Any, step: Any) -> Any:
        return objective.step_sums(
            params, extras, batch, CallContext(jax.random.key(seed), step=step)
        )

    def update(gradient: PyTree, opt_state: PyTree, params: PyTree, loss: Any) -> Any:
        value = {"value": loss} if updater.takes_value else {}
        return updater.optimizer.update(gradient, opt_state, params, **value)

    if program.configuration.step is not None:
        return digests | {"step": _of_trace(step, state, batch)}
    # Custom derivative rules are part of the gradient.
    of_rows = state.params, state.extras, batch, state.seed, state.step
    digests["loss"] = _of_trace(sums, *of_rows)
    given = (state.params, state.opt_state, state.params, jax.ShapeDtypeStruct((), jnp.float32))
    try:
        begun = _of_trace(updater.optimizer.init, state.params)
        return digests | {"optimizer": _digest([begun, _of_trace(update, *given)])}
    except NameError:  # it refers to a mesh axis, only available in the compiled step
        return digests


def _of_trace(function: Any, *arguments: PyTree) -> str:
    """Return the digest of the operations of `function`, and of the paths of its results."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _digest([_text(traced), *_described(shapes)])


def _described(tree: PyTree) -> list[str]:
    return [f"{path} {kind}" for path, kind in shapes_by_path(tree).items()]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def _of_jaxpr(jaxpr: Jaxpr, consts: Iterable[Any]) -> str:
    """Return the digest of `jaxpr`, with variables numbered in order of appearance."""
    places: dict[Any, int] = {}

    def said(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{_kind(atom)}={_value(atom.val)}"
        return str(places.setdefault(atom, len(places)))

    def named(atoms: Iterable[Any]) -> str:
        return " ".join(f"{said(atom)}:{_kind(atom)}" for atom in atoms)

    lines = [named([*jaxpr.constvars, *jaxpr.invars]), *map(_value, consts)]
    for eqn in _that_matter(jaxpr):
        about = {key: each for key, each in eqn.params.items() if key not in _NO_PART}
        does = f"{eqn.primitive.name} {_text(about)} {' '.join(map(said, eqn.invars))}"
        lines.append(f"{named(eqn.outvars)} = {does}")
    return _digest([*lines, " ".join(map(said, jaxpr.outvars))])


def _that_matter(jaxpr: Jaxpr) -> list[Any]:
    """The operations that affect the results, without debugging operations."""
    wanted = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        looks_on = eqn.primitive.name in _LOOKS_ON
        if not looks_on and (eqn.effects or not wanted.isdisjoint(eqn.outvars)):
            kept.append(eqn)
            wanted |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return kept[::-1]


def _kind(atom: Any) -> str:
    return f"{getattr(atom.aval, 'dtype', '')}{getattr(atom.aval, 'shape', '')}"


def _value(value: Any) -> str:
    array = np.ascontiguousarray(numbers(value))
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"


def _text(value: Any) -> str:
    """Convert a parameter of an operation to text that is the same in every process."""
    kind = type(value).__name__
    match value:
        case ClosedJaxpr():
            return _of_jaxpr(value.jaxpr, value.consts)
        case Jaxpr():
            return _of_jaxpr(value, ())
        case np.ndarray() | jax.Array():
            return _value(value)
        case dict():
            return f"{{{', '.join(sorted(f'{key}: {_text(value[key])}' for key in value))}}}"
        case list() | tuple():
            return f"{kind}({', '.join(map(_text, value))})"
        case set() | frozenset():
            return f"{kind}({', '.join(sorted(map(_text, value)))})"
        case NamedSharding():
            return str(value.spec)
        case Sharding() | Mesh() | AbstractMesh():  # placement, not computation
            return kind
        case type():
            return value.__qualname__
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return kind + _text({key: each for key, each in fields.items() if key not in _NO_PART})
    if callable(value):  # such as a derivative rule; if used, it is in the gradient
        return kind
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
