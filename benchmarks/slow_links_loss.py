"""The loss that rounds cost: islands simulated in one job, against data parallelism, on CPUs.

GPTs of three widths on the bytes of Python's standard library, with the learning rates tuned for
each row. Results are added to `benchmarks/results/slow_links_loss.json` one by one, and rows that
are there are not run again.
"""

import argparse
import functools
import itertools
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT, ROWS, EVALUATED = 64, 32, 512
RESULTS = Path(__file__).parent / "results" / "slow_links_loss.json"
DEFAULTS: dict[str, Any] = {
    "width": 64,
    "islands": 0,
    "rate": 4e-3,
    "every": 30,
    "send": "float32",
    "outer": 0.6,
    "momentum": 0.9,
    "seed": 0,
    "steps": 3000,
}
"""A row; without islands it is data parallelism, for which only width, rate and seed matter."""


@functools.cache
def text(*, held_out: bool) -> np.ndarray:
    """Return the bytes of every tenth file of the standard library, or of the others."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-s]*/*.py"))
    chosen = [path for n, path in enumerate(files) if (n % 10 == 9) == held_out]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8)


def windows(of: np.ndarray, seed: list[int], rows: int) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(seed).integers(0, len(of) - CONTEXT - 1, rows)
    return {"tokens": of[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)}


def trained(row: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation losses of a run, by step."""
    import jax
    import optax

    import replicax as rx
    from replicax.recipes import transformer

    shape = transformer.Shape(2, 4, row["width"], CONTEXT, 256)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        tokens = batch["tokens"]
        scores = transformer.logits(params, tokens[:, :-1], shape.heads)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])

    rate = optax.warmup_cosine_decay_schedule(
        0, row["rate"], row["steps"] // 30, row["steps"], row["rate"] / 20
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate, 0.9, 0.99, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    )
    rounds, mesh = None, rx.make_mesh(devices=jax.devices()[: max(row["islands"], 1)])
    if row["islands"]:
        outer = optax.sgd(row["outer"], row["momentum"] or None, nesterov=row["momentum"] > 0)
        rounds = rx.Rounds(every=row["every"], send=row["send"], outer=outer, axis="data")
    dp = rx.DataParallel(loss, optimizer, mode="shard_map", mesh=mesh, rounds=rounds)
    params = transformer.init(shape, jax.random.key(row["seed"]))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = dp.init(params, seed=row["seed"])
    read, held_out = text(held_out=False), text(held_out=True)
    evaluated = windows(held_out, [1], EVALUATED)
    batches = [jax.tree.map(lambda x, n=n: x[n : n + 64], evaluated) for n in range(0, 512, 64)]
    curve, began = {}, time.perf_counter()
    for step in range(1, row["steps"] + 1):
        state, _ = dp.step(state, windows(read, [row["seed"], step], ROWS))
        if step == row["steps"]:
            state = dp.end_round(state)
        if step % 300 == 0 or step == row["steps"]:
            curve[step] = round(dp.evaluate(state, batches)["loss"], 5)
            if not np.isfinite(curve[step]):
                break
    seconds = time.perf_counter() - began
    return {"parameters": count, "loss": curve[max(curve)], "curve": curve, "seconds": seconds}


def grid(width: int) -> list[dict[str, Any]]:
    """Return the rows of a width, those that decide most first."""
    rows: list[dict[str, Any]] = []
    rates = (2e-3, 4e-3, 8e-3) if width < 256 else (1e-3, 2e-3, 4e-3)
    for rate in rates:
        rows.append({"islands": 0, "rate": rate})
    for islands, rate, outer in itertools.product((1, 2, 4), rates, ((0.6, 0.9), (0.8, 0.5))):
        momentum = {"outer": outer[0], "momentum": outer[1]}
        rows.append({"islands": islands, "rate": rate, **momentum})
    return [{**DEFAULTS, "width": width, **row} for row in rows]


def tuned(rows: list[dict[str, Any]], width: int, **fields: Any) -> dict[str, Any] | None:
    """Return the row with the smallest loss among those with these fields, if there is one."""
    wanted = {"width": width, "every": 30, "send": "float32", "seed": 0, "steps": 3000, **fields}
    found = [each for each in rows if wanted.items() <= each["row"].items()]
    return min(found, key=lambda each: float(each["loss"]), default=None)


METHODS: dict[str, dict[str, Any]] = {
    "data parallel": {"islands": 0},
    **{f"M={count}": {"islands": count} for count in (1, 2, 4)},
    "M=4, int4": {"islands": 4, "send": "int4"},
    "M=4, sparse": {"islands": 4, "send": "sparse"},
    "M=4, H=10": {"islands": 4, "every": 10},
    "M=4, H=100": {"islands": 4, "every": 100},
}
"""What is compared: M islands that exchange every 30 steps, or as said."""


def shown(rows: list[dict[str, Any]]) -> None:
    """Print the best row of each method, and by how much its loss is above data parallelism."""
    for width in sorted({each["row"]["width"] for each in rows}):
        base = tuned(rows, width, islands=0)
        for name, fields in METHODS.items():
            if (best := tuned(rows, width, **fields)) is None or base is None:
                continue
            row, above = best["row"], 100 * (best["loss"] / base["loss"] - 1)
            outer = f"outer {row['outer']:g}, {row['momentum']:g}" if row["islands"] else ""
            size = f"{best['parameters'] / 1e6:.2f}M"
            print(
                f"{size}  {name:<14} {best['loss']:.4f}  {above:+5.1f}%  {row['rate']:g}  {outer}"
            )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses of the widest models by step, and what islands cost by the model's size."""
    from replicax.bench.plots import STYLES
    from replicax.text.plot_style import picture

    widths = sorted({each["row"]["width"] for each in rows})
    with picture(path, 9.0, 3.8) as figure:
        curves, costs = figure.subplots(1, 2)
        names = [name for name in METHODS if name.startswith("M=") and "," not in name]
        for name, (colour, marker) in zip(["data parallel", *names], STYLES, strict=False):
            each = [(tuned(rows, w, **METHODS[name]), tuned(rows, w, islands=0)) for w in widths]
            if (widest := each[-1][0]) is not None:
                steps, losses = zip(*widest["curve"].items(), strict=True)
                curves.plot(list(map(int, steps)), losses, color=colour, marker=marker, label=name)
            pairs = [(one, base) for one, base in each if one and base and name in names]
            sizes = [one["parameters"] / 1e6 for one, _ in pairs]
            above = [100 * (one["loss"] / base["loss"] - 1) for one, base in pairs]
            costs.plot(sizes, above, color=colour, marker=marker)
        curves.grid(axis="y")
        costs.grid(axis="y")
        curves.set(xlabel="step", ylabel="evaluation loss [nats a byte]")
        curves.legend()
        costs.axhline(0, color=STYLES[0][0], linewidth=1)
        costs.set(
            xlabel="parameters [million]", ylabel="loss above data parallel [%]", xscale="log"
        )
        costs.minorticks_off()
        sizes = [best["parameters"] / 1e6 for width in widths if (best := tuned(rows, width))]
        costs.set_xticks(sizes, [f"{size:.2g}" for size in sizes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="rows to run, in JSON: a list of changed fields")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="worker and workers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", type=Path, help="write this picture, and run nothing")
    args = parser.parse_args()
    if args.draw is not None:
        shown(known(args.out))
        draw(known(args.out), args.draw)
        return
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    if args.rows is None:
        rows = grid(args.width)
    else:
        rows = [{**DEFAULTS, **row} for row in json.loads(args.rows.read_text())]
    for number, row in enumerate(rows):
        if number % args.part[1] != args.part[0] or any(k["row"] == row for k in known(args.out)):
            continue
        found = {"row": row, **trained(row)}
        args.out.write_text(json.dumps([*known(args.out), found], indent=1) + "\n")
        told = {name: row[name] for name in row if row[name] != DEFAULTS[name]}
        print(f"{found['loss']:.4f}  {found['seconds']:.0f} s  {told}", flush=True)


def known(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


if __name__ == "__main__":
    main()
