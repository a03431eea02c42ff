"""A loss over stacked layers, and the sums of its step in pipeline stages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.core.models.definition import CallContext
from replicax.core.pipeline.staged_objective import Staged
from replicax.core.step.base import StepSums

LAYERS, WIDTH, TOKENS, WORDS, ROWS = 4, 8, 6, 24, 51
RULES = [("'h'", P("stage")), ("", P())]
TENSOR = [
    ("'up'", P("stage", None, "model")),
    ("'down'", P("stage", "model")),
    ("bias", P("stage")),
    ("", P()),
]


def model() -> dict[str, Any]:
    """Parameters of stacked layers between an embedding and its transpose."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "embedding": jax.random.normal(keys[0], (WORDS, WIDTH)),
        "h": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) / 3,
            "bias": jnp.zeros((LAYERS, 2 * WIDTH)),
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) / 4,
        },
        "scale": jnp.ones(WIDTH),
    }


def rows(count: int = ROWS) -> dict[str, np.ndarray]:
    """Tokens and those that follow, `[rows, tokens]`."""
    random = np.random.default_rng(0)
    draw = lambda: random.integers(0, WORDS, (count, TOKENS)).astype(np.int32)  # noqa: E731
    return {"tokens": draw(), "next": draw()}


def layer(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
    """A layer of the scan."""
    normal = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    return x + jnp.tanh(normal @ block["up"] + block["bias"]) @ block["down"], None


def head(model: Any, x: jax.Array, batch: Any) -> tuple[rx.Weighted, dict[str, jax.Array]]:
    """Loss by token, some of which weigh nothing, and a metric."""
    scores = (x * model["scale"]) @ model["embedding"].T  # tied: both ends have their gradient
    nats = optax.softmax_cross_entropy_with_integer_labels(scores, batch["next"])
    return rx.Weighted(nats, batch["next"] % 3 > 0), {"largest": jnp.max(scores, axis=(1, 2))}


def loss(model: Any, batch: Any, key: Any) -> Any:
    """A loss of one scan over the layers."""
    x, _ = lax.scan(layer, model["embedding"][batch["tokens"]], model["h"])
    return head(model, x, batch)


def made(
    loss: Any = loss,
    model: Callable[[], Any] = model,
    rules: Any = RULES,
    *,
    data: int = 1,
    tensor: int = 1,
    stage: int = 2,
    fsdp: int = 1,
    micro_batches: int = 2,
    **settings: Any,
) -> tuple[rx.DataParallel, Any]:
    """Return a `DataParallel` in stages, and its first state."""
    mesh = rx.make_mesh(data=data, model=tensor, stage=stage, fsdp=fsdp)
    optimizer = optax.adamw(1e-2)
    layout = {"mesh": mesh, "layout": rules, "accumulate": micro_batches}
    dp = rx.DataParallel(
        loss, optimizer, **(layout if stage > 1 else {"mode": "single"}), **settings
    )
    return dp, dp.init(model())


def sums_by_key(
    loss: Any = loss,
    model: Callable[[], Any] = model,
    schedule: str = "1f1b",
    source: Any = None,
    **settings: Any,
) -> Callable[[int], StepSums]:
    """Return the sums of one step, of 51 rows and padding, by the seed of its key."""
    dp, state = made(loss, model, **settings)
    (batch,) = dp.feed(rows() if source is None else source, batch_size=ROWS)
    objective = dp.program(state).split_objective
    if isinstance(objective, Staged):
        objective = dataclasses.replace(objective, schedule=schedule)

    @jax.jit
    def sums(state: Any, batch: Any, seed: int) -> StepSums:
        view = CallContext(jax.random.key(seed), step=state.step)
        return objective.step_sums(state.params, state.extras, batch.whole(), view)[0]

    return lambda seed: jax.device_get(sums(state, batch, seed))


def step_sums(*given: Any, **settings: Any) -> StepSums:
    """The sums of one step."""
    return sums_by_key(*given, **settings)(0)
