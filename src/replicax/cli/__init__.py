"""The command line: argv -> calls -> exit code.

0 done · 1 the run failed, with its cause in one line · 2 a wrong flag or configuration
75 stopped early with everything saved; launch: the first failure's own code

Whatever is wrong with a flag is a `ConfigError`, whose one line is printed here.
"""

import importlib
import importlib.metadata
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from replicax.cluster.failure import end
from replicax.errors import ConfigError, ReplicaxError, did_you_mean

COMMANDS = (
    *("train", "evaluate", "sample", "export", "runs"),
    *("plan", "bench", "verify", "lint", "launch", "doctor", "recipes"),
)
"""Each is the function of its name in `replicax.cli`, loaded when it is called."""
USAGE = """\
usage: replicax COMMAND ...

Data-parallel training for JAX that proves itself.

commands:
  train RECIPE [FLAGS]   train a recipe; replicax train RECIPE --help lists its flags
  evaluate RUN [FLAGS]   loss and metrics of a run's model, on its data or on yours
  sample RUN TEXT        continue a text with a run's model
  export RUN FILE        write a run's model as a .safetensors file
  runs [FOLDER]          list the runs in runs/, and how far each has come
  plan RECIPE --target T [FLAGS]
                         will it fit, and how fast, on hardware you do not have
  bench RECIPE [FLAGS]   measure its step in every mode, on several device counts
  verify RECIPE [FLAGS]  check that N devices compute what one does, in every mode;
                         or a step of your own, without a recipe
  lint FILES             read source code for the classic errors, without running it
  launch --processes N -- COMMAND
                         run COMMAND as N processes that train together
  doctor                 check versions, devices, and a job's processes
  recipes                list the built-in recipes

A recipe is a built-in name, your own as file.py:Name, or package.module:Name.
A run is what train has left in runs/: its name, or its folder.

options:
  -h, --help             show this help
  --version              show the version
"""

# JAX has no type of its own for what an allocator says.
_OUT_OF_MEMORY = re.compile(r"(Out of memory|Unable to allocate)[^.;]*")
SMALLER = "lower --batch-size, raise --accumulate, or use more devices"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error)
        end(error, code)
        return code


def failed(message: str, code: int) -> int:
    """Print why a command failed, in one line; return its exit code."""
    print(f"replicax: {' '.join(message.split())}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> int:
    """Say in one line what ended the command; returns its exit code."""
    if isinstance(error, ReplicaxError):
        return failed(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return failed("interrupted", 1)
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 128 + signal.SIGPIPE
    if refused := _OUT_OF_MEMORY.search(str(error)):
        return failed(f"{refused[0]}; {SMALLER}", 1)
    traceback.print_exception(error)  # a recipe's own: its author needs it
    return failed(f"{type(error).__name__}: {error}", 1)


def _nobody_reads() -> bool:
    """Whether whoever read the output has closed it, as `head` does; what is left of it is lost."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"replicax {importlib.metadata.version('replicax')}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(
            f"no command {command!r}; there are {', '.join(COMMANDS)}"
            f"{did_you_mean(command, COMMANDS)}"
        )
    run = getattr(importlib.import_module(f"replicax.cli.{command}"), command)
    code: int = run(rest)
    return code
