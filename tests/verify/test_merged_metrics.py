"""Verification compares metrics that are no means: their values, and rows without padding."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from support.counted_metrics import F1, MODEL, loss, rows
from support.tiers import EXHAUSTIVE
from support.training import parallel

import replicax as rx


@flax.struct.dataclass
class MeanOfF1(F1):
    """The mean of the F1 of two parts, which is not that of both."""

    def merge(self, other: Any) -> Any:
        mean = (self.compute() + other.compute()) / 2
        return MeanOfF1(mean, 2 * (1 - mean))


def verified(metric: Any) -> rx.types.Verification:
    def with_metric(model: Any, batch: Any, key: Any) -> Any:
        found, metrics = loss(model, batch, key)
        score, real = batch["x"] @ model["w"], rx.row_weights(batch["x"])
        more = {"m": metric.of(score, batch["label"], real), "by_row": rx.ByRow(score)}
        return found, metrics | more

    dp = parallel(with_metric, optax.sgd(0.1), mode="shard_map")
    model = jax.tree.map(jnp.asarray, MODEL)
    return rx.verify(dp, model, rows(), batch_size=32, modes=["shard_map"])


@EXHAUSTIVE
@pytest.mark.parametrize(("metric", "ok"), [(F1, True), (MeanOfF1, False)])
def test_the_mean_of_two_is_found(metric: Any, ok: bool) -> None:
    found = verified(metric)
    assert found.ok == ok, str(found)
    failed = [check for check in found.checks if check.verdict == "fail"]
    assert all(check.subject == "parity" and check.found.startswith("m ") for check in failed)
