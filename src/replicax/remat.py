"""Rematerialization: policies for `jax.checkpoint(layer, policy=...)`, and layers in turn."""

from typing import Any

import jax
from jax import lax

ATTENTION = "attention"
"""The name, for `jax.ad_checkpoint.checkpoint_name`, of what attention wants kept."""

_PRODUCTS_AND_NAMED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION),
)
_CUDNN_ATTENTION = "dot_product_attention_fwd"
"""How the names of JAX's primitives for cuDNN's attention begin."""


def products_and_attention(primitive: Any, *arguments: Any, **params: Any) -> Any:
    """Keep products with weights, and attention as cuDNN computes it; compute the rest again.

    What is computed again is cheap, norms and activation functions, and takes most of the memory.
    `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` alone has cuDNN's attention computed
    twice, which no policy of JAX's sees.

    Examples:
        >>> import jax
        >>> layer = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w), policy=products_and_attention)
    """
    if primitive.name.startswith(_CUDNN_ATTENTION):
        return True
    return _PRODUCTS_AND_NAMED(primitive, *arguments, **params)


@jax.custom_vjp
def in_turn(x: Any, params: Any) -> tuple[Any, Any]:
    """Return a layer's input and parameters as they are, for layers that are no loop.

    Backward, the layer before waits until the gradients of both are there. Else, where reductions
    may run beside computation, XLA computes the gradients of all layers' parameters last, and keeps
    for them what `jax.checkpoint` was to free.

    Examples:
        >>> layer = lambda x, w: x @ w
        >>> loss = lambda x, weights: layer(*in_turn(layer(*in_turn(x, weights[0])), weights[1]))
    """
    return x, params


def _in_turn_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    waited: tuple[Any, Any] = lax.optimization_barrier(gradients)
    return waited


in_turn.defvjp(lambda x, params: ((x, params), None), _in_turn_backward)
