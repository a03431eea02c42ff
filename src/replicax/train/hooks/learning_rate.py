"""`LearningRate`: the learning rate among the figures of each train record."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.in_flight import STEPS_IN_FLIGHT
from replicax.core.update import TrainState
from replicax.errors import ConfigError
from replicax.train.dispatched import Dispatched
from replicax.train.hook import Hook, Running
from replicax.train.records import Record

LEARNING_RATE = "learning_rate"


class LearningRate(Hook):
    """Adds the figure `learning_rate` to each train record: that of the update of its step.

    Example:
        >>> schedule = optax.cosine_decay_schedule(3e-4, 10_000)
        >>> dp = rx.DataParallel(loss, optax.adamw(schedule))
        >>> rx.fit(dp, state, source, batch_size=32, steps=10_000,
        ...        hooks=[rx.LearningRate(schedule)])

    Args:
        schedule: the optimizer's own, called with the number of updates before, as optax does; or a
            number. By default the rate is read from the state of `optax.inject_hyperparams`.

    Raises:
        ConfigError: in a run, nothing was given and there is no such state.
    """

    def __init__(self, schedule: Callable[[int], Any] | float | None = None) -> None:
        self._schedule = schedule
        self._rates: collections.deque[tuple[int, Any]] = collections.deque(
            maxlen=STEPS_IN_FLIGHT + 2  # as many as finish at once, at most
        )

    def start(self, run: Running) -> None:
        if self._schedule is None:
            _injected(run)

    def dispatched(self, run: Running, step: Dispatched) -> None:
        if self._schedule is None:  # a copy, as the next step may take the state's memory
            rate = jnp.copy(_injected(run).addressable_data(0))
            self._rates.append((step.place.step, rate))

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        rate = self._schedule
        if rate is None:
            rate = dict(self._rates)[record.step]
        elif callable(rate):
            # Those that were skipped left the optimizer's count as it was.
            skipped = sum(r.kind == "skip" and r.step < record.step for r in run.records)
            with _on_the_host():
                rate = rate(record.step - 1 - skipped)
        return {LEARNING_RATE: float(rate)}


def injected_rates(state: TrainState) -> list[jax.Array]:
    """Return the learning rates in `state`: those of `optax.inject_hyperparams`."""

    def is_injected(node: Any) -> bool:
        return LEARNING_RATE in getattr(node, "hyperparams", ())

    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_injected)
    return [node.hyperparams[LEARNING_RATE] for node in nodes if is_injected(node)]


def _injected(run: Running) -> jax.Array:
    """The rate in the optimizer's state."""
    found = injected_rates(run.state)
    if len(found) != 1:
        raise ConfigError(
            f"LearningRate() and {len(found)} learning rates in the optimizer's state, where there "
            "is to be 1: give LearningRate(schedule), or make the optimizer by "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)"
        )
    return found[0]


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Compute where a schedule does not wait behind the steps that were dispatched."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # the user's platforms leave it out
        host = None
    with jax.default_device(host):
        yield
