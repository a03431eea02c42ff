"""Classic and unusual mistakes in hand-written steps, and the words of their causes.

Those that lint finds too are in `support.source_broken`; `lint.test_rules` lets verify run them.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from verify import step_parts as zoo
from verify.step_parts import Entry, pmapped, pmean, psum, same, sgd, sharded, with_optax


def half_frozen(params: Any, rows: Any) -> jax.Array:
    return zoo.mean_loss({**params, "in": lax.stop_gradient(params["in"])}, rows)


def counted_inside(params: Any, rows: Any) -> jax.Array:
    """Weights are made inside the loss."""
    real = (rows["labels"] >= 0).astype(jnp.float32)
    return jnp.sum(zoo.errors(params, rows)[:, None] * real) / jnp.sum(real)


def lengths() -> Any:
    """Rows of 5 places, of which later rows fill fewer; -1 is none."""
    places = np.arange(5) < np.linspace(5, 1, zoo.ROWS).astype(int)[:, None]
    labels = np.random.default_rng(3).integers(0, 4, (zoo.ROWS, 5))
    return {**zoo.batch(), "labels": np.where(places, labels, -1).astype(np.int32)}


def clip(gradient: Any) -> Any:
    return optax.clip_by_global_norm(0.5).update(gradient, optax.EmptyState())[0]


loosely_clipped = optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.1))


def doubled_later(update: Any, since: int) -> Any:
    """From a step on, change twice what `update` does."""

    def step(state: Any, rows: Any) -> Any:
        before = state["params"]
        after, metrics = update({"params": before}, rows)
        factor = jnp.where(state["steps"] < since, 1.0, 2.0)
        params = jax.tree.map(lambda old, new: old + factor * (new - old), before, after["params"])
        return {"params": params, "steps": state["steps"] + 1}, metrics

    return step


# Python around the step.


def jit_in_each_call() -> Any:
    def step(state: Any, rows: Any) -> Any:
        anew = zoo.global_view(lambda state, rows: zoo.reference(state, rows), zoo.SPLIT)
        return anew()(state, rows)

    return step


def key_of_the_clock() -> Any:
    calls = itertools.count()
    noise = lambda seed: 1e-7 * jax.random.normal(jax.random.key(seed), (1,))  # noqa: E731
    update = pmapped(zoo.nudged(noise))()
    return lambda state, rows: update(state, rows, np.full(zoo.N, next(calls), np.uint32))


def reads_what_it_donated() -> Any:
    compiled = sharded(zoo.good)()

    def step(state: Any, rows: Any) -> Any:
        after, metrics = compiled(state, rows)
        old, new = (np.asarray(each["params"]["out"]["bias"]) for each in (state, after))
        return after, {**metrics, "moved": np.abs(new - old).max()}

    return step


def moved_reference(state: Any, rows: Any) -> Any:
    after, metrics = zoo.reference(state, rows)
    moved = after["params"]["out"]["bias"] - state["params"]["out"]["bias"]
    return after, {**metrics, "moved": jnp.abs(moved).max()}


def _broken(step: Any, *words: str, **more: Any) -> Entry:
    return Entry(step, words, **more)


BROKEN = {
    "pmean_in_unchecked_loss": _broken(sharded(zoo.mean_in_the_loss), "never reduced"),
    "pmean_of_summed_gradient": _broken(
        sharded(zoo.good, check_vma=True), "exactly 8 times", "check_vma=True"
    ),
    "psum_undivided": _broken(pmapped(sgd(psum, pmean)), "exactly 8 times", "use pmean"),
    "divided_twice": _broken(
        sharded(sgd(lambda tree: zoo.times(1 / zoo.N, pmean(tree)), pmean)),
        "1/8 of",
        "8 replicas twice",
    ),
    "masked_sum_over_all_rows": _broken(
        sharded(sgd(psum, loss=zoo.masked_loss(lambda mask: float(mask.size * zoo.N)))),
        "weight 0",
        case="padded batch",
        **zoo.MASKED,
    ),
    "mask_unseen": _broken(sharded(zoo.good), "are ignored", case="padded batch", **zoo.MASKED),
    "counted_inside": _broken(
        sharded(sgd(pmean, loss=counted_inside)),
        "mean of means",
        reference=sgd(loss=counted_inside),
        batch=lengths,
    ),
    "batch_replicated": _broken(
        zoo.global_view(zoo.reference, zoo.WHOLE), "whole batch", subject="redundant work"
    ),
    "one_device": _broken(lambda: jax.jit(zoo.reference), "in_shardings", subject="redundant work"),
    "remainder_dropped": _broken(
        zoo.of_whole_batch(zoo.cut_to(zoo.N)), "were dropped", case="indivisible batch"
    ),
    "remainder_of_sixteen": _broken(
        zoo.of_whole_batch(zoo.cut_to(16)), "were dropped", case="indivisible batch"
    ),
    "padding_counted": _broken(
        zoo.of_whole_batch(zoo.filled_to_fit), "padded to", "zeros", case="indivisible batch"
    ),
    "batch_norm_by_device": _broken(
        sharded(zoo.with_statistics(zoo.normed(), pmean, pmean)),
        "one another",
        "BatchNorm",
        **zoo.NORM,
    ),
    "batch_norm_by_device_in_pmap": _broken(
        pmapped(zoo.with_statistics(zoo.normed(), pmean)),
        "batch_stats",
        "never reduced",
        **zoo.NORM,
    ),
    "statistics_not_reduced": _broken(
        sharded(zoo.with_statistics(zoo.watching, pmean)),
        "input_mean",
        "never reduced",
        **zoo.WATCHING,
    ),
    "contrast_by_device": _broken(
        sharded(sgd(pmean, loss=zoo.contrast())), "one another", **zoo.CONTRAST
    ),
    "key_in_state_shared": _broken(sharded(zoo.key_in_state(pmean)), "random numbers", **zoo.KEYED),
    "raw_key_in_state_shared": _broken(
        pmapped(zoo.key_in_state(pmean)), "random numbers", **zoo.RAW_KEYED
    ),
    "micro_batches_undivided": _broken(
        sharded(zoo.accumulated(partial(jnp.sum, axis=0))),
        "exactly 4 times",
        "4 micro-batches",
        **zoo.MICRO,
    ),
    "last_micro_batch_only": _broken(
        pmapped(zoo.accumulated(lambda leaf: leaf[-1])), "last of 4 micro-batches", **zoo.MICRO
    ),
    "loss_of_replica_0": _broken(sharded(sgd(pmean, same)), "loss", "never reduced"),
    "clipped_too_early": _broken(
        sharded(sgd(lambda tree: pmean(clip(tree)), pmean)),
        "the reduction",
        "clip",
        reference=sgd(clip, same),
    ),
    "rate_by_replica": _broken(
        pmapped(sgd(lambda tree: zoo.times(1 + lax.axis_index(zoo.AXIS), pmean(tree)), pmean)),
        "learning rate",
        subject="replicas",
        case="8 replicas",
    ),
    "adam_of_summed_gradient": _broken(
        pmapped(with_optax(zoo.adam, psum, same, pmean)), "exactly 8 times", "mu", **zoo.ADAM
    ),
    "adam_by_replica": _broken(
        sharded(with_optax(zoo.adam, same, zoo.mean_of_floats, pmean)), "the reduction", **zoo.ADAM
    ),
    "sum_clipped_loosely": _broken(
        sharded(with_optax(loosely_clipped, psum, same, pmean)),
        "exactly 8 times",
        **zoo.optimized(loosely_clipped),
    ),
    "warm_up_psum": _broken(
        pmapped(with_optax(zoo.warm_up, psum, same, pmean)), "exactly 8 times", **zoo.WARM_UP
    ),
    "one_replica_strays": _broken(
        sharded(zoo.nudged(lambda: jnp.where(lax.axis_index(zoo.AXIS) == 3, 1e-3, 0.0))),
        "replica 3 only",
        subject="replicas",
        case="8 replicas",
    ),
    "layer_frozen": _broken(sharded(sgd(pmean, loss=half_frozen)), "not change"),
    "wrong_later": _broken(
        sharded(doubled_later(zoo.good, 2)),
        reference=doubled_later(zoo.reference, 9),
        state=lambda: {**zoo.only_params(), "steps": np.int32(0)},
        case="4 steps",
        options={"steps": 4},
    ),
    "jit_in_each_call": _broken(
        jit_in_each_call, "each call", subject="recompilation", case="same shapes"
    ),
    "key_of_the_clock": _broken(
        key_of_the_clock, "the arguments", subject="determinism", case="two runs"
    ),
    "reads_what_it_donated": _broken(
        reads_what_it_donated, "donate_argnums", reference=moved_reference, case="2 steps"
    ),
}
