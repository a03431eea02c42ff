"""A case of the search in mode `exact` -> its `DataParallel`, model and rows."""

from collections.abc import Callable
from typing import Any

import exact_optimizers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from exact_draws import Draw
from exact_layers import normal
from exact_models import LAYERS
from flax import nnx
from jax import lax

import replicax as rx
from replicax.core.ground.job import Job

CLASSES = 3


def rows_of(draw: Draw) -> dict[str, np.ndarray]:
    """The rows that are trained on."""
    random = np.random.default_rng([1, draw.seed])
    return {
        "x": (draw.scale * random.normal(size=(draw.rows, draw.features))).astype(np.float32),
        "y": random.normal(size=draw.rows).astype(np.float32),
        "label": random.integers(0, CLASSES, draw.rows).astype(np.int32),
        "weight": (10 ** random.uniform(-1, 1, draw.rows)).astype(np.float32),
    }


def model_of(draw: Draw) -> Any:
    """The model before the first step."""
    if draw.network:
        return Network(draw, nnx.Rngs(draw.seed))
    random = np.random.default_rng([2, draw.seed])
    params, width = {}, draw.features
    for number, (name, wanted) in enumerate(draw.layers):
        params[f"{number} {name}"] = LAYERS[name].init(random, width, wanted)
        width = _width_after(name, params[f"{number} {name}"], width)
    twin = {"c": normal(random, width, CLASSES)} if draw.head == "twins" else {}
    return {**params, "head": {"a": normal(random, width, CLASSES), **twin}}


def _width_after(name: str, params: Any, width: int) -> int:
    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    found = jax.eval_shape(lambda params, x: LAYERS[name].apply(params, x, None), params, x)
    return found.shape[1]


class Network(nnx.Module):
    """Layers of Flax NNX."""

    def __init__(self, draw: Draw, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(draw.features, 12, rngs=rngs)
        self.conv = nnx.Conv(1, 4, (3,), rngs=rngs) if draw.network == "conv" else None
        width = 4 if self.conv else 12
        self.norm = nnx.BatchNorm(width, rngs=rngs) if "norm" in draw.network else None
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if "dropout" in draw.network else None
        self.out = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.hidden(x)
        if self.conv is not None:
            x = jnp.max(self.conv(jnp.tanh(x)[..., None]), 1)
        for each in (self.norm, nnx.relu, self.dropout):
            x = x if each is None else each(x)
        return self.out(x)


def _out(draw: Draw, model: Any, batch: Any, key: Any) -> jax.Array:
    """What the model gives for each row: `[rows, 3]`."""
    if draw.network:
        return model(batch["x"])
    x = batch["x"]
    for number, (name, _) in enumerate(draw.layers):
        own = None if key is None else jax.random.fold_in(key, number)
        x = LAYERS[name].apply(model[f"{number} {name}"], x, own)
    head, out = model["head"], x @ model["head"]["a"]
    return out + jnp.tanh(x @ head["c"]) if "c" in head else out


HEADS: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "square": lambda out, batch: (jnp.sum(out, -1) - batch["y"]) ** 2,
    "twins": lambda out, batch: jnp.sum((out - batch["y"][:, None]) ** 2, -1),
    "cross entropy": lambda out, batch: optax.softmax_cross_entropy_with_integer_labels(
        out, batch["label"]
    ),
    "huber": lambda out, batch: optax.huber_loss(out[:, 0], batch["y"]) + jnp.var(out, -1),
    "mean": lambda out, batch: jnp.mean(jax.nn.softplus(out), -1) - batch["y"] * out[:, -1],
    "logsumexp": lambda out, batch: jax.nn.logsumexp(out, -1) - jnp.max(out, -1) * batch["y"],
    "unit": lambda out, batch: jnp.sum(out / jnp.linalg.norm(out, axis=-1, keepdims=True), -1),
}
"""What a row's loss is, by name."""

PENALTIES: dict[str, Callable[[list[jax.Array]], Any]] = {
    "": lambda leaves: 0,
    "l2": lambda leaves: 1e-3 * sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves),
    "norm": lambda leaves: 1e-2 * optax.global_norm(leaves),
}


def _centered(out: jax.Array) -> jax.Array:
    """`out`, less the mean of the rows of all micro-shards."""
    rows, real = rx.gather((out, rx.row_weights(out)))
    return out - real @ rows / jnp.sum(real)


def loss_of(draw: Draw) -> Callable[..., Any]:
    """The loss of the case."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        out = _out(draw, model, batch, key).astype(jnp.float32)
        out = _centered(out) if draw.gathers else out
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param) if draw.network else model)
        values = HEADS[draw.head](out, batch) + PENALTIES[draw.penalty](leaves)
        values = rx.Weighted(values, batch["weight"]) if draw.weighted else values
        if not draw.metrics:
            return values
        size = jnp.sqrt(jnp.sum(out**2, -1))
        return values, {"size": size, "share": rx.Weighted(jnp.abs(out[:, 0]), size)}

    return loss


def parallel(draw: Draw, devices: int, job: Job | None = None) -> rx.DataParallel:
    """The case on so many devices."""
    names = ("micro_shards", "precision", "reduction", "layout", "trainable", "ema", "donate")
    settings: dict[str, Any] = {name: getattr(draw, name) for name in names}
    settings["accumulate"] = min(draw.accumulate, draw.micro_shards // devices)
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    settings |= {"mode": "exact", "mesh": mesh, "job": job}
    if not draw.custom_step:
        optimizer = exact_optimizers.optimizer(draw.optimizer)
        return rx.DataParallel(loss_of(draw), optimizer, **settings)
    of_model = loss_of(draw)

    def of_state(state: Any, batch: Any, key: Any) -> Any:
        return of_model(state["model"], batch, key)

    return rx.DataParallel(of_state, step=_step(draw), **settings)


def begin(draw: Draw) -> Any:
    """What `init` is given."""
    model = model_of(draw)
    if not draw.custom_step:
        return model
    moments = exact_optimizers.optimizer(draw.optimizer).init(jax.tree.map(jnp.asarray, model))
    return {"model": model, "moments": moments, "center": jnp.zeros(draw.features)}


def _step(draw: Draw) -> Callable[..., Any]:
    """A custom step of the drawn kind."""
    optimizer = exact_optimizers.optimizer(draw.optimizer)
    by_value = draw.optimizer[0] in exact_optimizers.BY_VALUE
    loss = loss_of(draw)

    def once(held: Any, batch: Any, key: Any, of: Any = loss) -> tuple[Any, Any]:
        model, moments = held
        means, gradient = rx.value_and_grad(of)(model, batch, key)
        more = {"value": means["loss"]} if by_value else {}
        updates, after = optimizer.update(gradient, moments, model, **more)
        moments = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), after, moments)
        return (optax.apply_updates(model, updates), moments), means

    def twice(held: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        held, _ = once(held, batch, jax.random.fold_in(key, 1))
        return once(held, batch, key)

    def scan(held: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        held, means = lax.scan(
            lambda held, number: once(held, batch, jax.random.fold_in(key, number)),
            held,
            jnp.arange(2),
        )
        return held, jax.tree.map(lambda mean: mean[-1], means)

    def until(held: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        held, means = once(held, batch, key)

        def goes_on(carry: Any) -> Any:
            return (carry[0] < 3) & (carry[2]["loss"] > 0.1)

        def turn(carry: Any) -> Any:
            return carry[0] + 1, *once(carry[1], batch, jax.random.fold_in(key, carry[0]))

        _, held, means = lax.while_loop(goes_on, turn, (jnp.int32(1), held, means))
        return held, means

    def either(held: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        return lax.cond(
            rx.mean(batch["y"]) > 0,
            lambda: once(held, batch, key),
            lambda: twice(held, batch, key),
        )

    def two(held: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        def other(model: Any, batch: Any, key: Any) -> Any:
            return jnp.sum(jnp.cos(_out(draw, model, batch, key)), -1)

        held, _ = once(held, batch, key, other)
        return once(held, batch, key)

    kinds = {"twice": twice, "scan": scan, "while": until, "cond": either, "two losses": two}
    train = kinds.get(draw.custom_step, once)

    def step(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        (model, moments), means = train((state["model"], state["moments"]), batch, key)
        center = state["center"]
        if draw.custom_step == "gather":
            x, real = rx.gather((batch["x"], rx.row_weights(batch["x"])))
            center = jnp.sum(x * real[:, None], 0) / jnp.sum(real)
            center = center + jax.vmap(rx.mean, in_axes=-1)(batch["x"])
        mean = rx.mean(batch["y"] ** 2)
        state = {"model": model, "moments": moments, "center": center}
        return state, {**means, "mean": mean}

    return step
