"""The gradient noise scale: how much the gradients of parts of a batch differ.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv:1812.06162), appendix
A.1, compare the squared gradient norm of a batch with those of smaller batches. Here the smaller
batches are disjoint parts of one batch, possibly of unequal weight.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.call_checks import agree_on_program
from replicax.core.data.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.first_step.memory_check import check_fits
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.mapping import lift
from replicax.core.modes.mode_table import MODES
from replicax.core.placement.mesh import batch_shardings, replicated, row_axis
from replicax.core.step.accumulate import Sequential, folded, split_rows, zeros_like
from replicax.core.step.loss_scale import unscaled
from replicax.core.step.objective import Objective, only_read
from replicax.core.step.update import step_key
from replicax.errors import ConfigError
from replicax.text.arguments import Count, typed
from replicax.text.wording import counted, first_line
from replicax.train.dispatched import Dispatched
from replicax.train.files.places import read_bytes
from replicax.train.files.records import Record, write_json
from replicax.train.files.sealed import unsealed
from replicax.train.hooks.hook import Hook, Running

PARTS = 4
"""Parts per batch, for any number of devices. The variance of |G|² with two parts is twice the
limit of many parts; with four it is a third above. Each part adds a reduction."""
CONFIDENCE = 0.95
"""Confidence level of the range."""
LEAST_SAMPLES = 5
"""Fewer samples give no error estimate."""
FILE, NOISE = "noise_scale.json", "noise"  # the latter is the record kind of a sample
_NUMBERS = ("squared_gradient_norm", "trace")


class NoiseSample(NamedTuple):
    """Unbiased estimates from one batch, float32 scalars: average many before dividing them.

    NaN if fewer than two parts have nonzero weight.
    """

    squared_gradient_norm: Any
    """|G|², where G is the gradient of the mean loss over all data; noise can make it negative."""
    trace: Any
    """tr Σ, the variance of a single row's gradient, summed over the parameters."""
    rows: Any
    """Number of real rows in the batch."""


def noise_probe(dp: DataParallel, state: TrainState) -> Any:
    """Return a function that measures the gradient noise, without affecting the training.

    It is the same program in all modes: the compiler splits the rows of each part over the devices,
    as in mode `jit`. The parts contain the same rows on any number of devices, and are computed
    sequentially, in at least as many micro-batches as the step. It needs memory for two gradients,
    sharded like the parameters, and the communication of `PARTS` steps. It is compiled, a function
    of the state before a step and the step's batch, and returns a `NoiseSample`.
    """
    program, mesh = dp.program(state), dp.mesh
    function = partial(
        _sample,
        objective=program.objective,
        micro_batches=-(-dp.split.micro_batches // PARTS),
        mesh=mesh,
        shardings=only_read(program.shardings.params, program.objective.read),
    )
    placed = program.shardings, batch_shardings(mesh), replicated(mesh)
    return lift(function, MODES["jit"], mesh, *placed)


def _sample(
    state: TrainState,
    batch: Batch,
    axis: None,
    *,
    objective: Objective,
    micro_batches: int,
    mesh: Mesh,
    shardings: PyTree,
) -> NoiseSample:
    """Estimate from the parts of the whole batch.

    A part of weight w has a mean gradient g of expectation G and covariance Σ / w; the whole batch,
    of weight W, has their weighted mean. So the sum of w |g - mean|² over the n parts has
    expectation (n - 1) tr Σ for any weights, and |mean|² has |G|² + tr Σ / W. For equal weights
    this is appendix A.1 with a part as the small batch and the whole batch as the big one.
    """
    batch, accumulate, key = batch.whole(), Sequential(micro_batches), step_key(state)

    def gradient(number: jax.Array, rows: Batch) -> tuple[PyTree, jax.Array]:
        sums, _ = accumulate(objective.step_sums, state, rows, folded(key, number), None)
        mean = jax.tree.map(lambda leaf: leaf / sums.divisor, unscaled(sums, state).gradient)
        return lax.with_sharding_constraint(mean, shardings), sums.weight

    def add(carry: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        mean, weight, scatter, count = carry
        part_mean, part_weight = gradient(*numbered)
        # Welford's algorithm: a difference of two nearly equal sums would lose all digits.
        apart = jax.tree.map(jnp.subtract, part_mean, mean)
        share = part_weight / jnp.where(weight + part_weight > 0, weight + part_weight, 1)
        mean = jax.tree.map(lambda old, step: old + share * step, mean, apart)
        scatter = scatter + weight * share * optax.tree.norm(apart, squared=True)
        return (mean, weight + part_weight, scatter, count + (part_weight > 0)), None

    # Adjacent rows go to different parts: no row leaves its device, and the padding at the end,
    # which depends on the number of devices, does not change the parts of the real rows.
    parts = jax.tree.map(partial(split_rows, parts=PARTS), _padded(batch, PARTS * micro_batches))
    parts = lax.with_sharding_constraint(
        parts, NamedSharding(mesh, PartitionSpec(None, row_axis(mesh)))
    )
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    zeros, weight = zeros_like(jax.eval_shape(gradient, jnp.int32(0), first))
    carry = (lax.with_sharding_constraint(zeros, shardings), weight, weight, jnp.int32(0))
    (mean, weight, scatter, count), _ = lax.scan(add, carry, (jnp.arange(PARTS), parts))
    noise = scatter / (count - 1) / weight  # that of the whole batch's gradient; 0 / 0 for one part
    rows = jnp.sum(batch.mask)
    return NoiseSample(optax.tree.norm(mean, squared=True) - noise, noise * rows, rows)


def _padded(batch: Batch, multiple: int) -> Batch:
    if batch.size % multiple == 0:
        return batch
    index = jnp.arange(-(-batch.size // multiple) * multiple)
    padded: Batch = jax.tree.map(lambda leaf: leaf[index % batch.size], batch)
    return dataclasses.replace(padded, mask=jnp.where(index < batch.size, padded.mask, 0))


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """B = tr Σ / |G|² over the later half of a run."""

    rows: float
    """The estimate; infinite if the estimate of |G|² is not positive."""
    low: float
    high: float
    """The 95 % range, in rows: from 0 if nothing is excluded, to infinity if |G|² may be 0."""
    squared_gradient_norm: float
    trace: float
    """Means of the samples, see `NoiseSample`."""
    samples: int
    """Number of batches measured."""
    left_out: int
    """Batches excluded as not finite, or with fewer than two parts of nonzero weight."""
    parts: int
    """Number of parts per batch."""
    batch_rows: int
    """Rows of the largest batch measured."""
    first_step: int
    last_step: int
    """First and last step measured, counted from 1."""

    @property
    def resolved(self) -> bool:
        """Whether |G|² differs significantly from 0, so that the scale has an upper bound."""
        return math.isfinite(self.high)

    def __str__(self) -> str:
        said = counted(self.samples, "sample")
        if self.left_out:
            said += f", {self.left_out} left out"
        if self.resolved:
            rows = f"{_rows(self.rows)} rows (95%: {_rows(self.low)} to {_rows(self.high)})"
            return f"B_simple {rows} · {said}"
        above = f"B_simple above {_rows(self.low)} rows" if self.low else "B_simple not resolved"
        return f"{above}: measure longer · {said}"

    def save(self, folder: Path) -> None:
        """Write `noise_scale.json`, with null for infinity, which JSON lacks."""
        write_json(folder / FILE, dataclasses.asdict(self))


class NoiseMeter(Hook):
    """Measure the gradient noise every few steps, each time at about the cost of a gradient.

    At the end of the run the estimate is in `scale`, and in `noise_scale.json` in its folder. See
    docs/noise-scale.md.

    Examples:
        >>> noise = rx.hooks.NoiseMeter(every=10)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, hooks=[noise])
        >>> print(noise.scale)

    Args:
        every: steps between two samples.

    Raises:
        ConfigError: `every` below 1, or batches of one row.
    """

    @typed
    def __init__(self, every: Count) -> None:
        self.scale: NoiseScale | None = None
        self._every = every
        self._probe: Any = None
        self._sample: NoiseSample | None = None

    def before_run(self, run: Running) -> None:
        if run.source.batch_size == 1:
            raise ConfigError(
                "a NoiseMeter with batch_size=1; the noise is measured between parts of a batch, "
                "and 1 row has no parts: use at least 2 rows, preferably many"
            )

    def start(self, run: Running) -> None:
        self._probe = None

    def before_step(self, run: Running, batch: Batch) -> None:
        """Measure on `batch` before its step, if due, without waiting for the result."""
        dp, given = run.dp, (run.state, batch)
        if self._probe is None:  # compile at the first step, before timing starts
            self._probe = noise_probe(dp, run.state)
            lowered = self._probe.lower(*given)
            agree_on_program(dp.configuration, "the noise measurement", given, lowered.as_text)
            check_fits([lowered.compile()], dp.mesh, batch.size)
        if (run.place.step + 1) % self._every == 0:
            self._sample = self._probe(*given)

    def dispatched(self, run: Running, step: Dispatched) -> None:
        sample, self._sample = self._sample, None
        if sample is not None:
            metrics = {name: float(getattr(sample, name)) for name in _NUMBERS}
            at = step.place
            run.keep(Record(NOISE, at.step, at.epoch, metrics, int(sample.rows), 0.0))

    def end(self, run: Running) -> None:
        self.scale = noise_scale(run.records)
        if run.folder is not None and run.error is None:
            self.scale.save(run.folder)

    def summary(self) -> list[str]:
        return [f"noise  {self.scale}"]


def noise_scale(records: Sequence[Record]) -> NoiseScale:
    """The noise scale over the later half of a run; it grows during training, fastest at first.

    Numerator and denominator are averaged before the division. The range is Fieller's interval
    for the ratio of two means (J. R. Statist. Soc. B 16, 1954), which is unbounded if the
    denominator may be 0.
    """
    samples = [record for record in records if record.kind == NOISE]
    middle = max((record.step for record in records), default=0) / 2
    later = [record for record in samples if record.step > middle]
    finite = [r for r in later if all(math.isfinite(r.metrics[name]) for name in _NUMBERS)]
    pairs = np.array([[record.metrics[name] for name in _NUMBERS] for record in finite])
    steps = [record.step for record in finite] or [0]
    square, trace = pairs.mean(0) if finite else (math.nan, math.nan)
    low, high = _range(pairs) if len(finite) >= LEAST_SAMPLES else (0.0, math.inf)
    return NoiseScale(
        rows=float(trace / square) if square > 0 else math.inf,
        low=low,
        high=high,
        squared_gradient_norm=float(square),
        trace=float(trace),
        samples=len(finite),
        left_out=len(later) - len(finite),
        parts=PARTS,
        batch_rows=max((record.rows for record in finite), default=0),
        first_step=min(steps),
        last_step=max(steps),
    )


def load_noise_scale(path: Path) -> NoiseScale:
    """Read the noise scale that a run measured."""
    file = path / FILE if path.is_dir() else path
    try:
        fields = unsealed(read_bytes(file), dict[str, Any])
        null: dict[str, Any] = dict.fromkeys(_NUMBERS, math.nan)
        null |= {"rows": math.inf, "high": math.inf}
        numbers = {name: null[name] if fields[name] is None else fields[name] for name in fields}
        return NoiseScale(**numbers)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} does not contain a noise scale ({first_line(error)}); a run writes it at its "
            "end: measure one with replicax train --measure-noise-scale"
        ) from error


def _range(pairs: np.ndarray) -> tuple[float, float]:
    """The range of ratios of mean trace to mean |G|² that the samples `[n, 2]` do not exclude.

    A ratio r is excluded if the mean of trace - r |G|² is too far from 0. The others satisfy a
    quadratic inequality in r: a r² - 2 b r + c <= 0.
    """
    from scipy.special import stdtrit  # a dependency of JAX

    count = len(pairs)
    square, trace = pairs.mean(0).tolist()
    slack = stdtrit(count - 1, (1 + CONFIDENCE) / 2) ** 2 / count  # Student's t
    (squares, products), (_, traces) = (slack * np.cov(pairs.T)).tolist()
    a = square**2 - squares
    b = trace * square - products
    c = trace**2 - traces
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and square > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    # |G|² may be 0. Small ratios are still excluded if the trace cannot be 0.
    excluded = a < 0 and c > 0 and trace > 0
    return max((b - root) / a, 0.0) if excluded else 0.0, math.inf


def _rows(rows: float) -> str:
    """Format rows with three digits: `1,230`, `12.3`."""
    return f"{float(f'{rows:.3g}'):,.0f}" if rows >= 100 else f"{rows:.3g}"
