"""What the programs have in common: a tiny model of tokens, its data, and one device's step.

A batch is sentences of up to `PLACES` tokens, of which later rows have fewer; `IGNORED` marks no
token. So every replica and every micro-batch has another number of tokens.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

DEVICES, ROWS, PLACES, WIDTH, WORDS = 4, 16, 4, 3, 5
RATE, IGNORED = 0.5, -100
IN_TWO, IN_FOUR = {"micro_batches": 2}, {"micro_batches": 4}
ACCUMULATING = {"mode": "single", "accumulate": 2}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights() -> Any:
    return normal(1, WIDTH, WORDS) / 2


def sentences() -> Any:
    labels = np.random.default_rng(2).integers(0, WORDS, (ROWS, PLACES))
    lengths = np.linspace(PLACES, 1, ROWS).round().astype(int)[:, None]
    labels = np.where(np.arange(PLACES) < lengths, labels, IGNORED).astype(np.int32)
    return {"x": normal(3, ROWS, PLACES, WIDTH), "labels": labels}


def losses(w: Any, batch: Any) -> jax.Array:
    """Return the loss of each token, `[rows, PLACES]`; 0 where there is none."""
    real = batch["labels"] != IGNORED
    labels = jnp.where(real, batch["labels"], 0)
    each = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, labels)
    return jnp.where(real, each, 0.0)


def total(w: Any, batch: Any) -> jax.Array:
    return jnp.sum(losses(w, batch))


def tokens(batch: Any) -> jax.Array:
    return jnp.sum(batch["labels"] != IGNORED).astype(jnp.float32)


def one_device(w: Any, batch: Any) -> Any:
    """Return the step that all of these programs want to be."""
    loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / tokens(batch))(w)
    return w - RATE * gradient, loss


def micro_batches(batch: Any, count: int = 2) -> list[Any]:
    """Return `count` parts of a replica's rows, in order."""
    rows = len(jax.tree.leaves(batch)[0]) // count
    return [
        jax.tree.map(lambda leaf, n=n: leaf[n * rows : (n + 1) * rows], batch) for n in range(count)
    ]


def clipped(gradient: Any, norm: Any, most: float = 0.1) -> Any:
    factor = jnp.minimum(1.0, most / norm)
    return jax.tree.map(lambda leaf: leaf * factor, gradient)


def norm_of(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


class Program:
    """A public bug, in our words: its docstring says what went wrong, `broken` does it.

    `mended` is what its project's correction does. `also`: other numbers with the same mistake.
    """

    project: ClassVar[str] = ""
    number: ClassVar[str] = ""
    also: ClassVar[str] = ""

    @classmethod
    def says(cls) -> str:
        return (cls.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


class Handwritten(Program):
    """A step that reduces by hand, with its form for one device; `broken()` returns it."""

    reference: ClassVar[Any] = staticmethod(one_device)
    state: ClassVar[Any] = staticmethod(weights)
    batch: ClassVar[Any] = staticmethod(sentences)
    options: ClassVar[dict[str, Any]] = {}


class Loss(Program):
    """A loss for `rx.DataParallel`, `broken(model, batch, key)`; `options` are its arguments."""

    model: ClassVar[Any] = staticmethod(weights)
    batch: ClassVar[Any] = staticmethod(sentences)
    options: ClassVar[dict[str, Any]] = {"mode": "shard_map"}


class Loader(Program):
    """A source of batches that is stopped in the middle of an epoch and read again."""


class Loop(Program):
    """A loop that only its source text shows: `broken` and `mended` do not run."""


@dataclasses.dataclass(frozen=True)
class Unwritable:
    """A bug that no program of a user can have here, and why."""

    project: str
    number: str
    says: str
    why: str


def file_of(program: type[Program]) -> Path:
    return Path(__file__).with_name(program.__module__.rpartition(".")[2] + ".py")
