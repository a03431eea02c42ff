"""The same GPT training step in Replicax, hand-written JAX and PyTorch, interleaved in one run.

Parameters, tokens and AdamW are the same in all, and the losses of the first steps must agree
before timing starts. The batch of random tokens is fixed, so input is not measured. PyTorch runs
eager and compiled, on all cores; with several devices, both also with one process per device.
"""

import argparse
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import environment, interleaved, ratios, save, spread
from torch_peer import Peer, torch_version

import replicax as rx
from replicax.analysis.hardware import chip_of_kind
from replicax.recipes import transformer
from replicax.recipes.transformer import cudnn_takes, published
from replicax.train.run.host_memory import keep_freed_memory

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = 0.9, 0.95
OPTIMIZER = optax.adamw(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY)

STEPS_COMPARED = 4
# Largest difference in the loss, in nats: of the first step, and after three updates.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 3e-2)}


@dataclasses.dataclass(frozen=True)
class Contender:
    steps: Callable[[int], list[float]]
    """Runs the given number of steps, and returns the loss of each."""
    devices: int = 1


def main() -> None:
    args = arguments()
    # Otherwise JAX reserves most of the GPU memory, and PyTorch needs some of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_num_cpu_devices", args.devices or 2)
    platform = jax.default_backend()
    devices = args.devices or (2 if platform == "cpu" else 1)
    if args.batch % devices:
        raise SystemExit(f"--batch={args.batch} on {devices} devices; the rows must divide evenly")
    if platform == "cpu":
        keep_freed_memory()  # as in `replicax train`; the others use it too
    shape = transformer.Shape(args.layers, args.heads, args.width, args.context, args.vocab)
    params = transformer.init(shape, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, args.vocab, (args.batch, args.context + 1))
    where = {**environment(), "device": jax.devices()[0].device_kind}
    where["torch"] = torch_version(args.torch_python)

    contenders = replicax(shape, params, tokens, devices, args)
    contenders["jax by hand, 1 device"] = by_hand(shape, params, tokens, args.precision)
    if where["torch"]:
        contenders |= pytorch(shape, params, tokens, devices, where["cores"], args)
    else:
        print(f"{args.torch_python} has no torch: skipping PyTorch; see --torch-python")
    losses = {name: each.steps(STEPS_COMPARED) for name, each in contenders.items()}
    check_agreement(losses, TOLERANCES[args.precision])
    runs = {name: functools.partial(each.steps, args.steps) for name, each in contenders.items()}
    seconds = {
        name: [value / args.steps for value in values]
        for name, values in interleaved(runs, args.rounds, warmups=1).items()
    }
    flops = flops_per_token(shape)
    chip = chip_of_kind(where["device"])
    peak = chip.flops_per_second.get(args.precision) if chip else None
    table = summary(contenders, seconds, args.batch * args.context, flops, peak)
    show(table, flops, args.batch * args.context)
    settings = {**vars(args), "devices": devices, "flops_per_token": flops}
    del settings["torch_python"]
    result = {"environment": where, "settings": settings, "first_losses": losses, "steps": table}
    print(f"see {save('gpt', result)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 8, "vocab": 65}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--precision", choices=list(TOLERANCES), default="float32")
    parser.add_argument("--remat", choices=get_args(transformer.Remat), default="selective")
    parser.add_argument("--devices", type=int, help="default: 2 on a CPU, 1 elsewhere")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: 9)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each per round (default: 3)")
    parser.add_argument(
        "--torch-python",
        default="python3",
        help="an interpreter with torch (default: python3); otherwise PyTorch is skipped",
    )
    return parser.parse_args()


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def replicax(
    shape: transformer.Shape,
    params: transformer.Params,
    tokens: np.ndarray,
    devices: int,
    args: argparse.Namespace,
) -> dict[str, Contender]:
    """Return contenders on one device, and in each mode on several if available."""

    def loss(model: transformer.Params, batch: dict[str, jax.Array], key: Any) -> jax.Array:
        tokens = batch["tokens"]
        logits = transformer.logits(model, tokens[:, :-1], shape.heads, args.remat)
        return cross_entropy(logits, tokens[:, 1:])

    def contender(mode: str, devices: int) -> Contender:
        mesh = rx.make_mesh(devices=jax.devices()[:devices])
        dp = rx.DataParallel(loss, OPTIMIZER, mesh=mesh, mode=mode, precision=args.precision)
        state = dp.init(params)
        (batch,) = dp.feed({"tokens": tokens.astype(np.int32)}, len(tokens))
        return Contender(stepping(dp, state, batch), devices)

    contenders = {"replicax single, 1 device": contender("single", 1)}
    if devices > 1:
        for mode in ("jit", "shard_map"):
            contenders[f"replicax {mode}, {devices} devices"] = contender(mode, devices)
    return contenders


def stepping(
    dp: rx.DataParallel, state: rx.TrainState, batch: rx.Batch
) -> Callable[[int], list[float]]:
    """Return a function that runs a number of steps on one batch, and returns their losses."""

    def steps(count: int) -> list[float]:
        nonlocal state
        losses = []
        for _ in range(count):
            state, metrics = dp.step(state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        return [float(loss) for loss in losses]

    return steps


def by_hand(
    shape: transformer.Shape, params: transformer.Params, tokens: np.ndarray, precision: str
) -> Contender:
    """Return a textbook step in JAX: a list of blocks, activations `[rows, tokens, width]`.

    Attention uses cuDNN on GPUs that support it, which JAX does only on request.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            params = jax.tree.map(lambda leaf: leaf.astype(precision), params)
            logits = logits_by_hand(params, tokens[:, :-1], shape.heads)
            return jnp.mean(cross_entropy(logits, tokens[:, 1:]))

        loss, gradient = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], params["h"]) for i in range(shape.layers)]
    for block in blocks:  # query, key and value side by side, as published
        dense = block["attn"]["c_attn"]
        dense["weight"] = dense["weight"].reshape(shape.width, 3 * shape.width)
        dense["bias"] = dense["bias"].reshape(3 * shape.width)
    params = jax.tree.map(jnp.copy, {**params, "h": blocks})
    opt_state = OPTIMIZER.init(params)
    batch = jnp.asarray(tokens, jnp.int32)

    def steps(count: int) -> list[float]:
        nonlocal params, opt_state
        losses = []
        for _ in range(count):
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
        jax.block_until_ready(params)
        return [float(loss) for loss in losses]

    return Contender(steps)


def logits_by_hand(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    def dense(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["weight"] + params["bias"]

    def norm(params: Any, x: jax.Array) -> jax.Array:
        normal = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5).astype(x.dtype)
        return normal * params["weight"] + params["bias"]

    def attention(params: Any, x: jax.Array) -> jax.Array:
        qkv = jnp.split(dense(params["c_attn"], x), 3, axis=-1)
        q, k, v = (each.reshape(*x.shape[:2], heads, -1) for each in qkv)
        kernel = "cudnn" if cudnn_takes(q) else None
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
        return dense(params["c_proj"], attended.reshape(x.shape))

    x = params["wte"]["weight"][tokens] + params["wpe"]["weight"][: tokens.shape[1]]
    for block in params["h"]:
        x = x + attention(block["attn"], norm(block["ln_1"], x))
        hidden = jax.nn.gelu(dense(block["mlp"]["c_fc"], norm(block["ln_2"], x)))
        x = x + dense(block["mlp"]["c_proj"], hidden)
    return norm(params["ln_f"], x) @ params["wte"]["weight"].T


def pytorch(
    shape: transformer.Shape,
    params: transformer.Params,
    tokens: np.ndarray,
    devices: int,
    cores: int,
    args: argparse.Namespace,
) -> dict[str, Contender]:
    """Return eager and compiled contenders, also as DistributedDataParallel on several devices."""
    settings = {
        "shape": dataclasses.asdict(shape),
        "adamw": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        "precision": args.precision,
        "platform": "cuda" if jax.default_backend() == "gpu" else "cpu",
        "devices": devices,
        "cores": cores,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        np.savez(Path(folder, "start.npz"), tokens=tokens, **published(params))
        used = {"eager": 1, "compile": 1}
        if devices > 1:
            used |= {"ddp": devices, "ddp-compile": devices}
        return {
            f"torch {how}": Contender(Peer(args.torch_python, "gpt_torch.py", [folder, how]), count)
            for how, count in used.items()
        }


def check_agreement(losses: dict[str, list[float]], tolerances: tuple[float, float]) -> None:
    """Stop if a contender's first or last loss differs from that of Replicax."""
    (reference, expected), *others = losses.items()
    for name, found in others:
        for step, tolerance in zip((0, -1), tolerances, strict=True):
            if not abs(found[step] - expected[step]) <= tolerance:
                raise SystemExit(
                    f"{name} has losses {found}, {reference} {expected}; they differ by more than "
                    f"{tolerance}: the models or optimizers differ"
                )
    first, last = expected[0], expected[-1]
    print(f"all agree: a loss of {first:.5f}, and {last:.5f} after {STEPS_COMPARED - 1} steps")


def flops_per_token(shape: transformer.Shape) -> int:
    """Count the FLOPs per token of a training step by the usual formula.

    6 per weight of a matrix product (the tied embedding once, as the output), plus attention's
    12 * layers * context * width, halved because it is causal. Recomputation is not counted.
    """
    weights = 12 * shape.layers * shape.width**2 + shape.vocab_size * shape.width
    return 6 * weights + 6 * shape.layers * shape.context * shape.width


def summary(
    contenders: dict[str, Contender],
    seconds: dict[str, list[float]],
    tokens: int,
    flops: int,
    peak: float | None,
) -> dict[str, dict[str, Any]]:
    """Summarize each contender: seconds per step of every round, and the median speed."""
    torch = [name for name in contenders if name.startswith("torch")]
    best = min(torch, key=lambda name: spread(seconds[name])[0], default=None)
    table = {}
    for name, values in seconds.items():
        tokens_per_second = tokens / spread(values)[0]
        row: dict[str, Any] = {
            "seconds_per_step": [round(value, 5) for value in values],
            "tokens_per_second": round(tokens_per_second, 1),
            "gflops_per_second": round(tokens_per_second * flops / 1e9, 1),
        }
        if peak:
            possible = peak * contenders[name].devices
            row["model_flop_utilisation"] = round(tokens_per_second * flops / possible, 4)
        if best:
            over = spread(ratios(values, seconds[best]))
            row["time_over_best_torch"] = [round(value, 4) for value in over]
        table[name] = row
    return table


def show(table: dict[str, dict[str, Any]], flops: int, tokens: int) -> None:
    """Print a line for each; the last column is the time relative to the fastest PyTorch."""
    print(f"{flops / 1e6:.1f} MFLOP per token, {tokens:,} tokens per step; medians [quartiles]")
    print(f"{'':<30} seconds per step           tokens/s  GFLOP/s  of peak  time over best torch")
    for name, row in table.items():
        middle, low, high = spread(row["seconds_per_step"])
        used, over = row.get("model_flop_utilisation"), row.get("time_over_best_torch")
        print(
            f"{name:<30} {middle:.4f} [{low:.4f}, {high:.4f}]  {row['tokens_per_second']:>9,.0f}"
            f"  {row['gflops_per_second']:>7,.0f}  {f'{used:.1%}' if used else '-':>7}  "
            + ("{:.3f} [{:.3f}, {:.3f}]".format(*over) if over else "-")
        )


if __name__ == "__main__":
    main()
