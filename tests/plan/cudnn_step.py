"""`python cudnn_step.py MODE LAYOUT ATTENTION`: kernels of GPT-2 in bfloat16 on eight H100."""

import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.small_steps import gpt2

from replicax.core.modes.exact import tuning
from replicax.errors import CompilerError
from replicax.plan.compilation import Compilation, Compiler
from replicax.plan.compiler import compiler_for
from replicax.plan.exported import ExportedStep, export_step
from replicax.plan.target import parse_target


def main() -> None:
    mode, layout, attention = sys.argv[1:]
    step = gpt2(16, attention, mode=mode, layout=layout, precision="bfloat16")
    program = export_step(step.on(8).dp, step.model, step.batch, "cuda", 9.0)
    with compiler_for(parse_target("h100:8")) as (compiler, notes):
        assert compiler is not None, notes
        done = compiler.compile(program)
        unrecorded = [missing(compiler, program, options) for options in recorded()]
    assert isinstance(done, Compilation)
    calls = sorted(set(re.findall(r"__cudnn\$fmha\w+|dew_flash3\w+", done.text)))
    epilogues = sorted(set(re.findall(r'"epilogue":"(\w+)"', done.text)))
    found = {"calls": calls, "epilogues": epilogues, "unrecorded": unrecorded}
    print(json.dumps({**found, "notes": program.notes}))


def recorded() -> Iterator[dict[str, Any]]:
    """Compiler options that take kernels from a file without any, and those that choose them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "none.textproto")
        path.write_text("version: 3")
        yield tuning.Tuning(path).complete
    yield {**tuning.MEASURING, **tuning.COMPLETE}


def missing(compiler: Compiler, program: ExportedStep, options: dict[str, Any]) -> list[str]:
    try:
        compiler.compile(dataclasses.replace(program, options=options))
    except CompilerError as error:
        return re.findall(r"Failed to get configs for: (\d+) out of (\d+)", str(error))
    return ["compiled"]


main()
