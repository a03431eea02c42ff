"""Haiku's `transform_with_state`, as a model whose loss returns its state."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from support import training
from support.tiers import EXHAUSTIVE

import replicax as rx

pytestmark = EXHAUSTIVE
X = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
ROWS = {"x": X, "y": np.float32(np.linalg.norm(X, axis=1) > 1)}


@pytest.fixture(scope="module")
def network() -> Any:
    hk = pytest.importorskip("haiku", reason="no Haiku: `make peers` installs it")

    def forward(x: Any, training: bool) -> Any:
        x = hk.Linear(8, with_bias=False)(x)  # the gradient of a bias would be 0 but for rounding
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, training))
        if training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(1)(x)[:, 0]

    return hk.transform_with_state(forward)


def trained(network: Any, mode: str, devices: int) -> tuple[list[float], Any, Any]:
    """Losses of four steps, the evaluation and the model."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        logits, state = network.apply(model.model, model.state, key, batch["x"], key is not None)
        values = optax.sigmoid_binary_cross_entropy(logits, batch["y"])
        return values if key is None else rx.NewState(values, state)

    dp = training.parallel(loss, optax.adam(1e-2), mode=mode, devices=devices)
    begun = rx.Stateful(*network.init(jax.random.key(0), X[:2], True))
    state, told = training.train(dp, begun, training.epochs(dp, ROWS, 32, 2))
    return training.losses(told), dp.evaluate(state, dp.feed(ROWS, 32)), dp.model(state)


def test_several_devices_write_the_state_of_one(network: Any) -> None:
    losses, score, model = trained(network, "single", 1)
    for devices in (2, 4):
        again, score_again, model_again = trained(network, "jit", devices)
        assert again == pytest.approx(losses, rel=1e-6)
        assert score_again == pytest.approx(score, rel=1e-6)
        training.assert_near(model_again, model)
    averages = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim == 2]
    assert len(averages) == 4
    assert all(np.any(leaf != 0) for leaf in averages)


def test_statistics_of_each_replicas_rows_are_refused(network: Any) -> None:
    with pytest.raises(rx.errors.LossError, match="mode='jit'"):
        trained(network, "shard_map", 2)
