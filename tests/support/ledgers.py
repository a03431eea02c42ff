"""Ledgers of a run's time with a fake clock."""

from pathlib import Path

from replicax.train.folder.goodput import BUCKETS, FILE, Goodput, Ledger

NOTHING = dict.fromkeys(BUCKETS, 0.0)


class Clock:
    """Eighths of seconds, which floats add exactly."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def unix(self) -> float:
        return self.time + 1.75e9

    def ledger(self, folder: Path, token: int, step: int | None) -> Ledger:
        ledger = self.unopened(folder, token)
        ledger.restored(step)
        return ledger

    def unopened(self, folder: Path, token: int) -> Ledger:
        return Ledger(folder / FILE, token, clock=self, now=self.unix)

    def spend(self, ledger: Ledger, **seconds: float) -> None:
        for bucket, spent in seconds.items():
            ledger.enter(bucket)
            self.time += spent


def worked(folder: Path) -> tuple[Clock, Ledger]:
    """Return a first start after 10 s of work, marked at step 10."""
    clock = Clock()
    ledger = clock.ledger(folder, 1, None)
    clock.spend(ledger, productive=10)
    ledger.mark(10)
    return clock, ledger


def spent(goodput: Goodput) -> dict[str, float]:
    return {bucket: seconds for bucket, seconds in goodput.seconds.items() if seconds}
