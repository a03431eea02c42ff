"""The command line: dispatch argv to a command and return its exit code.

0 done · 1 the run failed, with a one-line cause · 2 an invalid flag or configuration
75 stopped early with everything saved; launch: the exit code of the first failure

An invalid flag raises `ConfigError`, whose one-line message is printed here.

Each command is a file. Read `train.py`, then what commands share: `step_options.py` (the options
of a step, one set for all), `flags.py` (from argv to options and a recipe) with `config_file.py`
(presets, and files of `--config`), `output.py`. This room may import every other, and only
`__main__` imports it. Tests: `tests/cli/`. Public: the flags.
"""

import contextlib
import importlib
import importlib.metadata
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from replicax.errors import ConfigError, ReplicaxError, did_you_mean
from replicax.text.table import fold_lines, for_stream, printable

COMMANDS = (
    *("train", "evaluate", "sample", "export", "runs"),
    *("plan", "bench", "verify", "lint", "launch", "doctor", "recipes"),
)
"""Each is a function in the module of its name in `replicax.cli`, imported when called."""
_USAGE = """\
usage: replicax COMMAND ...

Data-parallel training for JAX that proves itself.

commands:
  train RECIPE [FLAGS]   train a recipe; its flags: replicax train RECIPE --help
  evaluate RUN [FLAGS]   loss and metrics of a run's model, on its data or yours
  sample RUN TEXT        continue a text with a run's model
  export RUN FILE        write a run's model as a .safetensors file
  runs [FOLDER]          list the runs in runs/ and their progress
  plan RECIPE --target T [FLAGS]
                         predict memory and speed on hardware you do not have
  plan --failures --devices N [FLAGS]
                         predict the goodput of a job whose devices fail
  bench RECIPE [FLAGS]   measure its step in all modes, on several device counts
  verify RECIPE [FLAGS]  check that N devices compute the same as one, in every
                         mode; or check a custom step, without a recipe
  lint FILES             check source code for common errors, without running it
  launch --processes N -- COMMAND
                         run COMMAND as N processes that train together
  doctor                 check versions, devices, and a job's processes
  recipes                list the built-in recipes

RECIPE is a built-in name, your own as file.py:Name, or package.module:Name.
RUN is the name of a run in runs/, or its folder.

options:
  -h, --help             show this help
  --version              show the version
"""

# JAX has no exception type for running out of memory.
# A sentence ends at a dot, which sizes have too: 745.06GiB, and NumPy's 745. GiB.
_OUT_OF_MEMORY = re.compile(r"(Out of memory|Unable to allocate)([^.;]|\.(?=\d| ?[KMGTPE]i?B))*")
SMALLER = "lower --batch-size, raise --accumulate, or use more devices"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):  # such as ASCII
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        from replicax.cluster.failure import end  # imports JAX, which --help does without

        code = _explain(error)
        end(error, code)
        return code


def failed(message: str, code: int) -> int:
    """Print why a command failed, in one line; return the exit code."""
    with contextlib.suppress(OSError):  # the terminal is gone; the code says it, too
        line = f"replicax: {printable(' '.join(message.split()))}"
        print(for_stream(line, sys.stderr), file=sys.stderr)
    return code


def _explain(error: BaseException) -> int:
    """Print the error that ended the command in one line; return the exit code."""
    if isinstance(error, ReplicaxError):
        return failed(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return failed("interrupted", 1)
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 128 + signal.SIGPIPE
    if refused := _OUT_OF_MEMORY.search(str(error)):
        return failed(f"{refused[0]}; {SMALLER}", 1)
    traceback.print_exception(error)  # from the recipe: its author needs it
    return failed(f"{type(error).__name__}: {error}", 1)


def _nobody_reads() -> bool:
    """Return whether the reader of stdout has closed it, like `head`; if so, discard the rest."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(fold_lines(_USAGE), end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"replicax {importlib.metadata.version('replicax')}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(
            f"unknown command {command!r}; the commands are {', '.join(COMMANDS)}"
            f"{did_you_mean(command, COMMANDS)}"
        )
    run = getattr(importlib.import_module(f"replicax.cli.{command}"), command)
    code: int = run(rest)
    return code
