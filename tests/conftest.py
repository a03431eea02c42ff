"""Every test sees eight CPU devices, and none of the caller's settings of Replicax."""

import importlib.metadata
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# Before jax is imported: a device count cannot change once the devices have been looked at, and
# child processes take the platform from the environment.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TRACKIO_DIR"] = str(Path(__file__).parents[1] / "build/test-trackio")
# A logger without its server would try again for minutes, in a thread beside the next tests.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ["NPROC"] = "8"  # threads of XLA, which would be more on a machine with more cores
if Path("/dev/shm").is_dir():  # runs would wait for the disk at every save
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
if "XLA_FLAGS" not in os.environ:  # set, if to nothing, it is left as it is: `make oldest` does
    # Programs that compile in half the time or less, in children too; they run more slowly.
    _flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # since jax 0.12 it has no other
        _flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(_flags)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import hypothesis
import jax
from support import programs
from support.command_line import Main, runner
from support.cost import functions
from support.waiting import Threads

from replicax.train.hooks.drawing import CURVES

HERE = Path(__file__).parent
PIECES = json.loads((HERE / "durations.json").read_text())["pieces"]
"""Cases, cost and seconds by file of each target, from the last run that wrote them."""
TIERS: dict[str, dict[str, Any]] = json.loads((HERE / "tiers.json").read_text())
"""By file and function, the target that runs it, if not `test`; or a table, in which "*" stands for
all cases but those that it names. Written by benchmarks/test_choice.py."""
FAST_SECONDS = 0.05
"""Most seconds of a test, on average, in a file that `--fast` runs."""

# The machine may be busy; the same draws in every run, unless others are asked for.
hypothesis.settings.register_profile(
    "replicax", deadline=None, derandomize="TEST_RANDOM" not in os.environ
)
hypothesis.settings.load_profile("replicax")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, before a command makes others
for _name, _value in programs.CACHE.items():
    jax.config.update(_name.lower(), _value)

# Background jobs of a shell ignore SIGINT, and nohup's ignore SIGHUP: restore the defaults.
for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only files whose tests take no time")
    parser.addoption("--no-tiers", action="store_true", help="as if tests/tiers.json were empty")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-tiers"):
        TIERS.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone of which the target runs no test."""
    name = collection_path.relative_to(HERE).as_posix()
    if not name.endswith(".py") or config.option.markexpr != "not exhaustive":
        return None
    if config.getoption("--fast"):
        tests, *_, seconds = _times("test").get(name, [1, 0.0])
        if seconds > FAST_SECONDS * tests:
            return True
    known = TIERS.get(name, {}).items()
    left = {test.rpartition("::")[2] for test, tier in known if "test" not in _tiers(tier)}
    return (bool(left) and left.issuperset(functions(collection_path))) or None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what left `make test`; run the slowest files first, so that short ones fill the end."""
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        function, bracket, case = name.partition("[")
        tier = TIERS.get(file, {}).get(function, "test")
        if isinstance(tier, dict):
            tier = tier.get(bracket + case, tier["*"])
        if tier != "test":
            item.add_marker("exhaustive" if tier == "test-all" else "everything")
        if item.get_closest_marker("everything"):
            item.add_marker("exhaustive")
    times = _times("test-all" if config.option.markexpr.startswith("exhaustive") else "test")

    def place(item: pytest.Item) -> tuple[float, str]:
        name = item.path.relative_to(HERE).as_posix()
        return -times.get(name, [1, 60.0])[-1], name

    items.sort(key=place)


def _tiers(tier: Any) -> set[str]:
    return set(tier.values()) if isinstance(tier, dict) else {tier}


def _times(piece: str) -> dict[str, list[float]]:
    return PIECES.get(piece, {}).get("files", {})


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        programs.prune()


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LLVM optimizes, as for users: to compare the bits of different programs."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    monkeypatch.setenv(name.upper(), "0")  # for child processes
    jax.config.update(name, False)
    jax.clear_caches()  # programs compiled the other way have other bits
    yield
    jax.config.update(name, before)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _no_replicax_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REPLICAX_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands in processes of their own keep nothing in the user's cache."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}):
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_drawn() -> Iterator[None]:
    """Runs draw no curves, which would take longer than the runs."""

    def start(folder: Path, *, last: bool = False) -> Any:
        (folder / CURVES).touch()
        return mock.Mock(poll=lambda: 0)

    with mock.patch("replicax.train.hooks.curves.start_drawing", start):
        yield


@pytest.fixture
def prefetching() -> Threads:
    """Lists the threads that prefetch batches, without those that earlier tests left behind."""
    before = set(threading.enumerate())

    def since() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if thread.name == "replicax-prefetch"]

    return since


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
    """Runs the command line in an empty folder; returns its exit code and output."""
    return runner(capsys)
