"""The devices that a step is traced for: attached or described ones.

A model that selects kernels by GPU queries this, so that it is planned exactly as it will run.
"""

import jax

traced_for = jax.make_user_context("attached")
"""`with traced_for(capability)`: the CUDA compute capability of the described devices, or None if
they are not NVIDIA GPUs. JAX retraces functions that were traced for other devices."""


def cuda_capability() -> float | None:
    """Return the CUDA compute capability being traced for; None if not an NVIDIA GPU."""
    described: float | str | None = traced_for.value
    if not isinstance(described, str):
        return described
    from jax.extend.backend import get_backend  # not before: jax.extend imports Pallas

    if "cuda" not in get_backend().platform_version:
        return None
    return float(jax.local_devices()[0].compute_capability)
