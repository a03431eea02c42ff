"""Encoded gradients between islands that exchange in every step, with error feedback."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from replicax.core.ground.codecs import Codec
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import from_host, whole_on_host
from replicax.core.ground.vectors import as_blocks
from replicax.core.placement.mesh import AnyMesh, options_on, replicated


class CodedSums:
    """Adds the sums of all islands; gradients travel by `codec`, everything else in float32.

    The residual is one float32 vector of each island: the sum of gradients that it did not send.
    Payloads are added in rank order, so that all islands get the same bits.
    """

    def __init__(self, codec: Codec, mesh: AnyMesh, job: Job) -> None:
        self._job, self._everywhere = job, replicated(mesh)
        compiled = partial(jax.jit, compiler_options=options_on(mesh))
        self._encode = compiled(partial(_encoded, codec), out_shardings=self._everywhere)
        self._add = compiled(partial(_added, codec), donate_argnums=0)
        self._decode = compiled(_decoded)

    def __call__(self, sums: Any, residual: jax.Array) -> tuple[Any, jax.Array]:
        """Return the sums over all islands, and the next residual."""
        payload, exact, left = self._encode(sums, residual)
        sent = [whole_on_host(array) for array in (payload, exact)]
        total = np.zeros(residual.shape, np.float32), np.zeros(exact.shape, np.float32)
        for arrays in self._job.share(sent)():
            total = self._add(total, *(from_host(array, self._everywhere) for array in arrays))
        found: tuple[Any, jax.Array] = self._decode(sums, *total, left, residual)
        return found


def _encoded(codec: Codec, sums: Any, residual: jax.Array) -> tuple[jax.Array, ...]:
    total, *rest = sums
    gradient = residual + as_blocks(total.gradient)[0]
    payload = codec.encode(gradient)
    left = gradient - codec.decode(payload, gradient.size)
    return payload, ravel_pytree((total.weighted, rest))[0], left


def _added(codec: Codec, total: tuple[Any, Any], payload: jax.Array, exact: jax.Array) -> Any:
    return total[0] + codec.decode(payload, total[0].size), total[1] + exact


def _decoded(
    sums: Any, gradient: jax.Array, exact: jax.Array, left: jax.Array, residual: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the sums of all, and what is kept: `left`, or `residual` if the step is skipped."""
    total, *rest = sums
    kept = jnp.where(jnp.all(jnp.isfinite(gradient)), left, residual)
    _, unravel = ravel_pytree((total.weighted, rest))
    weighted, rest = unravel(exact)
    gradient = as_blocks(total.gradient)[1](gradient)
    return (type(total)(gradient, weighted), *rest), kept
