"""Bytes of GPT-2 350M on 8 devices in each layout, read from the compiled step; no timing.

    python benchmarks/layouts.py

Each layout is compiled for 8 CPU devices. `whole` is the peak of parameter and gradient bytes that
are unsplit at the same time if a layout splits them: all-gather outputs and reduce-scatter inputs,
from when they are written until they are last read.
"""

import argparse
import json
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import RESULTS, environment, save

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.analysis.memory_use import MemoryUse, compile_with_memory
from replicax.analysis.schedule import read_schedule
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2

DEVICES = 8
LAYOUTS = {
    "shard_map replicated": {"mode": "shard_map"},
    "shard_map zero1": {"mode": "shard_map", "layout": "zero1"},
    "shard_map fsdp": {"mode": "shard_map", "layout": "fsdp"},
    "shard_map fsdp in 2 groups of 4": {"mode": "shard_map", "layout": "fsdp", "fsdp": 4},
    "exact zero1, without clipping": {"mode": "exact", "layout": "zero1", "clips": False},
    "jit replicated": {"mode": "jit"},
    "jit zero1": {"mode": "jit", "layout": "zero1"},
    "jit fsdp": {"mode": "jit", "layout": "fsdp"},
}
SENT = {
    "all-reduce": lambda n, size: 2 * (n - 1) / n * size,
    "all-gather": lambda n, size: (n - 1) / n * size,
    "reduce-scatter": lambda n, size: (n - 1) * size,
    "all-to-all": lambda n, size: (n - 1) / n * size,
}
"""Bytes that each of `n` devices sends in a ring, as a function of the result's bytes."""


def lowered_step(
    preset: str,
    rows: int,
    layers: int | None,
    *,
    fsdp: int = 1,
    clips: bool = True,
    **settings: Any,
) -> tuple[Any, rx.TrainState]:
    """Return the lowered step, and its abstract state with shardings."""
    fields = dict(GPT2.presets[preset])
    if layers is not None:
        fields["layers"] = layers
    recipe = GPT2(**fields)
    shape = transformer.Shape(
        recipe.layers, recipe.heads, recipe.width, recipe.context, fields["vocab_size"]
    )
    model = jax.eval_shape(lambda: transformer.init(shape, jax.random.key(0)))
    optimizer = optax.adamw(1e-4)
    if clips:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    dp = rx.DataParallel(recipe.loss, optimizer, mesh=rx.make_mesh(fsdp=fsdp), **settings)
    one = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, recipe.context + 1), jnp.int32)
    batch = {"tokens": tokens, "length": one, "bytes": one}
    return dp.lower(model, batch), dp.abstract_state(model)


def bytes_on_a_device(tree: Any) -> int:
    """Return the bytes of the largest shard of `tree` on a device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def whole_at_once(use: MemoryUse) -> int:
    """Return the peak bytes of live arrays that are gathered or not yet scattered."""
    every = {each.name: each for some in use.computations.values() for each in some}
    touched = set()
    for each in every.values():
        if each.opcode in ("all-gather", "reduce-scatter"):
            touched.add(each.name)
            for name in each.inputs:
                while every[name].opcode in ("bitcast", "get-tuple-element"):
                    name = every[name].inputs[0]
                touched.add(name)
    alive = np.zeros(len(use.bytes), np.int64)
    for buffer in use.buffers:
        if buffer.instruction in touched:
            alive[buffer.first : buffer.last + 1] += buffer.size
    return int(alive.max())


def measured(preset: str, rows: int, layers: int | None) -> dict[str, dict[str, Any]]:
    """Return the figures of each layout."""
    found = {}
    for name, settings in LAYOUTS.items():
        lowered, state = lowered_step(preset, rows, layers, **settings)
        compiled, use = compile_with_memory(lowered)
        memory = inspect(compiled).memory
        assert memory is not None
        sent: dict[str, float] = defaultdict(float)
        for each in read_schedule(compiled.as_text() or "").collectives:
            sent[each.kind] += each.runs * SENT[each.kind](each.devices or DEVICES, each.bytes)
        found[name] = {
            "parameter_bytes": bytes_on_a_device(state.params),
            "optimizer_bytes": bytes_on_a_device(state.opt_state),
            "temporary_bytes": memory.temporaries,
            "whole_at_once_bytes": whole_at_once(use),
            "sent_bytes": {kind: round(size) for kind, size in sent.items()},
            "sent_bytes_in_all": round(sum(sent.values())),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="350m")
    parser.add_argument("--rows", type=int, default=8, help="rows per global batch")
    parser.add_argument("--layers", type=int, help="number of layers; the preset's by default")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found = measured(asked.preset, asked.rows, asked.layers)
    result = {"environment": environment(), **vars(asked), "layouts": found}
    if asked.layers is None:
        print(save("layouts", result).relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
