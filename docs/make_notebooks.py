"""Make a notebook of each tutorial from the blocks of its page, and run it from top to bottom.

    python docs/make_notebooks.py docs/tutorials/lenet.md [--check | --run]

The cells are those of the page; `cells` says what differs. `--check` runs the notebook that is
there instead, and compares what it prints with the page; `--run` does not compare, as on other
devices than the page's eight it is something else. Needs nbclient and ipykernel, which `make
docs` installs. Set `REPLICAX_SOURCE` to try the cell that installs Replicax.
"""

import argparse
import itertools
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from run_page import COMMAND, FILE, PICTURE, Block, alike, among, blocks

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs/notebooks"
INSTALL = """\
# Where Replicax is missing, this installs it, and jax for the accelerators that are there.
import glob
import importlib.util
import os
import shutil
import subprocess
import sys

SOURCE = os.environ.get("REPLICAX_SOURCE", "{source}")  # git+https://..., or the URL of a wheel
gpu = shutil.which("nvidia-smi") is not None
tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
if not (gpu or tpu):
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # a CPU as eight devices
programs = os.path.dirname(sys.executable)  # `replicax` of this Python, also off the PATH
os.environ["PATH"] = os.pathsep.join([programs, os.environ["PATH"]])

if importlib.util.find_spec("replicax") is None:
    if not SOURCE:
        raise SystemExit("Replicax is not installed here: set SOURCE to where pip can get it")
    jax = (["jax[cuda13]"] if gpu else []) + (["jax[tpu]"] if tpu else [])
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, f"replicax[all] @ {{SOURCE}}", *jax], check=True)
"""
TO_NOTEBOOK = re.compile(r"^\[This page as a notebook\].*?\n\n", re.MULTILINE | re.DOTALL)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
BOX = re.compile(r"[─-╿]| +$", re.MULTILINE)
"""Boxes, which a notebook draws in another way, and spaces at the end of a line."""
Cell = tuple[dict[str, Any], Block | None]
"""A cell of a notebook, and the block of the page that it is."""


def cells(page: Path) -> Iterator[Cell]:
    """Yield the cells of a page.

    A run shows its progress, which a page turns off; commands are of `%%bash`; pictures are
    outputs, and their descriptions the text below them; links lead to other notebooks.
    """
    text = page.read_text(encoding="utf-8")
    text = TO_NOTEBOOK.sub("", text.partition("\n---\n\n")[2])
    counter = itertools.count()

    def code(source: str, block: Block | None = None) -> Cell:
        made = {"cell_type": "code", "execution_count": None, "outputs": []}
        return _cell(made, source, next(counter)), block

    def told(markdown: str, before: str) -> Iterator[Cell]:
        for picture in PICTURE.finditer(markdown):
            if f'savefig("{picture["name"]}"' not in before:
                yield code(
                    f'from IPython.display import Image\n\nImage("{picture["name"]}", width=760)'
                )
        markdown = re.sub(rf"!\[([^]]*){PICTURE.pattern}", r"*\1*", markdown).strip()
        if markdown:
            yield _cell({"cell_type": "markdown"}, _linked(markdown), next(counter)), None

    yield code(INSTALL.format(source=_source()))
    at, before = 0, ""
    for block in blocks(text):
        yield from told(text[at : block.start()], before)
        at, before = block.end(), ""
        if block.re is COMMAND:
            # Not `!`, which forks this process of many threads, and JAX warns of that.
            yield code(f"%%bash --no-raise-error\n{block['command']}", block)
        elif block.re is FILE:
            yield code(f"%%writefile {block['name']}\n{block['code']}", block)
        else:
            before = block["code"]
            yield code(re.sub(r"^ *progress=False,\n", "", before, flags=re.MULTILINE), block)
    yield from told(text[at:], before)


def _cell(made: dict[str, Any], source: str, number: int) -> dict[str, Any]:
    lines = source.rstrip("\n").splitlines(keepends=True)
    return {**made, "id": f"cell-{number}", "metadata": {}, "source": lines}


def _source() -> str:
    """Return what pip installs Replicax from, once pyproject.toml says where it is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = project.get("urls", {}).get("Source", "")
    return f"git+{found}" if found else ""


def _linked(markdown: str) -> str:
    """Return the text with links that hold in the folder of notebooks."""
    return re.sub(r"\]\((\w[\w-]*)\.md(#[\w-]+)?\)", r"](\1.ipynb)", markdown)


def notebook(made: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a notebook of cells, as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": list(made), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebook_of(page: Path) -> Path:
    """Return where the notebook of a page is."""
    return NOTEBOOKS / f"{page.stem}.ipynb"


def execute(content: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook in an empty folder, as `run_page` runs a page; an error ends it."""
    import nbformat
    from nbclient import NotebookClient

    opened = nbformat.reads(json.dumps(content), as_version=4)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        NotebookClient(
            opened,
            timeout=None,
            extra_arguments=["--log-level=ERROR"],
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    found: dict[str, Any] = json.loads(nbformat.writes(opened))
    for cell in found["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = list(_merged(cell["outputs"]))
    return notebook(found["cells"])


def _merged(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the outputs of a cell with what it printed in a row as one."""
    for stream, group in itertools.groupby(outputs, lambda output: output.get("name")):
        if stream is None:
            yield from group
        else:
            several = list(group)
            yield {**several[0], "text": [line for each in several for line in each["text"]]}


def differences(page: Path, content: dict[str, Any]) -> list[str]:
    """Return where a notebook and its page disagree: in a cell, or in what it prints."""
    wanted, found = list(cells(page)), content["cells"]
    sources = [cell["source"] for cell, _ in wanted]
    if sources != [_lines(cell["source"]) for cell in found]:
        return [f"{notebook_of(page).name} is not made from {page.name}: make tutorials"]
    return [
        f"{page.name}: cell {number} prints\n{printed(cell)}and not\n{block['output']}"
        for number, (cell, (_, block)) in enumerate(zip(found, wanted, strict=True))
        if block is not None and block.re is not FILE and not _agrees(printed(cell), block)
    ]


def _agrees(output: str, block: Block) -> bool:
    if block.re is COMMAND:
        return among(output, block["output"])
    return alike(output, BOX.sub("", block["output"] or ""), block["kind"])


def printed(cell: dict[str, Any]) -> str:
    """Return what a cell printed, without colors; if nothing, the text of what it showed."""
    outputs = [each for each in cell["outputs"] if each.get("name") != "stderr"]
    texts = ["".join(each["text"]) for each in outputs if each["output_type"] == "stream"]
    if not texts and all("text/html" in each["data"] for each in outputs):
        texts = ["".join(each["data"]["text/plain"]) for each in outputs]
    return BOX.sub("", COLOR.sub("", "".join(texts)))


def _lines(source: str | list[str]) -> list[str]:
    return source.splitlines(keepends=True) if isinstance(source, str) else source


def main() -> None:
    """Make or check the notebooks; exit with what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=lambda path: Path(path).resolve())
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("COLUMNS", "80")
    os.environ.pop("MPLBACKEND", None)
    problems: list[str] = []
    for page in options.pages:
        path = notebook_of(page)
        if options.check or options.run:
            made = json.loads(path.read_text(encoding="utf-8"))
        else:
            made = notebook(cell for cell, _ in cells(page))
        ran = execute(made)
        problems += [] if options.run else differences(page, ran)
        if not (options.check or options.run):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(ran, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    raise SystemExit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
