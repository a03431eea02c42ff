"""The command line: argv -> calls -> exit code.

0 done · 1 the run failed, with its cause in one line · 2 a wrong flag or configuration
75 stopped early with everything saved; launch: the first failure's own code
"""

import importlib.metadata
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from replicax.cluster.failure import end
from replicax.errors import ConfigError, ReplicaxError, did_you_mean

USAGE = """\
usage: replicax COMMAND ...

Data-parallel training for JAX that proves itself.

commands:
  train RECIPE [FLAGS]   train a recipe; replicax train RECIPE --help lists its flags
  plan RECIPE --target T [FLAGS]
                         will it fit, and how fast, on hardware you do not have
  bench RECIPE [FLAGS]   measure its step in every mode, on several device counts
  verify RECIPE [FLAGS]  check that N devices compute what one does, in every mode;
                         or a step of your own, without a recipe
  launch --processes N -- COMMAND
                         run COMMAND as N processes that train together
  doctor                 check versions, devices, and a job's processes
  recipes                list the built-in recipes

A recipe is a built-in name, your own as file.py:Name, or package.module:Name.

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


def _explain(error: BaseException) -> int:
    """Say in one line what ended the command; returns its exit code."""
    if isinstance(error, ReplicaxError):
        return _failed(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return _failed("interrupted", 1)
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 128 + signal.SIGPIPE
    if refused := _OUT_OF_MEMORY.search(str(error)):
        return _failed(f"{refused[0]}; {SMALLER}", 1)
    traceback.print_exception(error)  # a recipe's own: its author needs it
    return _failed(f"{type(error).__name__}: {error}", 1)


def _nobody_reads() -> bool:
    """Whether whoever read the output has closed it, as `head` does; what is left of it is lost."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "bench": _bench,
        "verify": _verify,
        "launch": _launch,
        "doctor": _doctor,
        "recipes": _recipes,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"replicax {importlib.metadata.version('replicax')}")
        return 0
    if command not in commands:
        raise ConfigError(
            f"no command {command!r}; there are {', '.join(commands)}"
            f"{did_you_mean(command, commands)}"
        )
    return commands[command](rest)


def _recipes(arguments: list[str]) -> int:
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"recipes takes no argument {arguments[0]!r}; leave it out")
    from replicax.recipes.recipe import BUILT_IN, find_recipe

    for name in BUILT_IN:
        try:
            text = (find_recipe(name).__doc__ or "").splitlines()[0]
        except ReplicaxError as error:
            text = f"not available: {error}"
        print(f"{name:<18} {text}")
    print(f"{'file.py:Name':<18} your own; replicax train RECIPE --help lists the flags of any")
    return 0


def _train(arguments: list[str]) -> int:
    from replicax.commands.train import train

    code, said = train(arguments)
    return _failed(said, code) if said else code


def _plan(arguments: list[str]) -> int:
    from replicax.commands.plan import plan

    plan(arguments)
    return 0


def _bench(arguments: list[str]) -> int:
    from replicax.commands.bench import bench

    bench(arguments)
    return 0


def _verify(arguments: list[str]) -> int:
    from replicax.commands.verify import verify

    return verify(arguments)


def _launch(arguments: list[str]) -> int:
    from replicax.commands.launch import launch

    code, said = launch(arguments)
    return _failed(said, code) if said else code


def _doctor(arguments: list[str]) -> int:
    from replicax.commands.doctor import doctor

    return doctor(arguments)


def _failed(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"replicax: {line}", file=sys.stderr)
    return code
