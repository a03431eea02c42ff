"""The devices that a step is traced for: the attached, or described ones.

A model that takes a kernel only where the GPU has it asks here, and is planned as it will run.
"""

import jax
from jax.extend.backend import get_backend

traced_for = jax.make_user_context("attached")
"""`with traced_for(capability)`: the CUDA compute capability of the devices that are described, or
None where they are no NVIDIA GPUs. JAX traces anew what it has traced for others."""


def cuda_capability() -> float | None:
    """The CUDA compute capability that is traced for; None where it is no NVIDIA GPU."""
    described: float | str | None = traced_for.value
    if not isinstance(described, str):
        return described
    if "cuda" not in get_backend().platform_version:
        return None
    return float(jax.local_devices()[0].compute_capability)
