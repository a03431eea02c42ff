"""Running the command line in this process."""

from collections.abc import Callable

import pytest

from replicax import cli

Main = Callable[..., tuple[int, str, str]]
"""Arguments -> exit code, standard output, standard error."""


def runner(capsys: pytest.CaptureFixture[str]) -> Main:
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:  # as --help does
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def done(main: Main, *arguments: object) -> str:
    """Return what a command prints that succeeds: exit code 0, and nothing on standard error."""
    code, out, err = main(*arguments)
    assert (code, err) == (0, "")
    return out


def one_line(err: str) -> str:
    """Return the single line on standard error that a user error is."""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("replicax: ")
    return line


def refusal(main: Main, *arguments: object) -> str:
    """Return the error of a wrong flag or configuration: one line, exit code 2."""
    code, _, err = main(*arguments)
    assert code == 2
    return one_line(err)


RECIPE = """
import dataclasses
from replicax.recipes.linear_regression import LinearRegression

@dataclasses.dataclass(frozen=True)
class Mine(LinearRegression):
    "A line of mine."

    points: int = 48
    epochs: int = 2
    batch_size: int = 16
    offset: float = 0.0
    "Added to nothing."
"""
REGRESSION = ["train", "linear_regression", "--points", "48", "--epochs", "1"]
