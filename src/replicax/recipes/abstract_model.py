"""A model of any kind with shapes for arrays."""

from collections.abc import Callable
from typing import Any

import jax

from replicax.core.models.definition import Definition, PyTree
from replicax.core.models.split import split_model


def abstract_model(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return `make(*arguments)` with shapes for arrays; really made where it cannot be traced."""
    definitions: list[Definition] = []

    def parts() -> tuple[PyTree, PyTree]:
        definition, params, extras = split_model(make(*arguments))
        definitions.append(definition)
        return params, extras

    try:
        params, extras = jax.eval_shape(parts)
    except jax.errors.JAXTypeError:  # it looks at values
        return make(*arguments)
    return definitions[0].merge(params, extras)
