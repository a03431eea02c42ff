"""Rematerialization: a policy for `jax.checkpoint(layer, policy=...)`, and layers in order."""

from typing import Any

import jax
from jax import lax

ATTENTION = "attention"
"""The name, for `jax.ad_checkpoint.checkpoint_name`, of attention residuals to save."""

_PRODUCTS_AND_NAMED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION),
)
_CUDNN_ATTENTION = "dot_product_attention_fwd"
"""Prefix of the names of JAX's primitives for cuDNN attention."""


def products_and_attention(primitive: Any, *arguments: Any, **params: Any) -> Any:
    """Save products with weights and the results of cuDNN attention; recompute the rest.

    The rest, norms and activation functions, is cheap to compute but takes most of the memory.
    `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` alone recomputes cuDNN attention,
    which none of JAX's own policies can save.

    Examples:
        >>> import jax
        >>> layer = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w), policy=products_and_attention)
    """
    if primitive.name.startswith(_CUDNN_ATTENTION):
        return True
    return _PRODUCTS_AND_NAMED(primitive, *arguments, **params)


@jax.custom_vjp
def in_turn(x: Any, params: Any) -> tuple[Any, Any]:
    """Return a layer's input and parameters unchanged; for layers that are not in a loop.

    In the backward pass, the previous layer waits until both gradients are computed. Otherwise,
    when reductions may overlap computation, XLA computes all layers' parameter gradients last, and
    keeps the memory for them that `jax.checkpoint` should have freed.

    Examples:
        >>> layer = lambda x, w: x @ w
        >>> loss = lambda x, weights: layer(*in_turn(layer(*in_turn(x, weights[0])), weights[1]))
    """
    return x, params


def _in_turn_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    waited: tuple[Any, Any] = lax.optimization_barrier(gradients)
    return waited


in_turn.defvjp(lambda x, params: ((x, params), None), _in_turn_backward)
