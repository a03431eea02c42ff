"""Programs drawn at random, run by Replicax and by one device.

Parameters walk by themselves, and do not train: each step is compared by itself, and rounding does
not grow. What is compared are means, gradients and the rows of a state.
"""

import contextlib
import dataclasses
import random
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from row_backward import CURVED, LINEAR
from row_parts import APART, DRAWN, ENDS, GATES, METRICS, MIXING, STATE, Context
from row_weighed import CAREFUL, CARELESS, WEIGHED_ENDS
from row_words import OneDevice, Replicax

import replicax as rx

ROWS, SHORT, RATE = 16, 13, 0.05
FULL = (ROWS,) * 6
PARTS = {
    **{name: part for name, (_, part) in DRAWN.items()},
    **APART,
    **MIXING,
    **CAREFUL,
    **CARELESS,
    **LINEAR,
    **CURVED,
    **STATE,
}
EVERY_END = {**ENDS, **WEIGHED_ENDS}
APARTS = {*APART, *LINEAR, *STATE, *(name for name, (fine, _) in DRAWN.items() if fine)}
WEIGHED = {*CAREFUL, *CARELESS, *WEIGHED_ENDS}
LOW = {"in bfloat16", "in float16"}
DTYPES = {name: jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")}

Told = list[dict[str, np.ndarray]]
"""What is compared after each step, by name, in float64."""


@dataclasses.dataclass(frozen=True)
class Case:
    """How a program is run."""

    mode: str
    accumulate: int = 1
    devices: int = 4

    def __str__(self) -> str:
        return f"{self.mode}, {self.devices} devices, {self.accumulate} parts"


CASES = (
    *(Case("shard_map"), Case("shard_map", 1, 2), Case("jit"), Case("jit", 1, 2)),
    *(Case("single", 1, 1), Case("jit", 2, 2), Case("shard_map", 2, 2), Case("pmap", 1, 2)),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, or a custom step whose first parts are in its body, `before` the loss.

    `closure`: the loss closes over the result of these parts. `parts` are pairs of names, of a gate
    and of a part. `rows` are the sizes of its batches, one for each step. `memory`: how many rows
    of its state, an `rx.ByRow`, were written; others are 0.
    """

    parts: tuple[tuple[str, str], ...]
    end: str = "rows"
    metrics: str = "none"
    before: int | None = None
    closure: bool = False
    updates: int = 1
    rows: tuple[int, ...] = FULL
    numbers: str = "normal"
    dtype: str = "float32"
    memory: int | None = None
    given: str = ""
    """The dtype of the numbers, if they are computed in a wider one."""
    jitter: int = 0
    """The seed of a change of all numbers by their rounding, or 0."""

    @property
    def own(self) -> bool:
        return self.before is not None

    @cached_property
    def kind(self) -> str:
        """Whether rows stay apart, are mixed with care for padding, or are mixed."""
        names = [name for _, name in self.parts]
        fine = EVERY_END[self.end][0] and METRICS[self.metrics][0]
        if not fine or not {*names} <= APARTS | {*CAREFUL}:
            return "curved" if {*names} & {*CURVED} else "mixed"
        return "careful" if {*names, self.end} & WEIGHED else "apart"

    @property
    def weighs(self) -> bool:
        return bool({*(name for _, name in self.parts), self.end} & WEIGHED)

    @property
    def draws(self) -> bool:
        return bool({name for _, name in self.parts} & {*DRAWN})

    @property
    def low(self) -> bool:
        """Whether anything is computed in less than float32."""
        narrow = self.dtype in ("bfloat16", "float16")
        return narrow or bool({name for _, name in self.parts} & LOW)

    def cases(self, draw: random.Random, count: int) -> list[Case]:
        """Return some of the cases that apply."""
        found = [case for case in CASES if self.applies(case)]
        return draw.sample(found, min(count, len(found)))

    def applies(self, case: Case) -> bool:
        """Whether a case is defined: draws differ between parts, a closure has all rows."""
        divided = case.accumulate > 1 or case.mode in ("shard_map", "pmap")
        return not (self.draws and divided) and not (self.closure and case.accumulate > 1)

    def __str__(self) -> str:
        parts = (f"{name} ({gate})" if gate != "always" else name for gate, name in self.parts)
        said = f"step, {self.before} before{', closure' * self.closure}" if self.own else "loss"
        said += f": {' > '.join(parts)} > {self.end}, {self.metrics}; rows {list(self.rows)}"
        said += f", {self.updates} updates" * (self.updates > 1)
        said += f", {self.memory} rows of state" * (self.memory is not None)
        return f"{said}, {self.numbers} in {self.dtype}"

    def at(self, dtype: str) -> "Program":
        """Return the same program on the same numbers, computed in another dtype."""
        return dataclasses.replace(self, dtype=dtype, given=self.given or self.dtype)

    def jittered(self, seed: int) -> "Program":
        """Return the same program on numbers that differ by rounding."""
        return dataclasses.replace(self, jitter=seed)

    def _cast(self, array: Any) -> Any:
        if self.jitter:
            size = 2 * float(jnp.finfo(DTYPES[self.dtype]).eps)
            noise = np.random.default_rng(self.jitter).uniform(-size, size, np.shape(array))
            array = array * (1 + noise)
        wide = np.asarray(array, np.float64)
        return wide.astype(DTYPES[self.given or self.dtype]).astype(DTYPES[self.dtype])

    def model(self, step: int) -> dict[str, Any]:
        """Return the parameters of a step; a gate is closed in the first."""
        numbers = np.random.default_rng((step, 1))
        named = {"w": (4, 4), "table": (4, 4), "scale": (4,)}
        model = {name: numbers.normal(size=shape) / 2 for name, shape in named.items()}
        model["scale"] = 1 + model["scale"] / 2
        return {**jax.tree.map(self._cast, model), "gate": self._cast(step * 0.25)}

    def batch(self, step: int, rows: int) -> dict[str, Any]:
        """Return a batch; the numbers of later ones may be unlike those of the first."""
        numbers = np.random.default_rng((step, 7))
        mask = np.ones(ROWS) if step == 0 else numbers.integers(0, 2, ROWS)
        x, y = numbers.normal(size=(ROWS, 4)), numbers.normal(size=ROWS)
        if self.numbers == "larger":
            x, y = (each * (1 if step < 4 else 6) for each in (x, y))
        elif self.numbers == "smaller":
            away = 0.2 if step >= 4 else 6 * np.where(np.arange(ROWS) < 4, 0.1, -1)
            x, y = (x if step >= 4 else np.abs(x)) * np.reshape(away, (-1, 1)), y * away
        elif self.numbers == "far":
            x, y = (each / 2 + (1 if step % 2 else -1) * 3 for each in (x, y))
        elif self.numbers == "other sign":
            sign = np.where((np.arange(ROWS) >= 4) | (step > 2), -2, 0.5) if step else np.ones(ROWS)
            x, y = (np.abs(x) + 0.2) * sign[:, None], (np.abs(y) + 0.2) * sign
        batch = {
            "x": self._cast(x),
            "y": self._cast(y),
            "label": numbers.integers(0, 4, ROWS).astype(np.int32),
            "mask": self._cast(mask),
            "flag": np.ones(ROWS, bool) if step == 0 else numbers.random(ROWS) < 0.5,
        }
        return {name: leaf[:rows] for name, leaf in batch.items()}

    def first_memory(self) -> Any:
        numbers = np.random.default_rng(3).normal(size=(ROWS, 4))
        return self._cast(np.where(np.arange(ROWS)[:, None] < self.memory, numbers, 0))

    def loss(self, first: int, words: Any) -> Any:
        """Return the loss: the parts from `first` on, and the end."""

        def loss(model: Any, batch: Any, key: Any) -> Any:
            c = Context(model, batch, key, words)
            if self.weighs:
                c.real = words.row_weights(batch["x"])
            z = batch["x"] * model["scale"]
            z = self._through(c, z, first, len(self.parts))
            values, metrics = EVERY_END[self.end][1](c, z), METRICS[self.metrics][1](c, z)
            return (values, metrics) if metrics else values

        return loss

    def _through(self, c: Context, z: Any, first: int, last: int) -> Any:
        for gate, name in self.parts[first:last]:
            part = lambda c, z, name=name: PARTS[name](c, z).astype(z.dtype)  # noqa: E731
            z = GATES[gate](c, part, z).astype(z.dtype)
        return z

    def step(self, state: Any, batch: Any, key: Any, words: Any) -> Any:
        """Run a custom step: some parts in its body, the others in its loss."""
        model, memory = state["model"], state.get("memory")
        inner = {n: getattr(v, "value", v) for n, v in batch.items()}
        if memory is not None:
            inner["memory"] = memory = getattr(memory, "value", memory)
            batch = {**batch, "memory": memory}
        c = Context(model, inner, None, words)
        if self.weighs:
            c.real = words.row_weights(batch["x"])
        z = self._through(c, batch["x"], 0, self.before or 0)
        seen, rest = (
            {**batch, "x": batch["x"] if self.closure else z},
            self.loss(self.before, words),
        )

        def loss(model: Any, rows: Any, key: Any) -> Any:
            return rest(model, {**rows, "x": z} if self.closure else rows, key)

        means, gradient = {}, model
        for update in range(self.updates):
            if update:
                model = jax.tree.map(lambda p, g: (p - RATE * g).astype(p.dtype), model, gradient)
            means, gradient = words.value_and_grad(loss)(model, seen, key)
        after = {"model": state["model"], "gradient": gradient}
        if memory is not None:
            after["memory"] = (0.9 * memory + 0.1 * z).astype(z.dtype)
        return after, means

    def plain(self) -> Told:
        """Return what one device computes from the real rows, without Replicax."""
        seed, told = jax.random.key(0), []

        @jax.jit
        def step(state: Any, batch: Any, number: Any) -> Any:
            words, key = OneDevice(number), jax.random.fold_in(seed, number)
            key = jax.random.fold_in(key, 0)
            if self.own:
                return self.step(state, batch, key, words)
            means, gradient = words.value_and_grad(self.loss(0, words))(state["model"], batch, key)
            return {"gradient": gradient}, means

        with self._precise():
            memory = None if self.memory is None else self.first_memory()
            for number, rows in enumerate(self.rows):
                state = {"model": self.model(number)}
                if memory is not None:
                    state["memory"] = memory[:rows]
                batch = {**self.batch(number, rows), "weight": np.float32(number > 1)}
                after, means = jax.device_get(step(state, batch, np.int32(number)))
                if memory is not None:
                    memory = np.concatenate([after["memory"], memory[rows:]])
                told.append(_named(means, after["gradient"], memory))
        return told

    def found(self, case: Case) -> tuple[Told, str]:
        """Return what Replicax computes until it refuses, and how it refuses, or nothing."""
        settings: dict[str, Any] = {"mode": case.mode, "accumulate": case.accumulate}
        settings |= {"mesh": rx.make_mesh(devices=jax.devices()[: case.devices]), "donate": False}
        told: Told = []
        with self._precise():
            try:
                if self.own:
                    dp = rx.DataParallel(step=self._replicax_step, **settings)
                else:
                    dp = rx.DataParallel(self.loss(0, Replicax), _kept_gradient(), **settings)
                model = self.model(0)
                state = dp.init(self._first_state(model) if self.own else model)
                for number, rows in enumerate(self.rows):
                    state = self._walked(state, number) if number else state
                    given = {**self.batch(number, rows), "weight": rx.Replicated(float(number > 1))}
                    [batch] = dp.feed([given], batch_size=ROWS, prefetch=0)
                    state, means = dp.step(state, batch)
                    params = state.params
                    gradient = params["gradient"] if self.own else state.opt_state
                    memory = params["memory"].value if self.memory is not None else None
                    told.append(_named(*jax.device_get((means, gradient, memory))))
            except rx.ReplicaxError as error:
                return told, str(error)
        return told, ""

    def _replicax_step(self, state: Any, batch: Any, key: Any) -> Any:
        after, means = self.step(state, batch, key, Replicax)
        if "memory" in after:
            after["memory"] = rx.ByRow(after["memory"])
        return after, dict(means)

    def _first_state(self, model: Any) -> Any:
        state = {"model": model, "gradient": jax.tree.map(np.zeros_like, model)}
        if self.memory is not None:
            state["memory"] = rx.ByRow(jnp.asarray(self.first_memory()))
        return state

    def _walked(self, state: Any, number: int) -> Any:
        """Return a state with the parameters of a step."""
        params = state.params
        before = params["model"] if self.own else params
        model = jax.tree.map(
            lambda new, old: jax.device_put(jnp.asarray(new), old.sharding),
            self.model(number),
            before,
        )
        return dataclasses.replace(state, params={**params, "model": model} if self.own else model)

    def _precise(self) -> Any:
        return jax.enable_x64(True) if self.dtype == "float64" else contextlib.nullcontext()


def _kept_gradient() -> optax.GradientTransformation:
    """Return an optimizer whose state is the latest gradient, and that updates nothing."""

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, gradient), gradient

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _named(means: Any, gradient: Any, memory: Any) -> dict[str, np.ndarray]:
    found = {**means, **{f"gradient.{name}": leaf for name, leaf in gradient.items()}}
    if memory is not None:
        found["memory"] = memory
    return {name: np.asarray(value, np.float64) for name, value in found.items()}
