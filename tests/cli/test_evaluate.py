"""`replicax evaluate`: the figures of a run's model are those that the run recorded."""

import json
import re
from pathlib import Path

import pytest
from support.command_line import Main, done, refusal
from support.object_store import register
from support.recipe_runs import Ended
from support.tiers import only

from replicax.train.files.places import copy_files, place, shown


@pytest.mark.parametrize("recipe", only(["mlp"], ["mlp", "gpt2"]))
def test_the_figures_are_those_of_the_last_evaluation(
    recipe: str, main: Main, there: dict[str, Ended]
) -> None:
    *_, last = (each for each in there[recipe].result.records if each.kind == "eval")
    out = done(main, "evaluate", recipe, "--json")
    found = json.loads(out)
    assert found["recorded"] == last.metrics
    assert found["metrics"] == pytest.approx(last.metrics, rel=1e-6)
    assert (found["step"], found["rows"]) == (last.step, last.rows)
    out = done(main, "evaluate", there[recipe].folder)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if line[0] != " ")
    assert f"{recipe} · step {last.step}" in lines["run"]
    assert lines["eval"].startswith(lines["record"])
    assert "differs" not in out


def test_other_data_is_evaluated_whole(main: Main, there: dict[str, Ended]) -> None:
    text = there["gpt2"].folder.parents[1] / "texts" / "00.txt"
    out = done(main, "evaluate", "gpt2", "--data", text, "--json")
    found = json.loads(out)
    assert (found["data"], found["recorded"]) == (str(text), None)
    assert found["rows"] == -(-len(text.read_bytes()) // 16)  # and not the twentieth held out


def test_what_is_no_longer_the_runs_data_is_told(main: Main, there: dict[str, Ended]) -> None:
    texts = there["gpt2"].folder.parents[1] / "texts" / "19.txt"
    before = texts.read_bytes()
    try:
        texts.write_bytes(before[::-1])
        code, out, _ = main("evaluate", "gpt2")
    finally:
        texts.write_bytes(before)
    assert code == 0
    assert out.splitlines()[-1].startswith("record ")
    assert "differs" in out.splitlines()[-1]


def test_a_run_in_an_object_store(main: Main, there: dict[str, Ended], tmp_path: Path) -> None:
    folder, url = there["mlp"].folder, "s3://bucket/runs/mlp"
    (tmp_path / "objects").mkdir()
    register(tmp_path / "objects")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    copy_files(folder, place(url), [str(path.relative_to(folder)) for path in paths])
    found = []
    for run in (folder, url):
        out = done(main, "evaluate", run, "--step", "3")
        assert f"run    {shown(place(run))} · mlp · step 3" in out
        assert "record" not in out  # it is of the last step
        found.append([line for line in out.splitlines() if line.startswith("eval")])
    assert found[0] == found[1] != []
    assert re.search(f"{url} .*no best.json", refusal(main, "evaluate", url, "--step", "best"))
    assert main("export", url, tmp_path / "model.safetensors")[0] == 0
    assert main("export", "mlp", tmp_path / "same.safetensors")[0] == 0
    files = [tmp_path / f"{name}.safetensors" for name in ("same", "model")]
    assert files[0].read_bytes() == files[1].read_bytes()
