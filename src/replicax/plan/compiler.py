"""Compilers: a separate process for described devices, this process for attached ones."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

import jax

from replicax.analysis.hardware import FACTS
from replicax.errors import CompilerError, MissingDependencyError, ReplicaxError
from replicax.plan.compilation import (
    Compilation,
    Compiler,
    Description,
    TooLarge,
    answer,
    compiler_name,
)
from replicax.plan.exported import ExportedStep
from replicax.plan.kept import KeepingCompiler
from replicax.plan.target import ATTACHED, Target


class AttachedCompiler:
    """The compiler of devices attached to this process, run in this process."""

    note = ""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self.name = compiler_name(devices[0].platform)

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """See `Compiler`."""
        return _checked(answer(program, self._devices, tunes=True))


class CompilerProcess:
    """A compiler in a process that is started once, compiles any number of steps, and is closed.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: jax requires another version of it.
        CompilerError: it cannot compile for these devices.
    """

    note = ""
    _timeout_seconds = 900.0
    """Longer than any step has taken; beyond this the compiler is considered stuck."""

    def __init__(self, description: Description) -> None:
        self._connection, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        serve = "from replicax.plan.compilation import serve; import sys; serve(int(sys.argv[1]))"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", serve, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=_environment(description),
        )
        theirs.close()
        try:
            answered: str | ReplicaxError = self._ask(description)
            if isinstance(answered, ReplicaxError):
                raise answered
        except BaseException:
            self.close()
            raise
        self.name = answered

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """See `Compiler`; also fails if the process ends or does not answer in time."""
        return _checked(self._ask(program))

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # a busy compiler would not notice a closed connection
        self._process.wait()
        self._connection.close()
        self._said.close()

    def _ask(self, question: Description | ExportedStep) -> Any:
        try:
            self._connection.send(question)
            if not self._connection.poll(self._timeout_seconds):
                self._process.kill()  # or a late answer would be read as the next one
                raise CompilerError(
                    f"the compiler has not answered for {self._timeout_seconds:.0f} s; a step "
                    "rarely takes a minute: try a smaller model or fewer devices"
                )
            return self._connection.recv()
        except (EOFError, OSError) as ended:
            raise CompilerError(self._last_words()) from ended

    def _last_words(self) -> str:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"the compiler ended with {how} without an answer: {last[:200]}"


def _checked(answered: Compilation | TooLarge | CompilerError) -> Compilation | TooLarge:
    if isinstance(answered, CompilerError):
        raise answered
    return answered


def _environment(description: Description) -> dict[str, str]:
    """Environment variables of the process, which must find no accelerator and join no job."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if description.platform == "cpu":
        environment["JAX_NUM_CPU_DEVICES"] = str(description.devices)
    if description.platform == "tpu":
        # Otherwise libtpu queries the cloud's metadata server and waits for an answer.
        environment["TPU_SKIP_MDS_QUERY"] = "1"
        # No TPU is attached, so several processes cannot conflict over it.
        environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return environment


@contextlib.contextmanager
def compiler_for(
    target: Target, by_formula: bool = False
) -> Iterator[tuple[Compiler | None, tuple[str, ...]]]:
    """Yield the compiler for a target, or None and the reasons why there is none.

    Raises:
        ConfigError: jax requires another version of it.
        CompilerError: it cannot describe the target.
    """
    if by_formula:
        yield None, ("by formula, as requested",)
        return
    if target.text == ATTACHED and target.chip.platform != "cpu":
        yield AttachedCompiler(jax.devices()), ()
        return
    described = _description(target)
    if described is None:
        yield None, (f"by formula: no compiler describes an {target.chip.title}",)
        return
    with contextlib.ExitStack() as stack:
        start = lambda: stack.enter_context(contextlib.closing(CompilerProcess(described)))  # noqa: E731
        name = compiler_name(described.platform)
        try:
            compiler = KeepingCompiler(start, described, name if " " in name else None)
        except MissingDependencyError as missing:
            yield None, (f"by formula: {missing}",)
        else:
            yield compiler, ()


def _description(target: Target) -> Description | None:
    """Return the description for a compiler; None if no compiler supports the chip."""
    chip = target.chip
    if chip.platform == "cpu":
        return Description("cpu", target.devices, {})
    if chip.platform == "cuda" and chip.name not in DESCRIBED:
        return None
    arguments = dict(target.topology_arguments)
    platform = arguments.pop("platform")
    if platform == "cuda":
        assert chip.memory_bytes is not None  # known for every chip in DESCRIBED
        arguments["target_config"] = gpu_description(chip.name, chip.memory_bytes)
    return Description(platform, target.devices, arguments)


DESCRIBED = {name: facts["xla"] for name, facts in FACTS.items() if "xla" in facts}
"""Figures of `hardware.toml` by chip. CUDA 13 does not compile for older ones (V100)."""
CUDNN = (9, 10, 0)
"""The version in XLA's own device descriptions."""
CUDA = "12.8.0"


def gpu_description(name: str, memory_bytes: int) -> str:
    """Return XLA's description of a chip in `DESCRIBED`: a `GpuTargetConfigProto` as text."""
    facts = DESCRIBED[name]
    kind, (major, minor) = facts["device_kind"], facts["capability"]
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": facts["shared_memory"],
        "shared_memory_per_block_optin": facts["shared_memory_of_block"],
        "core_count": facts["multiprocessors"],
        "fpus_per_core": facts["lanes"],
        "memory_bandwidth": facts["memory_bytes_per_second"],
        "l2_cache_size": facts["l2_cache"],
        "clock_rate_ghz": facts["clock_ghz"],
        "device_memory_size": memory_bytes,
    }
    info = " ".join(f"{field}: {value}" for field, value in fields.items())
    features = "ACCELERATED_FEATURES" if facts["accelerated_features"] else "NONE"
    return f"""\
gpu_device_info {{
  {info}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_interconnect_info {{ active_links: {facts["nvlinks"]} }}
  driver_version: "13.0.0"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{".".join(map(str, CUDNN))}"
  name: "{kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
device_description_str: "{kind}"
"""
