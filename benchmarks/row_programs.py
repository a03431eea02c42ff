"""Programs drawn at random whose rows stay apart, or mix: always, or by a schedule or a gate."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, SHORT, STEPS, RATE = 16, 13, 7, 0.05
DEVICES = 4

Part = Callable[..., Any]


class Context:
    """What the parts of one program read: parameters, batch, key and step number."""

    def __init__(self, model: Any, batch: Any, key: Any, step: Any) -> None:
        self.model, self.batch, self.key, self.step = model, batch, key, step


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
        carry = jnp.tanh(carry + column)
        return carry, carry * 0.5

    last, found = jax.lax.scan(step, jnp.zeros(len(z)), z.T)
    return found.T + last[:, None]


def picked(c: Context, z: Any) -> Any:
    return z + jax.nn.log_softmax(z)[jnp.arange(len(z)), c.batch["label"]][:, None]


def stepped(c: Context, z: Any) -> Any:
    return z + jax.vmap(
        lambda row: jax.lax.while_loop(lambda v: jnp.sum(v**2) > 0.1, lambda v: v / 2, row)
    )(jax.lax.stop_gradient(z))


def by_norm(z: Any) -> Any:
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


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
        jnp.einsum("bi,bj->bij", z, z) + jnp.eye(4), z[..., None]
    )[..., 0],
    "solved": lambda c, z: (
        jax.scipy.linalg.solve_triangular(
            jnp.tril(c.model["w"]) / 4 + jnp.eye(4) * 2, z.T, lower=True
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

GATES: dict[str, Callable[[Context, Part, Any], Any]] = {
    "always": lambda c, part, z: part(c, z),
    "warm-up": lambda c, part, z: z + jnp.minimum(c.step, 1) * (part(c, z) - z),
    "late": lambda c, part, z: jnp.where(c.step >= 4, part(c, z), z),
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
}

ENDS: dict[str, tuple[bool, Part]] = {
    "rows": (True, lambda c, z: (z[:, 0] - c.batch["y"]) ** 2 + 0.1 * (z**2).sum(1)),
    "entries": (True, lambda c, z: (z - c.batch["y"][:, None]) ** 2),
    "weighted": (
        True,
        lambda c, z: rx.Weighted((z[:, 0] - c.batch["y"]) ** 2, c.batch["mask"] + 0.5),
    ),
    "flags": (True, lambda c, z: rx.Weighted((z**2).sum(1), c.batch["mask"] > 0.3)),
    "mean": (True, lambda c, z: jnp.mean((z[:, 0] - c.batch["y"]) ** 2)),
    "cross-entropy": (
        True,
        lambda c, z: optax.softmax_cross_entropy_with_integer_labels(z, c.batch["label"]),
    ),
    "sum": (False, lambda c, z: jnp.sum((z[:, 0] - c.batch["y"]) ** 2)),
    "root": (False, lambda c, z: jnp.sqrt(jnp.mean((z[:, 0] - c.batch["y"]) ** 2))),
    "weighted mean": (
        False,
        lambda c, z: jnp.sum((z**2).sum(1) * c.batch["mask"]) / (c.batch["mask"].sum() + 1e-3),
    ),
}
METRICS: dict[str, tuple[bool, Part]] = {
    "none": (True, lambda c, z: {}),
    "accuracy": (True, lambda c, z: {"right": jnp.argmax(z, 1) == c.batch["label"]}),
    "mean": (True, lambda c, z: {"size": jnp.mean(jnp.abs(z))}),
    "largest": (False, lambda c, z: {"largest": jnp.max(z)}),
    "spread": (False, lambda c, z: {"spread": jnp.std(z)}),
    "count": (False, lambda c, z: {"count": jnp.sum(z > 0).astype(jnp.float32)}),
}


class Program:
    """A loss, or a custom step whose first parts are in its body, `before` the loss.

    `closure`: the loss closes over the result of these parts. `parts` are pairs of names, of a gate
    and of a part in `APART` or `MIXING`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, str]],
        end: str = "rows",
        metrics: str = "none",
        *,
        before: int | None = None,
        closure: bool = False,
        updates: int = 1,
    ) -> None:
        self.own, self.before = before is not None, before or 0
        self.closure, self.updates = closure, updates
        self.parts, self.end, self.metrics = parts, end, metrics
        mixing = any(name in MIXING for _, name in parts)
        self.apart = not mixing and ENDS[end][0] and METRICS[metrics][0]

    @classmethod
    def drawn(cls, seed: int) -> "Program":
        """Return the program of `seed`: half of them keep rows apart, half are custom steps."""
        draw = random.Random(seed)
        apart, own = draw.random() < 0.5, draw.random() < 0.5
        parts = [("always", name) for name in draw.choices(list(APART), k=draw.randint(1, 4))]
        if draw.random() < 0.4:  # a gate around a part that keeps rows apart
            n = draw.randrange(len(parts))
            parts[n] = (draw.choice(list(GATES)), parts[n][1])
        end = draw.choice([name for name, (fine, _) in ENDS.items() if fine])
        metrics = draw.choice([name for name, (fine, _) in METRICS.items() if fine])
        if not apart:
            where = draw.random()
            if where < 0.1:
                end = draw.choice([name for name, (fine, _) in ENDS.items() if not fine])
            elif where < 0.2 and not own:
                metrics = draw.choice([name for name, (fine, _) in METRICS.items() if not fine])
            else:
                name = draw.choice(list(MIXING))
                place = draw.randint(0, len(parts))
                parts.insert(place, (draw.choice(list(GATES)), name))
        before = draw.randint(0, len(parts)) if own else None
        closure = own and draw.random() < 0.3
        updates = draw.randint(1, 2) if own else 1
        return cls(parts, end, metrics, before=before, closure=closure, updates=updates)

    def __str__(self) -> str:
        said = " > ".join(
            f"{name} ({gate})" if gate != "always" else name for gate, name in self.parts
        )
        own = (
            f"step, {self.before} before{', closure' if self.closure else ''}"
            if self.own
            else "loss"
        )
        return f"{own}: {said} > {self.end}, {self.metrics}"

    def model(self) -> Any:
        def normal(*shape: int) -> Any:
            numbers = np.random.default_rng(1).normal(size=shape) / 2
            return jnp.asarray(numbers, jnp.float32)

        return {
            "w": normal(4, 4),
            "table": normal(4, 4),
            "scale": jnp.ones(4),
            "gate": jnp.zeros(()),
        }

    def batch(self, step: int, rows: int) -> dict[str, Any]:
        numbers = np.random.default_rng((step, 7))
        mask = np.ones(ROWS) if step == 0 else numbers.integers(0, 2, ROWS)
        batch = {
            "x": numbers.normal(size=(ROWS, 4)).astype(np.float32),
            "y": numbers.normal(size=ROWS).astype(np.float32),
            "label": numbers.integers(0, 4, ROWS).astype(np.int32),
            "mask": mask.astype(np.float32),
            "flag": np.ones(ROWS, bool) if step == 0 else numbers.random(ROWS) < 0.5,
        }
        return {name: leaf[:rows] for name, leaf in batch.items()}

    def through(self, c: Context, z: Any, first: int, last: int) -> Any:
        for gate, name in self.parts[first:last]:
            z = GATES[gate](c, {**APART, **MIXING}[name], z)
        return z

    def loss(self, first: int, step: Any) -> Any:
        def loss(model: Any, batch: Any, key: Any) -> Any:
            c = Context(model, batch, key, step())
            z = self.through(c, batch["x"] * model["scale"], first, len(self.parts))
            values, metrics = ENDS[self.end][1](c, z), METRICS[self.metrics][1](c, z)
            return (values, metrics) if metrics else values

        return loss

    def step(self, state: Any, batch: Any, key: Any, value_and_grad: Any, step: Any) -> Any:
        """Run a custom step: some parts in its body, the others in its loss."""
        inner, weight = {n: v for n, v in batch.items() if n != "weight"}, batch["weight"]
        weight = getattr(weight, "value", weight)
        c = Context(state, {**inner, "weight": weight}, None, step())
        z = self.through(c, batch["x"], 0, self.before)
        seen = {**batch, "x": batch["x"] if self.closure else z}
        rest = self.loss(self.before, step)

        def loss(model: Any, rows: Any, key: Any) -> Any:
            return rest(model, {**rows, "x": z} if self.closure else rows, key)

        means = {}
        for _ in range(self.updates):
            means, gradient = value_and_grad(loss)(state, seen, key)
            state = jax.tree.map(lambda p, g: p - RATE * g, state, gradient)
        return state, means

    def plain(self, rows: int) -> list[dict[str, float]]:
        """Return the metrics of each step on one device, without Replicax."""
        model, told, seed = self.model(), [], jax.random.key(0)

        def value_and_grad(loss: Any) -> Any:
            def mean(value: Any) -> Any:
                if isinstance(value, rx.Weighted):
                    weights = jnp.broadcast_to(value.weights, value.values.shape)
                    return jnp.sum(value.values * weights) / jnp.sum(weights)
                return jnp.mean(jnp.asarray(value, jnp.float32))

            def total(model: Any, batch: Any, key: Any) -> Any:
                found = loss(model, batch, key)
                values, metrics = found if isinstance(found, tuple) else (found, {})
                named = {"loss": values, **metrics}
                means = {name: mean(value) for name, value in named.items()}
                return means["loss"], means

            def run(model: Any, batch: Any, key: Any) -> Any:
                (_, means), gradient = jax.value_and_grad(total, has_aux=True)(model, batch, key)
                return means, gradient

            return run

        @jax.jit
        def step(model: Any, batch: Any, number: Any) -> Any:
            at = lambda: number  # noqa: E731
            key = jax.random.fold_in(jax.random.fold_in(seed, number), 0)
            if self.own:
                return self.step(model, batch, key, value_and_grad, at)
            means, gradient = value_and_grad(self.loss(0, at))(model, batch, key)
            return jax.tree.map(lambda p, g: p - RATE * g, model, gradient), means

        for number in range(STEPS):
            batch = {**self.batch(number, rows), "weight": jnp.float32(number > 1)}
            model, means = step(model, batch, jnp.int32(number))
            told.append({name: float(value) for name, value in means.items()})
        return told

    def found(self, mode: str, accumulate: int, rows: int) -> list[dict[str, float]] | str:
        """Return the metrics of each step, or the first line of the refusal."""
        settings: dict[str, Any] = {"mode": mode, "accumulate": accumulate, "donate": False}
        settings["mesh"] = rx.make_mesh(devices=jax.devices()[:DEVICES])
        if self.own:
            step = lambda s, b, k: self.step(s, b, k, rx.value_and_grad, rx.step_number)  # noqa: E731
            dp = rx.DataParallel(step=step, **settings)
        else:
            dp = rx.DataParallel(self.loss(0, rx.step_number), optax.sgd(RATE), **settings)
        told, state = [], dp.init(self.model())
        try:
            for number in range(STEPS):
                batch = {**self.batch(number, rows), "weight": rx.Shared(float(number > 1))}
                state, means = dp.step(state, next(iter(dp.feed([batch], batch_size=ROWS))))
                told.append({name: float(value) for name, value in means.items()})
        except rx.ReplicaxError as error:
            return str(error)
        return told


def differs(found: list[dict[str, float]], plain: list[dict[str, float]]) -> float:
    """Return the largest relative difference of a metric, until the loss diverges."""
    gaps = [0.0]
    for one, other in zip(found, plain, strict=True):
        if not abs(other["loss"]) < 1e3:
            break
        for name in set(one) & set(other):
            gap = abs(one[name] - other[name]) / max(1e-3, abs(other[name]))
            gaps.append(float("inf") if np.isnan(gap) else gap)
    return max(gaps)
