"""The optimizer of a model: trainable parameters, required gradients, and parameter averaging."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.ground.precision import to_sum
from replicax.core.models.definition import Definition
from replicax.core.models.leaf_checks import check_trained
from replicax.core.step.objective import only_read
from replicax.errors import ConfigError

Trainable = Any
"""One or more regexes searched in parameter paths (`['dense']['kernel']`); a function of the path;
or, for an NNX model, a filter such as `nnx.LoRAParam`."""

_TRAINED, _FROZEN = "trained", "frozen"

_NO_SEARCH = "use optax.lbfgs(0.1, linesearch=None)"
_INSTEAD = {
    optax.ScaleByZoomLinesearchState: _NO_SEARCH,
    optax.ScaleByBacktrackingLinesearchState: _NO_SEARCH,
    optax.contrib.SAMState: "use opaque_mode=False, as examples/sam.py does",
    optax.LookaheadState: "average the parameters with DataParallel(ema=0.99)",
}
"""Fixes, by the type of state of an optimizer that needs more than a step provides."""


@dataclasses.dataclass(frozen=True)
class Updater:
    """An optimizer and its requirements."""

    optimizer: optax.GradientTransformation
    takes_value: bool
    """Whether its `update` takes the loss as `value`, as line searches and plateaus do."""
    read: tuple[bool, ...] | None
    """For each parameter, whether its gradient is read (not if frozen); None for all."""
    names_replicas: bool = False
    """Whether it names the axis of the replicas, e.g. in `jax.lax.pmean(leaf, "data")`."""


def updater(
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
    ema: float | None,
    definition: Definition,
    params: PyTree,
) -> Updater:
    """Return the updater of the trainable parameters; `params` are arrays or their shapes."""
    if ema is not None:
        optimizer = averaging(optimizer, ema)
    if trainable is not None:
        optimizer = _training(optimizer, trainable, definition, params)
    found = _updater(optimizer, *jax.tree.flatten(jax.eval_shape(lambda params: params, params)))
    check_trained(only_read(params, found.read))
    return found


def _updater(optimizer: Any, leaves: Sequence[Any], structure: Any) -> Updater:
    given = optimizer.init, optimizer.update, structure, *leaves
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        try:  # it may only pass `value` on to other optimizers, so try
            return Updater(optimizer, True, *_read(*given, value=jax.ShapeDtypeStruct((), "f4")))
        except ConfigError as error:
            if not isinstance(error.__cause__, TypeError):
                raise
    return Updater(optimizer, False, *_read(*given))


@lru_cache(maxsize=16)
def _read(
    init: Any, update: Any, structure: Any, *leaves: Any, **more: jax.ShapeDtypeStruct
) -> tuple[tuple[bool, ...] | None, bool]:
    """Return which gradients it reads, and whether it names the axis of the replicas."""
    updates = lambda gradient, params, state, more: update(gradient, state, params, **more)  # noqa: E731
    shapes, state = jax.tree.unflatten(structure, leaves), None
    try:
        state = jax.eval_shape(init, shapes)
        closed, outputs = jax.make_jaxpr(updates, return_shape=True)(shapes, shapes, state, more)
    except NameError:  # it names a mesh axis, defined only inside the step
        return None, True
    except ConfigError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        kinds = map(type, jax.tree.leaves(state, is_leaf=lambda node: type(node) in _INSTEAD))
        fixes = (_INSTEAD[kind] for kind in kinds if kind in _INSTEAD)
        raise ConfigError(
            f"the optimizer raised {said}; a step calls update(gradient, state, params), with "
            f"value=loss if supported, and nothing else: {next(fixes, 'fix it, or use another')}"
        ) from error
    new, old = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (outputs[0], shapes))
    other = [f"{one} and not {like}" for one, like in zip(new, old, strict=False) if one != like]
    if other and len(new) == len(old):
        raise ConfigError(
            f"the optimizer returns updates of shape {other[0]}, as if it expected one gradient "
            "per row; it is given the mean gradient: use another, or a custom step that takes "
            "rx.mean of jax.vmap(jax.grad(...)) of the rows"
        )
    _, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    read = tuple(used[: len(leaves)])
    return None if all(read) else read, False


def _training(
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
    definition: Definition,
    params: PyTree,
) -> optax.GradientTransformation:
    """Return `optimizer` restricted to the trainable parameters.

    It does not read gradients of the others, so these are neither computed nor reduced, and it has
    no state for them.
    """
    picks = _picker(trainable, definition, params)
    paths = list(by_path(params))
    labels = [_TRAINED if picks(path) else _FROZEN for path in paths]
    if _TRAINED not in labels:
        raise ConfigError(
            f"trainable={trainable!r} matches none of the {len(paths)} parameters, such as "
            f"{', '.join(paths[:3])}: fix it, or omit it to train all"
        )
    tree = jax.tree.unflatten(jax.tree.structure(params), labels)
    return optax.partition({_TRAINED: optimizer, _FROZEN: optax.set_to_zero()}, tree)


def _picker(trainable: Trainable, definition: Definition, params: PyTree) -> Callable[[str], Any]:
    if inspect.isroutine(trainable):
        return trainable
    regexes = [trainable] if isinstance(trainable, str) else trainable
    if isinstance(regexes, Sequence) and all(isinstance(regex, str) for regex in regexes):
        try:
            compiled = [re.compile(regex) for regex in regexes]
        except re.error as error:
            raise ConfigError(f"trainable={trainable!r} is no regex ({error}): fix it") from error
        return lambda path: any(regex.search(path) for regex in compiled)
    if not hasattr(definition, "paths_of"):
        raise ConfigError(
            f"trainable={trainable!r}; it must be one or more regexes searched in parameter paths, "
            "a function of the path, or for an NNX model an NNX filter: use one of these"
        )
    return frozenset(definition.paths_of(trainable, params)).__contains__


class Averaged(NamedTuple):
    """State of an optimizer, and the average of the parameters it trains."""

    optimizer: PyTree
    average: PyTree
    """Shaped like the parameters, in float32 or wider: a narrower dtype would round small steps
    away."""


def check_decay(decay: Any) -> None:
    """Raise `ConfigError` if `decay` is not a valid decay rate."""
    if decay is not None and not (isinstance(decay, Real) and 0 < float(decay) < 1):
        raise ConfigError(
            f"ema={decay}; it is the decay rate of the average, above 0 and below 1: use "
            "0.999, for example"
        )


def averaging(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """Return `optimizer` with an exponential moving average of the parameters in its state.

    The average starts at the initial parameters. After each update it is `decay` times the previous
    average plus `1 - decay` times the new parameters. It needs the memory of the parameters in
    float32, split like them if a layout splits the optimizer state, and no communication.
    """

    def init(params: PyTree) -> Averaged:
        return Averaged(optimizer.init(params), jax.tree.map(to_sum, params))

    def update(
        gradient: PyTree, state: Averaged, params: PyTree = None, **more: Any
    ) -> tuple[PyTree, Averaged]:
        updates, inner = optimizer.update(gradient, state.optimizer, params, **more)
        after = jax.tree.map(to_sum, optax.apply_updates(params, updates))
        average = optax.incremental_update(after, state.average, 1 - decay)
        return updates, Averaged(inner, average)

    kinds = optax.GradientTransformation, optax.GradientTransformationExtraArgs
    return kinds[isinstance(optimizer, kinds[1])](init, update)


def average_of(opt_state: PyTree, params: PyTree) -> PyTree:
    """Return an optimizer's average, in the dtypes of `params`, or raise `ConfigError`."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Averaged))
    averages = [node.average for node in nodes if isinstance(node, Averaged)]
    if not averages:
        raise ConfigError(
            "ema=True but the state has no average of the parameters; keep one with "
            "DataParallel(loss, optimizer, ema=0.999)"
        )

    def newest(average: Any, param: jax.Array) -> jax.Array:
        frozen = isinstance(average, optax.MaskedNode)
        return param if frozen else jnp.asarray(average, param.dtype)

    return jax.tree.map(
        newest, averages[0], params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
