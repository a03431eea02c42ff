"""`replicax runs`: a table of runs, whole ones and broken ones."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.command_line import Main, done, refusal
from support.figures import assert_mentions
from support.recipe_runs import Ended, train
from support.resumable import data_parallel, fit, rows

from replicax.train.checkpoints.store import Store
from replicax.train.files.lease import take_lease
from replicax.train.folder.goodput import read_goodput
from replicax.train.hooks.record_lines import metrics_text


def listed(out: str) -> dict[str, dict[str, str]]:
    """Name -> what is told of each run, whose state is under `""`; of a table, or of paragraphs."""
    head, *lines = out.splitlines()
    if head.startswith("name "):
        starts = [*(found.start() for found in re.finditer(r"\S+", head)), len(head) + 1]
        pairs = [*itertools.pairwise(starts), (starts[-1], None)]
        cells = [[line[a:b].strip() for a, b in pairs] for line in lines]
        return {
            name: dict(zip([*head.split()[1:], ""], rest, strict=True)) for name, *rest in cells
        }
    found = dict[str, str]()
    for line in out.splitlines():
        if not line.startswith(" "):
            name = line
        found[name] = f"{found[name]} {line.strip()}" if name in found else ""
    told = {name: text.strip().split(" · ") for name, text in found.items()}
    return {
        name: {"": state, **dict(part.split(" ", 1) for part in parts)}
        for name, (state, *parts) in told.items()
        if parts
    }


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_each_run_is_told_with_its_whole_name(
    main: Main, there: dict[str, Ended], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ended = there["mlp"]
    out = done(main, "runs")
    assert max(map(len, out.splitlines())) <= columns
    told = listed(out)["mlp"]
    *_, last = (each for each in ended.result.records if each.kind == "eval")
    assert (told["recipe"], told["step"], told[""]) == ("mlp", str(ended.result.step), "done")
    spent = read_goodput(ended.folder / "goodput.jsonl")  # to the end, later than the result
    assert told["used"] == f"{spent.clock_fraction:.0%}"
    assert spent.clock_fraction == pytest.approx(ended.result.goodput.clock_fraction, abs=0.01)
    assert told["epoch"] == "2/2"
    status = json.loads((ended.folder / "status.json").read_text())
    assert (status["step"], status["steps"]) == (ended.result.step, ended.result.step)
    assert status["eval"]["metrics"] == pytest.approx(last.metrics)
    assert told["eval"].startswith(f"loss {last.metrics['loss']:.4g}")
    total = sum(path.lstat().st_size for path in ended.folder.rglob("*") if path.is_file())
    assert float(told["size"].split()[0]) == pytest.approx(total / 1e3, rel=1e-2)


def test_how_far_a_run_has_come(main: Main, folder: Path) -> None:
    train("stopped", "linear_regression", "--points", "256", "--epochs", "2", "--save-every", "3")
    _, newest = Store(folder / "runs/stopped/checkpoints", 1, None).paths()[-1]
    shutil.rmtree(newest)
    train("by-steps", "linear_regression", "--steps", "5")
    train("unsaved", "linear_regression", "--steps", "5", "--save-minutes", "0")
    fit(data_parallel(1), folder / "runs/own")
    train("held", "linear_regression", "--steps", "5")
    with take_lease(folder / "runs/held"):
        code, out, _ = main("runs", "runs")
    assert code == 0
    found = listed(out)
    # By the time at which they were saved; "stopped" lost its last checkpoint.
    assert list(found) == ["unsaved", "stopped", "by-steps", "own", "held"]
    assert [found["stopped"][name] for name in ("step", "epoch", "")] == ["6", "2/2", "stopped"]
    assert (found["by-steps"]["step"], found["by-steps"][""]) == ("5/5", "done")
    assert (found["unsaved"].get("saved", "-"), found["unsaved"][""]) == ("-", "?")
    own = found["own"]
    assert (own.get("recipe", "-"), own["step"], own["epoch"], own[""]) == (
        "-",
        "15",
        "3/3",
        "done",
    )
    assert found["held"][""] == "running"
    told = json.loads(done(main, "runs", "--json"))
    by_name = {run["name"]: run for run in told["runs"]}
    assert [by_name["stopped"][name] for name in ("step", "epoch", "steps")] == [6, 2, None]
    assert (by_name["by-steps"]["steps"], by_name["unsaved"]["saved_at"]) == (5, None)
    assert (by_name["own"]["recipe"], told["damaged"]) == (None, [])
    assert "'--foo'" in refusal(main, "runs", "--foo")
    assert re.search("a and b", refusal(main, "runs", "a", "b"))


def test_an_evaluation_of_an_earlier_step_says_of_which(
    main: Main, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs/resumed"
    fit(data_parallel(1), run, epochs=1, eval_source=rows(16, 2))
    result = fit(data_parallel(1), run, epochs=2, progress=True)
    old, new = (next(r for r in result.records[::-1] if r.kind == k) for k in ("eval", "train"))
    assert (old.step, new.step) == (5, 10)
    assert (result.metrics, result.metrics_step, result.evaluation) == (new.metrics, 10, old)
    assert f"loss {new.metrics['loss']:.4g}" in repr(result)
    lines = capsys.readouterr().out.splitlines()
    older = f"eval   of step 5: {metrics_text(old.metrics)}"
    assert lines[lines.index(older) - 1] == f"train  {metrics_text(new.metrics)}"
    told = listed(main("runs")[1])["resumed"]
    assert told["eval"] == f"of step 5: {metrics_text(old.metrics)}"
    assert told[""] == "done"


def test_broken_folders_are_lines_too(main: Main, there: dict[str, Ended], folder: Path) -> None:
    whole, runs = there["mlp"].folder, folder / "runs"
    names = ["config", "records", "manifest", "link", "lost"]
    for name in names:
        shutil.copytree(whole, runs / name)
    (runs / "config/config.json").write_text("{")
    (runs / "records/records.jsonl").write_bytes(b'\xff\n{"kind": "eval"}\nnull\n[1')
    _, newest = Store(runs / "manifest/checkpoints", 1, None).paths()[-1]
    (newest / "manifest.json").unlink()
    os.symlink("nowhere", runs / "link/config.json.new")
    (runs / "lost/config.json").unlink()
    (runs / "plan-mlp").mkdir()
    (runs / "a file").write_text("")
    os.chdir(folder)
    out = done(main, "runs")
    *_, config, manifest, _ = out.splitlines()
    assert_mentions(config, "config  ", "its config.json", "be read")
    assert_mentions(manifest, "manifest  ", "newest checkpoint", "damaged")
    found = listed(out.partition("config  its")[0])
    assert found["records"].get("eval", "-") == "-"
    assert found["link"][""] == found["lost"][""] == "done"
    assert re.fullmatch(r"5 runs in .*, and 1 other folder", out.splitlines()[-1])


def test_a_name_is_printed_without_what_a_terminal_obeys(
    main: Main, there: dict[str, Ended], folder: Path
) -> None:
    name = "\x1b[31mred\x9b\u202e"
    shutil.copytree(there["mlp"].folder, folder / "runs" / name)
    (folder / "runs" / f"broken{name}").mkdir()
    (folder / "runs" / f"broken{name}/config.json").write_text("{")
    os.chdir(folder)
    for command in (["runs"], ["evaluate", name], ["evaluate", f"broken{name}"], ["runs", name]):
        code, out, err = main(*command)
        assert code == (0 if command in (["runs"], ["evaluate", name]) else 2)
        assert "\\x1b[31mred\\x9b\\u202e" in out + err
        assert not {"\x1b", "\x9b", "\u202e"} & {*out, *err}


def test_where_nothing_is(main: Main, folder: Path) -> None:
    for arguments, place in (((), "runs"), ((folder,), folder)):  # the first run creates runs/
        code, out, _ = main("runs", *arguments)
        assert (code, out) == (0, f"0 runs in {place}, and 0 other folders\n")
    assert re.search(r"nowhere is .*folder", refusal(main, "runs", "nowhere"))
