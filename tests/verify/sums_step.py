"""`python sums_step.py MODE`: the result of `check_sums` for GPT-2 in bfloat16 on eight H100."""

import dataclasses
import json
import sys

import jax
import numpy as np

import replicax as rx
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.recipe import abstract_model
from replicax.verified import compiling_for
from replicax.verify.sums import check_sums


def main() -> None:
    recipe = GPT2(**{**GPT2.presets["124m"], "layers": 2, "batch_size": 64})
    batch = {
        "tokens": np.zeros((64, recipe.context + 1), np.uint16),
        "length": np.zeros(64, np.int32),
        "bytes": np.zeros(64, np.int32),
    }
    settings = {"mode": sys.argv[1], "precision": "bfloat16", "mesh": rx.make_mesh(8)}
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), **settings)
    model = abstract_model(recipe.model, jax.random.key(0))
    checks = check_sums(dp, model, batch, compiling_for("h100:8", lambda text: None))
    print(json.dumps([dataclasses.asdict(check) for check in checks]))


main()
