"""Steps of GPT, LeNet, CNN and MLP on CPUs with XLA's fusions for YNNPACK, without, and with some.

Three values of one compiler option, interleaved: `default`, products, convolutions and reductions;
`none`; `individual`, products and convolutions, with which jax 0.10.2 computes right sums
(docs/troubleshooting.md). Each in mode `single` on one device and `jit` on two, at the recipes'
sizes; GPT has 6 layers of width 384 and 8 rows of 256 tokens. Run it with each version of jax; the
result is `results/cpu_fusions_<version>.json`.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from gpt import OPTIMIZER, cross_entropy, stepping
from timing import environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.known_wrong.avoidance import avoiding
from replicax.known_wrong.self_tests import product_then_sum
from replicax.recipes import transformer
from replicax.recipes.cnn import CNN
from replicax.recipes.lenet import LeNet
from replicax.recipes.mlp import MLP
from replicax.train.run.host_memory import keep_freed_memory

OPTION = "xla_cpu_experimental_ynn_fusion_type"
INDIVIDUAL = [f"LIBRARY_FUSION_TYPE_INDIVIDUAL_{kind}" for kind in ("DOT", "CONVOLUTION")]
FUSIONS = {
    "default": ",".join([*INDIVIDUAL, "LIBRARY_FUSION_TYPE_REDUCE"]),
    "none": "",
    "individual": ",".join(INDIVIDUAL),
}
CASES = {"single, 1 device": ("single", 1), "jit, 2 devices": ("jit", 2)}

Subject = tuple[Any, optax.GradientTransformation, Any, dict[str, np.ndarray]]
"""The loss, the optimizer, the model and the rows of a batch."""


def gpt(layers: int) -> Subject:
    shape = transformer.Shape(layers, 6, 384, 256, 65)
    tokens = np.random.default_rng(0).integers(0, 65, (8, 257)).astype(np.int32)

    def loss(model: transformer.Params, batch: dict[str, jax.Array], key: Any) -> jax.Array:
        logits = transformer.logits(model, batch["tokens"][:, :-1], shape.heads, "selective")
        return cross_entropy(logits, batch["tokens"][:, 1:])

    return loss, OPTIMIZER, transformer.init(shape, jax.random.key(0)), {"tokens": tokens}


def of_images(recipe: Any, optimizer: optax.GradientTransformation, _: int) -> Subject:
    random = np.random.default_rng(0)
    rows = {
        "image": random.integers(0, 256, (recipe.batch_size, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, recipe.batch_size).astype(np.int32),
    }
    return recipe.loss, optimizer, recipe.model(jax.random.key(0)), rows


def mlp(_: int) -> Subject:
    recipe = MLP()
    rows = {name: leaf[: recipe.batch_size] for name, leaf in recipe.train_source().items()}
    return recipe.loss, recipe.optimizer(), recipe.model(jax.random.key(0)), rows


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "gpt": gpt,
    "lenet": functools.partial(of_images, LeNet(), optax.sgd(0.05, momentum=0.9)),
    "cnn": functools.partial(of_images, CNN(), optax.adam(1e-3)),
    "mlp": mlp,
}


def steps_of(subject: Subject, mode: str, devices: int, fusions: str) -> Callable[[int], Any]:
    loss, optimizer, model, rows = subject
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    dp = rx.DataParallel(loss, optimizer, mesh=mesh, mode=mode, compiler_options={OPTION: fusions})
    (batch,) = dp.feed(rows, len(next(iter(rows.values()))))
    return stepping(dp, dp.init(model), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default: 11)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each in a round (default: 1)"
    )
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--layers", type=int, default=6, help="layers of GPT (default: 6)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    keep_freed_memory()  # as in `replicax train`
    subjects = {name: SUBJECTS[name](args.layers) for name in args.only}
    wrong = {name: product_then_sum({OPTION: fusions}) for name, fusions in FUSIONS.items()}
    print(f"jax {jax.__version__}: wrong sums with {[n for n in wrong if wrong[n]] or 'none'}")
    table = {
        f"{name}, {case}": measured(subject, *where, args)
        for name, subject in subjects.items()
        for case, where in CASES.items()
    }
    for name, row in table.items():
        shown = ", ".join(f"{n} {v['milliseconds'][0]:.2f}" for n, v in row["fusions"].items())
        print(f"{name:<24} {shown} ms; individual / default {row['individual_over_default']}")
    result = {
        "environment": environment(),
        "settings": vars(args),
        "wrong_sums": wrong,
        "replicax_sets": avoiding("cpu"),
        "steps": table,
    }
    print(f"see {save(f'cpu_fusions_{jax.__version__}', result)}")


def measured(subject: Subject, mode: str, devices: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a step by fusions, and their ratios round by round."""
    steps = {name: steps_of(subject, mode, devices, value) for name, value in FUSIONS.items()}
    losses = {name: step(2)[-1] for name, step in steps.items()}
    once = functools.partial(steps["default"], 1)
    count = max(1, round(args.seconds / np.median(interleaved({"": once}, 3)[""])))
    runs = {name: functools.partial(step, count) for name, step in steps.items()}
    seconds = interleaved(runs, args.rounds, warmups=1)
    each = {
        name: {
            "milliseconds": [round(1e3 * value / count, 4) for value in spread(values)],
            "loss_after_2_steps": losses[name],
        }
        for name, values in seconds.items()
    }
    over = {
        f"{name}_over_default": [
            round(value, 4) for value in spread(ratios(seconds[name], seconds["default"]))
        ]
        for name in ("none", "individual")
    }
    return {"steps_per_round": count, "fusions": each, **over}


if __name__ == "__main__":
    main()
