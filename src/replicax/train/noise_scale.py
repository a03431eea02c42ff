"""The gradient noise scale: how far the gradients of parts of a batch are apart.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv:1812.06162), appendix
A.1, compare the squared norm of a batch's gradient with those of smaller ones. Here these are
disjoint parts of one batch, and the parts may weigh unequally.
"""

import dataclasses
import json
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

from replicax.core.accumulate import Sequential, cut, folded, zeros_like
from replicax.core.batch import Batch
from replicax.core.capacity import check_fits
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replicated, row_axis
from replicax.core.models.definition import PyTree
from replicax.core.modes import MODES, batch_shardings, lift
from replicax.core.objective import Objective, only_read
from replicax.core.ready import agree_on_program
from replicax.core.scaling import unscaled
from replicax.core.update import TrainState, step_key
from replicax.errors import ConfigError, check_at_least
from replicax.train.dispatched import Dispatched
from replicax.train.hook import Hook, Running
from replicax.train.records import Record, write_json
from replicax.wording import first_line

PARTS = 4
"""Parts of a batch, on any number of devices. Two would do, and give |G|² with twice the variance
that many parts tend to; four come within a third of that, and each adds a reduction."""
CONFIDENCE = 0.95
"""Confidence of the range."""
LEAST_SAMPLES = 5
"""Fewer say nothing about their own error."""
FILE, NOISE = "noise_scale.json", "noise"  # the latter is the kind of record that a sample is
_NUMBERS = ("squared_gradient_norm", "trace")


class NoiseSample(NamedTuple):
    """Unbiased estimates from one batch, float32 scalars: average many before dividing any.

    NaN where fewer than two parts have any weight.
    """

    squared_gradient_norm: Any
    """|G|², G the gradient of the mean loss over all data; noise can make it negative."""
    trace: Any
    """tr Σ, the variance of the gradient of one row, summed over the parameters."""
    rows: Any
    """Real rows of the batch."""


def noise_probe(dp: DataParallel, state: TrainState) -> Any:
    """Return what measures the noise in the gradient, beside the training, which it leaves as is.

    It is one program in all modes: the compiler splits each part's rows over the devices, as in
    mode `jit`. The parts hold the same rows on any number of devices, and are computed one after
    the other, in at least as many micro-batches as the step. It holds two gradients, split as the
    layout splits the parameters, and moves what `PARTS` steps reduce. It is a `jax.jit` function of
    the state before a step and the step's batch, and gives a `NoiseSample`.
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
    _axis: None,
    *,
    objective: Objective,
    micro_batches: int,
    mesh: Mesh,
    shardings: PyTree,
) -> NoiseSample:
    """The estimates from the parts of the whole batch.

    A part of weight w has a mean gradient g of expectation G and covariance Σ / w; the whole batch,
    of weight W, their mean. So the sum of w |g - mean|² over the n parts has expectation
    (n - 1) tr Σ, whatever they weigh, and |mean|² has |G|² + tr Σ / W. Where parts weigh alike this
    is appendix A.1 with a part as the small batch and the whole as the big one.
    """
    batch, accumulate, key = batch.whole(), Sequential(micro_batches), step_key(state)

    def gradient(number: jax.Array, rows: Batch) -> tuple[PyTree, jax.Array]:
        sums, _ = accumulate(objective.step_sums, state, rows, folded(key, number), None)
        divisor = jnp.where(sums.weight > 0, sums.weight, 1)
        mean = jax.tree.map(lambda leaf: leaf / divisor, unscaled(sums, state).gradient)
        return lax.with_sharding_constraint(mean, shardings), sums.weight

    def add(carry: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        mean, weight, scatter, count = carry
        found, own = gradient(*numbered)
        # Welford's way: the difference of two nearly equal sums would lose all digits.
        apart = jax.tree.map(jnp.subtract, found, mean)
        share = own / jnp.where(weight + own > 0, weight + own, 1)
        mean = jax.tree.map(lambda old, step: old + share * step, mean, apart)
        scatter = scatter + weight * share * optax.tree.norm(apart, squared=True)
        return (mean, weight + own, scatter, count + (own > 0)), None

    # Neighbours go to different parts: no row leaves its device, and the padding at the end, of
    # which each number of devices needs another, leaves the real rows in their parts.
    parts = jax.tree.map(partial(cut, parts=PARTS), _padded(batch, PARTS * micro_batches))
    parts = lax.with_sharding_constraint(
        parts, NamedSharding(mesh, PartitionSpec(None, row_axis(mesh)))
    )
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    zeros, weight = zeros_like(jax.eval_shape(gradient, jnp.int32(0), first))
    carry = (lax.with_sharding_constraint(zeros, shardings), weight, weight, jnp.int32(0))
    (mean, weight, scatter, count), _ = lax.scan(add, carry, (jnp.arange(PARTS), parts))
    noise = scatter / (count - 1) / weight  # of the whole batch's gradient; 0 / 0 for one part
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
    """The estimate; infinite where that of |G|² is not above 0."""
    low: float
    high: float
    """Its range of 95 %, in rows: 0 where nothing is excluded, infinite where |G|² may be 0."""
    squared_gradient_norm: float
    trace: float
    """Means of the samples, see `NoiseSample`."""
    samples: int
    """Batches measured."""
    left_out: int
    """Batches that were measured and not finite, or had fewer than two parts with any weight."""
    parts: int
    """Each batch was cut into so many."""
    batch_rows: int
    """Rows of the largest batch measured."""
    first_step: int
    last_step: int
    """Steps on whose batches it was measured, counted from 1."""

    @property
    def resolved(self) -> bool:
        """Whether the samples tell |G|² from 0, so that the scale has an upper bound."""
        return math.isfinite(self.high)

    def __str__(self) -> str:
        said = f"{self.samples:,} sample{'s' * (self.samples != 1)}"
        if self.left_out:
            said += f", {self.left_out} left out"
        if self.resolved:
            rows = f"{_rows(self.rows)} rows (95%: {_rows(self.low)} to {_rows(self.high)})"
            return f"B_simple {rows} · {said}"
        above = f"B_simple above {_rows(self.low)} rows" if self.low else "B_simple not resolved"
        return f"{above}: measure longer · {said}"

    def save(self, folder: Path) -> None:
        """Write `noise_scale.json`; JSON has no infinity, and null stands for it."""
        write_json(folder / FILE, dataclasses.asdict(self))


class NoiseMeter(Hook):
    """Measures the gradient noise every so many steps, each time at the cost of about a gradient.

    The estimate is `scale` once the run has ended, and `noise_scale.json` in its folder. See
    docs/noise-scale.md.

    Examples:
        >>> noise = rx.NoiseMeter(every=10)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, hooks=[noise])
        >>> print(noise.scale)

    Args:
        every: steps between two samples.

    Raises:
        ConfigError: nothing to measure.
    """

    def __init__(self, every: int) -> None:
        check_at_least("a NoiseMeter with every", every, 1)
        self.scale: NoiseScale | None = None
        self._every = every
        self._probe: Any = None
        self._sample: NoiseSample | None = None

    def start(self, run: Running) -> None:
        if run.source.batch_size == 1:
            raise ConfigError(
                "a NoiseMeter with batch_size=1; the noise is how far parts of a batch are apart, "
                "and 1 row has none: use at least 2 rows, better many"
            )
        self._probe = None

    def before_step(self, run: Running, batch: Batch) -> None:
        """Measure before the step on `batch`, where it is time to, without waiting for it."""
        dp, given = run.dp, (run.state, batch)
        if self._probe is None:  # it compiles at the first step, before the clock is started
            self._probe = noise_probe(dp, run.state)
            lowered = self._probe.lower(*given)
            agree_on_program(dp.configuration, "the noise measurement", given, lowered)
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
    """The noise scale over the later half of a run: it grows while a model learns, most at first.

    Numerator and denominator are averaged before the division. The range is Fieller's for the
    ratio of two means (J. R. Statist. Soc. B 16, 1954), which has no upper end where the
    denominator may be 0.
    """
    taken = [record for record in records if record.kind == NOISE]
    middle = max((record.step for record in records), default=0) / 2
    later = [record for record in taken if record.step > middle]
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
    """Return the noise scale that a run measured."""
    file = path / FILE if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        null: dict[str, Any] = dict.fromkeys(_NUMBERS, math.nan)
        null |= {"rows": math.inf, "high": math.inf}
        told = {name: null[name] if fields[name] is None else fields[name] for name in fields}
        return NoiseScale(**told)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} holds no noise scale ({first_line(error)}); a run writes it at its end: "
            "measure one with replicax train --measure-noise-scale"
        ) from error


def _range(pairs: np.ndarray) -> tuple[float, float]:
    """The ratios of mean trace to mean |G|² that the samples `[n, 2]` of the two do not exclude.

    A ratio r is excluded where the mean of trace - r |G|² is too far from 0. That is a quadratic
    inequality in r: a r² - 2 b r + c <= 0.
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
    # |G|² may be 0. Where the trace may not, small ratios are excluded nevertheless.
    excluded = a < 0 and c > 0 and trace > 0
    return max((b - root) / a, 0.0) if excluded else 0.0, math.inf


def _rows(rows: float) -> str:
    """Rows in three digits: `1,230`, `12.3`."""
    return f"{float(f'{rows:.3g}'):,.0f}" if rows >= 100 else f"{rows:.3g}"
