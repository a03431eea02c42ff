"""The notebooks of the tutorials: made from their pages, and run from top to bottom."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE, only

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
SHORT = [page for page in PAGES if page.stem == "deep-mlp"]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_notebooks
    finally:
        sys.path.pop(0)
    return make_notebooks


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_cells_and_the_output_of_its_page(script: Any, page: Path) -> None:
    path = script.notebook_of(page)
    assert f"](../notebooks/{path.name})" in page.read_text(encoding="utf-8")
    content = read(path)
    assert script.differences(page, content) == []
    counts = [cell["execution_count"] for cell in content["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [each for cell in content["cells"] for each in cell.get("outputs", ())]
    assert not [each for each in outputs if each["output_type"] == "error"]
    drawn = sum("image/png" in each.get("data", ()) for each in outputs)
    assert drawn == page.read_text(encoding="utf-8").count("](../images/tutorials/")
    assert path.stat().st_size < 300_000


def test_a_notebook_that_is_not_its_page_is_found(script: Any) -> None:
    page = SHORT[0]
    content = read(script.notebook_of(page))
    cell = next(cell for cell in content["cells"] if cell.get("outputs"))
    text = cell["outputs"][0]["text"]
    cell["outputs"][0]["text"] = ["another"]
    assert len(script.differences(page, content)) == 1
    cell["outputs"][0]["text"] = text
    cell["source"] = [*cell["source"], "\npass"]
    (told,) = script.differences(page, content)
    assert "deep-mlp.ipynb" in told


def test_a_command_and_a_picture_of_a_page_are_cells(script: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "---\njupytext: x\n---\n\n# Title\n\n[This page as a notebook](x.ipynb), y.\n\n"
        '```python\nfit(\n    progress=False,\n)\nfigure.savefig("a.png")\n```\n\n'
        "![An a](../images/tutorials/a.png)\n\n![A b](../images/tutorials/b.png)\n\n"
        "See [lenet](lenet.md#x) and [runs](../runs.md#y).\n\n"
        "```console\n$ replicax runs\nrun\n```\n"
    )
    sources = ["".join(cell["source"]) for cell, _ in script.cells(page)][1:]
    title, program, picture, text, command = sources
    assert (title, program) == ("# Title", 'fit(\n)\nfigure.savefig("a.png")')
    assert picture.endswith('Image("b.png", width=760)')
    assert text.split() == [
        *("*An", "a*", "*A", "b*", "See", "[lenet](lenet.ipynb)", "and", "[runs](../runs.md#y)."),
    ]
    assert command.splitlines()[1:] == ["replicax runs"]


@pytest.mark.parametrize(
    ("files", "source", "installed", "devices"),
    [
        ([], "", None, "8"),
        ([], "git+https://a/b", ["replicax[all] @ git+https://a/b"], "8"),
        (["nvidia-smi"], "https://a/b.whl", ["replicax[all] @ https://a/b.whl", "jax[cuda13]"], ""),
    ],
)
def test_the_first_cell_installs_what_the_machine_needs(
    script: Any, tmp_path: Path, files: list[str], source: str, installed: Any, devices: str
) -> None:
    """Without Replicax, and with a pip that says what it is asked for."""
    for name in files:
        (tmp_path / name).touch(mode=0o755)
    (first, _), *_ = script.cells(PAGES[0])
    told = tmp_path / "told"
    pip = (
        "import importlib.util, json, os, subprocess\n"
        "importlib.util.find_spec = lambda name: None\n"
        "def run(command, check):\n"
        f"    open({str(told)!r}, 'w').write(json.dumps(command[5:]))\n"
        "subprocess.run = run\n"
    )
    code = f"{pip}{''.join(first['source'])}\nprint(os.environ.get('JAX_NUM_CPU_DEVICES', ''))"
    env = {"PATH": str(tmp_path), "REPLICAX_SOURCE": source}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env
    )
    if installed is None:
        assert (done.returncode, told.exists()) == (1, False)
        assert "SOURCE" in done.stderr
        return
    assert (done.returncode, done.stdout) == (0, f"{devices}\n"), done.stderr
    assert json.loads(told.read_text()) == installed


def run(page: Path, folder: Path, how: str, devices: int) -> None:
    command = [sys.executable, ROOT / "docs/make_notebooks.py", how, page]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    env |= {"JAX_NUM_CPU_DEVICES": f"{devices}", "IPYTHONDIR": f"{folder}"}
    env["JUPYTER_DATA_DIR"] = f"{folder}"
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the first start of all says where that is
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


can_run = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
    reason="nbclient or ipykernel is not installed: make docs",
)


@EXHAUSTIVE
@can_run
@pytest.mark.parametrize("page", only(SHORT, PAGES, SHORT), ids=lambda page: page.stem)
def test_a_notebook_prints_what_its_page_shows(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, "--check", 8)


@EXHAUSTIVE
@pytest.mark.everything
@can_run
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_on_the_devices_that_exist(
    page: Path, devices: int, tmp_path: Path
) -> None:
    run(page, tmp_path, "--run", devices)
