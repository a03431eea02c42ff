"""Hooks that add figures or metrics to the train records."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.analysis.flops import count_flops
from replicax.analysis.hardware import chip_of_kind
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.step.base import Apply, StepFigure, StepSums
from replicax.errors import ConfigError
from replicax.text.arguments import NotNegative, typed
from replicax.train.dispatched import Dispatched
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Hook, Running

GRADIENT_NORM, LEARNING_RATE = "gradient_norm", "learning_rate"


class DeviceMemory(Hook):
    """Adds the figure `device_memory_bytes`: the highest peak memory of this process's devices.

    It is the peak since the process began, as reported by the allocator of GPUs and TPUs. CPU
    devices do not report it, so their records omit the figure.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10, hooks=[rx.hooks.DeviceMemory()])
    """

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        stats = [device.memory_stats() or {} for device in run.dp.mesh.local_devices]
        peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
        return {"device_memory_bytes": float(max(peaks))} if peaks else {}


class Throughput(Hook):
    """Adds the figures `tokens_per_second` and `peak_flops_fraction` to each train record.

    The second is the FLOPs of matrix products and convolutions, divided by the data-sheet peak of
    all devices of the mesh over that time, in the step's precision. Both are derived from the
    record's `rows_per_second`, which excludes evaluations and checkpoints.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10,
        ...        hooks=[rx.hooks.Throughput(tokens_per_row=1024)])

    Args:
        tokens_per_row: without it, `tokens_per_second` is omitted.
        flops_per_row: FLOPs of a step per row; by default counted in its program, including
            recomputation. If the devices' peak is unknown, as on CPUs, the fraction is omitted.

    Raises:
        ConfigError: a number below 0.
    """

    interval = None

    @typed
    def __init__(
        self, tokens_per_row: NotNegative | None = None, flops_per_row: NotNegative | None = None
    ) -> None:
        self._tokens, self._given = tokens_per_row, flops_per_row
        self._flops: float | None = None  # FLOPs per row, once known
        self._peak: float | None = None  # FLOP/s of all devices, if known

    def start(self, run: Running) -> None:
        devices = run.dp.mesh.devices
        chip = chip_of_kind(devices.flat[0].device_kind)
        peak = None if chip is None else chip.flops_per_second.get(run.dp.precision.name)
        self._peak = None if peak is None else peak * devices.size
        self._flops = self._given

    def before_step(self, run: Running, batch: Any) -> None:
        if self._flops is None and self._peak is not None:
            traced = run.dp.trace(run.state, batch.first)
            platform = run.dp.mesh.devices.flat[0].platform
            self._flops = count_flops(traced.jaxpr.jaxpr, platform) / batch.first.size

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        figures, rate = {}, record.rows_per_second
        if math.isnan(rate):  # the first step is not timed
            return {}
        if self._tokens is not None:
            figures["tokens_per_second"] = rate * self._tokens
        if self._flops is not None and self._peak is not None:
            figures["peak_flops_fraction"] = rate * self._flops / self._peak
        return figures


class GradientNorm(Hook):
    """Adds the metric `gradient_norm`: the L2 norm of the gradient of the global mean loss.

    It covers all trainable parameters and is computed from the gradient passed to the optimizer,
    before clipping. It is computed inside the step, so the compiled program changes.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10, hooks=[rx.hooks.GradientNorm()])

    Raises:
        ConfigError: in a run, a custom step, or a metric of that name.
    """

    @property
    def wrap(self) -> Callable[[Apply], Apply]:
        return with_gradient_norm

    def before_run(self, run: Running) -> None:
        if run.dp.configuration.step is not None:
            raise ConfigError(
                "GradientNorm with a custom step, which may have several gradients: remove the "
                "hook, and return optax.tree.norm(gradient) as one of the step's metrics"
            )


def with_gradient_norm(apply: Apply) -> Apply:
    """Return `apply` with the metric `gradient_norm`."""

    def with_norm(state: TrainState, total: StepSums, *rest: PyTree) -> tuple[TrainState, Metrics]:
        if GRADIENT_NORM in total.weighted:
            raise ConfigError(
                f"GradientNorm and the loss both define the metric {GRADIENT_NORM}: remove the "
                "hook, or rename the metric"
            )
        after, metrics = apply(state, total, *rest)
        divisor = total.divisor
        means = [leaf / divisor for leaf in jax.tree.leaves(total.gradient)]
        squares = [jnp.sum(jnp.square(jnp.abs(mean))) for mean in means]
        norm = jnp.sqrt(jnp.sum(jnp.stack([jnp.float32(0), *squares])))
        figure: Any = StepFigure(norm)
        return after, {**metrics, GRADIENT_NORM: figure}

    return with_norm


class LearningRate(Hook):
    """Adds the figure `learning_rate` to each train record: the rate used in its step.

    Examples:
        >>> schedule = optax.cosine_decay_schedule(3e-4, 20)
        >>> dp = rx.DataParallel(loss, optax.adamw(schedule))
        >>> result = rx.fit(dp, dp.init(model), source, batch_size=32, steps=20,
        ...                 hooks=[rx.hooks.LearningRate(schedule)])

    Args:
        schedule: the optimizer's schedule, called with the number of previous updates, as in optax;
            or a number. By default the rate is read from the state of `optax.inject_hyperparams`.

    Raises:
        ConfigError: in a run, no schedule was given and there is no such state.
    """

    @typed
    def __init__(self, schedule: Callable[[int], Any] | float | None = None) -> None:
        self._schedule = schedule
        self._rate: Any = None  # of the last finished step

    def before_run(self, run: Running) -> None:
        if self._schedule is None:
            _injected(run)

    @property
    def interval(self) -> int | None:
        return 1 if self._schedule is None else None  # the rate of each step is in its state

    def dispatched(self, run: Running, step: Dispatched) -> None:
        if self._schedule is None:  # a copy, as the next step may reuse the state's memory
            step.attached[LEARNING_RATE] = jnp.copy(_injected(run).addressable_data(0))

    def step(self, run: Running, step: Dispatched) -> None:
        self._rate = step.attached.get(LEARNING_RATE)

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        rate = self._schedule
        if rate is None:
            rate = self._rate
        elif callable(rate):
            # Skipped steps do not advance the optimizer's count.
            skipped = sum(r.kind == "skip" and r.step < record.step for r in run.records)
            try:  # on the host, so that it does not wait for the dispatched steps
                host = jax.local_devices(backend="cpu")[0]
            except RuntimeError:  # excluded by the user's jax_platforms
                host = None
            with jax.default_device(host):
                rate = rate(record.step - 1 - skipped)
        return {LEARNING_RATE: float(rate)}


def injected_rates(state: TrainState) -> list[jax.Array]:
    """Return the learning rates that `optax.inject_hyperparams` keeps in `state`."""

    def is_injected(node: Any) -> bool:
        return LEARNING_RATE in getattr(node, "hyperparams", ())

    inner = getattr(state.islands, "inner", state)
    nodes = jax.tree.leaves(inner.opt_state, is_leaf=is_injected)
    return [node.hyperparams[LEARNING_RATE] for node in nodes if is_injected(node)]


def _injected(run: Running) -> jax.Array:
    rates = injected_rates(run.state)
    if len(rates) != 1:
        raise ConfigError(
            f"LearningRate() with {len(rates)} learning rates in the optimizer's state; exactly 1 "
            "is required: use LearningRate(schedule), or create the optimizer with "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)"
        )
    return rates[0]
