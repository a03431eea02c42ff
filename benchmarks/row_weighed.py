"""Parts that mix rows and weigh padding: those that leave it out, and those that do not.

Each reads the rows of all replicas and their weights, `real`: 1, and 0 for padding. On one device
without padding all weights are 1, which defines what each computes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from row_parts import Context, Part
from row_words import wide

INF = jnp.inf


def on_gathered(function: Any) -> Part:
    """Return a part of `function(c, z, g, w)`: own rows, those of all replicas, their weights."""

    def part(c: Context, z: Any) -> Any:
        g, w = c.words.gather((z, c.real))
        return function(c, z, g, w)

    return part


def column(g: Any) -> Any:
    return g[:, 0]


def real_or(w: Any, x: Any, fill: Any) -> Any:
    """Choose the rows that are real; `fill` for the others."""
    return jnp.where((w > 0).reshape(-1, *[1] * (x.ndim - 1)), x, fill)


def weighted_mean(g: Any, w: Any) -> Any:
    return (wide(g) * w[:, None]).sum(0) / w.sum()


def normalized(c: Context, z: Any, g: Any, w: Any) -> Any:
    """Normalize by mean and variance of the real rows, like an advantage."""
    mean = weighted_mean(g, w)
    variance = (w[:, None] * (g - mean) ** 2).sum(0) / w.sum()
    return (z - mean) / jnp.sqrt(variance + 0.1)


def chosen(c: Context, z: Any, g: Any, w: Any) -> Any:
    """Add a real row, chosen by a softmax that passes the gradient straight through."""
    soft = jax.nn.softmax(real_or(w, column(g), -INF))
    hard = jax.nn.one_hot(jnp.argmax(real_or(w, column(g), -INF)), len(g))
    return z + (soft + jax.lax.stop_gradient(hard - soft)) @ g


def chosen_of_all(c: Context, z: Any, g: Any, w: Any) -> Any:
    """Like `chosen`, but padding takes its share of the gradient."""
    soft = jax.nn.softmax(column(g))
    hard = jax.nn.one_hot(jnp.argmax(real_or(w, column(g), -INF)), len(g))
    return z + (soft + jax.lax.stop_gradient(hard - soft)) @ g


def contrast(c: Context, z: Any, g: Any, w: Any) -> Any:
    return z * jnp.tanh(jax.nn.logsumexp(wide(z @ g.T), axis=1, b=w) / 4)[:, None]


CAREFUL: dict[str, Part] = {
    name: on_gathered(function)
    for name, function in {
        "centred": lambda c, z, g, w: z - weighted_mean(g, w),
        "normalized": normalized,
        "contrast by b": contrast,
        "largest real": lambda c, z, g, w: z / (2 + jnp.tanh(real_or(w, column(g), -INF).max())),
        "smallest real": lambda c, z, g, w: z + jnp.tanh(real_or(w, column(g), INF).min()),
        "largest above the lowest float": lambda c, z, g, w: (
            z + jnp.tanh(real_or(w, column(g), jnp.finfo(g.dtype).min).max())
        ),
        "any real": lambda c, z, g, w: z * (1 + real_or(w, column(g) > 1.5, False).any()),
        "all real": lambda c, z, g, w: z * (1 + real_or(w, column(g) > -1, True).all()),
        "their number, real": lambda c, z, g, w: z * 4 / w.sum(),
        "sum of chosen": lambda c, z, g, w: z * jnp.tanh(real_or(w, g, 0).sum() / 32),
        "product of chosen": lambda c, z, g, w: z * real_or(w, 1 + jnp.tanh(g) / 9, 1).prod(0),
        "row of the largest": lambda c, z, g, w: z + g[jnp.argmax(real_or(w, column(g), -INF))],
        "softmax of real": lambda c, z, g, w: z + jax.nn.softmax(real_or(w, column(g), -INF)) @ g,
        "straight through": chosen,
        "lowest four": lambda c, z, g, w: z + jnp.tanh(jnp.sort(real_or(w, column(g), INF))[:4]),
        "rank among real": lambda c, z, g, w: (
            z * (real_or(w, column(g), INF)[None] < z[:, :1]).sum(1, keepdims=True) / 8
        ),
        "covariance": lambda c, z, g, w: (
            jnp.tanh(z) @ ((wide(jnp.tanh(g)) * w[:, None]).T @ wide(jnp.tanh(g)) / w.sum())
        ),
        "by class": lambda c, z, g, w: (
            z * (1 + jax.ops.segment_sum(w, c.words.gather(c.batch["label"]), 4) / w.sum())
        ),
        "attention": lambda c, z, g, w: (
            z + jax.nn.softmax(jnp.where(w > 0, wide(z @ g.T), -INF), axis=1) @ wide(g)
        ),
        "norm of all": lambda c, z, g, w: z / jnp.sqrt(1 + (wide(g) ** 2 * w[:, None]).sum()),
    }.items()
}

CARELESS: dict[str, Part] = {
    name: on_gathered(function)
    for name, function in {
        "largest, times": lambda c, z, g, w: z / (2 + jnp.tanh((column(g) * w).max())),
        "smallest, times": lambda c, z, g, w: z + jnp.tanh((column(g) * w).min()),
        "largest or 0": lambda c, z, g, w: z + jnp.tanh(real_or(w, column(g), 0).max()),
        "largest above -10": lambda c, z, g, w: z + real_or(w, column(g), -10).max() / 8,
        "logsumexp, times": lambda c, z, g, w: z * jnp.tanh(jax.nn.logsumexp(column(g) * w) / 4),
        "exp, times": lambda c, z, g, w: z + jnp.tanh(jnp.exp(column(g) * w).sum() / 16),
        "mean, times": lambda c, z, g, w: z - (g * w[:, None]).mean(0),
        "std, times": lambda c, z, g, w: z / (1 + (g * w[:, None]).std(0)),
        "sum of others": lambda c, z, g, w: z * jnp.tanh(real_or(w, g, 1e-2).sum() / 32),
        "product, times": lambda c, z, g, w: z * (jnp.tanh(g) * w[:, None]).prod(0),
        "sorted, times": lambda c, z, g, w: z + jnp.tanh(jnp.sort(column(g) * w)[-4:]),
        "median, times": lambda c, z, g, w: z - jnp.median(g * w[:, None], axis=0),
        "row of the largest, times": lambda c, z, g, w: z + g[jnp.argmax(column(g) * w)],
        "row of the nearest to 0": lambda c, z, g, w: z + g[jnp.argmin(jnp.abs(column(g) * w))],
        "softmax, times": lambda c, z, g, w: z + jax.nn.softmax(column(g) * w) @ g,
        "softmax, then times": lambda c, z, g, w: z + (jax.nn.softmax(column(g)) * w) @ g,
        "straight through all": chosen_of_all,
        "any is 0": lambda c, z, g, w: z * (1 + (column(g) * w == 0).any()),
        "all above -1": lambda c, z, g, w: z * (1 + (column(g) * w > -1).all()),
        "any below -1": lambda c, z, g, w: z * (1 + (real_or(w, column(g), 0) < -1).any()),
        "any, chosen by True": lambda c, z, g, w: z * (1 + real_or(w, column(g) > 9, True).any()),
        "variance of all": lambda c, z, g, w: z * w.sum() / (w.sum() + g.var()),
        "a small term of all": lambda c, z, g, w: z - weighted_mean(g, w) - 1e-3 * g.mean(0),
        "their number, all": lambda c, z, g, w: z * w.sum() / len(w),
        "rank among all": lambda c, z, g, w: (
            z * (column(g * w[:, None])[None] < z[:, :1]).sum(1, keepdims=True) / 8
        ),
        "weights to a power": lambda c, z, g, w: z - (g * (w[:, None] - 0.5)).sum(0) / w.sum(),
        "last of the sum": lambda c, z, g, w: z + jnp.tanh(jnp.cumsum(column(g))[-1] * w.mean()),
        "attention, times": lambda c, z, g, w: z + jax.nn.softmax(wide(z @ g.T) * w, axis=1) @ g,
        "norm of all, unweighted": lambda c, z, g, w: z * w.sum() / jnp.sqrt(1 + (g**2).sum()),
        "own weight": lambda c, z, g, w: z * (1 + c.real.sum()) / 8,
    }.items()
}
"""Most differ with padding: on some numbers only, in the gradient only, or by little."""

WEIGHED_ENDS: dict[str, tuple[bool, Part]] = {
    "weighted by hand": (
        True,
        on_gathered(lambda c, z, g, w: (wide(g**2).sum(1) * w).sum() / w.sum()),
    ),
    "mean, times": (False, on_gathered(lambda c, z, g, w: (wide(g**2).sum(1) * w).mean())),
    "divided by all": (
        False,
        on_gathered(lambda c, z, g, w: wide((z - c.batch["y"][:, None]) ** 2).sum(1) / len(w)),
    ),
    "with a term of all": (
        False,
        on_gathered(
            lambda c, z, g, w: wide((z - c.batch["y"][:, None]) ** 2).sum(1) + g.var() / w.sum()
        ),
    ),
}
