"""Steps that compile fast, with the shapes of their models and batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicax as rx
from replicax.core.placement.mesh import abstract_mesh
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.lenet import LeNet
from replicax.recipes.mlp import MLP
from replicax.recipes.recipe import abstract_model


@dataclasses.dataclass(frozen=True)
class SmallStep:
    """A step, and the arguments of its export."""

    dp: rx.DataParallel
    model: Any
    batch: Any

    def on(self, devices: int) -> "SmallStep":
        """For as many devices, which need not exist."""
        return dataclasses.replace(self, dp=self.dp.replace(mesh=abstract_mesh(devices)))


def lenet(rows: int, **settings: Any) -> SmallStep:
    """LeNet on `rows` images; `settings` are of `DataParallel`."""
    batch = {"image": _of((rows, 28, 28, 1), jnp.uint8), "label": _of((rows,), jnp.int32)}
    return _step(LeNet(), optax.sgd(0.1, momentum=0.9), batch, settings)


def mlp(rows: int, **settings: Any) -> SmallStep:
    """Three layers of Flax Linen, with Adam."""
    recipe = MLP(layers=3, hidden=64, inputs=32)
    batch = {"x": _of((rows, 32), jnp.float32), "y": _of((rows, 10), jnp.float32)}
    return _step(recipe, optax.adam(1e-3), batch, settings)


def gpt2(rows: int, attention: transformer.Attention = "cudnn", **settings: Any) -> SmallStep:
    """One layer of 128 tokens, with heads as wide as those of the published sizes."""
    shape = transformer.Shape(layers=1, heads=2, width=128, context=128, vocab_size=256)
    recipe = GPT2(heads=shape.heads, context=shape.context, attention=attention)
    batch = {
        "tokens": _of((rows, shape.context + 1), jnp.int32),
        "length": _of((rows,), jnp.int32),
        "bytes": _of((rows,), jnp.int32),
    }
    model = jax.eval_shape(lambda key: transformer.init(shape, key), jax.random.key(0))
    return SmallStep(rx.DataParallel(recipe.loss, optax.adamw(1e-3), **settings), model, batch)


def wide(rows: int, **settings: Any) -> SmallStep:
    """One matrix; the input is 64 KiB a row."""

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(batch["x"] @ model["w"]) ** 2, axis=-1)

    model = {"w": _of((2**14, 128), jnp.float32)}
    return SmallStep(
        rx.DataParallel(loss, optax.sgd(0.1), **settings),
        model,
        {"x": _of((rows, 2**14), jnp.float32)},
    )


SMALL_STEPS: dict[str, Callable[..., SmallStep]] = {"lenet": lenet, "mlp": mlp, "gpt2": gpt2}


def _step(
    recipe: Any, optimizer: optax.GradientTransformation, batch: Any, settings: dict[str, Any]
) -> SmallStep:
    model = abstract_model(recipe.model, jax.random.key(0))
    return SmallStep(rx.DataParallel(recipe.loss, optimizer, **settings), model, batch)


def _of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
