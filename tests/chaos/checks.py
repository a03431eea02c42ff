"""Checks of a finished trial: its records and rows must be those of the undisturbed run."""

from typing import Any

from chaos.trial import Reference, Trial
from support.counted_rows import seen_once_an_epoch

_OF_TIME = {"seconds", "input_wait_fraction", "rows_per_second"}
Records = list[dict[str, Any]]


def check_results(
    trial: Trial, reference: Reference, epochs: int, *, every_row: bool = True
) -> None:
    """Check that whoever has completed the run has the state of the undisturbed one.

    If it trained on `every_row`, each epoch used every row once: each counts in its own digit.
    """
    results, its = trial.results(), reference.result
    trial.check(results, "nobody has completed the run")
    for who, result in results.items():
        for name in ("params", "state", "step"):
            one, other = str(result[name])[:16], str(its[name])[:16]
            trial.check(one == other, f"{name} of {who} is {one}, of the undisturbed run {other}")
        trial.check(result["seen"] == its["seen"], "other rows used than undisturbed")
        once = seen_once_an_epoch(epochs)
        wrong = {row: count for row, count in enumerate(result["seen"]) if count != once}
        trial.check(not (wrong and every_row), f"rows not used exactly once an epoch: {wrong}")


def is_equal(trial: Trial, reference: Reference) -> bool:
    """Return whether all final states are that of the undisturbed run, and there is one."""
    results, its = trial.results().values(), reference.result
    return bool(results) and all(
        result[name] == its[name] for result in results for name in ("params", "state")
    )


def check_records(trial: Trial, mine: Records, its: Records) -> None:
    """Check that records have the figures of the undisturbed run, to the bit."""
    mine, its = comparable(mine), comparable(its)
    if mine != its:
        differ = next(
            (f"{a} and not {b}" for a, b in zip(mine, its, strict=False) if a != b),
            f"{len(mine)} and not {len(its)} records",
        )
        trial.wrong.append(f"records differ from the undisturbed run's: {differ}")


def comparable(records: Records) -> Records:
    """Return what must be the same to the bit: all but times."""
    return [
        {name: value for name, value in record.items() if name not in _OF_TIME}
        for record in records
    ]


def check_alike(one: Reference, other: Reference) -> None:
    """Check that two undisturbed runs do not differ."""
    if one.result != other.result or comparable(one.records) != comparable(other.records):
        raise RuntimeError(f"two undisturbed runs differ: {one.result} and {other.result}")


def check_steps(trial: Trial, steps: list[int], all_steps: int) -> None:
    """Check that each step is recorded once, in order."""
    trial.check(steps == list(range(1, all_steps + 1)), f"steps on record: {steps}")


def check_nothing_left(trial: Trial, *, refused: bool = False) -> None:
    """Check that the folder of checkpoints has finished ones only, and perhaps `refused` ones."""
    names = [path.name for path in trial.checkpoints.iterdir() if not path.name.isdigit()]
    left = [name for name in names if not (refused and name.startswith("refused-"))]
    trial.check(not left, f"left in the checkpoints' folder: {left}")
