"""Programs that a start compiles are read by the next one, with the same bits."""

import errno
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.recipe_runs import MLP

from replicax.cli import program_cache
from replicax.cli.program_cache import keep_programs
from replicax.text.cache_folder import prune, read_entry, write_entry

HITS, MISSES = "Persistent compilation cache hit", "PERSISTENT COMPILATION CACHE MISS"


@pytest.fixture
def configured() -> Iterator[Any]:
    """The configuration as a user leaves it, restored after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)
    program_cache.compilation_cache.reset_cache()


def train(folder: Path, cache: Path, *flags: str) -> str:
    return replicax(folder, cache, "train", *MLP, *flags, "--mode", "exact", "--micro-shards", "4")


def replicax(folder: Path, cache: Path, *arguments: str) -> str:
    """Run a command in a process of its own; return its output and JAX's log."""
    ours = ("JAX_", "NPROC")
    of_user = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "replicax", *arguments],
        env={
            **of_user,
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(cache),
            "JAX_DEBUG_LOG_MODULES": "jax._src.compiler",
            "JAX_ENABLE_COMPILATION_CACHE": str(cache.name != "none").lower(),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def bits(text: str) -> str:
    found = re.search(r"^bits .* (\w+)$", text, re.MULTILINE)
    assert found
    return found[1]


def test_a_second_start_compiles_nothing_and_has_the_same_bits(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = train(tmp_path, cache, "--steps", "4", "--run", "a")
    assert re.search(r"^cache  .*programs", first, re.MULTILINE)
    again = train(tmp_path, cache, "--steps", "4", "--run", "b")
    assert again.count(MISSES) == 0
    assert not re.search("^cache ", again, re.MULTILINE)
    assert again.count(HITS) > 2
    without = train(tmp_path, tmp_path / "none", "--steps", "4", "--run", "c")
    assert without.count(HITS) == without.count(MISSES) == 0
    assert bits(first) == bits(again) == bits(without)
    entries = sorted(cache.rglob("programs/*/*-cache"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in {entries[0].parent, *entries}} == {
        *(0o700, 0o600)
    }
    assert all(read_entry(path) for path in entries)


def test_a_second_verification_compiles_nothing(tmp_path: Path) -> None:
    verify = ["verify", "linear_regression", "--devices", "2", "--modes", "jit,exact"]
    kept = []
    for _ in range(2):
        assert re.search(
            r"^\d+ checks: .*pass", replicax(tmp_path, tmp_path, *verify), re.MULTILINE
        )
        kept.append(set(tmp_path.rglob("programs/*/*-cache")))
    assert len(kept[0]) > 5
    assert kept[1] == kept[0]


def test_a_users_own_cache_is_left_alone(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "/own")
    assert keep_programs(jax.devices()[0], prunes=True) is None
    assert configured.jax_compilation_cache_dir == "/own"
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_has_a_folder_for_its_features(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = keep_programs(jax.devices()[0], prunes=True)
    [folder] = tmp_path.glob("replicax/programs/cpu-*")
    assert configured.jax_compilation_cache_dir == str(folder)
    assert str(folder) in (said or "")
    configured.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(program_cache, "host_processor", lambda: "another")
    keep_programs(jax.devices()[0], prunes=True)
    assert len(list(tmp_path.glob("replicax/programs/cpu-*"))) == 2


def test_a_folder_that_cannot_be_made_is_said(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert os.strerror(errno.ENOTDIR) in (keep_programs(jax.devices()[0], prunes=True) or "")
    assert configured.jax_compilation_cache_dir is None


@pytest.mark.parametrize("of_others", ["writable", "owned"])
def test_a_folder_of_others_is_not_used_and_said(
    configured: Any, of_others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program_cache, "host_processor", lambda: "other")
    assert keep_programs(jax.devices()[0], prunes=True) is not None
    folder = Path(configured.jax_compilation_cache_dir)
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o755)  # as earlier versions made it
    assert keep_programs(jax.devices()[0], prunes=True) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    jax.config.update("jax_compilation_cache_dir", None)
    if of_others == "owned":
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    else:
        folder.chmod(0o770)
    assert str(folder) in (keep_programs(jax.devices()[0], prunes=True) or "")
    assert configured.jax_compilation_cache_dir is None


def test_a_program_in_place_of_another_is_not_run(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program_cache, "host_processor", lambda: "other")
    assert keep_programs(jax.devices()[0], prunes=True) is not None

    def results() -> list[float]:
        def three(x: jax.Array) -> jax.Array:
            return 3 * x

        def five(x: jax.Array) -> jax.Array:
            return 5 * x

        one = np.float32(1)
        return [float(jax.jit(each)(one)) for each in (three, five)]

    assert results() == [3, 5]
    (a,), (b,) = (list(tmp_path.rglob(f"jit_{name}-*-cache")) for name in ("three", "five"))
    a.write_bytes(b.read_bytes())
    assert read_entry(a) is None
    assert results() == [3, 5]
    assert read_entry(a) is not None


@pytest.mark.parametrize("kind", ["another", "cut", "pipe", "link", "writable"])
def test_an_entry_is_what_was_written_in_its_place(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "a-cache", tmp_path / "b-cache"
    for each in (path, other):
        write_entry(each, each.name.encode())
    assert (read_entry(path), read_entry(other)) == (b"a-cache", b"b-cache")
    if kind == "another":
        other.replace(path)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "writable":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "there")
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "there")
    assert read_entry(path) is None
    write_entry(path, b"new")
    assert read_entry(path) == b"new"


def test_the_programs_read_first_are_removed(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / f"{number}-cache"
        path.write_bytes(bytes(10))
        os.utime(path, (number, number))
    prune(tmp_path.iterdir(), 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-cache", "3-cache"]
