"""A run that goes on elsewhere than it was cut: devices, processes, batches, a harmed folder."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.processes import SUPPORT, run_job
from support.resumable import (
    BATCH,
    BATCHES,
    EPOCHS,
    STEPS,
    Killed,
    bits,
    check_same,
    crashing,
    data_parallel,
    fit,
    loss,
    rows,
    steps_saved,
    watching,
    whole,
    written,
)
from support.saved_checkpoint import data_file
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.errors import CheckpointError, ConfigError

# Other devices.

DEVICES = [{"devices": 8}, {"devices": 1}, {"devices": 4}, {"devices": 2}]
LAYOUTS = [{"devices": 4}, {"devices": 8, "layout": "fsdp"}, {"mode": "single"}]
LAYOUTS += [{"devices": 2, "layout": "zero1"}]
MOVES: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "devices": (80, DEVICES),
    "200 steps": (200, DEVICES),
    "layouts": (96, LAYOUTS),
}


def check_moved(folder: Path, steps: int, kinds: list[dict[str, Any]], most: float) -> None:
    """Check that a run that is cut and moved to each of `kinds` is the run on the first.

    Its steps see the same rows, and its parameters differ by up to `most`.
    """
    dps, part = [data_parallel(**kind) for kind in kinds], steps // len(kinds)
    seen: list[tuple[int, list[int]]] = []
    expected: list[tuple[int, list[int]]] = []
    settings = {"steps": steps, "log_every": 10}
    with watching(expected):
        wanted = fit(dps[0], **settings)
    settings["save_every"] = part // 2
    with watching(seen):
        for number, dp in enumerate(dps[:-1], 1):
            with crashing(number * part + 2):
                fit(dp, folder, **settings)
        found = fit(dps[-1], folder, **settings)
    assert dict(seen) == dict(expected)
    assert len(dict(seen)) == steps
    assert len(seen) == steps + 2 * (len(kinds) - 1)  # repeated steps
    pairs = zip(*(jax.tree.leaves(each.state.params) for each in (wanted, found)), strict=True)
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"largest difference {largest:.3g}")
    assert largest <= most, f"parameters differ by up to {largest:.3g}"
    steps_told = [(line["kind"], line["step"], line["rows"]) for line in written(folder)]
    assert steps_told == [(r.kind, r.step, r.rows) for r in wanted.records]


@pytest.mark.promise("checkpoints.other-devices")
@pytest.mark.parametrize("move", only(["devices"], MOVES))
def test_on_other_devices_it_is_the_same_up_to_rounding(tmp_path: Path, move: str) -> None:
    check_moved(tmp_path / "run", *MOVES[move], most=1e-6)


@pytest.mark.promise("exact.goes-on-elsewhere")
@EXHAUSTIVE
@pytest.mark.usefixtures("optimized")
def test_in_mode_exact_to_the_bit(tmp_path: Path) -> None:
    exact = {"mode": "exact", "micro_shards": 8}
    check_moved(tmp_path / "run", 80, [kind | exact for kind in DEVICES], most=0)


@EXHAUSTIVE
@pytest.mark.parametrize("mode", ["jit", "exact"])
@pytest.mark.parametrize("first", [1, 2])
def test_one_process_and_two_are_one_run(tmp_path: Path, mode: str, first: int) -> None:
    steps = 200

    def job(folder: str, stop: int, processes: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = [SUPPORT / "job_resume.py", tmp_path / folder, mode, steps, stop]
        for ended in run_job(*arguments, processes=processes, devices=2 // processes):
            assert ended.code == (75 if stop else 0), ended.err
        lines = (tmp_path / folder / "told.jsonl").read_text().splitlines()
        seen = [(each["step"], each["examples"]) for each in map(json.loads, lines)]
        return seen, {} if stop else dict(np.load(tmp_path / folder / "params.npz"))

    expected, wanted = job("whole", 0, first)
    job("parts", steps // 2, first)
    seen, found = job("parts", 0, 3 - first)
    assert [step for step, _ in expected] == list(range(1, steps + 1))
    assert seen == expected
    apart = max(np.abs(wanted[name] - found[name]).max() for name in wanted)
    print(f"{mode}, {first} then {3 - first} processes: {apart:.2e} apart after {steps} steps")
    assert apart == 0 if mode == "exact" else apart < 1e-6


@pytest.mark.promise("exact.digests-are-compared")
@pytest.mark.parametrize("altered", only([True], [False, True]))
def test_other_programs_than_the_run_began_with_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], altered: bool
) -> None:
    folder = tmp_path / "run"
    with crashing(5):
        fit(data_parallel(2, mode="exact"), folder)
    config = json.loads((folder / "config.json").read_text())
    assert list(config["bits"]) == ["step.0", "step.1"]
    if altered:
        config["bits"]["step.1"] = "another"
        del config["checksum"]
        (folder / "config.json").write_text(json.dumps(config))
    fit(data_parallel(4, mode="exact"), folder, progress=True)
    said = capsys.readouterr().err
    assert ("ALARM  bits" in said) == altered
    assert ("step.1" in said) == altered


# Other batches.


def test_a_batch_size_that_divides_goes_on_at_the_same_row(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    with crashing(BATCHES + 4):
        fit(dp, tmp_path / "run", save_every=2)
    assert steps_saved(tmp_path / "run")[-1] == str(BATCHES + 3)
    seen: list[tuple[int, list[int]]] = []
    with watching(seen):
        found = fit(dp, tmp_path / "run", save_every=50, batch_size=8, accept_changes=True)
    order = np.random.default_rng([0, 1]).permutation(75)
    done = np.concatenate([index for _, index in seen[:4]])
    assert done.tolist() == order[3 * BATCH :].tolist()
    assert found.records[-1].epoch == EPOCHS - 1
    assert sum(record.rows for record in found.records) == 75 * EPOCHS


def test_a_batch_size_that_does_not_divide_is_refused(
    dp: rx.DataParallel, killed: Killed, tmp_path: Path
) -> None:
    folder = killed(tmp_path / "run", 4)
    with pytest.raises(ConfigError, match=r"^the run\b.*\b48 rows into .* 0 .* batch_size=10"):
        fit(dp, folder, batch_size=10, accept_changes=True)
    check_same(fit(dp, folder, log_every=1), whole(dp, log_every=1), folder)


def test_at_an_epochs_end_any_batch_size_goes_on(dp: rx.DataParallel, tmp_path: Path) -> None:
    with crashing(BATCHES):
        fit(dp, tmp_path / "run", save_every=BATCHES)
    again = {"save_every": BATCHES, "batch_size": 30, "accept_changes": True}
    found = fit(dp, tmp_path / "run", **again)
    assert found.steps == (EPOCHS - 1) * 3
    assert int(found.state.step) == BATCHES + found.steps
    assert sum(record.rows for record in found.records) == 75 * EPOCHS


def test_rows_of_processes_are_those_of_as_many(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crashing(4):
        fit(dp, tmp_path / "run", source=rx.ProcessLocal(rows()))
    with monkeypatch.context() as patch:
        name = "replicax.train.run.run_state.parts_of_processes"
        patch.setattr(name, lambda source: {"processes": 2})
        says = r"fed by .*\.ProcessLocal in 1 process\w* and\b.*\bnow"
        with pytest.raises(ConfigError, match=says):
            fit(dp, tmp_path / "run", source=rx.ProcessLocal(rows()))
    accepted = {"accept_changes": True, "source": rows()}
    with pytest.raises(ConfigError, match=r"rx\.ProcessLocal\b.*\bnow fed\b.*\bshared"):
        fit(dp, tmp_path / "run", **accepted)


# Another run.


def test_another_model_is_refused(dp: rx.DataParallel, killed: Killed, tmp_path: Path) -> None:
    folder = killed(tmp_path / "run", 4)
    saved = steps_saved(folder)
    other = rx.DataParallel(loss, optax.sgd(0.01))
    with pytest.raises(ConfigError, match=r"configuration: program\.optimizer \w+ -> \w+ \("):
        fit(other, folder)
    with pytest.raises(ConfigError, match=r"opt_state\.0\.count is .*\bnot in\b.*\brun"):
        fit(other, folder, accept_changes=True)
    assert steps_saved(folder) == saved
    check_same(fit(dp, folder, log_every=1), whole(dp, log_every=1), folder)


@pytest.mark.promise("checkpoints.another-program")
def test_another_configuration_is_refused_or_accepted(dp: rx.DataParallel, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with crashing(4):
        fit(dp, folder, config={"fields": {"rate": 1}})
    with pytest.raises(ConfigError, match=r"fields.rate 1 -> 2, data.seed 0 -> 5; ") as no:
        fit(dp, folder, config={"fields": {"rate": 2}}, seed=5)
    assert str(no.value).isprintable()
    found = fit(dp, folder, config={"fields": {"rate": 2}}, accept_changes=True)
    check_same(found, whole(dp), folder)
    fit(dp, folder, config={"fields": {"rate": 2}})


# Damage.


def damage(path: Path) -> None:
    file = data_file(path)
    content = bytearray(file.read_bytes())
    content[7] ^= 4
    file.write_bytes(content)


@pytest.mark.promise("checkpoints.falls-back")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    dp: rx.DataParallel, killed: Killed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed(tmp_path / "run", 7)
    damage(folder / "checkpoints/6")
    found = fit(dp, folder, log_every=1, progress=True)
    assert found.steps == STEPS - 3
    out, alarm = capsys.readouterr()
    assert alarm.startswith("ALARM  refused step 6: default/")
    assert "(set aside" in alarm
    assert alarm.endswith(" refused-6-1)\n")
    (said,) = (line for line in out.splitlines() if line.startswith("resume"))
    assert said.startswith(f"resume {folder}: step 3, saved ")
    assert said.endswith(" repeat: 3")
    check_same(found, whole(dp, log_every=1), folder)
    assert (folder / "checkpoints/refused-6-1").is_dir()


def test_where_all_are_damaged_it_begins_anew(
    dp: rx.DataParallel, killed: Killed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed(tmp_path / "run", 7)
    for step in (3, 6):
        damage(folder / f"checkpoints/{step}")
    before = (folder / "records.jsonl").read_bytes()
    found = fit(dp, folder, log_every=1)
    assert found.steps == STEPS
    alarms = capsys.readouterr().err
    assert "refused step 6: " in alarms
    assert "refused step 3: " in alarms
    assert re.search(r"step 0: .*\b2 checkpoints\b.*\btrusted", alarms)
    assert (folder / "records-damaged.jsonl").read_bytes() == before
    check_same(found, whole(dp, log_every=1), folder)


def test_what_a_system_leaves_in_a_folder_is_no_damage(
    dp: rx.DataParallel, killed: Killed, tmp_path: Path
) -> None:
    folder = killed(tmp_path / "run", 7)
    for name in (".DS_Store", "default/._d", "default/.nfs0000000000a1b2c3"):
        (folder / "checkpoints/6" / name).write_bytes(b"x")
    assert fit(dp, folder).steps == STEPS - 6


@pytest.mark.parametrize("left", [None, 0, 3])
def test_lost_records_are_told_and_the_rest_is_right(
    dp: rx.DataParallel,
    killed: Killed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    left: int | None,
) -> None:
    folder = killed(tmp_path / "run", 7)
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(lines[: left or 0]))
    if left is None:
        (folder / "records.jsonl").unlink()
        left = 0
    found = fit(dp, folder, log_every=1, progress=True)
    assert f"records.jsonl: {6 - left} of 6 records" in capsys.readouterr().err
    assert bits(found.state) == bits(whole(dp, log_every=1).state)
    assert [line["step"] for line in written(folder)] == [*range(1, left + 1), *range(7, 16)]


def test_a_checkpoint_that_cannot_be_read_after_all_is_told_in_one_line(
    dp: rx.DataParallel, killed: Killed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "run", 7)

    async def broken(*arguments: Any) -> None:
        raise ValueError("NOT_FOUND: a chunk\nat another line")

    monkeypatch.setattr("orbax.checkpoint.type_handlers.ArrayHandler.deserialize", broken)
    monkeypatch.setattr("replicax.train.checkpoints.arrays.is_small", lambda leaf: False)
    with pytest.raises(CheckpointError, match=r"default .*read: NOT_FOUND: a chunk$"):
        fit(dp, tmp_path / "run")


def test_what_is_not_a_run_is_refused(dp: rx.DataParallel, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"the records\b.*another run"):
        fit(dp, tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == "{}\n"
