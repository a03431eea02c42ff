"""Mistaken values for a loss, an optimizer or a state, each refused in one line."""

import inspect
from collections.abc import Iterable
from typing import Any

import jax

from replicax.core.layout import Layout
from replicax.core.leaves import by_path
from replicax.core.precision import Precision, as_precision
from replicax.core.update import TrainState
from replicax.errors import ConfigError, StateError


def check_loss(loss: Any, name: str = "loss") -> None:
    """Raise `ConfigError` if `loss`, or what has that name, is not called `(model, batch, key)`."""
    _check_function(name, loss, ("model", "batch", "key"))


def _check_function(name: str, function: Any, wanted: tuple[str, ...]) -> None:
    call = f"{name}({', '.join(wanted)})"
    if not callable(function):
        instead = {
            "loss": "DataParallel(loss, optimizer)",
            "step": "DataParallel(step=step)",
            "function": "predict(function, state, batches)",
        }
        raise ConfigError(
            f"the {name} is a {type(function).__name__}; it is a function {call}: give "
            f"{instead[name]}"
        )
    try:
        # A decorator's own arguments count, not those of what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C, or by a library that hides it
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"the {name} takes ({', '.join(signature.parameters)}) and is called with 3 arguments, "
            f"{call}: let it take these, used or not ({error})"
        ) from error


def check_optimizer(optimizer: Any) -> None:
    """Raise `ConfigError` if `optimizer` has no `init` and `update` as optax's have."""
    what = f"of type {type(optimizer).__name__}"
    if isinstance(optimizer, type) or inspect.isroutine(optimizer):
        what = f"{optimizer.__name__}, not called"
    elif all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return
    raise ConfigError(
        f"the optimizer is {what}; it is an optax gradient transformation: give optax.adam(1e-3), "
        "say"
    )


def check_own_step(
    *,
    step: Any,
    loss: Any,
    optimizer: Any,
    trainable: Any,
    ema: Any,
    layout: Layout,
    precision: str | Precision,
    **_others: Any,
) -> None:
    """Raise `ConfigError` if `step` cannot be called, or comes with what it must do itself."""
    _check_function("step", step, ("state", "batch", "key"))
    if loss is not None:
        check_loss(loss)
    itself = {"optimizer": optimizer, "trainable": trainable, "ema": ema}
    given = [name for name, value in itself.items() if value is not None]
    if given:
        raise ConfigError(
            f"step= and {' and '.join(given)} were given; a step of one's own updates its state "
            "itself, optimizers, averages and frozen parameters too: write them in the step"
        )
    if as_precision(precision).scales:
        raise ConfigError(
            "step= with precision='float16', where one scale keeps the gradient of one loss in "
            "range; a step of one's own may have several: use 'bfloat16' or 'float32'"
        )
    if layout.splits_optimizer and not layout.splits_params:
        raise ConfigError(
            f"step= with layout={layout.name!r}, which splits the optimizer's state; a step of "
            "one's own has all its state in one: use layout='fsdp', or rules"
        )


def check_outside_jit(tree: Any) -> None:
    """Raise `StateError` if `tree` holds what `jax.jit` or `jax.grad` traces."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise StateError(
            "step and evaluate were called inside jax.jit or another transformation; they are "
            "compiled already: call them outside of it"
        )


def check_kind(state: Any) -> None:
    """Raise `StateError` if `state` is none, or what `jax.jit` traces, or was donated."""
    if not isinstance(state, TrainState):
        raise StateError(
            f"the state is a {type(state).__name__}; it is the rx.TrainState that "
            "state = dp.init(model) returns"
        )
    check_outside_jit(state.step)
    check_unused(state)


def check_unused(tree: Any) -> None:
    """Raise `StateError` if an array in a state or model was donated."""
    # jax 0.10 does not raise for donated arrays on several devices: it kills the process.
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    if any(not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted() for leaf in arrays):
        raise StateError(
            "this state or model has arrays that were consumed by an earlier step; use the state "
            "that step returned, dp.model without copy=False, or DataParallel(donate=False)"
        )


def check_state(state: TrainState, abstract: TrainState) -> None:
    """Raise `StateError` if `state` has other shapes or shardings than `abstract` has.

    Dtypes may differ; `jax.jit` takes it in others too.
    """
    check_outside_jit(state)
    leaves, structure = jax.tree.flatten(state)
    wanted, expected = jax.tree.flatten(abstract)
    if (structure, _shapes(leaves)) != (expected, _shapes(wanted)):
        raise StateError(
            f"{_difference(state, abstract)}; it is of another model, optimizer, reduction or "
            "precision: use a state that init of this DataParallel returned"
        )
    elsewhere = sum(map(_lies_elsewhere, leaves, wanted))
    if elsewhere:
        raise StateError(
            f"{elsewhere} arrays of the state lie on these devices otherwise than this "
            "DataParallel's layout has them; begin with init(other.model(state))"
        )


def _difference(state: TrainState, abstract: TrainState) -> str:
    found, wanted = (
        {path: getattr(leaf, "shape", ()) for path, leaf in by_path(tree).items()}
        for tree in (state, abstract)
    )
    paths = [path for path in {**wanted, **found} if found.get(path) != wanted.get(path)]
    if not paths:  # two optimizers without arrays, say
        return "state has another structure"
    path = max(paths)  # params before opt_state
    return f"state{path} has shape {found.get(path)} and not {wanted.get(path)}"


def _shapes(leaves: Iterable[Any]) -> list[tuple[int, ...]]:
    return [getattr(leaf, "shape", ()) for leaf in leaves]  # np.shape takes ten times as long


def _lies_elsewhere(leaf: Any, like: Any) -> bool:
    """Whether `jax.jit` would refuse `leaf`: it moves what is on other devices, or on none yet."""
    if not isinstance(leaf, jax.Array) or leaf.sharding == like.sharding or not leaf.committed:
        return False
    here, wanted = leaf.sharding, like.sharding
    return here.device_set == wanted.device_set and not here.is_equivalent_to(wanted, leaf.ndim)
