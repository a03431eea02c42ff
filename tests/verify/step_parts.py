"""What hand-written steps are made of, right and wrong ones: lifts, models, losses, reductions."""

import dataclasses
import itertools
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


@dataclasses.dataclass(frozen=True)
class Entry:
    """A step and its single-device form."""

    step: Callable[[], Any]
    """Makes the step; the devices may be looked at."""
    reference: Any
    state: Callable[[], Any]
    batch: Callable[[], Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Broken(Entry):
    """What has to be found."""

    subject: str = "parity"
    words: tuple[str, ...] = ()
    """Of its cause."""
    case: str = "full batch"


# Lifts.


def mesh() -> Mesh:
    return jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def pmapped(update: Any, in_axes: Any = 0) -> Callable[[], Any]:
    return lambda: jax.pmap(update, axis_name=AXIS, in_axes=in_axes)


def sharded(update: Any, *, check_vma: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        lifted = jax.shard_map(
            update, mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check_vma
        )
        return jax.jit(lifted, donate_argnums=0)

    return make


def global_view(update: Any, *axes: str) -> Callable[[], Any]:
    def make() -> Any:
        whole, rows = NamedSharding(mesh(), P()), NamedSharding(mesh(), P(*axes))
        return jax.jit(update, in_shardings=(whole, rows), out_shardings=whole)

    return make


# A regression by two layers.


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def params() -> Any:
    return {
        "in": {"kernel": _normal(1, 6, 16) / 3, "bias": np.zeros(16, np.float32)},
        "out": {"kernel": _normal(2, 16, 1) / 4, "bias": np.zeros(1, np.float32)},
    }


def only_params() -> Any:
    return {"params": params()}


def batch() -> Any:
    x = _normal(3, ROWS, 6)
    return {"x": x, "y": np.sin(x.sum(1)) + x[:, 0] ** 2}


def masked_batch() -> Any:
    return {**batch(), "mask": np.ones(ROWS, np.float32)}


def predict(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["in"]["kernel"] + params["in"]["bias"])
    return (hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]


def errors(params: Any, rows: Any) -> jax.Array:
    return (predict(params, rows["x"]) - rows["y"]) ** 2


def mean_loss(params: Any, rows: Any) -> jax.Array:
    return jnp.mean(errors(params, rows))


def descend(params: Any, gradient: Any, rate: Any = RATE) -> Any:
    return jax.tree.map(lambda param, slope: param - rate * slope, params, gradient)


def reference(state: Any, rows: Any) -> Any:
    loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
    return {"params": descend(state["params"], gradient)}, {"loss": loss}


pmean = partial(lax.pmean, axis_name=AXIS)
psum = partial(lax.psum, axis_name=AXIS)


def reduced_by(reduce_gradient: Any, reduce_loss: Any = pmean) -> Any:
    """A step of one replica, with its reductions given."""

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
        after = descend(state["params"], reduce_gradient(gradient))
        return {"params": after}, {"loss": reduce_loss(loss)}

    return update


good = reduced_by(pmean)


def mean_in_the_loss(state: Any, rows: Any) -> Any:
    """Differentiates the mean over the replicas: right with check_vma=True only."""

    def loss_of(params: Any) -> jax.Array:
        return pmean(mean_loss(params, rows))

    loss, gradient = jax.value_and_grad(loss_of)(state["params"])
    return {"params": descend(state["params"], gradient)}, {"loss": loss}


def rate_by_index(state: Any, rows: Any) -> Any:
    loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
    rate = RATE * (1 + lax.axis_index(AXIS))
    return {"params": descend(state["params"], pmean(gradient), rate)}, {"loss": pmean(loss)}


def one_replica_strays(state: Any, rows: Any) -> Any:
    after, metrics = good(state, rows)
    nudge = jnp.where(lax.axis_index(AXIS) == 3, 1e-3, 0.0)
    after["params"]["out"]["bias"] += nudge
    return after, metrics


def half_frozen(state: Any, rows: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return mean_loss({**params, "in": lax.stop_gradient(params["in"])}, rows)

    loss, gradient = jax.value_and_grad(loss_of)(state["params"])
    return {"params": descend(state["params"], pmean(gradient))}, {"loss": pmean(loss)}


# Masks.


def masked_loss(params: Any, rows: Any) -> jax.Array:
    return jnp.sum(errors(params, rows) * rows["mask"]) / jnp.sum(rows["mask"])


def masked_reference(state: Any, rows: Any) -> Any:
    loss, gradient = jax.value_and_grad(masked_loss)(state["params"], rows)
    return {"params": descend(state["params"], gradient)}, loss


def masked_by_device(state: Any, rows: Any) -> Any:
    """The seeds' own: each device divides by its own rows."""
    loss, gradient = jax.value_and_grad(masked_loss)(state["params"], rows)
    return {"params": descend(state["params"], pmean(gradient))}, pmean(loss)


def _masked_sum(divide: Any) -> Any:
    def update(state: Any, rows: Any) -> Any:
        def total(params: Any) -> jax.Array:
            return jnp.sum(errors(params, rows) * rows["mask"])

        loss, gradient = jax.value_and_grad(total)(state["params"])
        loss, gradient = psum((loss, gradient))
        count = divide(rows["mask"])
        gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
        return {"params": descend(state["params"], gradient)}, loss / count

    return update


masked_rightly = _masked_sum(lambda mask: psum(jnp.sum(mask)))
masked_over_all_rows = _masked_sum(lambda mask: float(mask.size * N))


def mask_unseen(state: Any, rows: Any) -> Any:
    after, metrics = good(state, rows)
    return after, metrics["loss"]


# Batches that do not divide.


def cut_to_fit(state: Any, rows: Any) -> Any:
    """On the whole batch: leaves out what does not divide."""
    count = rows["x"].shape[0] // N * N
    kept = jax.tree.map(lambda leaf: leaf[:count], rows)
    kept = lax.with_sharding_constraint(kept, NamedSharding(mesh(), P(AXIS)))
    after, metrics = reference(state, kept)
    return lax.with_sharding_constraint(after, NamedSharding(mesh(), P())), metrics


def filled_to_fit(state: Any, rows: Any) -> Any:
    """On the whole batch: fills it with zeros, which count."""
    missing = -rows["x"].shape[0] % N

    def filled(leaf: Any) -> Any:
        return jnp.concatenate([leaf, jnp.zeros((missing, *leaf.shape[1:]), leaf.dtype)])

    full = jax.tree.map(filled, rows) if missing else rows
    full = lax.with_sharding_constraint(full, NamedSharding(mesh(), P(AXIS)))
    after, metrics = reference(state, full)
    return lax.with_sharding_constraint(after, NamedSharding(mesh(), P())), metrics


# BatchNorm, and other losses in which rows meet.


def norm_state() -> Any:
    return {
        "params": {**params(), "scale": np.ones(16, np.float32), "shift": np.zeros(16, np.float32)},
        "batch_stats": {"mean": np.zeros(16, np.float32), "var": np.ones(16, np.float32)},
    }


def norm_update(statistics: Any, gradients: Any, stored: Any) -> Any:
    """With BatchNorm between the layers; the three reductions are given."""

    def loss_of(params: Any, rows: Any) -> Any:
        hidden = rows["x"] @ params["in"]["kernel"]
        mean = statistics(jnp.mean(hidden, 0))
        var = statistics(jnp.mean(hidden**2, 0)) - mean**2
        hidden = (hidden - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["shift"]
        values = (jax.nn.relu(hidden) @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]
        return jnp.mean((values - rows["y"]) ** 2), {"mean": mean, "var": var}

    def update(state: Any, rows: Any) -> Any:
        graded = jax.value_and_grad(loss_of, has_aux=True)
        (loss, seen), gradient = graded(state["params"], rows)
        after = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new, state["batch_stats"], stored(seen)
        )
        return {
            "params": descend(state["params"], gradients(gradient)),
            "batch_stats": after,
        }, {"loss": gradients(loss)}

    return update


def same(value: Any) -> Any:
    return value


norm_reference = norm_update(same, same, same)


def running_mean_state() -> Any:
    return {**only_params(), "input_mean": np.zeros(6, np.float32)}


def running_mean(reduce: Any, reduce_mean: Any) -> Any:
    """Keeps a running mean of its inputs."""

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
        mean = reduce_mean(jnp.mean(rows["x"], 0))
        after = {
            "params": descend(state["params"], reduce(gradient)),
            "input_mean": 0.9 * state["input_mean"] + 0.1 * mean,
        }
        return after, {"loss": reduce(loss)}

    return update


def contrast(gather: Any, reduce: Any) -> Any:
    """Each row against all others of the batch."""

    def loss_of(params: Any, rows: Any) -> jax.Array:
        one = rows["x"] @ params["in"]["kernel"]
        other = (rows["x"] ** 2) @ params["in"]["kernel"]
        first = lax.axis_index(AXIS) * one.shape[0] if gather is not same else 0
        scores = one @ gather(other).T / 4
        labels = first + jnp.arange(one.shape[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], rows)
        return {"params": descend(state["params"], reduce(gradient))}, {"loss": reduce(loss)}

    return update


def gather_rows(values: jax.Array) -> jax.Array:
    return lax.all_gather(values, AXIS, tiled=True)


# Optimizers.


def with_optax(optimizer: Any, before: Any = same, after: Any = same, loss: Any = same) -> Any:
    """With what is reduced before the optimizer, after it, and of the loss."""

    def update(state: Any, rows: Any) -> Any:
        error, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
        updates, memory = optimizer.update(before(gradient), state["opt_state"], state["params"])
        changed, memory = after((optax.apply_updates(state["params"], updates), memory))
        return {"params": changed, "opt_state": memory}, {"loss": loss(error)}

    return update


def mean_of_floats(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: pmean(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


adam = optax.adamw(1e-2, weight_decay=1e-3)
clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def optax_state(optimizer: Any) -> Callable[[], Any]:
    return lambda: {"params": params(), "opt_state": optimizer.init(params())}


def clip_too_early(state: Any, rows: Any) -> Any:
    loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
    gradient, _ = optax.clip_by_global_norm(0.5).update(gradient, optax.EmptyState())
    return {"params": descend(state["params"], pmean(gradient))}, {"loss": pmean(loss)}


def clip_reference(state: Any, rows: Any) -> Any:
    loss, gradient = jax.value_and_grad(mean_loss)(state["params"], rows)
    gradient, _ = optax.clip_by_global_norm(0.5).update(gradient, optax.EmptyState())
    return {"params": descend(state["params"], gradient)}, {"loss": loss}


# Micro-batches.


def accumulated(finish: Any) -> Any:
    """`finish(gradients)`, stacked by micro-batch, gives the gradient before the reduction."""

    def update(state: Any, rows: Any) -> Any:
        parts = jax.tree.map(lambda leaf: leaf.reshape(K, -1, *leaf.shape[1:]), rows)
        losses, gradients = lax.map(
            lambda part: jax.value_and_grad(mean_loss)(state["params"], part), parts
        )
        gradient = pmean(jax.tree.map(finish, gradients))
        return {"params": descend(state["params"], gradient)}, {"loss": pmean(jnp.mean(losses))}

    return update


def reduced_each_time(state: Any, rows: Any) -> Any:
    parts = jax.tree.map(lambda leaf: leaf.reshape(K, -1, *leaf.shape[1:]), rows)

    def add(total: Any, part: Any) -> Any:
        result = pmean(jax.value_and_grad(mean_loss)(state["params"], part))
        return jax.tree.map(jnp.add, total, result), None

    zeros = jax.tree.map(jnp.zeros_like, state["params"])
    (loss, gradient), _ = lax.scan(add, (jnp.zeros(()), zeros), parts)
    gradient = jax.tree.map(lambda leaf: leaf / K, gradient)
    return {"params": descend(state["params"], gradient)}, {"loss": loss / K}


# Dropout.


def dropout_step(fold: Any, reduce: Any) -> Any:
    def update(state: Any, rows: Any, key: Any) -> Any:
        key = fold(key)

        def loss_of(params: Any) -> jax.Array:
            hidden = jax.nn.relu(rows["x"] @ params["in"]["kernel"] + params["in"]["bias"])
            kept = jax.random.bernoulli(key, 0.5, hidden.shape)
            hidden = jnp.where(kept, hidden * 2, 0)
            values = (hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]
            return jnp.mean((values - rows["y"]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state["params"])
        return {"params": descend(state["params"], reduce(gradient))}, {"loss": reduce(loss)}

    return update


def own_key(key: Any) -> Any:
    return jax.random.fold_in(key, lax.axis_index(AXIS))


def sharded_with_key(update: Any) -> Callable[[], Any]:
    return lambda: jax.jit(
        jax.shard_map(
            update, mesh=mesh(), in_specs=(P(), P(AXIS), P()), out_specs=P(), check_vma=False
        )
    )


# Python around the step.


def jit_in_each_call() -> Any:
    def step(state: Any, rows: Any) -> Any:
        return global_view(lambda state, rows: reference(state, rows), AXIS)()(state, rows)

    return step


def key_of_the_clock() -> Any:
    calls = itertools.count()

    @pmapped_with_seed
    def update(state: Any, rows: Any, seed: Any) -> Any:
        after, metrics = good(state, rows)
        noise = 1e-7 * jax.random.normal(jax.random.key(seed), (1,))
        after["params"]["out"]["bias"] += noise
        return after, metrics

    return lambda state, rows: update(state, rows, np.full(N, next(calls), np.uint32))


def pmapped_with_seed(update: Any) -> Any:
    return jax.pmap(update, axis_name=AXIS)


def placed_batch() -> Any:
    return jax.device_put(batch(), NamedSharding(mesh(), P(AXIS)))


def placed_state() -> Any:
    return jax.device_put(only_params(), NamedSharding(mesh(), P()))


KEY = {"key": jax.random.key(5)}
MICRO = {"micro_batches": K}
MASKED = {"reference": masked_reference, "batch": masked_batch}
NORM = {"reference": norm_reference, "state": norm_state}
RUNNING = {"reference": running_mean(same, same), "state": running_mean_state}
ADAM = {"reference": with_optax(adam), "state": optax_state(adam)}
