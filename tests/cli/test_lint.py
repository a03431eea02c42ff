"""`replicax lint`: files and folders, text, JSON and annotations."""

import json
from pathlib import Path

import pytest
from support.command_line import Main, done, refusal

WRONG = """import jax

@jax.pmap
def step(w, x):
    grads = jax.grad(lambda w: (w * x).mean())(w)
    return jax.tree.map(lambda w, g: w - g, w, grads)
"""


@pytest.fixture
def wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (folder / "code").mkdir()
    path = folder / "code" / "wrong.py"
    path.write_text(WRONG)
    (folder / "code" / "right.py").write_text("x = 1\n")
    return path


@pytest.mark.usefixtures("wrong")
def test_a_folder(main: Main) -> None:
    code, out, err = main("lint", "code")
    assert (code, err) == (1, "")
    assert "6:12 no-reduction" in out
    assert [line.split()[-1] for line in out.splitlines() if "6:12" in line] == ["error"]
    assert out.splitlines()[-1] == "1 error in 2 files"
    assert [len(each.splitlines()) for each in main("lint", "code/right.py")[1:]] == [1, 0]


@pytest.mark.usefixtures("wrong")
def test_json_and_annotations(main: Main) -> None:
    code, out, _ = main("lint", "code", "--json")
    assert code == 1
    assert [len(file["findings"]) for file in json.loads(out)["files"]] == [0, 1]
    _, out, _ = main("lint", "code", "--github")
    assert out.startswith("::error file=code/wrong.py,line=6,")


@pytest.mark.usefixtures("wrong")
def test_the_file_for_verify(main: Main) -> None:
    out = done(main, "lint", "--step-file", "code/wrong.py")
    step, reference = "wrong_step.py:step", "wrong_step.py:reference"
    assert f"verify --step {step} --reference {reference}" in out
    compile(Path("wrong_step.py").read_text(), "wrong_step.py", "exec")
    assert "already exists" in refusal(main, "lint", "--step-file", "code/wrong.py")
