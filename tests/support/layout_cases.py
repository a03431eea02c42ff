"""Models with layouts for them, and the training that compares one with another."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.agreement import in_float64, record_gradient, without_keys
from support.cases import BATCH, CASES, CLASSES, Case

import replicax as rx
from replicax.core.ground.job import Job
from replicax.recipes.gpt2 import GPT2

STEPS = 5


def _tower() -> Any:
    """Stacked layers between an input and an output layer."""
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "in": jax.random.normal(keys[0], (6, 16)) / 3,
        "layers": {
            "kernel": jax.random.normal(keys[1], (8, 16, 16)) / 6,
            "bias": jax.random.normal(keys[1], (8, 16)) / 9,
        },
        "out": jax.random.normal(keys[2], (16, CLASSES)) / 4,
    }


def _tower_loss(model: Any, batch: Any, key: Any) -> Any:
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["kernel"] + own["bias"]), None

    x, _ = lax.scan(layer, batch["x"] @ model["in"], model["layers"])
    logits = x @ model["out"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    weighted = rx.Weighted(values, batch["weight"])
    return weighted, {"accuracy": jnp.argmax(logits, -1) == batch["label"]}


MODELS: dict[str, Case] = {
    **{
        name: CASES[name]
        for name in ("pytree", "weighted", "linen", "nnx", "mlp", "lenet", "cnn", "gpt2")
    },
    "tower": Case(_tower, _tower_loss, CASES["weighted"].source),
}

RULES: dict[str, list[tuple[str, P]]] = {
    "pytree": [("hidden.*kernel", P(None, "model")), ("hidden.*bias", P("model"))],
    "linen": [("Dense_0.*kernel", P(None, "model")), ("Dense_1.*kernel", P("model"))],
    "nnx": [("hidden.*kernel", P(None, "model")), ("out.*kernel", P("model"))],
    "mlp": [("Dense_[02].*kernel", P(None, "model")), ("Dense_1.*kernel", P("model"))],
    "lenet": [("dense1.*kernel", P(None, "model")), ("dense2.*kernel", P("model"))],
    "cnn": [("linear.*kernel", P("model"))],
    "gpt2": [
        ("wte", P(None, "model")),  # tied: the input and the output
        *GPT2().rules()[:-1],
    ],
    "tower": [("kernel", P("stage", None, "model")), ("layers", P("stage")), ("in", P("model"))],
}
RULES["weighted"] = RULES["pytree"]
"""Rules over the axes `model` and `stage`; other parameters are whole."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A mode, a layout, a mesh, and the order of micro-batches in stages."""

    mode: str
    layout: str
    axes: tuple[tuple[str, int], ...] = ()
    schedule: str = "1f1b"

    def __str__(self) -> str:
        sizes = "".join(f"-{name}{size}" for name, size in self.axes)
        return f"{self.mode}-{self.layout}{sizes}-{self.schedule}".removesuffix("-1f1b")

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return dict(self.axes).get("stage", 1)

    @property
    def by_rules(self) -> bool:
        """Return whether several devices share an axis that only rules use."""
        return any(name in ("model", "stage") for name, _ in self.axes)


def on(mode: str, layout: str, schedule: str = "1f1b", **axes: int) -> Setup:
    """Return a setup on a mesh of these axes."""
    return Setup(mode, layout, tuple(axes.items()), schedule)


SINGLE = Setup("single", "replicated")


def data_parallel(
    model: str, setup: Setup, accumulate: int = 1, job: Job | None = None
) -> rx.DataParallel:
    """Return the step of a model; a job runs it on all its devices."""
    devices = math.prod(size for _, size in setup.axes)
    rules = [*RULES[model], ("", P())] if setup.by_rules else ()
    return rx.DataParallel(
        MODELS[model].loss,
        optax.chain(record_gradient(), optax.adamw(1e-3, weight_decay=0.01)),
        mesh=rx.make_mesh(**dict(setup.axes), devices=None if job else jax.devices()[:devices]),
        mode=setup.mode,
        layout=rx.layout(setup.layout, rules=rules, schedule=setup.schedule),
        accumulate=accumulate,
        job=job,
    )


def train(model: str, setup: Setup, accumulate: int = 1, job: Job | None = None) -> dict[str, Any]:
    """Return the first gradient, metrics of the first and last step, and the final state."""
    case, dp = MODELS[model], data_parallel(model, setup, accumulate, job)
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(dp.mesh, P()))
    given = case.model()
    state = dp.init(in_float64(given) if jax.config.jax_enable_x64 else given)
    told: list[Any] = []
    for epoch in range(STEPS):
        (batch,) = dp.feed(case.source, BATCH, shuffle=True, epoch=epoch)
        state, metrics = dp.step(state, batch)
        told.append(jax.device_get(whole((metrics, state.opt_state[0]))))
    return {
        "metrics": [told[0][0], told[-1][0]],
        "gradient": told[0][1],
        "params": jax.device_get(whole(state.params)),
        "extras": without_keys(state.extras),
        "evaluated": dp.evaluate(state, dp.feed(case.source, BATCH)),
    }
