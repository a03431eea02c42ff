"""How fast a device can multiply matrices, by its data sheet."""

from replicax.analysis.hardware import chip_of_kind


def peak_flops_per_second(device_kind: str, precision: str) -> float | None:
    """The data sheet's peak of one device for matrix products; None where none is known.

    Args:
        device_kind: `jax.Device.device_kind`.
        precision: `float32` (TF32 where JAX takes that by default), `bfloat16` or `float16`.
    """
    chip = chip_of_kind(device_kind)
    return None if chip is None else chip.flops_per_second.get(precision)
