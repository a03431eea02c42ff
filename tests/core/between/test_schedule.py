"""Fragments, delay, mixing and momentum against a plain simulation in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.rounds import assert_close, on, over, train
from support.tiers import only

import replicax as rx
from replicax.core.between.transports import OverMesh

RNG = np.random.default_rng(1)
SOURCE = {
    "x": RNG.normal(size=(48, 4)).astype(np.float32),
    "y": RNG.normal(size=(48, 3)).astype(np.float32),
}
LEAVES = {"a": (4, 3), "b": (3,), "c": (3,), "d": (4, 3)}
MODEL = {name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, shape in LEAVES.items()}
FRAGMENTS = {1: ["abcd"], 2: ["ab", "cd"], 3: ["a", "d", "bc"], 4: list("adbc")}
"""Names by number of fragments, of about equal size."""
RATE, ISLANDS, BATCH = 0.05, 2, 8


def linear(model: Any, batch: Any, key: Any) -> Any:
    found = batch["x"] @ (model["a"] + 2 * model["d"]) + model["b"] * 3 - model["c"]
    return ((found - batch["y"]) ** 2).sum(-1)


def gradient(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    out = 2 * (x @ (model["a"] + 2 * model["d"]) + model["b"] * 3 - model["c"] - y) / len(x)
    whole, rows = x.T @ out, out.sum(0)
    return {"a": whole, "b": 3 * rows, "c": -rows, "d": 2 * whole}


@dataclasses.dataclass
class Nesterov:
    """SGD with momentum, as PyTorch writes it."""

    rate: float
    momentum: float
    buffer: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, value: np.ndarray, grad: np.ndarray) -> np.ndarray:
        self.buffer[name] = self.momentum * self.buffer.get(name, 0.0) + grad
        return value - self.rate * (grad + self.momentum * self.buffer[name])


def simulated(steps: int, rounds: rx.Rounds, outer_step: Nesterov) -> dict[str, np.ndarray]:
    """Return the outer parameters after `steps`, in float64."""
    names, parts = sorted(LEAVES), rounds.fragments
    fragments = FRAGMENTS[parts]
    interval = rounds.every // parts
    outer = {name: np.asarray(value, np.float64) for name, value in MODEL.items()}
    own = [dict(outer) for _ in range(ISLANDS)]
    way: list[tuple[int, str, dict[str, np.ndarray]]] = []
    for t in range(1, steps + 1):
        begin = (t - 1) * BATCH % 48
        rows = BATCH // ISLANDS
        for number, params in enumerate(own):
            cut = slice(begin + number * rows, begin + (number + 1) * rows)
            found = gradient(params, SOURCE["x"][cut], SOURCE["y"][cut])
            own[number] = {name: params[name] - RATE * found[name] for name in names}
        for fragment in range(parts):
            if (t - fragment * interval) % rounds.every == 0:
                chosen = fragments[fragment]
                mean = {n: np.mean([outer[n] - each[n] for each in own], axis=0) for n in chosen}
                way.append((t + rounds.delay, chosen, mean))
        for _, chosen, mean in [each for each in way if each[0] == t]:
            for name in chosen:
                outer[name] = outer_step(name, outer[name], mean[name])
                for each in own:
                    each[name] = rounds.mix * each[name] + (1 - rounds.mix) * outer[name]
    return outer


SCHEDULES = [
    *[(3, 1, 0, 0.0), (4, 2, 0, 0.0), (6, 2, 1, 0.5)],
    *[(6, 3, 1, 0.0), (8, 4, 1, 0.25), (5, 1, 4, 0.0)],
]
WITH_MOMENTUM = [(*each, momentum) for each in SCHEDULES for momentum in (0.9, 0.0)]


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix", "momentum"),
    only([*WITH_MOMENTUM[::2], WITH_MOMENTUM[5]], WITH_MOMENTUM),
)
def test_the_schedule_is_that_of_the_simulation(
    every: int, fragments: int, delay: int, mix: float, momentum: float
) -> None:
    outer = optax.sgd(0.6, momentum=momentum, nesterov=True)
    rounds = over(every, fragments=fragments, delay=delay, mix=mix, outer=outer)
    dp = on(ISLANDS, rounds, loss=linear, optimizer=optax.sgd(RATE))
    state, _ = train(dp, MODEL, SOURCE, steps=20, size=BATCH)
    wanted = simulated(20, rounds, Nesterov(0.6, momentum))
    assert_close(state.params, wanted, 2e-5)


def test_a_fragment_takes_effect_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    share, later = OverMesh.share, []

    def watched(self: OverMesh, sent: Any, **options: bool) -> Any:
        later.append(options["later"])
        return share(self, sent, **options)

    monkeypatch.setattr(OverMesh, "share", watched)
    dp = on(ISLANDS, over(6, fragments=2, delay=2), loss=linear, optimizer=optax.sgd(RATE))
    state, params = dp.init(MODEL), []
    for batch in list(dp.feed(SOURCE, BATCH)) * 2:
        state, _ = dp.step(state, batch)
        params.append(jax.device_get(state.params))
    changed = [
        "".join(n for n in sorted(LEAVES) if not np.array_equal(one[n], other[n]))
        for one, other in zip([MODEL, *params], params, strict=False)
    ]
    # Fragment 1 is sent after step 3, and fragment 0 after step 6.
    assert changed == ["", "", "", "", "cd", "", "", "ab", "", "", "cd", ""]
    assert later == [True] * 4  # in the background


def test_the_last_round_may_be_shorter() -> None:
    dp = on(ISLANDS, over(6, fragments=2, delay=2), loss=linear, optimizer=optax.sgd(RATE))
    state, _ = train(dp, MODEL, SOURCE, steps=4, size=BATCH)
    state = dp.end_round(state)
    inner = state.islands.inner.params
    for name in LEAVES:
        for each in np.asarray(inner[name]):
            np.testing.assert_array_equal(each, np.asarray(state.params[name]))
        assert not np.array_equal(state.params[name], MODEL[name])
    assert np.all(np.asarray(state.islands.weights) == 0)


def test_after_a_whole_round_nothing_is_left_to_send() -> None:
    dp = on(ISLANDS, over(3), loss=linear, optimizer=optax.sgd(RATE))
    state, _ = train(dp, MODEL, SOURCE, steps=6, size=BATCH)
    before = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, dp.end_round(state), before)
