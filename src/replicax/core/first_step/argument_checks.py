"""Validate a loss, an optimizer or a state; each mistake raises a one-line error."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from replicax.core.ground.leaves import by_path
from replicax.core.ground.precision import Precision
from replicax.core.ground.train_state import MADE_BY, TrainState, check_outside_jit, check_unused
from replicax.core.placement.layout import Layout
from replicax.errors import ConfigError, StateError


def check_loss(loss: Any, name: str = "loss") -> None:
    """Raise `ConfigError` if `loss`, `name` in errors, does not take `(model, batch, key)`."""
    _check_function(name, loss, ("model", "batch", "key"))


def with_key(function: Any) -> Any:
    """Return `function(model, batch, key)` for a function of a model and a batch, else as it is."""
    try:
        arguments = inspect.signature(function, follow_wrapped=False)
        arguments.bind(None, None)
    except (TypeError, ValueError):  # it takes another number of them, or does not tell
        return function
    try:
        arguments.bind(None, None, None)
    except TypeError:
        return lambda model, batch, key: function(model, batch)
    return function


def _check_function(name: str, function: Any, wanted: tuple[str, ...]) -> None:
    call = f"{name}({', '.join(wanted)})"
    if not callable(function):
        instead = {
            "loss": "DataParallel(loss, optimizer), and state = dp.init(model)",
            "step": "DataParallel(step=step)",
            "function": "dp.predict(state, source, function)",
        }
        raise ConfigError(
            f"the {name} is a {type(function).__name__}; it must be a function {call}: use "
            f"{instead[name]}"
        )
    bases = type(function).__mro__
    is_module = any(base.__module__.startswith(("flax.", "equinox.")) for base in bases)
    try:
        # Check a decorator's own arguments, not those of the wrapped function; Linen wraps all.
        signature = inspect.signature(function, follow_wrapped=is_module)
    except (TypeError, ValueError):  # written in C, or hidden by a library
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        fix = f"accept these, used or not ({error})"
        if is_module:
            fix = f"pass a function, and the {type(function).__name__} to dp.init(model)"
        raise ConfigError(
            f"the {name} takes ({', '.join(signature.parameters)}) and is called with 3 arguments, "
            f"{call}: {fix}"
        ) from error


def check_optimizer(optimizer: Any) -> None:
    """Raise `ConfigError` if `optimizer` lacks the `init` and `update` of optax."""
    what = f"of type {type(optimizer).__name__}"
    if isinstance(optimizer, type) or inspect.isroutine(optimizer):
        what = f"{optimizer.__name__}, not called"
    elif all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return
    raise ConfigError(
        f"the optimizer is {what}; it must be an optax gradient transformation: write, for "
        "example, DataParallel(loss, optax.adam(1e-3))"
    )


def check_custom_step(given: Mapping[str, Any], layout: Layout, precision: Precision) -> None:
    """Raise `ConfigError` if `step` is not callable, or given with options it must implement."""
    _check_function("step", given["step"], ("state", "batch", "key"))
    if given["loss"] is not None:
        check_loss(given["loss"])
    its_own = [name for name in ("optimizer", "trainable", "ema") if given[name] is not None]
    if its_own:
        raise ConfigError(
            f"step= and {' and '.join(its_own)} were given; a custom step updates its state "
            "itself, including optimizers, averages and frozen parameters: do so in the step"
        )
    if precision.scales:
        raise ConfigError(
            "step= with precision='float16', which has a single loss scale; a custom step may "
            "need several: use 'bfloat16' or 'float32'"
        )
    if layout.splits_optimizer and not layout.splits_params:
        raise ConfigError(
            f"step= with layout={layout.name!r}, which splits the optimizer state; a custom "
            "step has no separate optimizer state: use layout='fsdp', or rules"
        )


def check_is_state(state: Any) -> None:
    """Raise `StateError` if `state` is not a state."""
    if isinstance(state, TrainState):
        return
    fix = "pass the one from state = dp.init(model)"
    if isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        fix = "write state, metrics = dp.step(state, batch)"
    elif isinstance(getattr(state, "state", None), TrainState):
        fix = "pass its attribute .state"
    raise StateError(f"the state is a {type(state).__name__}; it must be an rx.TrainState: {fix}")


def check_kind(state: Any) -> None:
    """Raise `StateError` if `state` is not a state, is a tracer, or was donated."""
    check_is_state(state)
    check_outside_jit(state.step)
    check_unused(state)


def check_state(state: TrainState, abstract: TrainState) -> None:
    """Raise `StateError` as `check_kind`, or if shapes or shardings are not those of `abstract`.

    Dtypes may differ, as `jax.jit` accepts any.
    """
    check_kind(state)
    check_outside_jit(state)
    check_shapes(state, abstract)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True)
    elsewhere = sum(_lies_elsewhere(*pair) for pair in leaves if _on_same_devices(*pair))
    if elsewhere:
        raise StateError(
            f"{elsewhere} arrays of the state, on devices of several processes, are split over "
            "them in another way than in this DataParallel's layout: save it with rx.fit, and "
            "resume with the other layout"
        )


def check_shapes(state: TrainState, abstract: TrainState) -> None:
    """Raise `StateError` if `state` is no state, or its shapes are not those of `abstract`."""
    check_is_state(state)
    leaves, structure = jax.tree.flatten(state)
    wanted, expected = jax.tree.flatten(abstract)
    if (structure, _shapes(leaves)) != (expected, _shapes(wanted)):
        raise StateError(_difference(state, abstract))


def _difference(state: TrainState, abstract: TrainState) -> str:
    found, wanted = (
        {path: getattr(leaf, "shape", ()) for path, leaf in by_path(tree).items()}
        for tree in (state, abstract)
    )
    paths = [path for path in {**wanted, **found} if found.get(path) != wanted.get(path)]
    if paths:
        path = min(paths, key=lambda path: list(MADE_BY).index(_field(path)))
        shapes = found.get(path), wanted.get(path)
        said = ["is not there" if each is None else f"has the shape {each}" for each in shapes]
    else:  # for example, two optimizers without arrays
        of_field: Any = lambda tree, name: jax.tree.structure(getattr(tree, name))  # noqa: E731
        path = next(f".{n}" for n in MADE_BY if of_field(state, n) != of_field(abstract, n))
        said = ["has one structure", "another"]
    made_by, fix = MADE_BY[_field(path)], "use its own, from dp.init"
    if made_by == "optimizer":
        fix = "keep the optimizer, or start it anew with dp.init(other.model(state))"
    return (
        f"state{path} {said[0]} and, in a state of this DataParallel, {said[1]}; the {made_by} "
        f"differs: {fix}"
    )


def _field(path: str) -> str:
    """Return the field of a state that a path begins with; `.params['w']` is of `params`."""
    return path[1:].replace("[", ".").partition(".")[0]


def _shapes(leaves: Iterable[Any]) -> list[tuple[int, ...]]:
    return [getattr(leaf, "shape", ()) for leaf in leaves]  # np.shape takes ten times as long


def _lies_elsewhere(leaf: Any, like: Any) -> bool:
    """Whether an array that was placed has another sharding than `like`."""
    if not isinstance(leaf, jax.Array) or leaf.sharding == like.sharding or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def _on_same_devices(leaf: Any, like: Any) -> bool:
    """Whether `jax.jit` would refuse another sharding; it moves arrays from other devices."""
    return isinstance(leaf, jax.Array) and leaf.sharding.device_set == like.sharding.device_set


def placed_as(state: TrainState, abstract: TrainState) -> TrainState:
    """Return a state of any `DataParallel` with the shardings of `abstract`, which describes it.

    The losses that the guard of a run compares are left out if nothing reads them. Arrays that
    span processes stay where they are. `StateError` if the shapes differ.
    """
    check_kind(state)
    if not jax.tree.leaves(abstract.losses):
        state = dataclasses.replace(state, losses=())
    check_shapes(state, abstract)
    leaves, wanted = jax.tree.leaves(state), jax.tree.leaves(abstract)
    if any(map(_lies_elsewhere, leaves, wanted)) and all(
        getattr(leaf, "is_fully_addressable", True) for leaf in leaves
    ):
        state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    return state
