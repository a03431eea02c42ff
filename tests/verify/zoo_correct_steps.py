"""Hand-written steps of many kinds that are correct; `support.source_correct` has others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from verify import step_parts as zoo
from verify import zoo_recipes as recipes
from verify.step_parts import Entry, adam, pmapped, pmean, same, sgd, sharded, with_optax


def own_key(key: Any) -> Any:
    return jax.random.fold_in(key, lax.axis_index(zoo.AXIS))


clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
gather_rows = partial(lax.all_gather, axis_name=zoo.AXIS, tiled=True)

# Other models, states and batches.


def _with_adam(loss: Any, model: Any, rows: Any, lift: Any) -> Entry:
    return Entry(
        lift(with_optax(adam, pmean, same, pmean, loss)),
        reference=with_optax(adam, loss=loss),
        state=zoo.optax_state(adam, model),
        batch=rows,
    )


def tied(params: Any, rows: Any) -> jax.Array:
    return jnp.mean(recipes.tied(params, rows, None))


def labels() -> Any:
    return {"label": recipes.data(zoo.ROWS)["label"]}


def recurrent_model() -> Any:
    shapes = {"in": (6, 12), "again": (12, 12), "out": (12,)}
    return {name: zoo.normal(8, *shape) / 4 for name, shape in shapes.items()}


def series() -> Any:
    values = zoo.normal(11, zoo.ROWS, 7, 6)
    return values, np.cos(values.sum((1, 2)))


def recurrent(state: Any, series: Any, targets: Any) -> Any:
    """Takes its batch as two arguments, and its state is the parameters."""

    def loss_of(params: Any) -> jax.Array:
        def turn(hidden: Any, now: Any) -> Any:
            return jnp.tanh(now @ params["in"] + hidden @ params["again"]), None

        hidden, _ = lax.scan(turn, jnp.zeros((series.shape[0], 12)), series.swapaxes(0, 1))
        return jnp.mean((hidden @ params["out"] - targets) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return zoo.descend(state, gradient), loss


def kernels() -> Any:
    return {
        "one": zoo.normal(12, 3, 3, 1, 8) / 3,
        "two": zoo.normal(13, 3, 3, 8, 8) / 8,
        "bias": np.zeros(8, np.float32),
        "out": zoo.normal(14, 8 * 9, 10) / 8,
    }


def images() -> Any:
    blank = np.maximum(zoo.normal(15, zoo.ROWS, 12, 12, 1), 0)  # zeros, as on blank paper
    return {"image": blank, "label": np.random.default_rng(1).integers(0, 10, zoo.ROWS)}


def convolved(params: Any, rows: Any) -> jax.Array:
    """Convolution, relu, max pool, twice."""
    x = rows["image"]
    for name in ("one", "two"):
        dims = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x + params["bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    scores = x.reshape(x.shape[0], -1) @ params["out"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, rows["label"]))


_FLAX_OPTIMIZER = optax.adam(1e-2)


def flax_state() -> Any:
    return TrainState.create(apply_fn=zoo.errors, params=zoo.params(), tx=_FLAX_OPTIMIZER)


def flax_update(reduce: Any) -> Any:
    def update(state: Any, rows: Any) -> Any:
        mean = lambda params: jnp.mean(state.apply_fn(params, rows))  # noqa: E731
        loss, gradient = reduce(jax.value_and_grad(mean)(state.params))
        return state.apply_gradients(grads=gradient), loss

    return update


def pair() -> Any:
    rows = zoo.batch()
    return rows["x"], rows["y"]


def of_pair(update: Any) -> Any:
    return lambda state, rows: update(state, dict(zip("xy", rows, strict=True)))


def behind_a_function() -> Any:
    mapped = jax.pmap(lambda state, x, y: zoo.good(state, {"x": x, "y": y}), zoo.AXIS)
    return lambda state, rows: mapped(state, rows["x"], rows["y"])


def placed_batch() -> Any:
    return jax.device_put(zoo.batch(), NamedSharding(zoo.mesh(), zoo.SPLIT))


def placed_state() -> Any:
    return jax.device_put(zoo.only_params(), NamedSharding(zoo.mesh(), zoo.WHOLE))


CORRECT = {
    "pmap_whole_state": Entry(
        lambda: jax.pmap(zoo.good, axis_name=zoo.AXIS, in_axes=(None, 0), out_axes=None)
    ),
    "pmap_loss_by_replica": Entry(pmapped(sgd(pmean, same))),
    "pmap_behind_a_function": Entry(behind_a_function),
    "pmap_flax": Entry(pmapped(flax_update(pmean)), reference=flax_update(same), state=flax_state),
    "shard_map_checked": Entry(sharded(zoo.mean_in_the_loss, check_vma=True)),
    "jit": Entry(zoo.global_view(zoo.reference, zoo.SPLIT)),
    "jit_placed": Entry(lambda: jax.jit(zoo.reference), state=placed_state, batch=placed_batch),
    "adam": Entry(pmapped(with_optax(adam, pmean, same, pmean)), **zoo.ADAM),
    "clipped": Entry(sharded(with_optax(clipped, pmean, same, pmean)), **zoo.optimized(clipped)),
    "warm_up": Entry(pmapped(with_optax(zoo.warm_up, pmean, same, pmean)), **zoo.WARM_UP),
    "batch_norm_synced": Entry(sharded(zoo.with_statistics(zoo.normed(pmean), pmean)), **zoo.NORM),
    "batch_norm_jit": Entry(
        zoo.global_view(zoo.with_statistics(zoo.normed()), zoo.SPLIT), **zoo.NORM
    ),
    "statistics_reduced": Entry(
        pmapped(zoo.with_statistics(zoo.watching, pmean, pmean)), **zoo.WATCHING
    ),
    "micro_batches": Entry(sharded(zoo.accumulated(partial(jnp.mean, axis=0))), **zoo.MICRO),
    "micro_batches_reduced_each": Entry(sharded(zoo.reduced_each_time), **zoo.MICRO),
    "masked": Entry(sharded(zoo.masked_rightly), **zoo.MASKED),
    "contrast_gathered": Entry(sharded(sgd(pmean, loss=zoo.contrast(gather_rows))), **zoo.CONTRAST),
    "recurrent": Entry(
        zoo.global_view(recurrent, zoo.SPLIT, zoo.SPLIT),
        reference=recurrent,
        state=recurrent_model,
        batch=series,
    ),
    "tied_embedding": _with_adam(tied, recipes.tied_model, labels, sharded),
    "convolution": _with_adam(convolved, kernels, images, pmapped),
    "dropout_jit": Entry(zoo.global_view(sgd(loss=zoo.dropped()), zoo.SPLIT, zoo.WHOLE), **zoo.KEY),
    "key_in_state": Entry(sharded(zoo.key_in_state(pmean, own_key)), **zoo.KEYED),
    "raw_key_in_state": Entry(pmapped(zoo.key_in_state(pmean, own_key)), **zoo.RAW_KEYED),
    "keys_split_outside": Entry(pmapped(sgd(pmean, loss=zoo.dropped())), **zoo.KEY),
    "tuple_taken_whole": Entry(
        sharded(of_pair(zoo.good)), reference=of_pair(zoo.reference), batch=pair
    ),
}
