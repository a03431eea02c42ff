"""Rematerialization: a policy for `jax.checkpoint(layer, policy=...)`, and layers in order."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

ATTENTION = "attention"
"""The name, for `jax.ad_checkpoint.checkpoint_name`, of attention residuals to save."""

_CUDNN_ATTENTION = "dot_product_attention_fwd"
"""Prefix of the names of JAX's primitives for cuDNN attention."""


def with_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy that saves attention, too, also cuDNN's, which none of JAX's own can save.

    Examples:
        >>> import jax
        >>> policy = with_attention(jax.checkpoint_policies.save_only_these_names("hidden"))
        >>> layer = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w), policy=policy)
    """
    named = jax.checkpoint_policies.save_only_these_names(ATTENTION)
    both = jax.checkpoint_policies.save_from_both_policies(policy, named)

    def saves(primitive: Any, *arguments: Any, **params: Any) -> Any:
        is_attention = primitive.name.startswith(_CUDNN_ATTENTION)
        return is_attention or both(primitive, *arguments, **params)

    return saves


_PRODUCTS_AND_ATTENTION = with_attention(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def products_and_attention(primitive: Any, *arguments: Any, **params: Any) -> Any:
    """Save products with weights and the results of cuDNN attention; recompute the rest.

    The rest, norms and activation functions, is cheap to compute but takes most of the memory.
    `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` alone recomputes cuDNN attention.

    Examples:
        >>> import jax
        >>> layer = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w), policy=products_and_attention)
    """
    return _PRODUCTS_AND_ATTENTION(primitive, *arguments, **params)


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
