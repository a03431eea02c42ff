"""Every test sees eight CPU devices, and nothing of the caller's Replicax settings."""

import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before jax is imported: a device count cannot change once the devices have been looked at, and
# child processes take the platform from the environment.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "8"  # threads of XLA, which would be more on a machine with more cores
if "XLA_FLAGS" not in os.environ:  # set, if to nothing, it is respected: `make test-all` does
    # Code that is made in half the time, and is slower; of children too.
    _flags = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # jax 0.12 has no others
        _flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(_flags)

import hypothesis
import jax
from support.command_line import Main, runner

hypothesis.settings.register_profile("replicax", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("replicax")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, before a command makes others

# A shell's background jobs are born deaf to Ctrl-C, those of nohup to SIGHUP, and tests with them.
for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture(scope="session", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program that this process has compiled is not compiled again for the next test."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))


@pytest.fixture(autouse=True)
def _no_replicax_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REPLICAX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; recipes that a test has loaded are forgotten."""
    modules, paths = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def main(folder: Path, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs the command line in an empty folder; its exit code, and what it printed."""
    return runner(capsys)
