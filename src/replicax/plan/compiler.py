"""A compiler: for described devices in a process of its own, for attached ones in this one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

import jax

from replicax.errors import CompilerError, MissingDependencyError, ReplicaxError
from replicax.plan.compilation import (
    Compilation,
    Description,
    TooLarge,
    answer,
)
from replicax.plan.compile_process import compiler_name
from replicax.plan.exported import ExportedStep
from replicax.plan.gpu_description import DESCRIBED, gpu_description
from replicax.plan.target import ATTACHED, Target

TIMEOUT_SECONDS = 900.0
"""Longer than any step has taken; who takes longer is stuck."""


class Compiler(Protocol):
    """A compiler of programs for some devices."""

    name: str
    """Its package, and the version."""

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
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

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
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
            answered: str | ReplicaxError = self._ask(self._description)
        except BaseException:
            self.close()
            raise
        if isinstance(answered, ReplicaxError):
            self.close()
            raise answered
        self.name = answered
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """See `Compiler`; the process may also end, or not answer in time."""
        return _checked(self._ask(program))

    def close(self) -> None:
        """End the process; whoever waits for its answer, in another thread, gets an error."""
        self._process.kill()  # a compiler that is at work does not look whether anybody waits
        self._process.wait()
        with self._asking:
            self._connection.close()
            self._said.close()

    def _ask(self, question: Description | ExportedStep) -> Any:
        with self._asking:
            return self._answer_to(question)

    def _answer_to(self, question: Description | ExportedStep) -> Any:
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


def _checked(answered: Compilation | TooLarge | CompilerError) -> Compilation | TooLarge:
    if isinstance(answered, CompilerError):
        raise answered
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


MOST_PROCESSES = 2
"""One for the search, one for what is looked at beside it; each takes a gigabyte or two."""


class CompilerPool:
    """A `Compiler` that several threads may ask; it starts processes as they are needed.

    Args:
        description: the devices to compile for.

    Raises:
        ReplicaxError: on entering; see `CompilerProcess`.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        self._lock, self._free = Lock(), SimpleQueue[CompilerProcess]()
        self._started: list[CompilerProcess] = []
        self._most = min(MOST_PROCESSES, os.cpu_count() or 1)
        self._closed = False
        self.name = ""

    def __enter__(self) -> "CompilerPool":
        first = self._start()
        self.name = first.name
        self._free.put(first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Whoever waits for one of them gets an error, and so does who asks."""
        with self._lock:
            self._closed = True
        for process in self._started:
            process.close()

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """See `Compiler`."""
        process = self._take()
        try:
            return process.compile(program)
        finally:
            self._free.put(process)

    def _take(self) -> CompilerProcess:
        with self._lock:
            if self._closed:
                raise CompilerError("the compilers were ended before they were asked")
            if self._free.empty() and len(self._started) < self._most:
                return self._start()
        return self._free.get()

    def _start(self) -> CompilerProcess:
        process = CompilerProcess(self._description).__enter__()
        self._started.append(process)
        return process


@contextlib.contextmanager
def compiler_for(
    target: Target, by_formula: bool = False
) -> Iterator[tuple[Compiler | None, tuple[str, ...]]]:
    """The compiler for a target, or None and why there is none.

    Raises:
        ConfigError: jax wants another version of it.
        CompilerError: it cannot describe the target.
    """
    if by_formula:
        yield None, ("by formula, as it was asked for",)
        return
    if target.text == ATTACHED and target.chip.platform != "cpu":
        yield AttachedCompiler(jax.devices()), ()
        return
    described = _description(target)
    if described is None:
        yield None, (f"by formula: no compiler describes an {target.chip.title}",)
        return
    with contextlib.ExitStack() as stack:
        compiler: Compiler | None = None
        notes: tuple[str, ...] = ()
        try:
            compiler = stack.enter_context(CompilerPool(described))
        except MissingDependencyError as missing:
            notes = (f"by formula: {missing}",)
        yield compiler, notes


def _description(target: Target) -> Description | None:
    """For a compiler; None where there is none for the chip."""
    chip = target.chip
    if chip.platform == "cpu":
        return Description("cpu", target.devices, {})
    if chip.platform == "cuda" and chip.name not in DESCRIBED:
        return None
    arguments = dict(target.topology_arguments)
    platform = arguments.pop("platform")
    if platform == "cuda":
        assert chip.memory_bytes is not None  # it is in the table of those that are described
        arguments["target_config"] = gpu_description(chip.name, chip.memory_bytes)
    return Description(platform, target.devices, arguments)
