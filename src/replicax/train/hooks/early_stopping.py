"""`EarlyStopping`: the end of a run that no longer improves."""

from typing import Any

from replicax.train.hook import Hook, Running
from replicax.train.hooks.watched import Watched, check_at_least
from replicax.train.records import Record


class EarlyStopping(Hook):
    """Ends the run once an evaluated metric has not improved for a while.

    What it knows is in the checkpoints. A run that it has stopped and that is started again stops
    at once; with more patience it goes on.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=100, eval_source=held_out,
        ...        hooks=[rx.EarlyStopping("accuracy", patience=5)])

    Args:
        metric: of the evaluations, as their records name it.
        patience: evaluations in a row without an improvement.
        mode: whether the best is the `min` or the `max`; by default `min` of a loss, an error, a
            perplexity and bits per byte, and else `max`.
        least: what counts as an improvement.

    Raises:
        ConfigError: a number below 1, or below 0, or another mode.
    """

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        *,
        mode: str | None = None,
        least: float = 0.0,
    ) -> None:
        check_at_least("EarlyStopping with patience", patience, 1)
        check_at_least("EarlyStopping with least", least, 0)
        self._watched = self._nothing_seen = Watched("EarlyStopping", metric, mode)
        self._patience, self._least = patience, least

    @property
    def name(self) -> str:
        return f"EarlyStopping({self._watched.metric})"

    def start(self, run: Running) -> None:
        self._judge(run)

    def evaluation(self, run: Running, record: Record) -> None:
        self._watched = self._watched.after(record, self._least)
        self._judge(run)

    def end(self, run: Running) -> None:
        self._watched = self._nothing_seen  # of this run; there may be another

    def save_state(self) -> Any:
        return self._watched.save_state()

    def load_state(self, state: Any) -> None:
        self._watched = self._watched.load_state(state)

    def _judge(self, run: Running) -> None:
        watched = self._watched
        if watched.since >= self._patience:
            best = "was never finite"
            if watched.best is not None:
                best = f"is {watched.best:.6g}, of step {watched.step:,}"
            run.stop(f"{watched.title} {best}, {watched.since} evaluations ago")
