"""Try what finds the public bugs of `caught_programs`: the first step, `verify`, or `lint`.

    python benchmarks/caught.py
    python benchmarks/caught.py --only PrimeRL2358,VeOmni419

Each program has a broken form, as its project had it, and the mended one. All three are tried on
both: what finds the broken form has caught it, what finds the mended one is a false alarm. Writes
`results/caught.json`, from which docs/verify.md has its table.
"""

import argparse
import ast
import importlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    Unwritable,
    file_of,
    losses,
    weights,
)
from caught_programs.unwritable import UNWRITABLE
from timing import environment, save

import replicax as rx
from replicax.lint.files import examine_file
from replicax.verify.verification import Verification
from replicax.wording import first_line

KINDS = ("counts", "reductions", "split_models", "backward", "order", "loops")
FORMS = ("broken", "mended")
WAYS = ("first step", "verify", "lint")
CLEARED_EVERY = 8


def programs() -> Iterator[type[Program]]:
    """Yield the programs of all files, in order."""
    for kind in KINDS:
        module = importlib.import_module(f"caught_programs.{kind}")
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Program) and each.project:
                yield each


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
        "caught": broken,
        "false alarms": mended,
        "seconds": round(time.monotonic() - begun, 1),
    }


def unwritten(bug: Unwritable) -> dict[str, Any]:
    return {"project": bug.project, "number": bug.number, "says": bug.says, "why": bug.why}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", help="names of programs, separated by commas; saves nothing")
    only = parser.parse_args().only
    names, rows, begun = set(only.split(",")) if only else None, [], time.monotonic()
    for number, program in enumerate(programs(), 1):
        if names is not None and program.__name__ not in names:
            continue
        rows.append(row(program))
        told = rows[-1]["caught"] or {"nothing": ""}
        print(f"{program.__name__:20} {rows[-1]['seconds']:5.1f} s  ", end="")
        print(" · ".join(f"{way}: {text[:90]}" for way, text in told.items()), flush=True)
        for way, text in rows[-1]["false alarms"].items():
            print(f"    FALSE ALARM of {way}: {text}", flush=True)
        if number % CLEARED_EVERY == 0:
            jax.clear_caches()
    caught = sum(bool(each["caught"]) for each in rows)
    alarms = sum(bool(each["false alarms"]) for each in rows)
    print(f"{caught} of {len(rows)} caught, {alarms} false alarms, {len(UNWRITABLE)} unwritable")
    if names is None:
        result = {
            "caught": caught,
            "programs": len(rows),
            "false alarms": alarms,
            "rows": rows,
            "cannot be written": [unwritten(each) for each in UNWRITABLE],
            "seconds": round(time.monotonic() - begun),
            **environment(),
        }
        print(save("caught", result))


if __name__ == "__main__":
    main()
