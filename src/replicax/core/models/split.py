"""Any model <-> (params, extras): its trainable arrays, and its other arrays."""

import sys
from typing import Any

import jax

from replicax.core.models.definition import Parts
from replicax.core.models.foreign import refuse_foreign
from replicax.core.models.pytree import split_pytree
from replicax.core.models.stateful import Stateful
from replicax.core.refused import check_unused
from replicax.errors import ConfigError


def split_model(model: Any) -> Parts:
    """Return the definition, params and extras of a model of any kind.

    Raises:
        ConfigError: nothing to train, or what is no model.
        StateError: arrays that a step consumed.
    """
    definition, params, extras = _split(model)
    if not jax.tree.leaves(params):
        leaves = jax.tree.leaves(extras if extras else model)
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ConfigError(
            f"the model has {len(leaves)} leaves ({', '.join(kinds) or 'none'}) and 0 trainable "
            "arrays; a trainable array has a floating-point dtype: make it one with jnp.asarray"
        )
    check_unused((params, extras))
    return definition, params, extras


def _split(model: Any) -> Parts:
    # A model of a library that was never imported cannot be here, so none is imported for it.
    if "flax" in sys.modules:
        import flax.linen
        import flax.nnx

        if isinstance(model, flax.nnx.Module):
            from replicax.core.models.nnx import split_nnx

            return split_nnx(model)
        if isinstance(model, flax.linen.Module):
            from replicax.core.models.linen import split_linen

            return split_linen(model)
    refuse_foreign(model.model if isinstance(model, Stateful) else model)
    if "equinox" in sys.modules:
        from replicax.core.models.equinox import holds_equinox, split_equinox

        if holds_equinox(model):
            return split_equinox(model)
    return split_pytree(model)
