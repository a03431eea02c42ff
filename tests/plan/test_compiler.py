"""Compilers in other processes: equal results to JAX in this one, and their failures."""

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import pytest
from plan.compilers import PACKAGES, beside_jax
from support.small_steps import SMALL_STEPS, SmallStep, mlp
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import read_memory
from replicax.errors import CompilerError, ConfigError, MissingDependencyError
from replicax.plan.compilation import Compilation, Description, TooLarge, too_large
from replicax.plan.compiler import CompilerProcess
from replicax.plan.exported import ExportedStep, export_step
from replicax.train.guarded import guarded

DEVICES, ROWS = 2, 16
HOST = Description("cpu", DEVICES, {})
SETTINGS: dict[str, dict[str, Any]] = {
    "jit": {"mode": "jit"},
    "shard_map": {"mode": "shard_map"},
    "zero1": {"layout": "zero1"},
    "fsdp": {"layout": "fsdp"},
    "bfloat16 reduced": {"mode": "shard_map", "reduction": "bfloat16"},
}


def program(step: SmallStep, devices: int = DEVICES) -> ExportedStep:
    return export_step(step.on(devices).dp, step.model, step.batch, "cpu", None)


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompilerProcess]:
    with closing(CompilerProcess(HOST)) as started:
        yield started


def folder_with(path: Path, package: str, version: str) -> Path:
    """A folder where `package` seems to be installed."""
    info = path / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return path


@pytest.mark.promise("plan.memory-to-the-byte")
@pytest.mark.parametrize("in_fit", [False, True], ids=["step", "fit"])
@pytest.mark.parametrize("accumulate", only([1], [1, 2]))
@pytest.mark.parametrize("kind", only(["jit", "fsdp"], SETTINGS))
@pytest.mark.parametrize("name", only(["mlp"], ["mlp", "lenet", "gpt2"]))
def test_a_planned_step_takes_what_the_run_will(
    compiler: CompilerProcess, name: str, kind: str, accumulate: int, in_fit: bool
) -> None:
    mesh = rx.make_mesh(DEVICES, devices=jax.devices()[:DEVICES])
    step = SMALL_STEPS[name](ROWS, mesh=mesh, accumulate=accumulate, **SETTINGS[kind])
    if in_fit:
        other = guarded(step.dp, step.dp.abstract_state(step.model))
        step = dataclasses.replace(step, dp=other)
    planned = compiler.compile(program(step))
    run = read_memory(step.dp.lower(step.model, step.batch).compile())
    assert isinstance(planned, Compilation)
    assert run.temporaries > 0
    # A run leaves out unused arguments: here the row indices.
    # jaxlib 0.11 places the buffers of an exported step in another order now and then.
    slack = 64 if jax.__version_info__ >= (0, 11) else 0
    assert abs(planned.memory.temporaries - run.temporaries) <= slack
    assert dataclasses.replace(planned.memory, temporaries=run.temporaries) == run


@pytest.mark.parametrize("platform", only(["tpu"], ["tpu", "cuda"]))
def test_without_a_compiler_its_extra_is_named(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if beside_jax(platform):
        pytest.skip(f"{PACKAGES[platform]} is installed beside jax")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    extra = {"tpu": "plan-tpu", "cuda": "plan-gpu"}[platform]
    with pytest.raises(MissingDependencyError, match=rf"not installed; .*\[{extra}\]'$"):
        CompilerProcess(Description(platform, 1, {}))


@pytest.mark.parametrize(
    ("platform", "package"),
    only(
        [("cuda", "jax-cuda13-plugin")],
        [("tpu", "libtpu"), ("cuda", "jax-cuda13-plugin"), ("cuda", "jax-cuda12-plugin")],
    ),
)
def test_a_compiler_of_another_version_is_refused_before_it_is_loaded(
    platform: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder_with(tmp_path, package, "0.0.1")))
    with pytest.raises(ConfigError, match=rf"^{package} 0\.0\.1 is installed, .* jax"):
        CompilerProcess(Description(platform, 1, {}))


def test_a_compiler_that_is_killed_at_work() -> None:
    with closing(CompilerProcess(HOST)) as compiler:
        pid = compiler._process.pid
        os.kill(pid, signal.SIGSTOP)  # or it might be done before
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(CompilerError, match=r"signal SIGKILL .*without an\b.*answer"):
            compiler.compile(program(mlp(ROWS)))
        with pytest.raises(CompilerError, match="signal SIGKILL"):  # and from then on
            compiler.compile(program(mlp(ROWS)))


def test_a_compiler_that_ends_at_once_has_its_last_line_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nprint('no good', flush=True)\nos._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CompilerError, match=r"exit code 3 .*: no good$"):
        CompilerProcess(HOST)


def test_a_compiler_that_does_not_answer() -> None:
    with closing(CompilerProcess(HOST)) as compiler:
        compiler._timeout_seconds = 0.2
        os.kill(compiler._process.pid, signal.SIGSTOP)
        with pytest.raises(CompilerError, match="not answered"):
            compiler.compile(program(mlp(ROWS)))
        with pytest.raises(CompilerError):  # a late answer is not taken for that of the next
            compiler.compile(program(mlp(ROWS)))
    assert compiler._process.poll() == -signal.SIGKILL


def test_what_is_no_program_fails_alone(compiler: CompilerProcess) -> None:
    good = program(mlp(ROWS))
    with pytest.raises(CompilerError, match=r"compiler fails\b.*this step: "):
        compiler.compile(ExportedStep(b"no module" * 100, 0, {"data": DEVICES}, 1))
    assert isinstance(compiler.compile(good), Compilation)


@pytest.mark.promise("plan.undisturbed")
def test_who_plans_is_not_disturbed() -> None:
    before = jax.devices(), dict(os.environ), os.listdir("/proc/self/fd")
    with closing(CompilerProcess(HOST)) as compiler:
        compiler.compile(program(mlp(ROWS)))
        assert compiler._process.poll() is None
    assert compiler._process.poll() is not None
    assert (jax.devices(), dict(os.environ), os.listdir("/proc/self/fd")) == before


def test_settings_and_files_of_who_plans_do_not_reach_the_compiler(
    compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = program(mlp(ROWS))
    usual = compiler.compile(asked)
    for name, value in {
        "JAX_PLATFORMS": "tpu,cpu",
        "JAX_NUM_CPU_DEVICES": "5",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "REPLICAX_PROCESSES": "4",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("jax", "random", "numpy", "replicax"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    with closing(CompilerProcess(HOST)) as other:
        answered = other.compile(asked)
    assert isinstance(usual, Compilation)
    assert isinstance(answered, Compilation)
    assert answered.memory == usual.memory


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory on HBM, the "
            "total memory required for HLO temporaries (20.13G) exceeds available HBM (15.75G).",
            20.13,
            15.75,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 21.19G of 15.75G hbm. Exceeds hbm capacity by 5.44G.\n\nTotal hbm",
            21.19,
            15.75,
        ),
    ],
)
def test_what_too_large_a_step_needs_is_read(message: str, needed: float, available: float) -> None:
    read = too_large(message)
    assert read.needed_bytes == pytest.approx(needed * 2**30, abs=1)
    assert read.available_bytes == pytest.approx(available * 2**30, abs=1)


def test_too_large_without_sizes_and_other_messages() -> None:
    assert too_large("RESOURCE_EXHAUSTED: no more") == TooLarge(None, None)
    assert too_large("INVALID_ARGUMENT: used 3G of 2G") is None
