"""Hand-written steps of many kinds that are correct."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from verify.step_parts import (
    ADAM,
    AXIS,
    KEY,
    MASKED,
    MICRO,
    NORM,
    ROWS,
    RUNNING,
    Entry,
    _normal,
    accumulated,
    adam,
    batch,
    clipped,
    contrast,
    descend,
    dropout_step,
    gather_rows,
    global_view,
    good,
    masked_rightly,
    mean_in_the_loss,
    mesh,
    norm_reference,
    norm_update,
    only_params,
    optax_state,
    own_key,
    params,
    placed_batch,
    placed_state,
    pmapped,
    pmean,
    predict,
    reduced_by,
    reduced_each_time,
    reference,
    running_mean,
    same,
    sharded,
    sharded_with_key,
    with_optax,
)

# Other models, all of them right.


def token_state() -> Any:
    shared = {"embedding": _normal(5, 37, 16) / 4, "mix": _normal(6, 16, 16) / 4}
    return {"params": shared, "opt_state": adam.init(shared)}


def token_batch() -> Any:
    return {"tokens": np.random.default_rng(7).integers(0, 37, (ROWS, 9)).astype(np.int32)}


def tied(reduce: Any) -> Any:
    """One embedding, used at both ends; Adam."""

    def loss_of(params: Any, rows: Any) -> jax.Array:
        tokens = rows["tokens"]
        hidden = jnp.tanh(params["embedding"][tokens[:, :-1]] @ params["mix"])
        scores = hidden @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
        return jnp.mean(losses)

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = reduce(jax.value_and_grad(loss_of)(state["params"], rows))
        updates, memory = adam.update(gradient, state["opt_state"], state["params"])
        after = optax.apply_updates(state["params"], updates)
        return {"params": after, "opt_state": memory}, loss

    return update


def rnn_state() -> Any:
    return {"in": _normal(8, 6, 12) / 3, "again": _normal(9, 12, 12) / 4, "out": _normal(10, 12)}


def rnn_batch() -> Any:
    series = _normal(11, ROWS, 7, 6)
    return series, np.cos(series.sum((1, 2)))


def rnn_reference(state: Any, series: Any, targets: Any) -> Any:
    """Takes its batch as two arguments, and its state is the parameters."""

    def loss_of(params: Any) -> jax.Array:
        def turn(hidden: Any, now: Any) -> Any:
            return jnp.tanh(now @ params["in"] + hidden @ params["again"]), None

        hidden = jnp.zeros((series.shape[0], 12))
        hidden, _ = lax.scan(turn, hidden, series.swapaxes(0, 1))
        return jnp.mean((hidden @ params["out"] - targets) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return descend(state, gradient), loss


def rnn_global() -> Any:
    whole, rows = NamedSharding(mesh(), P()), NamedSharding(mesh(), P(AXIS))
    return jax.jit(rnn_reference, in_shardings=(whole, rows, rows), out_shardings=whole)


def image_state() -> Any:
    kernels = {
        "one": _normal(12, 3, 3, 1, 8) / 3,
        "two": _normal(13, 3, 3, 8, 8) / 8,
        "bias": np.zeros(8, np.float32),
        "out": _normal(14, 8 * 9, 10) / 8,
    }
    return {"params": kernels, "opt_state": adam.init(kernels)}


def image_batch() -> Any:
    images = np.maximum(_normal(15, ROWS, 12, 12, 1), 0)  # zeros, as on blank paper
    return {"image": images, "label": np.random.default_rng(1).integers(0, 10, ROWS)}


def convolved(reduce: Any) -> Any:
    """Convolution, relu, max pool, twice; Adam."""

    def loss_of(params: Any, rows: Any) -> jax.Array:
        x = rows["image"]
        for name in ("one", "two"):
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x + params["bias"])
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        scores = x.reshape(x.shape[0], -1) @ params["out"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, rows["label"]))

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = reduce(jax.value_and_grad(loss_of)(state["params"], rows))
        updates, memory = adam.update(gradient, state["opt_state"], state["params"])
        after = optax.apply_updates(state["params"], updates)
        return {"params": after, "opt_state": memory}, {"loss": loss}

    return update


def _correct(step: Any, **more: Any) -> Entry:
    usual = {"reference": reference, "state": only_params, "batch": batch}
    return Entry(step, **{**usual, **more})


def flax_state() -> Any:
    from flax.training.train_state import TrainState

    return TrainState.create(apply_fn=predict, params=params(), tx=_FLAX_OPTIMIZER)


_FLAX_OPTIMIZER = optax.adam(1e-2)


def flax_update(reduce: Any) -> Any:
    def update(state: Any, rows: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn(params, rows["x"]) - rows["y"]) ** 2)

        loss, gradient = reduce(jax.value_and_grad(loss_of)(state.params))
        return state.apply_gradients(grads=gradient), loss

    return update


CORRECT = {
    "pmap": _correct(pmapped(good)),
    "pmap_whole_state": _correct(
        lambda: jax.pmap(good, axis_name=AXIS, in_axes=(None, 0), out_axes=None)
    ),
    "pmap_loss_by_replica": _correct(pmapped(reduced_by(pmean, same))),
    "pmap_behind_a_function": _correct(
        lambda: _behind(jax.pmap(lambda state, x, y: good(state, {"x": x, "y": y}), AXIS))
    ),
    "pmap_flax": _correct(
        pmapped(flax_update(pmean)), reference=flax_update(same), state=flax_state
    ),
    "shard_map": _correct(sharded(good)),
    "shard_map_checked": _correct(sharded(mean_in_the_loss, check_vma=True)),
    "jit": _correct(global_view(reference, AXIS)),
    "jit_placed": _correct(lambda: jax.jit(reference), state=placed_state, batch=placed_batch),
    "adam": _correct(pmapped(with_optax(adam, pmean, same, pmean)), **ADAM),
    "clipped": _correct(
        sharded(with_optax(clipped, pmean, same, pmean)),
        reference=with_optax(clipped),
        state=optax_state(clipped),
    ),
    "batch_norm_synced": _correct(sharded(norm_update(pmean, pmean, same)), **NORM),
    "batch_norm_jit": _correct(global_view(norm_reference, AXIS), **NORM),
    "statistics_reduced": _correct(pmapped(running_mean(pmean, pmean)), **RUNNING),
    "micro_batches": _correct(sharded(accumulated(partial(jnp.mean, axis=0))), options=MICRO),
    "micro_batches_reduced_each": _correct(sharded(reduced_each_time), options=MICRO),
    "masked": _correct(sharded(masked_rightly), **MASKED),
    "masked_pmap": _correct(pmapped(masked_rightly), **MASKED),
    "contrast_gathered": _correct(
        sharded(contrast(gather_rows, pmean)), reference=contrast(same, same)
    ),
    "rnn": _correct(rnn_global, reference=rnn_reference, state=rnn_state, batch=rnn_batch),
    "tied_embedding": _correct(
        sharded(tied(pmean)), reference=tied(same), state=token_state, batch=token_batch
    ),
    "convolution": _correct(
        pmapped(convolved(pmean)), reference=convolved(same), state=image_state, batch=image_batch
    ),
    "dropout_jit": _correct(
        lambda: _jit_with_key(), reference=dropout_step(same, same), options=KEY
    ),
    "dropout_by_replica": _correct(
        sharded_with_key(dropout_step(own_key, pmean)),
        reference=dropout_step(same, same),
        options=KEY,
    ),
}


def _behind(mapped: Any) -> Any:
    return lambda state, rows: mapped(state, rows["x"], rows["y"])


def _jit_with_key() -> Any:
    whole, rows = NamedSharding(mesh(), P()), NamedSharding(mesh(), P(AXIS))
    return jax.jit(dropout_step(same, same), in_shardings=(whole, rows, whole), out_shardings=whole)
