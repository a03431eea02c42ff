"""`python cudnn_step.py MODE LAYOUT ATTENTION`: kernels of GPT-2 in bfloat16 on eight H100."""

import json
import re
import sys

from support.small_steps import gpt2

from replicax.plan.compilation import Compilation
from replicax.plan.compiler import compiler_for
from replicax.plan.exported import export_step
from replicax.plan.target import parse_target


def main() -> None:
    mode, layout, attention = sys.argv[1:]
    step = gpt2(16, attention, mode=mode, layout=layout, precision="bfloat16")
    program = export_step(step.on(8).dp, step.model, step.batch, "cuda", 9.0)
    with compiler_for(parse_target("h100:8")) as (compiler, notes):
        assert compiler is not None, notes
        done = compiler.compile(program)
    assert isinstance(done, Compilation)
    calls = sorted(set(re.findall(r"__cudnn\$fmha\w+|dew_flash3\w+", done.text)))
    epilogues = sorted(set(re.findall(r'"epilogue":"(\w+)"', done.text)))
    print(json.dumps({"calls": calls, "epilogues": epilogues, "notes": program.notes}))


main()
