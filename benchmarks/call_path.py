"""Count the files, functions and lines of Replicax that a command enters.

    python benchmarks/call_path.py plan lenet --target h100:8

Counts the functions of Replicax that this process calls, including threads but not child processes,
and the lines of those functions. Set PYTHONPATH to use another checkout.
"""

import inspect
import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ENTERED: set[CodeType] = set()


def note(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        ENTERED.add(frame.f_code)


def main() -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        from replicax.cli import main as command

        status = command(sys.argv[1:])
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.setprofile(None)
    import replicax

    root = Path(replicax.__file__).parent
    # The bodies of modules and classes are not optimized, and run on import.
    functions = [
        code
        for code in ENTERED
        if root in Path(code.co_filename).parents and code.co_flags & inspect.CO_OPTIMIZED
    ]
    lines = {
        (code.co_filename, line)
        for code in functions
        for line in range(code.co_firstlineno, max(at for *_, at in code.co_lines() if at) + 1)
    }
    counts = {
        "command": sys.argv[1:],
        "status": status,
        "files": len({code.co_filename for code in functions}),
        "functions": len(functions),
        "lines": len(lines),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
