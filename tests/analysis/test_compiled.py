"""The cost of a step, read from its compiled text, against counts by hand."""

import math
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.analysis.compiled import Collectives, CompiledStep, convolution_flops, inspect

ROWS, IN, HIDDEN, OUT = 64, 16, 32, 8
MODEL = {"w1": jnp.ones((IN, HIDDEN)), "w2": jnp.ones((HIDDEN, OUT))}
BATCH = {"x": np.ones((ROWS, IN), np.float32), "y": np.ones((ROWS, OUT), np.float32)}
GRADIENT_BYTES = 4 * (IN * HIDDEN + HIDDEN * OUT)
SCALAR_BYTES = 4 * 3  # the loss's total, its weight, and the divisor of the gradient
# Forward and both weight gradients, and the gradient that goes back through the second layer.
FLOPS = 2 * ROWS * (2 * IN * HIDDEN + 3 * HIDDEN * OUT)


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ model["w1"]) @ model["w2"] - batch["y"]) ** 2, axis=-1)


@cache
def step(mode: str, accumulate: int = 1, donate: bool = True) -> Any:
    dp = rx.DataParallel(loss, optax.adam(0.1), mode=mode, accumulate=accumulate, donate=donate)
    return inspect(dp.lower(MODEL, BATCH).compile())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_per_replica_step_has_one_reduction_whatever_the_accumulation(
    mode: str, accumulate: int
) -> None:
    expected = Collectives("all-reduce", 1, GRADIENT_BYTES + SCALAR_BYTES)
    assert step(mode, accumulate).collectives == (expected,)
    assert step(mode, accumulate).count("all-reduce") == 1
    assert step(mode, accumulate).count("all-gather") == 0


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mode", ["jit", "shard_map", "pmap"])
def test_the_flops_of_a_device_are_its_share(mode: str, accumulate: int) -> None:
    assert step(mode, accumulate).flops * 8 == FLOPS


def test_the_flops_of_a_convolution_are_those_of_the_hand_count() -> None:
    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 12, 12, 3), (5, 5, 3, 7))]
    compiled = jax.jit(convolve).lower(*shapes).compile()
    assert inspect(compiled).flops == 2 * (2 * 12 * 12 * 7) * (5 * 5 * 3)


def test_a_donated_state_is_reused() -> None:
    kept, given = step("jit", donate=False).memory, step("jit").memory
    assert kept.aliased == 0
    assert given.aliased >= 3 * GRADIENT_BYTES
    assert given.peak < kept.peak


class Compiled:
    """Stands in for a compiled function."""

    def __init__(self, line: str) -> None:
        self._line = line

    def as_text(self) -> str:
        return (
            "ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {\n"
            "  %p = f32[8]{0} parameter(0)\n"
            "  %q = f32[8]{0} parameter(1)\n"
            f"  {self._line}\n"
            "}\n"
        )

    def memory_analysis(self) -> None:
        return None


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("%r = f32[8]{0} all-reduce(%p), to_apply=%add", "all-reduce", 32),
        ("%r = (f32[8]{0}, f32[8]{0}) all-reduce(%p, %q), to_apply=%add", "all-reduce", 64),
        ("%r = f32[8]{0} all-reduce-start(%p), to_apply=%add", "all-reduce", 32),
        ("%r = (f32[8], f32[8]) all-reduce-start(%p, %q), to_apply=%add", "all-reduce", 64),
        ("%r = f32[1]{0} reduce-scatter(%p), to_apply=%add", "reduce-scatter", 4),
        ("%r = (f32[8]{0}, f32[64]{0}) all-gather-start(%p)", "all-gather", 256),
        ("%r = ((f32[8], f32[8]), (f32[64], f32[64])) all-gather-start(%p, %q)", "all-gather", 512),
        (
            "%r = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p)",
            "collective-permute",
            32,
        ),
    ],
    ids=lambda value: re.sub(r".* ([\w-]+)\((.*)\).*", r"\1 \2", str(value)).replace(" ", "-"),
)
def test_a_collective_moves_its_result(line: str, kind: str, size: int) -> None:
    read: CompiledStep = inspect(Compiled(line))  # type: ignore[arg-type]
    assert read.collectives == (Collectives(kind, 1, size),)


@pytest.mark.parametrize(("axis", "group"), [("model", 2), ("data", 4), (("data", "model"), 8)])
def test_a_device_sends_in_the_ring_of_its_group(axis: Any, group: int) -> None:
    mesh = rx.make_mesh(4, 2)
    spec = jax.sharding.PartitionSpec(("data", "model"))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    read = inspect(jax.jit(summed).lower(jnp.ones(64)).compile())
    assert read.collectives == (Collectives("all-reduce", 1, 32),)
    assert read.sent_bytes == 2 * 32 * (group - 1) / group


def test_a_collective_that_goes_on_in_another_instruction_is_not_another() -> None:
    line = "%r = f32[64]{0} all-gather(%p), backend_config="
    start, further = (
        f'{line}{{"async_collective_fusion_config":{{"flag_start":"{flag}","flag_end":"{flag}"}}}}'
        for flag in (-1, 2)
    )
    read = inspect(Compiled(f"{start}\n  {further}"))  # type: ignore[arg-type]
    assert read.collectives == (Collectives("all-gather", 1, 256),)


@pytest.mark.parametrize(
    ("image", "kernel", "result", "attributes", "seen"),
    [
        # Padded at the edges, whose outputs count as the others do.
        ((2, 12, 12, 3), (5, 5, 3, 7), (2, 12, 12, 7), "size=5x5 pad=2_2x2_2", 5 * 5 * 3),
        # A batch of 4 x 12 products, as a TPU has it: all but one tap meet zeros.
        ((4, 12, 64, 9), (4, 12, 9, 8), (4, 12, 64, 8), "size=4x12 stride=3x11 lhs_dilate=4x12", 9),
        # One product for each of 12 outputs: all but one tap lie outside of the image.
        ((4, 1, 64, 9), (1, 12, 9, 8), (4, 12, 64, 8), "size=1x12 pad=0_0x11_11", 9),
        # The gradient of a convolution of stride 2: zeros between the elements of its image.
        ((2, 6, 6, 3), (3, 3, 3, 7), (2, 11, 11, 7), "size=3x3 pad=1_1x1_1 lhs_dilate=2x2", 4 * 3),
        # The gradient of its kernel: elements of the second operand apart from each other.
        ((2, 13, 13, 3), (6, 6, 3, 7), (2, 3, 3, 7), "size=6x6 rhs_dilate=2x2", 6 * 6 * 3),
    ],
    ids=["padded", "batch", "outside", "dilated image", "dilated kernel"],
)
def test_the_taps_of_a_convolution(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    result: tuple[int, ...],
    attributes: str,
    seen: int,
) -> None:
    labels = "01bf_01io->01bf" if 64 in image else "b01f_01io->b01f"
    found = convolution_flops(
        image, kernel, result, f"window={{{attributes}}}, dim_labels={labels}"
    )
    assert found == 2 * math.prod(result) * seen
