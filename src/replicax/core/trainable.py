"""Which parameters train: those whose path a filter names, or that an NNX filter picks."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from replicax.core.models.definition import Definition, PyTree
from replicax.errors import ConfigError

Trainable = Any
"""A regex or some of them, found in a parameter's path (`['dense']['kernel']`); a function of that
path; or, for an NNX model, a filter such as `nnx.LoRAParam`."""

_TRAINED, _FROZEN = "trained", "frozen"


def training(
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
    definition: Definition,
    params: PyTree,
) -> optax.GradientTransformation:
    """Return `optimizer` for the parameters that train; it leaves the others as they are.

    It does not read the gradients of the others, so none is computed or reduced, and has no state
    for them.

    Raises:
        ConfigError: no parameter is named, or what names them is no filter.
    """
    picks = _picker(trainable, definition, params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    labels = [_TRAINED if picks(path) else _FROZEN for path in paths]
    if _TRAINED not in labels:
        raise ConfigError(
            f"trainable={trainable!r} names none of the {len(paths)} parameters, such as "
            f"{', '.join(paths[:3])}: correct it, or leave it out to train all"
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
            f"trainable={trainable!r}; it is a regex found in a parameter's path, several, or a "
            "function of the path, and for an NNX model also a filter of NNX: use one of these"
        )
    return frozenset(definition.paths_of(trainable, params)).__contains__
