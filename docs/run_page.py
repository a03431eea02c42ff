"""Run the programs and commands of documentation pages in order, and compare what they print.

    python docs/run_page.py docs/tutorials/linear-regression.md [--write]

A `text` block below a `python` block holds its output. A `console` block holds output whose numbers
differ from machine to machine: there only the words around them are compared; one that begins with
`$ command` runs that in a shell, and a line `...` stands for any others. A file that the page says
to save is saved. Pictures are saved under the names that the page shows. `--write` puts output and
pictures into the page instead. `docs/make_notebooks.py` makes notebooks of the same blocks.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```(?P<kind>text|console)\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(
    r"^Save this as `(?P<name>[\w.]+)`:\n\n```python\n(?P<code>.*?)^```\n", re.M | re.S
)
PICTURE = re.compile(r"\]\((?P<path>[^)]*/tutorials/(?P<name>[\w-]+\.png))\)")
Block = re.Match[str]
NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?|[█▏▎▍▌▋▊▉ ]{2,}")


def blocks(text: str) -> Iterator[Block]:
    """Yield the files, commands and programs of a page, in order."""
    at = 0
    while found := [block for kind in (FILE, COMMAND, BLOCK) if (block := kind.search(text, at))]:
        block = min(found, key=lambda each: each.start())
        at = block.end()
        yield block


def run(page: Path, *, write: bool) -> list[str]:
    """Return what differs between a page and what its blocks print and draw."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    problems: list[str] = []

    def called(block: Block) -> str:
        done = subprocess.run(
            block["command"],
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = "".join(f"{each.rstrip()}\n" for each in done.stdout.splitlines())
        if not among(output, block["output"]):
            problems.append(
                f"{page.name}: $ {block['command']}\n{output}and not\n{block['output']}"
            )
        kept = block["output"] if "...\n" in block["output"] else output
        return f"```console\n$ {block['command']}\n{kept}```\n"

    def ran(block: Block) -> str:
        line = text.count("\n", 0, block.start()) + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block["code"], page.name, "exec"), names)
        output = "".join(f"{each.rstrip()}\n" for each in printed.getvalue().splitlines())
        if not alike(output, block["output"] or "", block["kind"]):
            problems.append(f"{page.name}:{line} prints\n{output}and not\n{block['output']}")
        fence = f"\n```{block['kind'] or 'text'}\n{output}```\n" if output else ""
        return f"```python\n{block['code']}```\n{fence}"

    def saved(block: Block) -> str:
        Path(block["name"]).write_text(block["code"], encoding="utf-8")
        return block[0]

    written, at = "", 0
    for block in blocks(text):
        do = {FILE: saved, COMMAND: called, BLOCK: ran}[block.re]
        written += text[at : block.start()] + do(block)
        at = block.end()
    written += text[at:]
    for picture in PICTURE.finditer(text):
        if not Path(picture["name"]).exists():
            problems.append(f"{page.name}: {picture['name']} was not drawn")
        elif write:
            target = page.parent / picture["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture["name"], target)
    if write:
        page.write_text(written, encoding="utf-8")
    return [] if write else problems


def alike(output: str, shown: str, kind: str | None) -> bool:
    """Whether a page shows the output of a block; of a `console`, all but its numbers."""
    if kind == "console":
        output, shown = (NUMBER.sub("#", each) for each in (output, shown))
    return output.split() == shown.split()


def among(output: str, shown: str) -> bool:
    """Whether the lines shown are those of the output, with any others where `...` stands."""
    lines, at = [NUMBER.sub("#", line).split() for line in output.splitlines()], 0
    for part in shown.split("...\n"):
        wanted = [NUMBER.sub("#", line).split() for line in part.splitlines()]
        starts = (n for n in range(at, len(lines) + 1) if lines[n : n + len(wanted)] == wanted)
        found = next(starts, None)
        if found is None or (part is not shown and "..." not in shown and found != at):
            return False
        at = found + len(wanted)
    return "...\n" in shown or at == len(lines)


def main() -> None:
    """Run the pages; exit with what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=lambda path: Path(path).resolve())
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ.setdefault("COLUMNS", "80")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    problems: list[str] = []
    for page in options.pages:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            contextlib.chdir(folder),
        ):
            problems += run(page, write=options.write)
    raise SystemExit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
