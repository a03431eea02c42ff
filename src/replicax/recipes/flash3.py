"""FlashAttention-3 from the package dew-flash-attn-cu13, for GPUs of compute capability 9.0.

The package's public function asks an attached GPU which kernel to run, so it cannot be traced for
a described one. Its two FlashAttention-3 calls can, and size the kernels' scratch themselves.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from replicax.core.ground.traced_for import cuda_capability, traced_for
from replicax.errors import ConfigError, MissingDependencyError, install_command, require
from replicax.remat import ATTENTION
from replicax.text.wording import first_line

_HOPPER = 9.0
_MOST_HEAD_DIM = 256
_WHOLE = (-1, -1)
"""The window of keys that a query attends to: no bound on either side."""
_Arrays = tuple[jax.Array, ...]


def check_flash3(dtype: Any) -> None:
    """Raise `ConfigError` if the device that is traced for, or `dtype`, does not suit it."""
    capability = cuda_capability()
    if capability != _HOPPER and (capability is not None or traced_for.value is not None):
        device = "no NVIDIA GPU" if capability is None else f"compute capability {capability}"
        raise ConfigError(
            f"attention='fa3' with {device}; FlashAttention-3 runs on {_HOPPER} (H100 and H200): "
            "use attention='cudnn'"
        )
    if jnp.dtype(dtype).itemsize != 2:
        raise ConfigError(
            f"attention='fa3' in {jnp.dtype(dtype)}; FlashAttention-3 computes in 16 bits: use "
            "precision='bfloat16', or attention='cudnn'"
        )


def check_flash3_shape(head_dim: int, separate_documents: bool) -> None:
    """Raise `ConfigError` if FlashAttention-3 does not take such heads, or documents."""
    if head_dim % 8 or head_dim > _MOST_HEAD_DIM:
        raise ConfigError(
            f"attention='fa3' with heads of {head_dim}; FlashAttention-3 takes multiples of 8 up "
            f"to {_MOST_HEAD_DIM}: change the width or the heads, or use attention='cudnn'"
        )
    if separate_documents:
        raise ConfigError(
            "attention='fa3' with separate_documents; FlashAttention-3 takes no mask: use "
            "attention='cudnn', or leave it out"
        )


@jax.custom_vjp
def flash3(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Apply causal attention to 16-bit arrays `[rows, tokens, heads, head_dim]`.

    Raises:
        MissingDependencyError: the package, or the CUDA that it loads, is not installed.
    """
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, _Arrays]:
    output, log_total = _package()._forward3(q, k, v, None, None, _scale(q), True, _WHOLE)
    output, log_total = (checkpoint_name(each, ATTENTION) for each in (output, log_total))
    return output, (q, k, v, output, log_total)


def _backward(kept: _Arrays, gradient: jax.Array) -> _Arrays:
    found: _Arrays = _package()._backward3(
        gradient, *kept, None, None, _scale(gradient), True, _WHOLE
    )
    return found


flash3.defvjp(_forward, _backward)


def _package() -> Any:
    try:
        return require("dew_flash_attn", "flash3")
    except OSError as error:
        raise MissingDependencyError(
            f"attention='fa3': {first_line(error)}; its package loads CUDA 13: "
            f"{install_command('flash3')}"
        ) from error


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])
