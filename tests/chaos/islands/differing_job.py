"""The training of an island that differs from the others in one thing, CHAOS_DIFFERS.

CHAOS_MODE is the mode, and CHAOS_EVERY the steps of a round, 0 for none. It notes its steps, and
its parameters at the end, as the job of other trials does.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chaos import jobs
from chaos.islands.job import Noting, main
from support.counted_rows import rows

import replicax as rx
from replicax.cluster import alike
from replicax.train.files.fingerprint import sha256
from replicax.train.run import members

BATCH, ROWS, EPOCHS, FEATURES = 16, 96, 8, 8
Differ = Callable[["Settings"], Any]


@dataclasses.dataclass
class Settings:
    """The settings of an island's training."""

    dp: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    rate: float = 1e-2
    factor: float = 1.0
    decay: float = 0.0
    shift: float = 0.0
    """Added to one weight."""
    data: dict[str, np.ndarray] = dataclasses.field(default_factory=lambda: rows(ROWS, 2))
    tests: dict[str, np.ndarray] = dataclasses.field(default_factory=lambda: rows(20, 5))
    order: Callable[[int], np.ndarray] | None = None
    """Numbers of the rows of an epoch, read by a loader of the user's own."""


class Loader:
    """Reads rows in an order of its own, pass by pass."""

    def __init__(self, data: dict[str, np.ndarray], order: Callable[[int], np.ndarray]) -> None:
        self._data, self._order, self._passes = data, order, 0

    def __iter__(self) -> Any:
        self._passes += 1
        for numbers in self._order(self._passes).reshape(-1, BATCH):
            yield {name: values[numbers] for name, values in self._data.items()}


def set_to(**values: Any) -> Differ:
    return lambda settings: [setattr(settings, name, value) for name, value in values.items()]


def configured(name: str, value: Any) -> Differ:
    return lambda settings: jax.config.update(name, value)


def version_of(module: Any) -> Differ:
    return lambda settings: setattr(module, "__version__", "0.0.1")


def flags(text: str) -> Differ:
    return lambda settings: os.environ.update(XLA_FLAGS=text)


def built(**values: Any) -> Differ:
    return lambda settings: settings.dp.update(values)


def fitted(**values: Any) -> Differ:
    return lambda settings: settings.fit.update(values)


def changed(name: str) -> Differ:
    def change(settings: Settings) -> None:
        source = getattr(settings, name)
        source["x"][-1, -1] += 1e-3

    return change


def other_processor(settings: Settings) -> None:
    own = alike.processor()
    members.processor = lambda: {**own, "vectors": "sse2"}  # type: ignore[attr-defined]


DIFFERENCES: dict[str, Differ] = {
    "fast math": flags("--xla_cpu_enable_fast_math=true"),
    "instructions": flags("--xla_cpu_max_isa=SSE4_2"),
    "x64": configured("jax_enable_x64", True),
    "random numbers": configured("jax_default_prng_impl", "rbg"),
    "partitionable": configured("jax_threefry_partitionable", False),
    "matmul precision": configured("jax_default_matmul_precision", "bfloat16"),
    "gumbel": configured("jax_high_dynamic_range_gumbel", True),
    "jax": version_of(jax),
    "optax": version_of(optax),
    "replicax": version_of(rx),
    "processor": other_processor,
    "rate": set_to(rate=5e-2),
    "loss": set_to(factor=1.5),
    "decay": set_to(decay=1e-3),
    "weights": set_to(shift=1e-6),
    "data": changed("data"),
    "evaluation data": changed("tests"),
    "fewer rows": set_to(data=rows(ROWS - BATCH, 2)),
    "precision": built(precision="bfloat16"),
    "layout": built(layout="zero1"),
    "trainable": built(trainable=lambda path: "out" in path),
    "micro shards": built(micro_shards=4),
    "mode": built(mode="single"),
    "compiler options": built(compiler_options={"xla_cpu_enable_fast_min_max": True}),
    "batch size": fitted(batch_size=BATCH // 2),
    "epochs": fitted(epochs=EPOCHS + 1),
    "seed": fitted(seed=5),
    "no shuffle": fitted(shuffle=False),
    "saving": fitted(saving=rx.Saving(every=7)),
    "logging": fitted(log_every=2),
    "no evaluation": fitted(eval_source=None),
    "order of a loader": set_to(order=lambda n: np.random.default_rng(n + 9).permutation(ROWS)),
    "a loader without a seed": set_to(order=lambda n: np.random.default_rng().permutation(ROWS)),
    "rows of a loader": set_to(order=lambda n: np.roll(np.arange(ROWS), BATCH * (n > 1))),
}
"""By what one island does otherwise."""
LOADERS = [name for name in DIFFERENCES if "loader" in name]


def train(notes: jobs.Notes) -> None:
    name, mode = os.environ.get("CHAOS_DIFFERS", ""), os.environ["CHAOS_MODE"]
    settings = Settings(dp={"mode": mode})
    if os.environ["CHAOS_LOADS"] == "1":
        settings.order = lambda n: np.arange(ROWS)
    settings.fit = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 4, "eval_source": settings.tests}
    if every := int(os.environ["CHAOS_EVERY"]):
        settings.dp["rounds"] = rx.Rounds(every=every, outer=optax.sgd(0.8))
    if name:
        DIFFERENCES[name](settings)
    state = trained(settings, notes)
    notes.write("result", params=sha256(state.params), step=int(state.step))


def trained(settings: Settings, notes: jobs.Notes) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        x = batch["x"] if key is None else batch["x"] + jax.random.normal(key, batch["x"].shape)
        return settings.factor * (jnp.tanh(x @ model["in"]) @ model["out"] - batch["y"]) ** 2

    optimizer = optax.adamw(settings.rate, weight_decay=settings.decay)
    job = rx.initialize(verbose=False)
    dp = rx.DataParallel(loss, optimizer, job=job, **{"micro_shards": 8, **settings.dp})
    numbers = np.random.default_rng(1)
    model = {
        "in": 0.5 * numbers.normal(size=(FEATURES, 16)).astype(np.float32),
        "out": 0.3 * numbers.normal(size=16).astype(np.float32),
    }
    model["out"][0] += settings.shift
    options: dict[str, Any] = {"shuffle": True, "saving": rx.Saving(every=5), **settings.fit}
    source: Any = settings.data
    if settings.order is not None:
        source = Loader(source, settings.order)
        options.update(batch_size=None, shuffle=False, eval_source=None)
    run = {"run_dir": notes.folder / "run", "hooks": [Noting(notes)], "log_every": 1}
    return rx.fit(dp, dp.init(model), source, **{**run, **options}, progress=True).state


if __name__ == "__main__":
    main(train)
