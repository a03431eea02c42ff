"""Saves beside the training: failures are reported, and only the third ends the run."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.figures import assert_mentions
from support.saved_checkpoint import position_at, state_at

from replicax.core.ground.job import Alone
from replicax.errors import CheckpointError, RunInUseError
from replicax.train.checkpoints import saver as module
from replicax.train.checkpoints.manifest import read_manifest
from replicax.train.checkpoints.saver import MOST_FAILURES, Saver
from replicax.train.checkpoints.store import Store

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", 3, None)


@pytest.fixture
def saver(store: Store) -> Iterator[Saver]:
    made = Saver(store, 7, lambda: None, Alone(), 11, {"rate": 1})
    yield made
    if made._thread is not None:
        made._thread.join(20)


def save(saver: Saver, step: int) -> None:
    saver.save(state_at(step), position_at(step), {"batch": step})


def finished(saver: Saver) -> None:
    """Wait for the thread."""
    assert saver._thread is not None
    saver._thread.join(20)


def failed(saver: Saver, step: int) -> str:
    """Return the one alarm about a save that fails."""
    save(saver, step)
    finished(saver)
    (alarm,) = saver.poll()
    return alarm


def saved(store: Store) -> list[int]:
    return [step for step, _ in store.paths()]


def failing(error: Exception, times: int, whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return `whole`, raising `error` the first `times`."""
    left = [times]

    def call(*arguments: Any, **settings: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return whole(*arguments, **settings)

    return call


def in_waiting(error: Exception, times: int) -> Callable[..., Any]:
    """Return `begin_writing` whose wait fails."""
    whole, left = module.begin_writing, [times]

    def begin(*arguments: Any, **settings: Any) -> Callable[[], None]:
        wait = whole(*arguments, **settings)
        left[0] -= 1

        def fail() -> None:
            wait()
            raise error

        return fail if left[0] >= 0 else wait

    return begin


@pytest.mark.promise("checkpoints.storage-may-fail")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("where", ["begin_writing", "waiting", "file_entries", "write_manifest"])
def test_a_save_that_fails_is_told_once_and_the_next_is_tried(
    saver: Saver, store: Store, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    save(saver, 1)
    saver.wait()
    error = OSError(number, os.strerror(number))
    if where == "waiting":
        monkeypatch.setattr(module, "begin_writing", in_waiting(error, 1))
    else:
        monkeypatch.setattr(module, where, failing(error, 1, getattr(module, where)))
    assert_mentions(
        failed(saver, 2), "failed (1 in", f"row): {os.strerror(number)}; step 1 ", "last good"
    )
    assert saver.poll() == []
    assert not saver.wait()
    assert os.listdir(store.folder) == ["1"]
    save(saver, 3)
    assert saver.wait()
    assert saver.poll() == []
    assert saved(store) == [1, 3]


def test_words_of_tensorstore_are_the_systems(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("RESOURCE: writing x [OS error 28: No space left on device] [a='b']\nmore")
    monkeypatch.setattr(module, "begin_writing", in_waiting(error, 1))
    assert_mentions(failed(saver, 1), "(1 in", f": {os.strerror(errno.ENOSPC)}; no step")


@pytest.mark.parametrize("text", ["", "one\ntwo", "\n\n"])
def test_any_error_is_told_in_one_line(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(module, "begin_writing", in_waiting(KeyError(text), 1))
    alarm = failed(saver, 1)
    assert alarm.isprintable()
    assert ": ; " not in alarm


@pytest.mark.promise("checkpoints.storage-may-fail")
def test_the_third_in_a_row_ends_the_run(
    saver: Saver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, 5)
    saver.wait()
    monkeypatch.setattr(module, "write_manifest", failing(FULL, 99, module.write_manifest))
    for failure in range(1, MOST_FAILURES):
        assert re.search(rf"failed \({failure} .*row\): ", failed(saver, 5 + failure))
    save(saver, 9)
    finished(saver)
    with pytest.raises(CheckpointError) as ended:
        saver.poll()
    assert_mentions(str(ended.value), "3 saves", "have failed", os.strerror(errno.ENOSPC))
    assert_mentions(str(ended.value), "step 5", "last good", f"repair {store.folder}")
    assert saved(store) == [5]


def test_alarms_that_nobody_asked_for_are_kept(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_manifest", failing(FULL, 1, module.write_manifest))
    for step in (1, 2):
        save(saver, step)
    saver.wait()
    assert len(saver.poll()) == 1


@pytest.mark.parametrize("ask", ["poll", "wait", "save"])
def test_a_run_that_was_taken_over_ends(tmp_path: Path, ask: str) -> None:
    store = Store(tmp_path / "checkpoints", 3, None)

    def check() -> None:
        raise RunInUseError("start 8 of this run has taken over; this one stops")

    saver = Saver(store, 7, check, Alone(), 0, {})
    save(saver, 1)
    finished(saver)
    with pytest.raises(RunInUseError, match=r"^start 8\b.*taken over"):
        save(saver, 2) if ask == "save" else getattr(saver, ask)()
    assert saved(store) == []


def test_the_lease_is_looked_at_last_before_the_rename(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def check() -> None:
        (folder,) = store.folder.iterdir()
        assert read_manifest(folder).position.step == 1
        calls.append("check")

    saver = Saver(store, 7, check, Alone(), 0, {})
    whole = store.commit
    monkeypatch.setattr(
        store, "commit", lambda *arguments: (calls.append("commit"), whole(*arguments))
    )
    save(saver, 1)
    assert saver.wait()
    assert calls == ["check", "commit"]


def test_a_save_waits_for_the_one_before(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    going, most = [0], [0]
    whole, free = module.file_entries, threading.Event()

    def slow(folder: Path) -> Any:
        going[0] += 1
        most[0] = max(most[0], going[0])
        free.wait(20)
        going[0] -= 1
        return whole(folder)

    monkeypatch.setattr(module, "file_entries", slow)
    save(saver, 1)
    assert saver.poll() == []  # and returns at once
    assert saver.saved_step is None
    threading.Timer(0.2, free.set).start()
    save(saver, 2)
    assert saver.saved_step == 1
    assert saver.wait()
    assert (saver.saved_step, most[0]) == (2, 1)


def test_too_many_that_cannot_be_deleted_are_no_failure(
    saver: Saver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "retire", failing(FULL, 9, store.retire))
    for step in range(1, 6):
        save(saver, step)
        assert saver.wait()
    assert saved(store) == [1, 2, 3, 4, 5]
