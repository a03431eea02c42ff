"""Evaluations during a run."""

import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed, GaveUpError
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.models.metric_objects import as_metric
from replicax.core.step.loss import values_by_name
from replicax.core.step.objective import LossFunction
from replicax.core.step.optimizer import average_of
from replicax.errors import ConfigError
from replicax.text.arguments import Count, Int32Count, typed
from replicax.train.dispatched import RunPosition
from replicax.train.files.records import Record
from replicax.train.folder.program_fingerprint import some_rows
from replicax.train.folder.read_again import FirstBatch
from replicax.train.run.step_records import recorded

ONLY_ONCE = (
    "that is read only once, as a generator: pass a list, or a loader that can be read again"
)


@typed
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation schedule and data of a run. The final state is always evaluated.

    Examples:
        >>> sets = {"dev": held_out, "test": held_out}
        >>> result = rx.fit(dp, state, source, batch_size=32, steps=20,
        ...                 eval_source=rx.Evaluation(sets=sets, every_steps=10))
        >>> value = result.metrics["dev/loss"]

    Args:
        source: as for `dp.feed`.
        sets: name -> source, instead of `source`; metrics are then named `name/loss` and so on.
        batch_size: the run's batch size by default.
        every_epochs: epochs between evaluations; None to not evaluate at the end of epochs.
        every_steps: steps between evaluations.
        at_start: whether to evaluate before the first step as well.
        max_rows: maximum rows of each source, rounded up to whole batches; None for all.
        ema: whether to evaluate the averaged parameters; see `DataParallel.evaluate`.
        loss: a different loss, or metrics, to evaluate; see `DataParallel.evaluate`.

    Raises:
        ConfigError: numbers below 1, or both or neither of `source` and `sets`.
    """

    source: Any = None
    _: dataclasses.KW_ONLY
    sets: Mapping[str, Any] | None = None
    batch_size: Int32Count | None = None
    every_epochs: Count | None = 1
    every_steps: Count | None = None
    at_start: bool = False
    max_rows: Count | None = None
    ema: bool = False
    loss: LossFunction | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.sets):
            raise ConfigError(
                "an evaluation takes either a source or sets={name: source}: pass one of them"
            )


def as_evaluation(eval_source: Any, source: Any) -> Evaluation | None:
    """Return the evaluation of a run on `source`; None for no evaluation."""
    if eval_source is None or isinstance(eval_source, Evaluation):
        return eval_source
    if isinstance(eval_source, Mapping) and isinstance(source, Mapping | tuple):
        rows: Any = jax.tree.structure(opened(source).data)
        sets = opened(eval_source).data.items()
        named = [name for name, each in sets if rows == jax.tree.structure(each)]
        if named:
            raise ConfigError(
                f"eval_source has {len(named)} sources ({', '.join(map(str, named))}); a dict "
                "holds the arrays of one source: pass rx.Evaluation(sets=...)"
            )
    return Evaluation(eval_source)


class Evaluator:
    """Evaluates a run's states."""

    def __init__(
        self,
        plan: Evaluation,
        dp: DataParallel,
        state: TrainState,
        batch_size: int | None,
        interrupted: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        if plan.ema:  # fail now rather than at the end of the first epoch
            jax.eval_shape(average_of, state.opt_state, state.params)
        size = batch_size if plan.batch_size is None else plan.batch_size
        sources = plan.sets or {"": plan.source}
        self._feeds = {name: dp.feed(source, size) for name, source in sources.items()}
        for feed in self._feeds.values():
            feed.stops = interrupted
        self._plan, self._dp, self._say = plan, dp, say
        # Of a loader the rows are known only once it is read.
        self._first = {name: FirstBatch() for name in self._feeds if not self._digest(name)}

    def fingerprint(self) -> dict[str, str]:
        """Return a digest of the rows of each source whose rows can be read in any order."""
        return {name or "rows": digest for name in self._feeds if (digest := self._digest(name))}

    def _digest(self, name: str) -> str | None:
        source = self._feeds[name].source
        leaves = source.fingerprint().get("leaves")
        if leaves is None:
            return None
        first = f", the first {most}" if (most := self._plan.max_rows) is not None else ""
        return f"{source.rows} rows, {zlib.crc32(json.dumps(leaves).encode()):08x}{first}"

    def save_state(self) -> dict[str, Any]:
        return {name: each.save_state() for name, each in self._first.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in state.keys() & self._first.keys():
            self._first[name].load_state(state[name])

    def metrics(self, state: TrainState) -> list[str] | None:
        """Return the names of an evaluation's metrics; None if they are not known before it."""
        program, names = self._dp.program(state), list[str]()
        objective = program.objective
        if self._plan.loss is not None:
            objective = dataclasses.replace(objective, loss=self._plan.loss)
        given = program.shapes.params, program.shapes.extras, program.shapes.step
        for name, feed in self._feeds.items():
            if (rows := some_rows(feed.source)) is None:
                return None
            try:
                batch = opened(rows).described(feed.source.batch_size)
                returned = jax.eval_shape(
                    lambda params, extras, step, batch: values_by_name(
                        objective.returned(params, extras, batch, CallContext(step=step))[0]
                    ),
                    *(*given, batch),
                )
            except Exception:  # the evaluation will raise it, with more to say
                return None
            if any(map(as_metric, returned.values())):
                return None  # a metric that is no mean may have several numbers
            names += [f"{name}/{metric}" if name else metric for metric in returned]
        return names

    def check_passes(self, epochs: int) -> None:
        """Raise `ConfigError` if a source cannot be read as often as `epochs` need."""
        plan, every = self._plan, self._plan.every_epochs or epochs
        often = plan.at_start or plan.every_steps is not None or epochs > every
        for feed in self._feeds.values():
            if often and not feed.source.can_repeat:
                raise ConfigError(f"more than one evaluation of an eval_source {ONLY_ONCE}")

    def check(self) -> None:
        """Raise `LossError` if the loss cannot be exact on the evaluation data."""
        with contextlib.suppress(GaveUpError):  # the run is about to stop
            for feed in self._feeds.values():
                self._dp.check(feed)

    def is_due(self, place: RunPosition, *, epoch_over: bool) -> bool:
        plan = self._plan
        if place.step == 0:
            return plan.at_start
        if plan.every_steps is not None and place.step % plan.every_steps == 0:
            return True
        every = plan.every_epochs
        return epoch_over and every is not None and (place.epoch + 1) % every == 0

    def __call__(self, state: TrainState, place: RunPosition, stops: Callable[[], bool]) -> Record:
        """Evaluate the `state` at `place`, until `stops()` is true after a batch.

        Raises `GaveUpError` if the run is interrupted while a source has no batch ready.
        """
        metrics: dict[str, float] = {}
        started, rows = time.perf_counter(), 0
        for name, feed in self._feeds.items():
            batches = self._batches(name, feed, stops)
            means = self._dp.evaluate(state, batches, loss=self._plan.loss, ema=self._plan.ema)
            rows += int(means.pop("rows"))
            recorded(means)
            prefix = f"{name}/" if name else ""
            metrics |= {f"{prefix}{metric}": value for metric, value in means.items()}
        seconds = time.perf_counter() - started
        return Record("eval", place.step, place.epoch, metrics, rows, seconds)

    def _batches(self, name: str, feed: Feed, stops: Callable[[], bool]) -> Iterator[Batch]:
        rows, most, first = 0, self._plan.max_rows, self._first.get(name)
        with contextlib.closing(iter(feed)) as batches:
            for batch in batches:
                if first and not rows and (changed := first.begins(batch.host, self._dp.job)):
                    data = f"evaluation data {name}".rstrip()
                    self._say(f"change {data}: its first batch {changed}")
                yield batch
                rows += batch.rows or batch.size
                if stops() or (most is not None and rows >= most):
                    return
