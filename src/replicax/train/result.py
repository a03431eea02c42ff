"""`Fit`: how a run ended."""

import dataclasses

from replicax.core.update import TrainState
from replicax.train.goodput import Goodput
from replicax.train.records import Record
from replicax.wording import duration


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a run ended."""

    state: TrainState
    records: list[Record]
    steps: int
    """Updates done in this call; those that were skipped are counted."""
    rows: int
    """Real rows trained on in this call."""
    seconds: float
    """Wall time, compilation and evaluation included."""
    interrupted: bool
    """Whether Ctrl-C or SIGTERM ended it early."""
    step: int = 0
    """Updates done in the whole run, over all its starts."""
    saved: bool = False
    """Whether the same call goes on from its end."""
    stopped: str | None = None
    """Why a hook ended it early, as if it were done; None where none did."""
    failed_hooks: tuple[str, ...] = ()
    """Names of the hooks that failed, and were left out from there on."""
    goodput: Goodput | None = None
    """Where the run's time went, over all its starts; in process 0, where there is a folder."""

    def __repr__(self) -> str:
        how = "stopped early, " if self.interrupted else ""
        ordered = sorted(self.metrics.items(), key=lambda item: item[0] != "loss")
        told = "".join(f", {name} {value:.4g}" for name, value in ordered[:2])
        done = f"{self.rows:,} rows in {duration(self.seconds)}"
        return f"Fit({how}step={self.step}, {done}{told})"

    @property
    def exit_code(self) -> int:
        """0 where it is done; 75 where it stopped early with everything saved; else 1."""
        if not self.interrupted:
            return 0
        return 75 if self.saved else 1

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, or of the last train record where there was none."""
        steps = [r for r in self.records if r.kind in ("train", "eval")]
        kinds = [r for r in steps if r.kind == "eval"] or steps
        return kinds[-1].metrics if kinds else {}
