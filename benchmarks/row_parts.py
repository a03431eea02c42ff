"""Parts of drawn programs that keep rows apart, or mix them; gates around these; ends; metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from row_words import wide

Part = Callable[..., Any]


class Context:
    """What the parts of one program read: parameters, batch, key, words, and weights of rows."""

    def __init__(self, model: Any, batch: Any, key: Any, words: Any, real: Any = None) -> None:
        self.model, self.batch, self.key, self.words = model, batch, key, words
        self.step, self.real = words.step_number(), real


def drawn(c: Context, z: Any) -> Any:
    """Multiply by draws, all 1: like dropout, but equal on all replicas."""
    return z if c.key is None else z * jax.random.bernoulli(c.key, 1.0, z.shape)


def drawn_each(c: Context, z: Any) -> Any:
    if c.key is None:
        return z
    keys = jax.random.split(c.key, len(z))
    return jax.vmap(lambda k, row: row * jax.random.bernoulli(k, 1.0, row.shape))(keys, z)


def scanned(c: Context, z: Any) -> Any:
    def step(carry: Any, column: Any) -> Any:
        carry = jnp.tanh(carry + column).astype(column.dtype)
        return carry, carry * 0.5

    last, found = jax.lax.scan(step, z[:, 0] * 0, z.T)
    return found.T + last[:, None]


def picked(c: Context, z: Any) -> Any:
    return z + jax.nn.log_softmax(z)[jnp.arange(len(z)), c.batch["label"]][:, None]


def stepped(c: Context, z: Any) -> Any:
    return z + jax.vmap(
        lambda row: jax.lax.while_loop(lambda v: (v**2).sum() > 0.1, lambda v: v / 2, jnp.tanh(row))
    )(jax.lax.stop_gradient(z))


def by_norm(z: Any) -> Any:
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def noise(c: Context, shape: tuple[int, ...]) -> Any:
    return jax.random.normal(c.key, shape, jnp.float32) if c.key is not None else jnp.zeros(shape)


def looped(c: Context, z: Any) -> Any:
    """Add noise whose keys are split along the other dim."""
    keys = jax.random.split(jax.random.key(0) if c.key is None else c.key, 4)
    return z + jax.lax.map(lambda key: jax.random.normal(key, (len(z),), jnp.float32), keys).T


def places(c: Context, count: int) -> Any:
    key = jax.random.key(0) if c.key is None else c.key
    return jax.random.permutation(key, count) / 16


def through(dtype: Any) -> Part:
    """Return a part that computes in another precision; None for that of the program."""
    return lambda c, z: jnp.tanh(z.astype(dtype or z.dtype) * 1.5)


APART: dict[str, Part] = {
    "dense": lambda c, z: jnp.tanh(z @ c.model["w"]),
    "scale": lambda c, z: z * c.model["scale"] + 0.1,
    "norm": lambda c, z: (z - z.mean(1, keepdims=True)) / (z.std(1, keepdims=True) + 1),
    "softmax": lambda c, z: jax.nn.softmax(z) + z,
    "sorted": lambda c, z: jnp.sort(z, axis=1),
    "one-hot": lambda c, z: z + jax.nn.one_hot(c.batch["label"], 4),
    "table": lambda c, z: z + c.model["table"][c.batch["label"]],
    "own entry": picked,
    "take along": lambda c, z: z * jnp.take_along_axis(z, c.batch["label"][:, None], 1),
    "masked": lambda c, z: z * c.batch["mask"][:, None],
    "chosen": lambda c, z: jnp.where(c.batch["flag"][:, None], z, -z),
    "drawn": drawn,
    "drawn for each": drawn_each,
    "scan": scanned,
    "vmap": lambda c, z: jax.vmap(lambda row, y: row * jnp.cos(y))(z, c.batch["y"]),
    "checkpoint": lambda c, z: jax.checkpoint(lambda v: jnp.sin(v) * v)(z),
    "jit": lambda c, z: jax.jit(lambda v: jax.nn.gelu(v))(z),
    "branch": lambda c, z: jax.lax.cond(c.step % 2 == 0, jnp.sin, jnp.cos, z),
    "convolution": lambda c, z: jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3), "same"))(z),
    "cumulative": lambda c, z: jnp.cumsum(z, axis=1) / 4,
    "annealed": lambda c, z: z * (1 + 0.1 * jnp.minimum(c.step, 5)),
    "shared": lambda c, z: z * (1 + c.batch["weight"]),
    "while": stepped,
    "outer": lambda c, z: jnp.einsum("bi,bj->bij", z, z).mean(2),
    "inverse": lambda c, z: jnp.linalg.solve(
        wide(jnp.einsum("bi,bj->bij", z, z)) + jnp.eye(4), wide(z)[..., None]
    )[..., 0],
    "solved": lambda c, z: (
        jax.scipy.linalg.solve_triangular(
            wide(jnp.tril(c.model["w"])) / 4 + jnp.eye(4) * 2, wide(z).T, lower=True
        ).T
    ),
    "adversarial": lambda c, z: (
        z + 0.1 * jnp.sign(jax.grad(lambda v: jnp.mean(((v @ c.model["w"]) ** 2).sum(1)))(z))
    ),
    "adversarial in norm": lambda c, z: (
        z + 0.1 * by_norm(jax.grad(lambda v: jnp.mean(((v @ c.model["w"]) ** 2).sum(1)))(z))
    ),
    "flipped and back": lambda c, z: jnp.tanh(z[::-1])[::-1],
    "constant": lambda c, z: z + jnp.ones((len(z), 1)),
    "in bfloat16": through(jnp.bfloat16),
    "in float16": through(jnp.float16),
    "in its own precision": through(None),
    "logsumexp of a row": lambda c, z: z + jax.nn.logsumexp(z, axis=1, keepdims=True),
    "searched": lambda c, z: (
        z + jax.vmap(jnp.searchsorted)(jnp.sort(z, axis=1), z[:, 1])[:, None] / 4
    ),
}

MIXING: dict[str, Part] = {
    "mean": lambda c, z: z - z.mean(0),
    "std": lambda c, z: z / (z.std(0) + 0.5),
    "largest": lambda c, z: z / (jnp.abs(z).max() + 0.1),
    "roll": lambda c, z: 0.7 * z + 0.3 * jnp.roll(z, 1, axis=0),
    "reversed": lambda c, z: z * z[::-1],
    "ranks": lambda c, z: z * jnp.argsort(jnp.argsort(z[:, 0]))[:, None] / 10,
    "softmax of rows": lambda c, z: z * jax.nn.softmax(z[:, 0])[:, None],
    "contrast": lambda c, z: z * jnp.tanh(jax.nn.logsumexp(z @ z.T, axis=1) / 4)[:, None],
    "by their number": lambda c, z: z * 4 / len(z),
    "by the number of gathered": lambda c, z: z * 4 / len(c.words.gather(z)),
    "by place": lambda c, z: z * (1 + 0.1 * jnp.arange(len(z)))[:, None],
    "cumulative over rows": lambda c, z: jnp.cumsum(z, axis=0) / 8,
    "pairs": lambda c, z: (
        (z.reshape(-1, 2, 4) - z.reshape(-1, 2, 4).mean(1, keepdims=True)).reshape(z.shape)
        if len(z) % 2 == 0
        else z - z.mean(0)
    ),
    "quarters": lambda c, z: (
        z * z.reshape(4, -1, 4).mean(0).sum() if len(z) % 4 == 0 else z * z.sum(0)
    ),
    "median": lambda c, z: z - jnp.median(z, axis=0),
    "masked mean": lambda c, z: (
        z - (z * c.batch["mask"][:, None]).sum() / (c.batch["mask"].sum() + 1e-3)
    ),
    "shuffled": lambda c, z: z if c.key is None else z + 0.5 * jax.random.permutation(c.key, z),
    "scan over rows": lambda c, z: jax.lax.scan(lambda s, row: (0.5 * s + row,) * 2, z[0] * 0, z)[
        1
    ],
    "a row's negative": lambda c, z: z - z[(c.batch["label"] * 3) % len(z)],
    "count": lambda c, z: z * (z > 0).sum() / 32,
}

DRAWN: dict[str, tuple[bool, Part]] = {
    "noise [rows, 4]": (True, lambda c, z: z + noise(c, z.shape)),
    "noise [rows]": (True, lambda c, z: z + noise(c, (len(z),))[:, None]),
    "noise [rows, time]": (True, lambda c, z: z + noise(c, (len(z), 3)).mean(1)[:, None]),
    "noise [4]": (True, lambda c, z: z + noise(c, (4,))),
    "noise [time, rows]": (False, lambda c, z: z + noise(c, (3, len(z))).mean(0)[:, None]),
    "noise [4, rows]": (False, lambda c, z: z + noise(c, (4, len(z))).T),
    "noise [time, rows, 4]": (False, lambda c, z: z + noise(c, (2, *z.shape)).sum(0)),
    "noise in a loop": (False, looped),
    "places": (False, lambda c, z: z * places(c, len(z))[:, None]),
}
"""Draws by the step's key, and whether padding leaves those of the real rows as they are."""

STATE: dict[str, Part] = {
    "memory": lambda c, z: z + jnp.tanh(c.batch["memory"] * c.model["scale"]),
    "unit of memory": lambda c, z: z + by_norm(c.batch["memory"] * c.model["scale"]),
}
"""Rows of a state; those that were not written are 0, and have no norm to divide by."""

GATES: dict[str, Callable[[Context, Part, Any], Any]] = {
    "always": lambda c, part, z: part(c, z),
    "warm-up": lambda c, part, z: z + jnp.minimum(c.step, 1) * (part(c, z) - z),
    "late": lambda c, part, z: jnp.where(c.step >= 3, part(c, z), z),
    "every fifth": lambda c, part, z: jax.lax.cond(
        c.step % 5 == 3, lambda z: part(c, z), lambda z: z, z
    ),
    "weight": lambda c, part, z: z + c.batch["weight"] * (part(c, z) - z),
    "gate": lambda c, part, z: z + c.model["gate"] * (part(c, z) - z),
    "small": lambda c, part, z: z + 1e-2 * (part(c, z) - z),
    "in a loop": lambda c, part, z: jax.lax.fori_loop(0, 2, lambda i, z: part(c, z), z),
    "late in a loop": lambda c, part, z: jax.lax.scan(
        lambda z, _: (jnp.where(c.step > 2, part(c, z), z), None), z, length=2
    )[0],
    "jit": lambda c, part, z: jax.jit(lambda z: part(c, z))(z),
    "in training": lambda c, part, z: z if c.key is None else part(c, z),
    "of some rows": lambda c, part, z: jnp.where(c.batch["flag"][:, None], part(c, z), z),
    "checkpoint": lambda c, part, z: jax.checkpoint(lambda z: part(c, z))(z),
    "gradient only": lambda c, part, z: z + (own := part(c, z)) - jax.lax.stop_gradient(own),
    "value only": lambda c, part, z: z + jax.lax.stop_gradient(part(c, z) - z),
}

ENDS: dict[str, tuple[bool, Part]] = {
    "rows": (True, lambda c, z: (z[:, 0] - c.batch["y"]) ** 2 + 0.1 * (z**2).sum(1)),
    "entries": (True, lambda c, z: (z - c.batch["y"][:, None]) ** 2),
    "weighted": (
        True,
        lambda c, z: c.words.weighted((z[:, 0] - c.batch["y"]) ** 2, c.batch["mask"] + 0.5),
    ),
    "flags": (True, lambda c, z: c.words.weighted((z**2).sum(1), c.batch["mask"] > 0.3)),
    "mean": (True, lambda c, z: jnp.mean((z[:, 0] - c.batch["y"]) ** 2)),
    "cross-entropy": (
        True,
        lambda c, z: optax.softmax_cross_entropy_with_integer_labels(z, c.batch["label"]),
    ),
    "with a large constant": (True, lambda c, z: (z[:, 0] - c.batch["y"]) ** 2 + 5.5e4),
    "of both signs": (  # which add up to 0 for no number of rows
        True,
        lambda c, z: c.words.weighted((z**2).sum(1), c.batch["label"] - 1.83),
    ),
    "tokens": (
        True,
        lambda c, z: c.words.weighted(
            z**2, jnp.broadcast_to(c.batch["mask"][:, None] + 0.1, z.shape)
        ),
    ),
    "sum": (False, lambda c, z: jnp.sum((z[:, 0] - c.batch["y"]) ** 2)),
    "root": (False, lambda c, z: jnp.sqrt(jnp.mean((z[:, 0] - c.batch["y"]) ** 2))),
    "weighted mean": (
        False,
        lambda c, z: jnp.sum((z**2).sum(1) * c.batch["mask"]) / (c.batch["mask"].sum() + 1e-3),
    ),
}


def right(c: Context, z: Any) -> Any:
    """Return what is right, as booleans; the mean of these is float32 in all programs."""
    found = jnp.argmax(z, 1) == c.batch["label"]
    return found if z.dtype != jnp.float64 else found * 1.0


METRICS: dict[str, tuple[bool, Part]] = {
    "none": (True, lambda c, z: {}),
    "accuracy": (True, lambda c, z: {"right": right(c, z)}),
    "mean": (True, lambda c, z: {"size": jnp.mean(jnp.abs(z))}),
    "largest": (False, lambda c, z: {"largest": jnp.max(z)}),
    "spread": (False, lambda c, z: {"spread": jnp.std(z)}),
    "count": (False, lambda c, z: {"count": jnp.sum(z > 0).astype(jnp.float32)}),
}
