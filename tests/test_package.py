"""The wheel and the source archive install into an empty environment and run the first program."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {"jax", "jaxlib", "msgspec", "numpy", "optax", "replicax"}


def python(version: str) -> str | None:
    """Return the path of that Python, or None."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")


def run(*command: str | Path, **more: str) -> str:
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # by its jax
    done = subprocess.run(command, capture_output=True, text=True, env={**known, **more})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_readme_of_the_package_has_no_link_into_the_repository() -> None:
    outside = runpy.run_path(str(ROOT / "hatch_build.py"))["outside"]
    text = "![A](docs/a.png) [b `c`](d.md#e) [f](#g) [h](https://i)"
    assert outside(text, None) == "*A* b `c` [f](#g) [h](https://i)"
    assert outside(text, "https://x/y") == (
        "![A](https://x/y/raw/main/docs/a.png) [b `c`](https://x/y/blob/main/d.md#e) "
        "[f](#g) [h](https://i)"
    )


def test_every_file_names_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)", citation, re.MULTILINE) == [project["version"]]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.*?)\]", changes, re.MULTILINE)[0] == project["version"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "archive", "jax"),
    [("3.11", "*.whl", "jax==0.10.2"), ("3.13", "*.tar.gz", "jax>=0.10.2")],
    ids=["wheel", "source"],
)
def test_an_archive_installs_and_runs(version: str, archive: str, jax: str, tmp_path: Path) -> None:
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} is installed")
    run(sys.executable, "-m", "hatchling", "build", "--directory", tmp_path, PWD=str(ROOT))
    (made,) = tmp_path.glob(f"replicax-{archive}")
    if shutil.which("twine"):
        run("twine", "check", "--strict", made)
    run(interpreter, "-m", "venv", tmp_path / "venv")
    own = tmp_path / "venv/bin/python"
    run(own, "-m", "pip", "install", "--quiet", jax, made)
    listed = {line.partition("==")[0] for line in run(own, "-m", "pip", "freeze").splitlines()}
    listed = {name.partition(" @")[0].lower() for name in listed}
    assert listed >= CORE
    assert not listed & {"flax", "equinox", "matplotlib", "rich", "tyro", "grain"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert program is not None
    (tmp_path / "first.py").write_text(program[1])
    printed = run(own, tmp_path / "first.py", JAX_NUM_CPU_DEVICES="8")
    weights = [float(each) for each in printed.partition("[")[2].strip("]\n ").split()]
    assert weights == pytest.approx([1, 2, 3], abs=1e-3)
