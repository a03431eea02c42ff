"""Which code of Replicax a call enters."""

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import replicax

ROOT = Path(replicax.__file__).parent


def entered(call: Callable[[], Any]) -> set[CodeType]:
    """Return the functions of Replicax that `call` enters in this process, threads included."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    # The bodies of modules and classes are not optimized, and run on import.
    return {
        code
        for code in codes
        if ROOT in Path(code.co_filename).parents and code.co_flags & inspect.CO_OPTIMIZED
    }


def files(codes: set[CodeType]) -> set[str]:
    """Return the files of functions, relative to the package."""
    return {str(Path(code.co_filename).relative_to(ROOT)) for code in codes}


def lines(codes: set[CodeType]) -> int:
    """Return the number of lines of functions, each counted once."""
    return len(
        {
            (code.co_filename, line)
            for code in codes
            for line in range(code.co_firstlineno, max(at for *_, at in code.co_lines() if at) + 1)
        }
    )
