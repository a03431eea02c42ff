"""How fast a device can multiply matrices: by its data sheet, or by a measurement."""

import re
import time

import jax
import jax.numpy as jnp

SIZE = 1024
REPEATS = 5

# Dense TFLOP/s with bfloat16 and with float32 operands. Where a data sheet has figures "with
# sparsity" only, half of them. bfloat16 accumulates in float32; None: the device has no such units.
# float32 is what JAX does with it by default: TF32 on the tensor cores of Ampere and newer, plain
# float32 on older GPUs, and bfloat16 multiplications on TPUs.
_TERA: tuple[tuple[str, float | None, float], ...] = (
    # NVIDIA V100 data sheet (January 2020)
    (r"Tesla V100-SXM\d-.*", None, 15.7),
    (r"Tesla V100-PCIE-.*", None, 14.0),
    # NVIDIA T4 data sheet (March 2019)
    (r"(Tesla|NVIDIA) T4", None, 8.1),
    # NVIDIA A100 data sheet (June 2021)
    (r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 \d+GB PCIe", 312.0, 156.0),
    # NVIDIA A10G data sheet (February 2022)
    (r"NVIDIA A10G", 70.0, 35.0),
    # NVIDIA H100 data sheet: SXM, PCIe (2022)
    (r"NVIDIA H100 80GB HBM3", 989.4, 494.7),
    (r"NVIDIA H100 PCIe", 756.0, 378.0),
    # NVIDIA H200 data sheet: SXM (2024)
    (r"NVIDIA H200", 989.4, 494.7),
    # NVIDIA L4 data sheet (March 2023)
    (r"NVIDIA L4", 121.0, 60.0),
    # NVIDIA Ada GPU architecture white paper, appendix A
    (r"NVIDIA GeForce RTX 4090", 165.2, 82.6),
    # Cloud TPU documentation, system architecture: peak compute per chip (bf16)
    (r"TPU v4", 275.0, 275.0),
    (r"TPU v5 lite|TPU v5e", 197.0, 197.0),
    (r"TPU v5|TPU v5p", 459.0, 459.0),
    (r"TPU v6 lite|TPU v6e", 918.0, 918.0),
)


def peak_flops_per_second(device_kind: str, precision: str) -> float | None:
    """The data sheet's peak of one device for matrix products; None where none is known.

    Args:
        device_kind: `jax.Device.device_kind`.
        precision: `float32` (TF32 where JAX takes that by default) or `bfloat16`.
    """
    for pattern, bfloat16, float32 in _TERA:
        if re.fullmatch(pattern, device_kind):
            tera = bfloat16 if precision == "bfloat16" else float32
            return None if tera is None else tera * 1e12
    return None


def product_flops_per_second(device: jax.Device, precision: str) -> float:
    """The rate of a product of two `[1024, 1024]` matrices, the best of some, on one device.

    Not the hardware's peak: what XLA makes of the plainest product on the cores it has now.
    """
    ones = jnp.ones((SIZE, SIZE), jnp.dtype(precision), device=device)
    product = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(1 + REPEATS):  # the first compiles
        started = time.perf_counter()
        product(ones, ones).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return float(2 * SIZE**3 / min(seconds[1:]))
