"""Classic mistakes in hand-written steps, and the words that their cause must have."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from verify.step_parts import (
    ADAM,
    KEY,
    MASKED,
    MICRO,
    NORM,
    RUNNING,
    Broken,
    N,
    accumulated,
    adam,
    batch,
    clip_reference,
    clip_too_early,
    contrast,
    cut_to_fit,
    dropout_step,
    filled_to_fit,
    global_view,
    good,
    half_frozen,
    jit_in_each_call,
    key_of_the_clock,
    mask_unseen,
    masked_by_device,
    masked_over_all_rows,
    mean_in_the_loss,
    mean_of_floats,
    norm_update,
    one_replica_strays,
    only_params,
    pmapped,
    pmean,
    psum,
    rate_by_index,
    reduced_by,
    reference,
    running_mean,
    same,
    sharded,
    sharded_with_key,
    with_optax,
)


def _broken(step: Any, *words: str, **more: Any) -> Broken:
    usual = {"reference": reference, "state": only_params, "batch": batch}
    return Broken(step, words=words, **{**usual, **more})


BROKEN = {
    "pmap_no_pmean": _broken(pmapped(reduced_by(same)), "never reduced"),
    "shard_map_no_pmean": _broken(sharded(reduced_by(same)), "never reduced"),
    "shard_map_pmean_in_unchecked_loss": _broken(sharded(mean_in_the_loss), "never reduced"),
    "replicas_differ_by_no_pmean": _broken(
        sharded(reduced_by(same)), "never reduced", subject="replicas", case="8 replicas"
    ),
    "pmean_of_summed_gradient": _broken(
        sharded(good, check_vma=True), "exactly 8 times", "check_vma=True"
    ),
    "psum_undivided": _broken(pmapped(reduced_by(psum)), "exactly 8 times", "use pmean"),
    "divided_twice": _broken(
        sharded(reduced_by(lambda tree: jax.tree.map(lambda leaf: leaf / N, pmean(tree)))),
        "1/8 of",
        "8 replicas twice",
    ),
    "masked_mean_by_device": _broken(
        pmapped(masked_by_device), "mean of means", case="unequal weights", **MASKED
    ),
    "masked_mean_of_empty_device": _broken(
        sharded(masked_by_device), "replica 7", "0 by 0", case="padded batch", **MASKED
    ),
    "masked_sum_over_all_rows": _broken(
        sharded(masked_over_all_rows), "weight 0", case="padded batch", **MASKED
    ),
    "mask_unseen": _broken(sharded(mask_unseen), "are ignored", case="padded batch", **MASKED),
    "batch_replicated": _broken(global_view(reference), "whole batch", subject="redundant work"),
    "one_device": _broken(lambda: jax.jit(reference), "in_shardings", subject="redundant work"),
    "remainder_dropped": _broken(
        lambda: jax.jit(cut_to_fit), "were dropped", case="indivisible batch"
    ),
    "padding_counted": _broken(
        lambda: jax.jit(filled_to_fit), "padded to", "zeros", case="indivisible batch"
    ),
    "batch_norm_by_device": _broken(
        sharded(norm_update(same, pmean, pmean)), "one another", "BatchNorm", **NORM
    ),
    "batch_norm_by_device_in_pmap": _broken(
        pmapped(norm_update(same, pmean, same)), "batch_stats", "never reduced", **NORM
    ),
    "statistics_not_reduced": _broken(
        sharded(running_mean(pmean, same)), "input_mean", "never reduced", **RUNNING
    ),
    "contrast_by_device": _broken(
        sharded(contrast(same, pmean)), "one another", reference=contrast(same, same)
    ),
    "key_shared": _broken(
        sharded_with_key(dropout_step(same, pmean)),
        "random numbers",
        "fold",
        reference=dropout_step(same, same),
        options=KEY,
    ),
    "key_shared_in_pmap": _broken(
        pmapped(dropout_step(same, pmean), in_axes=(0, 0, None)),
        "random numbers",
        reference=dropout_step(same, same),
        options=KEY,
    ),
    "micro_batches_undivided": _broken(
        sharded(accumulated(partial(jnp.sum, axis=0))),
        "exactly 4 times",
        "4 micro-batches",
        options=MICRO,
    ),
    "last_micro_batch_only": _broken(
        pmapped(accumulated(lambda leaf: leaf[-1])),
        "last of 4 micro-batches",
        options=MICRO,
    ),
    "loss_of_replica_0": _broken(sharded(reduced_by(pmean, same)), "loss", "never reduced"),
    "clipped_too_early": _broken(
        sharded(clip_too_early), "the reduction", "clip", reference=clip_reference
    ),
    "rate_by_replica": _broken(
        pmapped(rate_by_index), "learning rate", subject="replicas", case="8 replicas"
    ),
    "adam_of_summed_gradient": _broken(
        pmapped(with_optax(adam, psum, same, pmean)), "exactly 8 times", "mu", **ADAM
    ),
    "adam_by_replica": _broken(
        sharded(with_optax(adam, same, mean_of_floats, pmean)),
        "the reduction",
        **ADAM,
    ),
    "one_replica_strays": _broken(
        sharded(one_replica_strays), "replica 3 only", subject="replicas", case="8 replicas"
    ),
    "layer_frozen": _broken(sharded(half_frozen), "not change"),
    "jit_in_each_call": _broken(
        jit_in_each_call, "each call", subject="recompilation", case="same shapes"
    ),
    "key_of_the_clock": _broken(
        key_of_the_clock, "the arguments", subject="determinism", case="two runs"
    ),
}
