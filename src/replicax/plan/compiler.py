"""A compiler: for described devices in a process of its own, for attached ones in this one."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import Pipe
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

import jax

from replicax.errors import CompilerError, ConfigError, MissingDependencyError, ReplicaxError
from replicax.plan.compilation import (
    NOT_INSTALLED,
    WRONG_VERSION,
    Compilation,
    Description,
    Failed,
    Ready,
    TooLarge,
)
from replicax.plan.compile import answer
from replicax.plan.installed import EXTRAS, compiler_name
from replicax.plan.program import Program

TIMEOUT_SECONDS = 900.0
"""Longer than any step has taken; who takes longer is stuck."""


class Compiler(Protocol):
    """What compiles programs for some devices."""

    name: str
    """Its package, and the version."""

    def compile(self, program: Program) -> Compilation | TooLarge:
        """A program for these devices, or that it is too large for them.

        Raises:
            CompilerError: the compiler fails.
        """


class AttachedCompiler:
    """The one of devices that are attached to this process, and in it.

    Args:
        devices: to compile for.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self.name = compiler_name(devices[0].platform)

    def compile(self, program: Program) -> Compilation | TooLarge:
        """See `Compiler`."""
        return _checked(answer(program, self._devices))


class CompilerProcess:
    """A compiler that is started once and asked as often as one likes.

    Example:
        >>> with CompilerProcess(description) as compiler:
        ...     compiled = compiler.compile(program)

    Args:
        description: the devices to compile for.
        timeout_seconds: for one answer.

    Raises:
        MissingDependencyError: on entering, where it is not installed.
        ConfigError: on entering, where jax wants another version of it.
        CompilerError: on entering, where it cannot compile for them.
    """

    def __init__(
        self, description: Description, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._description = description
        self._timeout_seconds = timeout_seconds
        self.name = ""

    def __enter__(self) -> "CompilerProcess":
        self._connection, theirs = Pipe()
        self._asking = Lock()
        self._said = tempfile.TemporaryFile()
        command = [sys.executable, "-P", "-m", "replicax.plan.compile_process"]
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=_environment(self._description),
        )
        theirs.close()
        try:
            answered: Ready | Failed = self._ask(self._description)
        except BaseException:
            self.close()
            raise
        if isinstance(answered, Failed):
            self.close()
            raise self._refusal(answered)
        self.name = answered.name
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def compile(self, program: Program) -> Compilation | TooLarge:
        """See `Compiler`; the process may also end, or not answer in time."""
        return _checked(self._ask(program))

    def close(self) -> None:
        """End the process; whoever waits for its answer, in another thread, gets an error."""
        self._process.kill()  # a compiler that is at work does not look whether anybody waits
        self._process.wait()
        with self._asking:
            self._connection.close()
            self._said.close()

    def _refusal(self, refused: Failed) -> ReplicaxError:
        install = f"pip install 'replicax[{EXTRAS.get(self._description.platform, 'cli')}]'"
        if refused.reason == NOT_INSTALLED:
            return MissingDependencyError(f"{refused.message}; {install}")
        if refused.reason == WRONG_VERSION:
            return ConfigError(f"{refused.message}; {install}, or plan by formula alone")
        return CompilerError(f"no devices can be described for a compiler: {refused.message}")

    def _ask(self, question: Description | Program) -> Any:
        with self._asking:
            return self._answer_to(question)

    def _answer_to(self, question: Description | Program) -> Any:
        try:
            self._connection.send(question)
            if not self._connection.poll(self._timeout_seconds):
                self._process.kill()  # or its answer would be taken for that to the next question
                raise CompilerError(
                    f"the compiler has not answered for {self._timeout_seconds:.0f} s; a step "
                    "seldom takes a minute: try a smaller model or fewer devices"
                )
            return self._connection.recv()
        except (EOFError, OSError) as ended:
            raise CompilerError(self._last_words()) from ended

    def _last_words(self) -> str:
        code = self._process.wait()
        if self._said.closed:
            return "the compiler was ended before it was asked"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the compiler ended with {how} and without an answer: {last[:200]}"


def _checked(answered: Compilation | TooLarge | Failed) -> Compilation | TooLarge:
    if isinstance(answered, Failed):
        raise CompilerError(f"the compiler fails on this step: {answered.message}")
    return answered


def _environment(description: Description) -> dict[str, str]:
    """The process's own: it must find no accelerator, and no job to join."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if description.platform == "cpu":
        environment["JAX_NUM_CPU_DEVICES"] = str(description.devices)
    if description.platform == "tpu":
        # libtpu asks the cloud's metadata server for its surroundings, and waits for an answer.
        environment["TPU_SKIP_MDS_QUERY"] = "1"
        # There is no TPU that two processes could fight for.
        environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return environment
