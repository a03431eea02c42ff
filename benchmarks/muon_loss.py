"""Loss of Muon beside AdamW: the GPT-2 recipe at its default size, 1,000 steps, three seeds.

The rates are tuned first, on 300 steps with another seed: AdamW's, then Muon's for the matrices of
the blocks, beside the best of AdamW for the other parameters; of AdamW's two best the one that is
better on 1,000 steps is compared. All else is the recipe's: warmup, cosine decay, clipping, weight
decay, batches of 32 rows of 128 bytes. Seeds draw the model and the order of rows. The loss is that
of the held-out text, in nats per byte, every 100 steps.

Results are added to `results/muon_loss.json` one by one, and runs that it has are not done again;
the figure is `docs/images/muon_loss.png`.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import jax
from timing import RESULTS, environment, save

import replicax as rx
from replicax.recipes.gpt2 import GPT2
from replicax.text.plot_style import PALETTE, picture

ADAMW, MUON = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (0.02, 0.04, 0.08, 0.16)
TUNING, STEPS, SEEDS = 300, 1_000, (1, 2, 3)
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "muon_loss.png"


def trained(recipe: GPT2, steps: int, seed: int, evaluations: int) -> list[tuple[int, float]]:
    """Return steps and held-out losses of a run, whose schedule ends with it."""
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), mesh=rx.make_mesh(1))
    result = rx.fit(
        *(dp, dp.init(recipe.model(jax.random.key(seed)), seed=seed), recipe.train_source()),
        batch_size=recipe.batch_size,
        steps=steps,
        seed=seed,
        eval_source=rx.Evaluation(recipe.eval_source(), every_steps=steps // evaluations),
        progress=False,
    )
    found = [record for record in result.records if record.kind == "eval"]
    return [(record.step, float(record.metrics["loss"])) for record in found]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    path = RESULTS / "muon_loss.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    kept["environment"] = environment()
    recipe = GPT2()

    def run(adamw: float, muon: float | None, steps: int, seed: int) -> list[tuple[int, float]]:
        name = f"adamw {adamw:g}, muon {muon or 0:g}, {steps} steps, seed {seed}"
        if name not in kept["runs"]:
            given = dataclasses.replace(recipe, learning_rate=adamw, muon_learning_rate=muon)
            rows = steps * recipe.batch_size
            given.__dict__["_text"] = dataclasses.replace(recipe._text, train_rows=rows)
            kept["runs"][name] = trained(given, steps, seed, 10 if steps == STEPS else 1)
            save("muon_loss", kept)
        print(f"{name}: {kept['runs'][name][-1][1]:.4f}", flush=True)
        return kept["runs"][name]

    adamw, next_best = sorted(ADAMW, key=lambda rate: run(rate, None, TUNING, 0)[-1][1])[:2]
    muon = min(MUON, key=lambda rate: run(adamw, rate, TUNING, 0)[-1][1])
    adamw = min((adamw, next_best), key=lambda rate: run(rate, None, STEPS, SEEDS[0])[-1][1])
    curves = {
        f"AdamW, {adamw:g}": [run(adamw, None, STEPS, seed) for seed in SEEDS],
        f"Muon, {muon:g}, and AdamW": [run(adamw, muon, STEPS, seed) for seed in SEEDS],
    }
    for name, runs in curves.items():
        last = [points[-1][1] for points in runs]
        print(f"{name}: {statistics.mean(last):.4f} ({min(last):.4f} to {max(last):.4f})")
    draw(curves)


def draw(curves: dict[str, list[list[tuple[int, float]]]]) -> None:
    """Draw the mean of the seeds, and their range."""
    with picture(FIGURE, 6, 4) as figure:
        axes = figure.subplots()
        for (name, runs), color in zip(curves.items(), PALETTE, strict=False):
            steps = [step for step, _ in runs[0]]
            losses = list(zip(*[[loss for _, loss in points] for points in runs], strict=True))
            axes.plot(steps, [statistics.mean(each) for each in losses], label=name, color=color)
            low, high = [min(each) for each in losses], [max(each) for each in losses]
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss (nats per byte)")
        axes.grid(visible=True)
        axes.legend()


if __name__ == "__main__":
    main()
