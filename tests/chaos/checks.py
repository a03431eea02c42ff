"""Checks of a finished trial: its result must be that of the undisturbed run."""

import json
from typing import Any

from chaos.sizes import EPOCHS, STEPS
from chaos.trial import Trial, Undisturbed
from support.counted_rows import seen_once_an_epoch

_OF_TIME = {"seconds", "input_wait_fraction", "rows_per_second"}
COMPARED = ("train", "eval", "skip")


def check_done(trial: Trial) -> None:
    """Check all that must hold at the end, whatever the fault was."""
    path = trial.folder / "result.json"
    if not path.exists():
        trial.wrong.append("the run has no result")
        return
    result: dict[str, Any] = json.loads(path.read_text())
    reference = trial.reference
    for name in ("sha256", "state", "step"):
        mine, its = str(result[name])[:16], str(reference.result[name])[:16]
        trial.check(mine == its, f"{name} is {mine}, of the undisturbed run {its}")
    _check_rows(trial, result["seen"])
    _check_replicas(trial)
    check_records(trial)
    names = [p.name for p in trial.checkpoints.iterdir() if p.name.startswith(".")]
    trial.check(not names, f"left in the checkpoints' folder: {names}")


def is_bitwise_equal(trial: Trial) -> bool:
    """Return whether the final state is that of the undisturbed run."""
    path = trial.folder / "result.json"
    if not path.exists():
        return False
    result = json.loads(path.read_text())
    return all(result[name] == trial.reference.result[name] for name in ("sha256", "state"))


def _check_rows(trial: Trial, seen: list[float]) -> None:
    """Check that each epoch used every row once: each epoch counts in its own digit."""
    if trial.data == "plain":
        wrong = {
            row: count for row, count in enumerate(seen) if count != seen_once_an_epoch(EPOCHS)
        }
        trial.check(not wrong, f"rows not used exactly once an epoch: {wrong}")
    trial.check(seen == trial.reference.result["seen"], "other rows used than undisturbed")


def _check_replicas(trial: Trial) -> None:
    """Check that all devices of all processes that finished last hold the same bits."""
    notes = (trial.folder / "notes").glob("*.fitted")
    fitted = sorted((json.loads(path.read_text()) for path in notes), key=lambda note: note["time"])
    copies = {copy for note in fitted[-trial.processes :] for copy in note["copies"]}
    trial.check(len(copies) == 1, f"the devices hold {len(copies)} different states")


def check_records(trial: Trial) -> None:
    """Check that each step is recorded once, in order, with the figures of the undisturbed run."""
    lines = (trial.run / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [r["step"] for r in records if r["kind"] in ("train", "skip")]
    train = [r["step"] for r in records if r["kind"] == "train"]
    skip = [r["step"] for r in records if r["kind"] == "skip"]
    expected = list(range(1, STEPS + 1))
    trial.check(sorted({*train, *skip}) == expected, f"steps on record: {steps}")
    for kind, steps in (("train", train), ("skip", skip)):
        trial.check(steps == sorted(set(steps)), f"{kind} records out of order or twice: {steps}")
    mine, its = comparable(records), comparable(trial.reference.records)
    if mine != its:
        differ = next(
            (f"{a} and not {b}" for a, b in zip(mine, its, strict=False) if a != b),
            f"{len(mine)} and not {len(its)} records",
        )
        trial.wrong.append(f"records differ from the undisturbed run's: {differ}")


def comparable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that must be the same to the bit: all but times, sorted by step and kind.

    A step's `skip` record may come some lines after its `train` record, or before.
    """
    compared = [
        {name: value for name, value in record.items() if name not in _OF_TIME}
        for record in records
        if record["kind"] in COMPARED
    ]
    return sorted(compared, key=lambda record: (record["step"], record["kind"]))


def check_undisturbed(reference: Undisturbed, data: str) -> None:
    """Check the undisturbed run itself."""
    seen = reference.result["seen"]
    assert reference.result["step"] == STEPS, reference.result
    if data == "plain":
        assert set(seen) == {seen_once_an_epoch(EPOCHS)}, seen
    kinds = {record["kind"] for record in reference.records}
    assert ("skip" in kinds) == (data != "plain"), kinds
