"""Hand-written training steps, without Replicax: classic mistakes, and correct ones."""

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


def pmapped(update: Any) -> Callable[[], Any]:
    return lambda: jax.pmap(update, axis_name=AXIS)


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


def placed_batch() -> Any:
    return jax.device_put(batch(), NamedSharding(mesh(), P(AXIS)))


def placed_state() -> Any:
    return jax.device_put(only_params(), NamedSharding(mesh(), P()))


def _broken(step: Any, *words: str, **more: Any) -> Broken:
    usual = {"reference": reference, "state": only_params, "batch": batch}
    return Broken(step, words=words, **{**usual, **more})


_KEY = {"key": jax.random.key(5)}
_MICRO = {"micro_batches": K}
_MASKED = {"reference": masked_reference, "batch": masked_batch}
_NORM = {"reference": norm_reference, "state": norm_state}
_RUNNING = {"reference": running_mean(same, same), "state": running_mean_state}
_ADAM = {"reference": with_optax(adam), "state": optax_state(adam)}

BROKEN = {
    "pmap_no_pmean": _broken(pmapped(reduced_by(same)), "never reduced over the replicas"),
    "shard_map_no_pmean": _broken(sharded(reduced_by(same)), "never reduced over the replicas"),
    "shard_map_pmean_in_unchecked_loss": _broken(sharded(mean_in_the_loss), "never reduced"),
    "replicas_differ_by_no_pmean": _broken(
        sharded(reduced_by(same)), "never reduced", subject="replicas", case="8 replicas"
    ),
    "pmean_of_summed_gradient": _broken(
        sharded(good, check_vma=True), "exactly 8 times", "summed already"
    ),
    "psum_undivided": _broken(pmapped(reduced_by(psum)), "exactly 8 times", "use pmean"),
    "divided_twice": _broken(
        sharded(reduced_by(lambda tree: jax.tree.map(lambda leaf: leaf / N, pmean(tree)))),
        "1/8 of",
        "divided by 8 replicas twice",
    ),
    "masked_mean_by_device": _broken(
        pmapped(masked_by_device), "mean of means", case="unequal weights", **_MASKED
    ),
    "masked_mean_of_empty_device": _broken(
        sharded(masked_by_device), "no weight at all", case="padded batch", **_MASKED
    ),
    "masked_sum_over_all_rows": _broken(
        sharded(masked_over_all_rows), "without weight included", case="padded batch", **_MASKED
    ),
    "mask_unseen": _broken(
        sharded(mask_unseen), "weights are not looked at", case="padded batch", **_MASKED
    ),
    "batch_replicated": _broken(
        global_view(reference), "computes the whole batch", subject="redundant work"
    ),
    "one_device": _broken(
        lambda: jax.jit(reference), "places its arrays", subject="redundant work"
    ),
    "remainder_dropped": _broken(
        lambda: jax.jit(cut_to_fit), "were dropped", case="indivisible batch"
    ),
    "padding_counted": _broken(
        lambda: jax.jit(filled_to_fit), "padding counts", "zeros", case="indivisible batch"
    ),
    "batch_norm_by_device": _broken(
        sharded(norm_update(same, pmean, pmean)), "depend on one another", "BatchNorm", **_NORM
    ),
    "batch_norm_by_device_in_pmap": _broken(
        pmapped(norm_update(same, pmean, same)), "batch_stats", "never reduced", **_NORM
    ),
    "statistics_not_reduced": _broken(
        sharded(running_mean(pmean, same)), "input_mean", "never reduced", **_RUNNING
    ),
    "contrast_by_device": _broken(
        sharded(contrast(same, pmean)), "depend on one another", reference=contrast(same, same)
    ),
    "key_shared": _broken(
        sharded_with_key(dropout_step(same, pmean)),
        "same random numbers",
        "fold",
        reference=dropout_step(same, same),
        options=_KEY,
    ),
    "key_shared_in_pmap": _broken(
        pmapped(dropout_step(same, pmean)),
        "same random numbers",
        reference=dropout_step(same, same),
        options=_KEY,
    ),
    "micro_batches_undivided": _broken(
        sharded(accumulated(partial(jnp.sum, axis=0))),
        "exactly 4 times",
        "4 micro-batches",
        options=_MICRO,
    ),
    "last_micro_batch_only": _broken(
        pmapped(accumulated(lambda leaf: leaf[-1])),
        "only the last of 4 micro-batches",
        options=_MICRO,
    ),
    "loss_of_replica_0": _broken(sharded(reduced_by(pmean, same)), "loss", "never reduced"),
    "clipped_too_early": _broken(
        sharded(clip_too_early), "before the reduction", "clip", reference=clip_reference
    ),
    "rate_by_replica": _broken(
        pmapped(rate_by_index), "learning rate", subject="replicas", case="8 replicas"
    ),
    "adam_of_summed_gradient": _broken(
        pmapped(with_optax(adam, psum, same, pmean)), "exactly 8 times", "mu", **_ADAM
    ),
    "adam_by_replica": _broken(
        sharded(with_optax(adam, same, mean_of_floats, pmean)),
        "before the reduction",
        **_ADAM,
    ),
    "one_replica_strays": _broken(
        sharded(one_replica_strays), "replica 3 only", subject="replicas", case="8 replicas"
    ),
    "layer_frozen": _broken(sharded(half_frozen), "does not change at all"),
    "jit_in_each_call": _broken(
        jit_in_each_call, "anew in each call", subject="recompilation", case="same shapes"
    ),
    "key_of_the_clock": _broken(
        key_of_the_clock, "outside the arguments", subject="determinism", case="two runs"
    ),
}


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
    "adam": _correct(pmapped(with_optax(adam, pmean, same, pmean)), **_ADAM),
    "clipped": _correct(
        sharded(with_optax(clipped, pmean, same, pmean)),
        reference=with_optax(clipped),
        state=optax_state(clipped),
    ),
    "batch_norm_synced": _correct(sharded(norm_update(pmean, pmean, same)), **_NORM),
    "batch_norm_jit": _correct(global_view(norm_reference, AXIS), **_NORM),
    "statistics_reduced": _correct(pmapped(running_mean(pmean, pmean)), **_RUNNING),
    "micro_batches": _correct(sharded(accumulated(partial(jnp.mean, axis=0))), options=_MICRO),
    "micro_batches_reduced_each": _correct(sharded(reduced_each_time), options=_MICRO),
    "masked": _correct(sharded(masked_rightly), **_MASKED),
    "masked_pmap": _correct(pmapped(masked_rightly), **_MASKED),
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
        lambda: _jit_with_key(), reference=dropout_step(same, same), options=_KEY
    ),
    "dropout_by_replica": _correct(
        sharded_with_key(dropout_step(own_key, pmean)),
        reference=dropout_step(same, same),
        options=_KEY,
    ),
}


def _behind(mapped: Any) -> Any:
    return lambda state, rows: mapped(state, rows["x"], rows["y"])


def _jit_with_key() -> Any:
    whole, rows = NamedSharding(mesh(), P()), NamedSharding(mesh(), P(AXIS))
    return jax.jit(dropout_step(same, same), in_shardings=(whole, rows, whole), out_shardings=whole)
