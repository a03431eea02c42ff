"""Parts of hand-written steps, right and wrong: lifts, models, losses, reductions."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

N, ROWS, K, RATE = 8, 64, 4, 0.1
AXIS = "data"
WHOLE, SPLIT = P(), P(AXIS)

# Lifts. Each makes the step when it is called, when devices may be used.


def mesh() -> Mesh:
    return jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def pmapped(update: Any) -> Callable[[], Any]:
    return lambda: jax.pmap(update, axis_name=AXIS)


def sharded(update: Any, *, check_vma: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        lifted = jax.shard_map(
            update, mesh=mesh(), in_specs=(WHOLE, SPLIT), out_specs=WHOLE, check_vma=check_vma
        )
        return jax.jit(lifted, donate_argnums=0)

    return make


def global_view(update: Any, *specs: P) -> Callable[[], Any]:
    """Lift to the global view; `specs` are those of the arguments after the state."""

    def make() -> Any:
        whole, *rest = (NamedSharding(mesh(), spec) for spec in (WHOLE, *specs))
        return jax.jit(update, in_shardings=(whole, *rest), out_shardings=whole)

    return make


# A regression by two layers.


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def params() -> Any:
    return {
        "in": {"kernel": normal(1, 6, 16) / 3, "bias": np.zeros(16, np.float32)},
        "out": {"kernel": normal(2, 16, 1) / 4, "bias": np.zeros(1, np.float32)},
    }


def only_params() -> Any:
    return {"params": params()}


def batch() -> Any:
    x = normal(3, ROWS, 6)
    return {"x": x, "y": np.sin(x.sum(1)) + x[:, 0] ** 2}


def masked_batch() -> Any:
    return {**batch(), "mask": np.ones(ROWS, np.float32)}


def hidden(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["in"]["kernel"] + params["in"]["bias"])


def squares(params: Any, hidden: Any, rows: Any) -> jax.Array:
    values = (hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]
    return (values - rows["y"]) ** 2


def errors(params: Any, rows: Any) -> jax.Array:
    return squares(params, hidden(params, rows["x"]), rows)


def mean_loss(params: Any, rows: Any) -> jax.Array:
    return jnp.mean(errors(params, rows))


# Reductions.

pmean = partial(lax.pmean, axis_name=AXIS)
psum = partial(lax.psum, axis_name=AXIS)


def same(value: Any) -> Any:
    return value


def times(factor: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def mean_of_floats(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: pmean(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


# Updates on a replica, or on one device with the whole batch.


def descend(params: Any, gradient: Any, rate: Any = RATE) -> Any:
    return jax.tree.map(lambda param, slope: param - rate * slope, params, gradient)


def sgd(
    reduce: Any = same,
    reduce_loss: Any = None,
    *,
    loss: Any = mean_loss,
    graded: Any = jax.value_and_grad,
) -> Any:
    """Gradient descent; `reduce` is applied to the gradient, and by default to the loss."""

    def update(state: Any, rows: Any, *key: Any) -> Any:
        value, gradient = graded(loss)(state["params"], rows, *key)
        after = {**state, "params": descend(state["params"], reduce(gradient))}
        return after, {"loss": (reduce_loss or reduce)(value)}

    return update


reference, good = sgd(), sgd(pmean)
mean_in_the_loss = sgd(loss=lambda *given: pmean(mean_loss(*given)))
"""Right only with check_vma=True."""


def by_micro_batch(loss: Any, reduce: Any = same) -> Any:
    """Values and gradients, stacked by micro-batch; `reduce` is applied to each."""

    def graded(params: Any, rows: Any) -> Any:
        parts = jax.tree.map(lambda leaf: leaf.reshape(K, -1, *leaf.shape[1:]), rows)
        return lax.map(lambda part: reduce(jax.value_and_grad(loss)(params, part)), parts)

    return graded


def accumulated(finish: Any) -> Any:
    """Make one gradient from those of the micro-batches by `finish`."""
    return sgd(
        lambda gradients: pmean(jax.tree.map(finish, gradients)),
        lambda losses: pmean(jnp.mean(losses)),
        graded=by_micro_batch,
    )


reduced_each_time = sgd(
    lambda tree: jax.tree.map(partial(jnp.mean, axis=0), tree),
    graded=partial(by_micro_batch, reduce=pmean),
)


def with_optax(
    optimizer: Any,
    before: Any = same,
    after: Any = same,
    reduce_loss: Any = same,
    loss: Any = mean_loss,
) -> Any:
    """With reductions before the optimizer, after it, and of the loss."""

    def update(state: Any, rows: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(state["params"], rows)
        updates, memory = optimizer.update(before(gradient), state["opt_state"], state["params"])
        changed, memory = after((optax.apply_updates(state["params"], updates), memory))
        return {"params": changed, "opt_state": memory}, {"loss": reduce_loss(value)}

    return update


def optax_state(optimizer: Any, model: Any = params) -> Callable[[], Any]:
    return lambda: {"params": model(), "opt_state": optimizer.init(model())}


def with_statistics(loss: Any, reduce: Any = same, stored: Any = same) -> Any:
    """With running means of statistics of the loss, by their names in the state."""

    def update(state: Any, rows: Any) -> Any:
        (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"], rows)
        before = {name: state[name] for name in seen}
        kept = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, before, stored(seen))
        after = {**kept, "params": descend(state["params"], reduce(gradient))}
        return after, {"loss": reduce(value)}

    return update


def nudged(by: Any) -> Any:
    """Add the result of `by` to a bias."""

    def update(state: Any, rows: Any, *more: Any) -> Any:
        after, metrics = good(state, rows)
        after["params"]["out"]["bias"] += by(*more)
        return after, metrics

    return update


def of_whole_batch(change: Any) -> Callable[[], Any]:
    """Change each array of the batch, then split it."""

    def update(state: Any, rows: Any) -> Any:
        rows = jax.tree.map(change, rows)
        rows = lax.with_sharding_constraint(rows, NamedSharding(mesh(), SPLIT))
        after, metrics = reference(state, rows)
        return lax.with_sharding_constraint(after, NamedSharding(mesh(), WHOLE)), metrics

    return lambda: jax.jit(update)


def cut_to(multiple: int) -> Any:
    return lambda leaf: leaf[: len(leaf) // multiple * multiple]


def filled_to_fit(leaf: Any) -> Any:
    """Pad with zeros, which count."""
    return jnp.concatenate([leaf, jnp.zeros((-len(leaf) % N, *leaf.shape[1:]), leaf.dtype)])


# Losses in which rows have weights, meet, or are changed at random.


def masked_loss(count: Any = jnp.sum) -> Any:
    def loss(params: Any, rows: Any) -> jax.Array:
        return jnp.sum(errors(params, rows) * rows["mask"]) / count(rows["mask"])

    return loss


masked_reference = sgd(loss=masked_loss())
masked_rightly = sgd(psum, loss=masked_loss(lambda mask: psum(jnp.sum(mask))))


def normed(reduce: Any = same) -> Any:
    """BatchNorm between the layers; its statistics are reduced."""

    def loss(params: Any, rows: Any) -> Any:
        before = rows["x"] @ params["in"]["kernel"]
        mean = reduce(jnp.mean(before, 0))
        var = reduce(jnp.mean(before**2, 0)) - mean**2
        after = (before - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["shift"]
        value = jnp.mean(squares(params, jax.nn.relu(after), rows))
        return value, {"batch_stats": {"mean": mean, "var": var}}

    return loss


def norm_state() -> Any:
    return {
        "params": {**params(), "scale": np.ones(16, np.float32), "shift": np.zeros(16, np.float32)},
        "batch_stats": {"mean": np.zeros(16, np.float32), "var": np.ones(16, np.float32)},
    }


def watching(params: Any, rows: Any) -> Any:
    return mean_loss(params, rows), {"input_mean": jnp.mean(rows["x"], 0)}


def watching_state() -> Any:
    return {**only_params(), "input_mean": np.zeros(6, np.float32)}


def contrast(gather: Any = same) -> Any:
    """Contrast each row with all others of the batch."""

    def loss(params: Any, rows: Any) -> jax.Array:
        one = rows["x"] @ params["in"]["kernel"]
        other = (rows["x"] ** 2) @ params["in"]["kernel"]
        first = lax.axis_index(AXIS) * one.shape[0] if gather is not same else 0
        scores = one @ gather(other).T / 4
        labels = first + jnp.arange(one.shape[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))

    return loss


def dropped(fold: Any = same) -> Any:
    """Dropout between the layers; `fold` is applied to its key."""

    def loss(params: Any, rows: Any, key: Any) -> jax.Array:
        values = hidden(params, rows["x"])
        kept = jax.random.bernoulli(fold(key), 0.5, values.shape)
        return jnp.mean(squares(params, jnp.where(kept, values * 2, 0), rows))

    return loss


def key_in_state(reduce: Any = same, fold: Any = same) -> Any:
    """Dropout with its key in the state."""

    def update(state: Any, rows: Any) -> Any:
        later, key = jax.random.split(state["rng"])
        after, metrics = sgd(reduce, loss=dropped(fold))(state, rows, key)
        return {**after, "rng": later}, metrics

    return update


def keyed_state() -> Any:
    return {**only_params(), "rng": jax.random.key(5)}


def raw_keyed_state() -> Any:
    return {**only_params(), "rng": np.asarray(jax.random.key_data(jax.random.key(5)))}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A step and its single-device form."""

    step: Callable[[], Any]
    words: tuple[str, ...] = ()
    """Words that the cause must contain, for broken steps."""
    subject: str = "parity"
    case: str = "full batch"
    reference: Any = reference
    state: Callable[[], Any] = only_params
    batch: Callable[[], Any] = batch
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def optimized(optimizer: Any) -> dict[str, Any]:
    return {"reference": with_optax(optimizer), "state": optax_state(optimizer)}


adam = optax.adamw(1e-2, weight_decay=1e-3)
warm_up = optax.adam(optax.linear_schedule(0.0, 1e-2, 4))
"""Its first learning rate is 0."""

ADAM, WARM_UP = optimized(adam), optimized(warm_up)
KEY = {"reference": sgd(loss=dropped()), "options": {"key": jax.random.key(5)}}
MICRO = {"options": {"micro_batches": K}}
MASKED = {"reference": masked_reference, "batch": masked_batch}
NORM = {"reference": with_statistics(normed()), "state": norm_state}
WATCHING = {"reference": with_statistics(watching), "state": watching_state}
CONTRAST = {"reference": sgd(loss=contrast())}
KEYED = {"reference": key_in_state(), "state": keyed_state}
RAW_KEYED = {"reference": key_in_state(), "state": raw_keyed_state}
