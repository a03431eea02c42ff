"""A rule of an optimizer by rank is told where the loss scans over stacked layers."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.figures import assert_mentions, logged
from support.tiers import EXHAUSTIVE, only
from support.training import normals, parallel

import replicax as rx
from replicax.text.checks import NOTE

MODEL = {
    "last": np.ones((4, 2), np.float32),
    "layers": {"bias": np.zeros((3, 4), np.float32), "kernel": normals(0)(3, 4, 4)},
}
BATCH = {"x": normals(1)(8, 4)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    def layer(x: Any, own: Any) -> Any:
        return jnp.tanh(x @ own["kernel"] + own["bias"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], model["layers"])
    return jnp.sum((x @ model["last"]) ** 2, axis=1)


def unrolled(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    for at in range(3):
        x = jnp.tanh(x @ model["layers"]["kernel"][at] + model["layers"]["bias"][at])
    return jnp.sum((x @ model["last"]) ** 2, axis=1)


def by_rank(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


BY_RANK = {
    "decay": (optax.adamw(0.1, mask=by_rank), ["['layers']['bias']", "[3, 4]", "[4]"]),
    "factored": (optax.adafactor(0.1, min_dim_size_to_factor=3), ["['layers']['bias']", "[4]"]),
    "muon": (optax.contrib.muon(0.1), ["['layers']['bias']", "1 other"]),
}
BY_PATH = {
    "adamw": optax.adamw(0.1),
    "names": optax.adamw(0.1, mask={"last": True, "layers": {"bias": False, "kernel": True}}),
    "muon": rx.optimizers.muon(0.1, "kernel"),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
    "factored": optax.adafactor(0.1),
}


def told(caplog: pytest.LogCaptureFixture, loss: Any, optimizer: Any) -> list[str]:
    """Return what two steps log."""
    dp = parallel(loss, optimizer, devices=2)
    state = dp.init(MODEL)
    with caplog.at_level(logging.WARNING, "replicax"):
        for _ in range(2):
            state, _ = dp.step(state, BATCH)
    return logged(caplog)


@pytest.mark.parametrize("name", only(["muon"], BY_RANK))
def test_a_rule_by_rank_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, parts = BY_RANK[name]
    [line] = told(caplog, loss, optimizer)
    assert_mentions(line, *parts)


@EXHAUSTIVE
@pytest.mark.parametrize("name", BY_PATH)
def test_a_rule_by_path_is_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, loss, BY_PATH[name]) == []


@EXHAUSTIVE
def test_nor_is_one_of_layers_that_are_not_scanned(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, unrolled, optax.contrib.muon(0.1)) == []


@EXHAUSTIVE
def test_verify_notes_it() -> None:
    dp = parallel(loss, optax.adamw(0.1, mask=by_rank), devices=2)
    found = [each for each in rx.verify(dp, MODEL, BATCH).checks if each.case == "rank"]
    assert [(each.verdict, each.subject) for each in found] == [(NOTE, "parameters")]
