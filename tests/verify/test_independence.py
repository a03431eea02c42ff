"""Dependence of rows, measured by leaving rows out."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

import replicax as rx
from replicax.verify.facts import examine_subject
from replicax.verify.independence import ADDED_UP, DEPENDENT, INDEPENDENT, WEIGHTED_SCALAR


def kind(loss: Any) -> str:
    dp = rx.DataParallel(loss, zoo.Entry().optimizer(), mode="single")
    return examine_subject(warm_subject(dp, zoo.network(), zoo.data(), 1, 0)).rows.kind


def nearly_equal_weights(model: Any, batch: Any, key: Any) -> Any:
    weights = 1 + batch["weight"] / 100
    return jnp.sum(zoo.errors(model, batch) * weights) / jnp.sum(weights)


def needs_a_key(model: Any, batch: Any, key: Any) -> Any:
    return zoo.errors(model, batch) * jax.random.uniform(jax.random.fold_in(key, 0))


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (zoo.good, INDEPENDENT),
        (zoo.mixture, INDEPENDENT),
        (zoo.equal_mean, INDEPENDENT),
        (zoo.dropout, INDEPENDENT),
        (zoo.divided_by_rows, ADDED_UP),
        (zoo.sum_over_rows, ADDED_UP),
        (zoo.mean_of_weighted_rows, WEIGHTED_SCALAR),
        (nearly_equal_weights, WEIGHTED_SCALAR),
        (zoo.contrastive, DEPENDENT),
        (zoo.contrastive_mean, DEPENDENT),
        (zoo.clipped_by_hand, DEPENDENT),
        (needs_a_key, INDEPENDENT),
    ],
)
def test_kind(loss: Any, found: str) -> None:
    assert kind(loss) == found
