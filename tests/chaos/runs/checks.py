"""Checks of a finished trial: its result must be that of the undisturbed run."""

import json

from chaos.checks import Records, check_nothing_left, check_records, check_results, check_steps
from chaos.runs.sizes import EPOCHS, STEPS
from chaos.runs.trial import Reference, Trial
from chaos.trial import records_of
from support.counted_rows import seen_once_an_epoch

COMPARED = ("train", "eval", "skip")


def check_done(trial: Trial) -> None:
    """Check all that must hold at the end, whatever the fault was."""
    check_results(trial, trial.reference, EPOCHS, every_row=trial.data == "plain")
    _check_replicas(trial)
    records = records_of(trial.run)
    _check_order(trial, records)
    check_records(trial, in_order(records), trial.reference.records)
    check_nothing_left(trial, refused=True)


def _check_replicas(trial: Trial) -> None:
    """Check that all devices of all processes that finished last hold the same bits."""
    notes = [json.loads(path.read_text()) for path in trial.notes.glob("*.fitted")]
    fitted = sorted(notes, key=lambda note: note["time"])
    copies = {copy for note in fitted[-trial.processes :] for copy in note["copies"]}
    trial.check(len(copies) == 1, f"the devices hold {len(copies)} different states")


def _check_order(trial: Trial, records: Records) -> None:
    """Check that each step is recorded once, in order."""
    train, skip = ([r["step"] for r in records if r["kind"] == kind] for kind in ("train", "skip"))
    check_steps(trial, sorted({*train, *skip}), STEPS)
    for kind, steps in (("train", train), ("skip", skip)):
        trial.check(steps == sorted(set(steps)), f"{kind} records out of order or twice: {steps}")


def in_order(records: Records) -> Records:
    """Return records that must be the same, sorted by step and kind.

    A step's `skip` record may come some lines after its `train` record, or before.
    """
    compared = [record for record in records if record["kind"] in COMPARED]
    return sorted(compared, key=lambda record: (record["step"], record["kind"]))


def check_undisturbed(reference: Reference, data: str) -> None:
    """Check the undisturbed run itself."""
    seen = reference.result["seen"]
    assert reference.result["step"] == STEPS, reference.result
    if data == "plain":
        assert set(seen) == {seen_once_an_epoch(EPOCHS)}, seen
    kinds = {record["kind"] for record in reference.records}
    assert ("skip" in kinds) == (data != "plain"), kinds
