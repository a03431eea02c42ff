"""Optimizers of whole leaves in layouts that split their state: right, or refused in one line.

A small model that scans over three layers is trained on four CPU devices for four steps, and
compared with one device: the largest difference of a parameter, or the first line of the error.
The table is in docs/matrices.md.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from timing import environment, save

import replicax as rx

HOW = {
    "zero1": ("jit", "zero1"),
    "zero1, shard_map": ("shard_map", "zero1"),
    "fsdp": ("jit", "fsdp"),
    "fsdp, shard_map": ("shard_map", "fsdp"),
    "exact, zero1": ("exact", "zero1"),
    "exact, replicated": ("exact", "replicated"),
}
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "rx.optimizers.muon": rx.optimizers.muon(
        0.02, {"'(up|down)'": None, "'gates'": (1, 3)}, weight_decay=0.1
    ),
    "optax.contrib.muon": optax.contrib.muon(0.02),
    "lamb": optax.lamb(0.01),
    "lars": optax.lars(0.01),
    "fromage": optax.fromage(0.01),
    "novograd": optax.novograd(0.01),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=16),
    "sm3": optax.sm3(0.01),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "optax.contrib.galore": optax.contrib.galore(0.01),
    "optax.contrib.dog": optax.contrib.dog(),
    "optax.contrib.ademamix": optax.contrib.ademamix(0.01),
    "optax.contrib.prodigy": optax.contrib.prodigy(),
    "optax.contrib.sophia": optax.contrib.sophia(0.01),
}


def loss(model: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, own: Any) -> Any:
        gates = jnp.einsum("bi,inj->bnj", x, own["gates"])
        x = x + gates[:, 0] * jnp.tanh(gates[:, 1])
        return x + jnp.tanh(x @ own["up"]) @ own["down"] + own["bias"], None

    x, _ = jax.lax.scan(layer, model["wte"][batch["token"]], model["layers"])
    logits = x @ model["wte"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])


def trained(optimizer: Any, mode: str, layout: str, devices: int) -> list[np.ndarray]:
    """Return the parameters after four steps."""
    draw = np.random.default_rng(0)
    shapes = {"up": (3, 32, 64), "down": (3, 64, 32), "gates": (3, 32, 2, 32), "bias": (3, 32)}
    layers = {name: 0.1 * draw.normal(size=size) for name, size in shapes.items()}
    model = {"wte": draw.normal(size=(16, 32)), "layers": layers}
    model = jax.tree.map(lambda leaf: leaf.astype(np.float32), model)
    tokens = draw.integers(0, 16, 64)
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    dp = rx.DataParallel(loss, optimizer, mesh=mesh, mode=mode, layout=layout)
    state = dp.init(model)
    for epoch in range(2):
        for batch in dp.feed({"token": tokens, "next": (3 * tokens + 1) % 16}, 32, epoch=epoch):
            state, _ = dp.step(state, batch)
    return list(map(np.asarray, jax.tree.leaves(dp.model(state))))


def compared(optimizer: Any, mode: str, layout: str) -> str:
    """Return the largest difference to one device, or the error."""
    try:
        one = trained(optimizer, "single", "replicated", 1)
        several = trained(optimizer, mode, layout, 4)
    except rx.ReplicaxError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    pairs = zip(one, several, strict=True)
    return f"{max(float(np.abs(a - b).max()) for a, b in pairs):.0e}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # four are used; `exact` needs a thread for each
    result: dict[str, Any] = {"environment": environment(), "differences": {}}
    for name, optimizer in OPTIMIZERS.items():
        found = {how: compared(optimizer, *way) for how, way in HOW.items()}
        result["differences"][name] = found
        print(name, *(f"  {how}: {each[:90]}" for how, each in found.items()), sep="\n")
    print(f"see {save('optimizer_layouts', result)}")


if __name__ == "__main__":
    main()
