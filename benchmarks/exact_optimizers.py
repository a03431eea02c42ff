"""Optimizers of a search for other bits in mode `exact`, each named by what it is made of."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

Transform = optax.GradientTransformation
RATE = 0.01

_MANY = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd"),
    *("optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd"),
    *("sign_sgd", "signum", "sm3", "yogi"),
)
_CONTRIBUTED = (
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad"),
    *("momo", "momo_adam", "muon", "prodigy", "schedule_free_adamw", "schedule_free_sgd"),
    "simplified_ademamix",
)

BASES: dict[str, Callable[[], Transform]] = {
    **{name: partial(getattr(optax, name), RATE) for name in _MANY},
    **{name: partial(getattr(contrib, name), learning_rate=RATE) for name in _CONTRIBUTED},
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "sgd bfloat16": lambda: optax.sgd(RATE, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adam bfloat16": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "adamw nesterov": lambda: optax.adamw(RATE, nesterov=True, weight_decay=0.1),
    "rmsprop centered": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "adafactor factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=2),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(3)),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=RATE),
    "lbfgs": lambda: optax.lbfgs(RATE, memory_size=3, linesearch=None),
    "sam": lambda: contrib.sam(optax.sgd(RATE), optax.sgd(0.05), sync_period=2),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(RATE), RATE),
    "mechanize": lambda: contrib.mechanize(optax.adam(RATE)),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(RATE), contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=2)
    ),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(RATE, 10), weight_decay=0.02
    ),
}
"""What is called with a learning rate."""

_SCHEDULES: dict[str, Callable[[], Any]] = {
    "cosine": lambda: optax.cosine_decay_schedule(1.0, 8),
    "warmup": lambda: optax.warmup_cosine_decay_schedule(0.1, 1.0, 2, 8),
    "piecewise": lambda: optax.piecewise_constant_schedule(1.0, {2: 0.3, 4: 0.3}),
    "exponential": lambda: optax.exponential_decay(1.0, 3, 0.7),
    "polynomial": lambda: optax.polynomial_schedule(1.0, 0.1, 2, 6),
    "onecycle": lambda: optax.cosine_onecycle_schedule(8, 1.0),
}

_BEFORE: dict[str, Callable[[], Transform]] = {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "clip": lambda: optax.clip(0.01),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.01),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "centralize": optax.centralize,
    "zero_nans": optax.zero_nans,
    "normalize": optax.normalize_by_update_norm,
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(4)),
    "ema of gradients": lambda: optax.ema(0.9),
    "trust": optax.scale_by_trust_ratio,
    "stddev": optax.scale_by_stddev,
}


def _by_rank(optimizer: Transform) -> Transform:
    """Matrices are trained by it, and vectors by SGD."""
    by_rank = {"matrices": optimizer, "rest": optax.sgd(RATE, momentum=0.5)}
    return optax.multi_transform(
        by_rank, partial(jax.tree.map, lambda p: "matrices" if p.ndim > 1 else "rest")
    )


_AROUND: dict[str, Callable[[Transform], Transform]] = {
    **{name: lambda inner, f=f: optax.chain(f(), inner) for name, f in _BEFORE.items()},
    **{
        name: lambda inner, f=f: optax.chain(inner, optax.scale_by_schedule(f()))
        for name, f in _SCHEDULES.items()
    },
    "multi_steps": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
    "multi_steps 3": lambda inner: optax.MultiSteps(inner, 3, False).gradient_transformation(),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 2),
    "apply_every": lambda inner: optax.chain(inner, optax.apply_every(2)),
    "keep_positive": lambda inner: optax.chain(inner, optax.keep_params_nonnegative()),
    "masked": lambda inner: optax.masked(inner, partial(jax.tree.map, lambda p: p.ndim > 1)),
    "multi_transform": _by_rank,
    "flatten": optax.flatten,
}

NAMES: tuple[str, ...] = tuple(BASES)
BY_VALUE = ("polyak_sgd", "momo", "momo_adam", "reduce_on_plateau")
"""Those that take the loss, which `MultiSteps` does not hand on."""
WRAPPERS: tuple[str, ...] = tuple(_AROUND)


def optimizer(names: Sequence[str]) -> Transform:
    """The first of `names` within the others, one after the other."""
    base, *around = names
    found = BASES[base]()
    for name in around:
        found = _AROUND[name](found)
    return found
