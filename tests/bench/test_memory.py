"""Memory over time: against counts by hand, and against what XLA says it reserves."""

import dataclasses
import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.analysis.hlo import Instruction
from replicax.analysis.memory_use import MemoryUse, compile_with_memory
from replicax.bench.memory_curve import (
    BACKWARD,
    FORWARD,
    IDLE,
    PHASES,
    REDUCTION,
    UPDATE,
    Event,
    Timeline,
    measure_timeline,
    memory_timeline,
    phase_of,
    traced_events,
)
from replicax.errors import ConfigError

ROWS, WIDTH, LAYERS = 64, 32, 4
BATCH = {"x": np.ones((ROWS, WIDTH), np.float32)}
PARAMETER_BYTES = 4 * LAYERS * WIDTH * 4 * WIDTH * 2


def model() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(first, (LAYERS, WIDTH, 4 * WIDTH)) / 6,
        "down": jax.random.normal(second, (LAYERS, 4 * WIDTH, WIDTH)) / 12,
    }


def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def stack_loss(model: Any, batch: Any, key: Any, *, remat: bool) -> jax.Array:
    body = jax.checkpoint(layer) if remat else layer
    return jnp.mean(jax.lax.scan(body, batch["x"], model)[0] ** 2, axis=-1)


def plain_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    x = batch["x"]
    for at in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda leaf, at=at: leaf[at], model))
    return jnp.mean(x**2, axis=-1)


LOSSES = {
    "plain": plain_loss,
    "scan": partial(stack_loss, remat=False),
    "scan, remat": partial(stack_loss, remat=True),
}


def data_parallel(loss: str, **options: Any) -> rx.DataParallel:
    return rx.DataParallel(LOSSES[loss], optax.adam(1e-3), **options)


@cache
def compiled(
    loss: str, mode: str = "shard_map", accumulate: int = 1, donate: bool = True
) -> tuple[jax.stages.Compiled, MemoryUse]:
    dp = data_parallel(loss, mode=mode, accumulate=accumulate, donate=donate)
    return compile_with_memory(dp.lower(model(), BATCH))


def order(timeline: Timeline) -> list[str]:
    return [phase for phase, _ in itertools.groupby(timeline.phase)]


@pytest.mark.promise("bench.memory-of-xla")
@pytest.mark.parametrize(
    ("loss", "mode", "accumulate"),
    only(
        [("plain", "jit", 1), ("scan, remat", "shard_map", 4)],
        [
            ("plain", "shard_map", 1),
            ("plain", "jit", 1),
            ("plain", "single", 1),
            ("scan", "shard_map", 1),
            ("scan, remat", "shard_map", 1),
            ("scan, remat", "pmap", 1),
            ("scan, remat", "shard_map", 4),
            ("scan", "jit", 4),
        ],
    ),
)
def test_the_peak_is_what_xla_reserves(loss: str, mode: str, accumulate: int) -> None:
    step = compiled(loss, mode, accumulate)
    memory = inspect(step[0]).memory
    timeline = memory_timeline(*step)
    assert timeline.reserved_bytes == memory.peak
    assert 0.95 * memory.peak <= timeline.peak <= memory.peak
    assert timeline.bytes.min() >= memory.arguments
    assert timeline.bytes[-1] < timeline.peak


def test_an_output_is_not_alive_before_it_is_written() -> None:
    # The only reason for a peak that is much lower: the new state of a step that does not donate
    # is reserved from the start, and written when the activations are gone.
    memory = inspect(compiled("scan", donate=False)[0]).memory
    timeline = memory_timeline(*compiled("scan", donate=False))
    assert memory.peak - memory.outputs <= timeline.peak < memory.peak


def test_every_byte_of_a_chain_of_products_is_counted() -> None:
    def chain(state: Any, x: jax.Array) -> jax.Array:
        for weight in state:
            x = x @ weight
        return x

    widths = (16, 64, 128, 32, 16)
    state = [jnp.ones(shape) for shape in itertools.pairwise(widths)]
    step = compile_with_memory(jax.jit(chain).lower(state, jnp.ones((64, widths[0]))))
    timeline = memory_timeline(*step)
    weights = sum(weight.nbytes for weight in state)
    result = [4 * 64 * width for width in widths[1:]]
    arguments = weights + 4 * 64 * widths[0]
    assert timeline.state_bytes == weights
    assert list(timeline.bytes - arguments) == [
        result[0],
        result[0] + result[1],
        result[1] + result[2],
        result[2] + result[3],
    ]
    assert list(timeline.edges) == [0, 1, 2, 3, 4]
    assert not timeline.measured


def test_micro_batches_go_forward_and_backward_in_turn() -> None:
    expected = [*[FORWARD, BACKWARD] * 4, REDUCTION, UPDATE]
    assert order(memory_timeline(*compiled("scan, remat", accumulate=4))) == expected


def test_several_kernels_of_an_instruction_are_one_execution() -> None:
    step = compiled("scan, remat")
    run = list(step[1].in_order())
    some = sorted({each.name for each in run if "fusion" in each.name})[::3]  # most are one
    whole = [Event(each.name, at, at + 1) for at, each in enumerate(run * 2)]
    halves = [
        dataclasses.replace(event, start=event.start + half / 2, end=event.start + (half + 1) / 2)
        for event in whole
        for half in range(2 if event.name in some else 1)
    ]
    expected = memory_timeline(*step, whole)
    timeline = memory_timeline(*step, halves)
    assert timeline.measured
    assert timeline.peak == expected.peak
    assert timeline.steps == expected.steps


def test_times_of_something_else_are_not_used() -> None:
    timeline = memory_timeline(*compiled("plain"), [Event("another.1", 0.0, 1.0)])
    assert not timeline.measured
    assert list(timeline.bytes) == list(memory_timeline(*compiled("plain")).bytes)


def test_two_steps_are_measured(tmp_path: Path) -> None:
    dp = data_parallel("scan, remat", mesh=rx.make_mesh(2), mode="shard_map")
    state = dp.init(model())
    (batch,) = dp.feed(BATCH, batch_size=ROWS)
    state, timeline = measure_timeline(dp, state, batch, tmp_path)
    assert int(state.step) == 3
    assert timeline.measured
    assert len(timeline.steps) == 2
    assert timeline.edges[0] == 0
    assert np.all(np.diff(timeline.edges) > 0)
    assert 0 < timeline.edges[-1] < 60  # seconds, not their parts
    assert len(timeline.bytes) == len(timeline.phase) == len(timeline.edges) - 1
    assert {*PHASES, IDLE} == set(timeline.phase)
    # The CPU runs what it can at the same time, so the peak need not be that of the schedule.
    arguments = compile_with_memory(dp.lower(state, batch))[1].argument_bytes
    assert arguments < timeline.peak <= timeline.reserved_bytes
    assert timeline.state_bytes == 3 * PARAMETER_BYTES + 4 * 3  # Adam's moments; three scalars


def test_a_folder_without_a_trace_has_no_events(tmp_path: Path) -> None:
    assert traced_events(tmp_path, "jit_step") == []


def test_a_backend_that_does_not_tell_is_refused() -> None:
    class Silent:
        def compile(self, compiler_options: Any) -> "Silent":
            return self

        def as_text(self) -> None:
            return None

    with pytest.raises(ConfigError, match=r"cpu\b.* buffer "):
        compile_with_memory(Silent())  # type: ignore[arg-type]


def test_a_cached_program_is_compiled_again(tmp_path: Path) -> None:
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
    keys = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {key: getattr(jax.config, key) for key in keys}
    try:
        for key, value in zip(keys, (str(tmp_path), 0.0), strict=True):
            jax.config.update(key, value)
        used = [compile_with_memory(lowered)[1].bytes for _ in range(2)]
        assert list(used[0]) == list(used[1])
        assert getattr(jax.config, keys[0]) == str(tmp_path)
    finally:
        for key, value in before.items():
            jax.config.update(key, value)


@pytest.mark.parametrize(
    ("op_name", "opcode", "phase"),
    [
        ("jit(f)/gradient/jvp()/dot_general", "dot", FORWARD),
        ("jit(f)/gradient/while/body/closed_call/jvp()/while/body/mul", "fusion", FORWARD),
        ("jit(f)/gradient/transpose(jvp())/dot_general", "dot", BACKWARD),
        ("jit(f)/gradient/transpose(jvp())/while/body/checkpoint/tanh", "fusion", BACKWARD),
        ("jit(f)/gradient/transpose(gradient)/jvp()/select_n", "fusion", BACKWARD),
        ("jit(f)/gradient/jvp(jit(transpose))/transpose", "transpose", FORWARD),
        ("jit(f)/gradient/(jvp()/reduce_sum:transpose(jvp())/dot_general)", "fusion", BACKWARD),
        ("jit(f)/gradient/(jvp()/sum:transpose(jvp())/dot)", "all-reduce", REDUCTION),
        ("jit(f)/gradient/transpose(jvp())/dot", "reduce-scatter", REDUCTION),
        ("jit(f)/gradient/transpose(jvp())/dot", "all-reduce-start", REDUCTION),
        ("jit(f)/gradient/jvp()/psum", "all-reduce", FORWARD),
        ("jit(f)/shard_map/reduction/psum", "all-reduce", REDUCTION),
        ("jit(f)/shard_map/update/jit(_where)/select_n", "fusion", UPDATE),
        ("jit(f)/shard_map/gradient/while/body/add", "fusion", None),
        ("", "copy", None),
    ],
)
def test_the_phase_is_in_the_name(op_name: str, opcode: str, phase: str | None) -> None:
    instruction = Instruction("name.1", "", opcode, (), f'metadata={{op_name="{op_name}"}}')
    assert phase_of(instruction) == phase
    assert phase_of(instruction, fills=True) is None
