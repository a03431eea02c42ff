"""`replicax runs`: a table of runs, whole ones and broken ones."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.command_line import REGRESSION, Main, refusal
from support.figures import assert_mentions
from support.recipe_runs import Ended, train
from support.resumable import data_parallel, fit

from replicax.train.checkpoints.store import Store
from replicax.train.goodput import read_goodput
from replicax.train.lease import take_lease


def table(out: str) -> dict[str, list[str]]:
    """Name -> cells of each line after the header."""
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in out.splitlines()]
    return {name: cells for name, *cells in lines[1:]}


def test_each_run_is_a_line(main: Main, there: dict[str, Ended]) -> None:
    code, out, err = main("runs")
    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header.split() == ["name", "recipe", "step", "epoch", "eval", "saved", "size", "used"]
    named = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert named == ["mlp", "gpt2"]  # the one saved last, last
    for name, ended in there.items():
        *_, last = (each for each in ended.result.records if each.kind == "eval")
        recipe, step, epoch, figures, _, size, used, state = table(out)[name]
        assert (recipe, step, state) == (name, str(ended.result.step), "done")
        spent = read_goodput(ended.folder / "goodput.jsonl")  # to the end, later than the result
        assert used == f"{spent.clock_fraction:.0%}"
        assert spent.clock_fraction == pytest.approx(ended.result.goodput.clock_fraction, abs=0.01)
        assert epoch == {"mlp": "2/2", "gpt2": "3/3"}[name]
        assert figures.startswith(f"loss {last.metrics['loss']:.4g}")
        total = sum(path.lstat().st_size for path in ended.folder.rglob("*") if path.is_file())
        assert float(size.split()[0]) == pytest.approx(total / 1e3, rel=1e-2)


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
    found = table(out)
    assert found["stopped"][-1] == "stopped"
    assert found["stopped"][1:3] == ["6", "2/2"]
    assert (found["by-steps"][1], found["by-steps"][-1]) == ("5/5", "done")
    assert (found["unsaved"][-4], found["unsaved"][-1]) == ("-", "?")
    assert (found["own"][0], found["own"][1], found["own"][-1]) == ("-", "15", "?")
    assert found["held"][-1] == "running"


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
    code, out, err = main("runs")
    assert (code, err) == (0, "")
    found = table(out)
    assert_mentions(*found["config"], "its config.json", "be read")
    assert_mentions(found["manifest"][0], "newest checkpoint", "damaged")
    assert found["records"][3] == "-"
    assert found["link"][-1] == found["lost"][-1] == "done"
    assert re.fullmatch(r"5 runs in .*, and 1 other folder", out.splitlines()[-1])


def test_the_table_fits_80_columns(main: Main, there: dict[str, Ended], folder: Path) -> None:
    long = "gpt2-with-a-name-that-goes-on-20261115-101500"
    shutil.copytree(there["gpt2"].folder, folder / "runs" / long)
    config = json.loads((folder / "runs" / long / "config.json").read_text())
    del config["checksum"]
    config["recipe"] = "my_recipes/of_the_last_year.py:TheOneThatWorked"
    (folder / "runs" / long / "config.json").write_text(json.dumps(config))
    shutil.copytree(there["mlp"].folder, folder / "runs/broken")
    (folder / "runs/broken/config.json").write_text("")
    os.chdir(folder)
    code, out, _ = main("runs")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert any(line.startswith("gpt2-") and line.endswith("done") for line in out.splitlines())


def test_where_nothing_is(main: Main, folder: Path) -> None:
    assert re.search(r"no folder\b.*\bruns\b", refusal(main, "runs"))
    code, out, _ = main("runs", folder)
    assert (code, out) == (0, f"0 runs in {folder}, and 0 other folders\n")
    assert re.search(r"nowhere is .*folder", refusal(main, "runs", "nowhere"))


def test_a_run_just_made_is_there(main: Main) -> None:
    assert main(*REGRESSION, "--run", "just-now")[0] == 0
    assert table(main("runs")[1])["just-now"][4] == "now"
