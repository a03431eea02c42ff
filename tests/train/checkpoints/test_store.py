"""Listing, checking and removing checkpoints, also after a kill between two operations."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from support.saved_checkpoint import POSITION, position_at, save, sealed
from support.tiers import only

from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.manifest import ArrayEntry, read_manifest
from replicax.train.checkpoints.store import Store, verify_checkpoint

WANTED = {"step": ArrayEntry("int32", ())}


class Killed(BaseException):
    """Ends an operation on a store as a kill would."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that tests copy."""
    folder = tmp_path_factory.mktemp("original")
    save(folder, {"step": jnp.int32(1)})
    return folder


@pytest.fixture
def put(original: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the checkpoint of a step and puts it into a store."""

    def write(store: Store, step: int, *, commit: bool = True, holds: int | None = None) -> Path:
        written = store.temporary(step, 1, step)
        shutil.copytree(original, written)
        (written / "manifest.json").unlink()
        sealed(written, arrays=WANTED, position=position_at(step if holds is None else holds))
        if commit:
            store.commit(written, step)
        return written

    return write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", 3, None)


def names(store: Store) -> list[str]:
    return [path.name for _, path in store.paths()]


def good(store: Store, said: list[str] | None = None) -> str | None:
    """Return the name of the newest good checkpoint."""
    found = store.newest_good(WANTED, (said if said is not None else []).append)
    return None if found is None else found[0].name


def test_the_names_of_earlier_versions_are_in_order(store: Store) -> None:
    for again in ("", *(f".{number}" for number in range(2, 12))):
        (store.folder / f"step-000000005{again}").mkdir(parents=True)
    (store.folder / "5").mkdir()
    assert names(store)[-3:] == ["step-000000005.10", "step-000000005.11", "5"]


@pytest.mark.parametrize(
    "name",
    [
        *("step-5", "step-000000005.1", "step-000000005.02", "step-000000005.", "step-000000005 "),
        *("xstep-000000005", "step-00000000x", ".saving-000000005-1-1", "refused-step-000000005-1"),
        *("05", "-5", "5.2", "9" * 19, "step_5", "٥", ".replaced-5", "refused-5-1", "5 "),
        *("step-" + "9" * 19, "step-٠٠٠٠٠٠٠٠٥x", "step-000000005.-2", "step--00000005"),
    ],
)
def test_other_names_are_none(store: Store, name: str) -> None:
    (store.folder / name).mkdir(parents=True)
    assert names(store) == []


# Checkpoints that are kept.


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [
        (1, None, [12]),
        (3, None, [10, 11, 12]),
        (99, None, list(range(1, 13))),
        (1, 5, [5, 10, 12]),
        (2, 4, [4, 8, 11, 12]),
        (1, 1, list(range(1, 13))),
        (1, 99, [12]),
    ],
)
def test_so_many_stay(tmp_path: Path, keep: int, keep_every: int | None, kept: list[int]) -> None:
    store = Store(tmp_path, keep, keep_every)
    for step in range(1, 13):
        (tmp_path / str(step)).mkdir()
    store.retire()
    assert [step for step, _ in store.paths()] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_of_one_step_the_last_stays(tmp_path: Path) -> None:
    for name in ("step-000000005", "step-000000005.2", "step-000000006", "step-000000006.2"):
        (tmp_path / name).mkdir()
    Store(tmp_path, 1, 5).retire()
    assert names(Store(tmp_path, 1, None)) == ["step-000000005.2", "step-000000006.2"]


def test_its_place_is_on_the_disk_before_it_counts(
    store: Store, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, list[str]]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, names(store)))

    written = put(store, 7, commit=False)
    monkeypatch.setattr(os, "fsync", sync)
    store.commit(written, 7)
    assert synced == [(store.folder.stat().st_ino, ["7"])]


def test_leftovers_are_deleted_and_nothing_else(store: Store, put: Callable[..., Path]) -> None:
    put(store, 3)
    put(store, 4, commit=False)
    for name in (".retired-1-77", ".replaced-3", "refused-2-1", "mine", ".hidden"):
        (store.folder / name / "state").mkdir(parents=True)
    store.clean()
    kept = {"3", "refused-2-1", "mine", ".hidden"}
    assert set(os.listdir(store.folder)) == kept


def test_a_leftover_is_in_nobodys_way(store: Store, put: Callable[..., Path]) -> None:
    put(store, 3)
    (store.folder / ".replaced-3" / "state").mkdir(parents=True)
    put(store, 3)
    assert os.listdir(store.folder) == ["3"]


def test_a_link_among_the_leftovers_is_not_followed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    store.folder.mkdir()
    (store.folder / ".saving-000000001-1-1").symlink_to(outside)
    store.clean()
    assert (outside / "file").read_text() == "mine"


# Checkpoints that are good.


FILE = "default/_METADATA"


def flip(path: Path) -> None:
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(bytes([data[0] ^ 1]) + data[1:])


HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, f"{FILE} "),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "no file": (lambda path: (path / FILE).unlink(), f"{FILE} is missing"),
    "no arrays": (lambda path: shutil.rmtree(path / "default"), "is missing"),
    "another step": (lambda path: sealed(path, arrays=WANTED, position=POSITION), "step 120"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("")), ""),
    "empty": (lambda path: (shutil.rmtree(path), path.mkdir()), "manifest.json is missing"),
}


@pytest.mark.parametrize(("harm", "reason"), HARM.values(), ids=HARM)
def test_what_is_not_good_is_set_aside_with_the_reason(
    store: Store, put: Callable[..., Path], harm: Callable[[Path], Any], reason: str
) -> None:
    for step in (5, 1_006, 1_007):
        put(store, step)
    for step in (1_006, 1_007):
        harm(store.folder / str(step))
    said: list[str] = []
    assert good(store, said) == "5"
    assert len(said) == 2
    assert said[0].startswith("refused step 1,007: ")
    assert reason in said[0]
    assert "(set aside" in said[0]
    assert said[0].endswith(" refused-1007-1)")
    assert all(line.isprintable() for line in said)
    aside = ["refused-1006-1", "refused-1007-1"]
    assert sorted(path.name for path in store.folder.glob("refused-*")) == aside
    assert names(store) == ["5"]


def test_refused_twice_both_are_kept(store: Store, put: Callable[..., Path]) -> None:
    for _ in range(2):
        put(store, 5, holds=6)
        assert good(store) is None
    aside = ["refused-5-1", "refused-5-2"]
    assert sorted(os.listdir(store.folder)) == aside


def test_a_good_one_of_another_model_is_an_error_and_stays(
    store: Store, put: Callable[..., Path]
) -> None:
    put(store, 4)
    put(store, 5)
    wanted = {"step": ArrayEntry("int64", ())}
    with pytest.raises(ConfigError, match=r"/5 .*run: step .*int32"):
        store.newest_good(wanted, print)
    assert len(names(store)) == 2


def test_one_that_cannot_be_set_aside_is_not_used(
    store: Store, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 4)
    put(store, 5, holds=6)

    def refuse(*paths: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=rf"set aside .{os.strerror(errno.EACCES)}."):
        good(store)


# A kill between any two operations.


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Kills the process, in effect, before its n-th operation on files."""

    def arm(count: int) -> None:
        left = [count]

        def counted(whole: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **settings: Any) -> Any:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return whole(*arguments, **settings)

            return call

        for name in ("rename", "fsync", "unlink", "rmdir", "listdir"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))

    yield arm
    monkeypatch.undo()


@pytest.mark.promise("checkpoints.kill-while-saving")
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step again"])
@pytest.mark.parametrize("keep", only([1], [1, 2]))
def test_a_kill_at_any_time_leaves_a_good_one_no_older_than_before(
    tmp_path: Path,
    put: Callable[..., Path],
    kill_at: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    again: bool,
) -> None:
    step, at, killed = 5 if again else 6, 0, True
    while killed:
        store = Store(tmp_path / f"{at}", keep, None)
        for before in (3, 4, 5):
            put(store, before)
        written = put(store, step, commit=False)
        kill_at(at)
        killed = False
        try:
            store.commit(written, step)
            done = True
            store.retire()
        except Killed:
            killed = True
        monkeypatch.undo()
        next_one = Store(store.folder, keep, None)
        for _, path in next_one.paths():  # none is in its place half deleted
            verify_checkpoint(path, read_manifest(path))
        next_one.clean()
        said: list[str] = []
        newest = good(next_one, said)
        assert newest in ("5", str(step))
        assert said == []
        assert not list(store.folder.glob(".*"))
        next_one.retire()
        assert good(next_one) == newest
        assert len(names(next_one)) == keep
        at += 1
    assert done
    assert at > 10
    assert newest == str(step)
