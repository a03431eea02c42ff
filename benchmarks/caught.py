"""Try what finds the public bugs of `caught_programs`: the first step, `verify`, or `lint`.

    python benchmarks/caught.py
    python benchmarks/caught.py --only PrimeRL2358,VeOmni419
    python benchmarks/caught.py --page

Each program has a broken form, as its project had it, and the mended one. All three are tried on
both: what finds the broken form has caught it, what finds the mended one is a false alarm. Writes
`results/caught.json`; `--page` writes it as the table of docs/verify.md.
"""

import argparse
import ast
import dataclasses
import importlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # its tests have devices, and start other processes
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import numpy as np
import optax
from caught_programs.parts import (
    DEVICES,
    RATE,
    Handwritten,
    Loader,
    Loss,
    Program,
    file_of,
    losses,
    weights,
)
from caught_programs.unwritable import UNWRITABLE
from timing import RESULTS, environment, save

import replicax as rx
from replicax.lint.files import examine_file
from replicax.text.wording import first_line
from replicax.verify.verification import Verification

KINDS = ("counts", "reductions", "split_models", "backward", "order", "loops")
FORMS = ("broken", "mended")
WAYS = ("first step", "verify", "lint")
CLEARED_EVERY = 8
PAGE = Path(__file__).parents[1] / "docs/verify.md"
COLUMNS = ("what went wrong", "project, number", "first step", "`verify`", "`lint`")
HEAD = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"


def programs() -> Iterator[type[Program]]:
    """Yield the programs of all files, in order."""
    for kind in KINDS:
        module = importlib.import_module(f"caught_programs.{kind}")
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Program) and each.project:
                yield each


def tried(program: type[Program]) -> list[str]:
    """Return the ways that apply: a step by hand has no first step of Replicax."""
    kinds = {"first step": (Loss, Loader), "verify": (Handwritten, Loss), "lint": (Program,)}
    return [way for way in WAYS if issubclass(program, kinds[way])]


def found(program: type[Program], form: str) -> dict[str, str]:
    """Return what each way says of one form, without the ways that say nothing."""
    said = {"lint": by_lint(program, form)}
    if issubclass(program, Handwritten):
        said["verify"] = by_verify_step(program, form)
    elif issubclass(program, Loss):
        said["first step"], said["verify"] = by_first_step(program, form), by_verify(program, form)
    elif issubclass(program, Loader):
        said["first step"] = by_second_start(program, form)
    return {way: said[way] for way in WAYS if said.get(way)}


def by_verify_step(program: type[Handwritten], form: str) -> str:
    return cause_of(
        rx.verify_step(
            getattr(program, form)(),
            program.reference,
            program.state(),
            program.batch(),
            replicas=DEVICES,
            **program.options,
        )
    )


def data_parallel(loss: Any, **options: Any) -> rx.DataParallel:
    mesh = rx.make_mesh(devices=jax.devices()[: 1 if options.get("mode") == "single" else DEVICES])
    return rx.DataParallel(loss, optax.sgd(RATE), mesh=mesh, **options)


def by_verify(program: type[Loss], form: str) -> str:
    """Return what `verify` says of its mode, or of `shard_map` if that is for one device."""
    options = program.options
    if options.get("mode") == "single":
        options = {**options, "mode": "shard_map"}
    dp = data_parallel(getattr(program, form), **options)
    return cause_of(rx.verify(dp, program.model(), program.batch(), modes=[dp.mode]))


def by_first_step(program: type[Loss], form: str) -> str:
    """Return the error of a first step, and of a short batch after it."""
    rows = program.batch()
    size = len(jax.tree.leaves(rows)[0])
    rows = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[: size - 3]]), rows)
    dp = data_parallel(getattr(program, form), **program.options)
    try:
        state = dp.init(program.model())
        for batch in dp.feed(rows, size):
            state, _ = dp.step(state, batch)
    except rx.ReplicaxError as error:
        return first_line(error)
    return ""


def by_second_start(program: type[Loader], form: str) -> str:
    """Return the error of a run that is started again in the middle of its second epoch."""

    def loss(w: Any, batch: Any, key: Any) -> Any:
        return losses(w, batch).sum(1)

    np.random.seed(0)
    dp = data_parallel(loss, mode="jit")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for resumed, steps in ((False, 6), (True, 8)):
                loader = getattr(program, form)(resumed)
                rx.fit(dp, dp.init(weights()), loader, steps=steps, run_dir=folder, progress=False)
    except rx.ReplicaxError as error:
        return first_line(error)
    return ""


def by_lint(program: type[Program], form: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(text_of(program, form), encoding="utf-8")
        findings = examine_file(path).findings
    return ", ".join(dict.fromkeys(each.rule for each in findings))


def text_of(program: type[Program], form: str) -> str:
    """Return the text of a program's file, with this form alone.

    Lines of other programs and of the other form are empty.
    """
    text = file_of(program).read_text(encoding="utf-8")
    lines, left_out = text.splitlines(), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == program.__name__:
            other = FORMS[1 - FORMS.index(form)]
            left_out += [each for each in node.body if getattr(each, "name", "") == other]
        elif isinstance(node, ast.ClassDef) and any(name_of(n) == "broken" for n in node.body):
            left_out.append(node)
    for node in left_out:
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)
    return "\n".join(lines) + "\n"


def name_of(node: ast.AST) -> str:
    return str(getattr(node, "name", ""))


def cause_of(verification: Verification) -> str:
    """Return the first failure in a few words: its cause, or what was found."""
    if verification.ok:
        return ""
    check = verification.failed[0]
    known = check.cause and not check.cause.startswith("no known cause")
    said = check.cause if known else check.found
    return f"{check.subject}, {check.case}: {said.partition(';')[0]}"


def row(program: type[Program]) -> dict[str, Any]:
    """Return what was found of a program, as JSON."""
    begun = time.monotonic()
    broken, mended = (found(program, form) for form in FORMS)
    return {
        "name": program.__name__,
        "project": program.project,
        "number": program.number,
        "also": program.also,
        "says": program.says(),
        "kind": program.__module__.rpartition(".")[2],
        "tried": tried(program),
        "caught": broken,
        "false alarms": mended,
        "seconds": round(time.monotonic() - begun, 1),
    }


def in_a_few_words(way: str, said: str) -> str:
    if way != "verify":
        return f"`{said}`" if way == "lint" and said else said.partition(":")[0]
    said = re.sub(r"^(state|loss)[^:]*: ", "", said.partition(": ")[2])
    return re.split(r": | \(", said)[0].replace("|", "/")


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    lines = []
    for each in result["rows"]:
        also = f" ({each['also']})" if each["also"] else ""
        number = f" #{each['number']}" if each["number"] else ""
        cells = [each["says"].rstrip("."), f"{each['project'].rpartition('/')[2]}{number}{also}"]
        for way in WAYS:
            said = in_a_few_words(way, each["caught"].get(way, ""))
            cells.append(said if way in each["tried"] else "–")
        lines.append("| " + " | ".join(cells) + " |\n")
    return HEAD + "".join(lines)


def counts(result: dict[str, Any]) -> str:
    """Return the lines of the page that count the rows."""
    by = [sum(way in row["caught"] for row in result["rows"]) for way in WAYS]
    alone = sum(list(row["caught"]) == ["verify"] for row in result["rows"])
    return (
        f"{result['caught']} of {result['programs']} programs are caught, {by[0]} by the first "
        f"step, {by[1]} by `verify` ({alone} by it alone), {by[2]} by `lint`;\nfalse alarms on "
        f"mended forms: {result['false alarms']} ({result['date']}, jax {result['jax']}, "
        "`benchmarks/results/caught.json`).\n"
    )


def saved() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / "caught.json").read_text(encoding="utf-8"))
    return result


def write_page() -> None:
    result = saved()
    page = PAGE.read_text(encoding="utf-8")
    old = re.search(re.escape(HEAD) + r"(\|.*\n)*", page)
    counted = re.search(r"\d+ of \d+ programs are caught.*\n.*\n", page)
    assert old is not None
    assert counted is not None
    page = page.replace(old[0], table(result)).replace(counted[0], counts(result))
    PAGE.write_text(page, encoding="utf-8")


def told(row: dict[str, Any]) -> str:
    """Return what is printed of a row."""
    said = " · ".join(f"{way}: {text[:90]}" for way, text in row["caught"].items())
    alarms = [f"\n    FALSE ALARM of {way}: {text}" for way, text in row["false alarms"].items()]
    return f"{row['name']:20} {row['seconds']:5.1f} s  {said or 'nothing'}" + "".join(alarms)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="names of programs, separated by commas; others stay")
    parser.add_argument("--page", action="store_true", help="write the table of docs/verify.md")
    asked = parser.parse_args()
    if asked.page:
        return write_page()
    names = [program.__name__ for program in programs()]
    chosen = asked.only.split(",") if asked.only else names
    begun = time.monotonic()
    rows = {row["name"]: row for row in saved()["rows"]} if asked.only else {}
    for number, program in enumerate(programs(), 1):
        if program.__name__ in chosen:
            rows[program.__name__] = row(program)
            print(told(rows[program.__name__]), flush=True)
            if number % CLEARED_EVERY == 0:
                jax.clear_caches()
    result = {
        "caught": sum(bool(each["caught"]) for each in rows.values()),
        "programs": len(rows),
        "false alarms": sum(bool(each["false alarms"]) for each in rows.values()),
        "rows": [rows[name] for name in names if name in rows],
        "cannot be written": [dataclasses.asdict(each) for each in UNWRITABLE],
        "seconds": saved()["seconds"] if asked.only else round(time.monotonic() - begun),
        **environment(),
    }
    print(counts(result), save("caught", result), sep="")


if __name__ == "__main__":
    main()
