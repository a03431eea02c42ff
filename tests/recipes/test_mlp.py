"""The MLP: it learns, its loss is the mean squared error, and depth leaves it a signal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.recipes.mlp import MLP

SMALL = MLP(rows=2000, epochs=3)


@EXHAUSTIVE
def test_it_learns() -> None:
    dp = rx.DataParallel(SMALL.loss, SMALL.optimizer())
    state = dp.init(SMALL.model(jax.random.key(0)))
    result = rx.fit(
        dp,
        state,
        SMALL.train_source(),
        batch_size=SMALL.batch_size,
        epochs=SMALL.epochs,
        eval_source=SMALL.eval_source(),
        progress=False,
    )
    of_the_best_constant = np.var(SMALL.eval_source()["y"])
    assert result.metrics["loss"] < of_the_best_constant / 3


def test_the_mean_of_the_loss_is_the_mean_squared_error() -> None:
    model = SMALL.model(jax.random.key(0))
    batch = SMALL.eval_source()
    values = SMALL.loss(model, batch, None)
    assert values.shape == (200,)
    assert float(jnp.mean(values)) == pytest.approx(
        float(jnp.mean((model(batch["x"]) - batch["y"]) ** 2)), rel=1e-6
    )


@pytest.mark.parametrize("layers", only([9], [9, 90]))
def test_many_layers_leave_a_signal(layers: int) -> None:
    deep = MLP(layers=layers, hidden=64)
    x = deep.eval_source()["x"][:32]
    assert 0.01 < float(jnp.std(deep.model(jax.random.key(0))(x))) < 100


def test_the_rows_are_one_function_of_different_draws() -> None:
    train, evaluation = SMALL.train_source(), SMALL.eval_source()
    for source, rows in ((train, 2000), (evaluation, 200)):
        assert (source["x"].shape, source["y"].shape) == ((rows, 16), (rows, 10))
        assert source["x"].dtype == source["y"].dtype == np.float32
    assert not set(map(bytes, evaluation["x"])) & set(map(bytes, train["x"]))
    weight, *_ = np.linalg.lstsq(train["x"], np.arctanh(train["y"]))
    np.testing.assert_allclose(np.tanh(evaluation["x"] @ weight), evaluation["y"], atol=1e-4)
    np.testing.assert_array_equal(SMALL.train_source()["x"], train["x"])


def test_few_rows_leave_one_to_evaluate_on() -> None:
    assert MLP(rows=3).eval_source()["x"].shape == (1, 16)


def test_the_preset_is_the_deep_and_wide_one() -> None:
    recipe = MLP(**MLP.presets["seed"])
    assert (recipe.batch_size, recipe.learning_rate) == (256 * 27, 1e-4)
    shapes = jax.eval_shape(lambda key: recipe.model(key).variables, jax.random.key(0))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    assert len(sizes) == 2 * 3  # 89 of the layers are one stack
    assert sum(sizes) == 1024 * 2056 + 89 * 2056**2 + 90 * 2056 + 2056 * 10 + 10
    assert recipe.rows >= 2 * recipe.batch_size
