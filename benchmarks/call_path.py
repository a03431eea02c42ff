"""Count the files, functions and lines of Replicax that a command or a step enters.

    python benchmarks/call_path.py plan lenet --target h100:8
    python benchmarks/call_path.py step

Counts the functions of Replicax that this process calls, including threads but not child processes,
and the lines of those functions. `step` traces a `jit` step and runs it once more. Set PYTHONPATH
to use another checkout.
"""

import json
import sys
from pathlib import Path
from types import CodeType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.entered import entered, files, lines
from support.one_step import warm_step


def command() -> None:
    from replicax.cli import main

    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        print("exit code:", ended.code or 0)


def main() -> None:
    codes: set[CodeType] = entered(warm_step() if sys.argv[1:] == ["step"] else command)
    counts = {"files": len(files(codes)), "functions": len(codes), "lines": lines(codes)}
    print(json.dumps({"command": sys.argv[1:], **counts}))


if __name__ == "__main__":
    main()
