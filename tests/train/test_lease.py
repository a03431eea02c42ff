"""The lease: one start holds a run, and a start that lost it is told so."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.lease_starts import AT_ONCE_SECONDS, Start, Watch, file_of, move, refused

from replicax.errors import RunInUseError
from replicax.train.files import lease
from replicax.train.files.lease import MOST_KEPT, Lease, take_lease
from replicax.train.files.sealed import sealed

# On one host


def test_a_second_start_is_refused_at_once_and_the_first_is_unharmed(
    run: Path, holding: Start
) -> None:
    with Watch() as watch:
        said = refused(run)
    assert watch.slept < AT_ONCE_SECONDS
    assert said.startswith(f"{run} is in")
    assert "(start 1, host " in said
    assert f"pid {holding.pid}, since " in said
    os.kill(holding.pid, signal.SIGSTOP)
    assert refused(run) == said
    os.kill(holding.pid, signal.SIGCONT)
    holding.go_on()
    assert holding.line() == "unharmed"


@pytest.mark.promise("checkpoints.one-writer")
def test_a_killed_start_is_followed_at_once(
    run: Path, holding: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(holding.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holding.pid, os.WEXITED | os.WNOWAIT)  # a zombie: dead, with its number
    with Watch() as watch, take_lease(run) as taken:
        assert taken.token == 2
        taken.check()
    assert watch.slept < AT_ONCE_SECONDS
    assert capsys.readouterr().err == ""


def test_a_run_of_this_process_is_not_another_process(run: Path) -> None:
    with take_lease(run), pytest.raises(RunInUseError) as refused:
        take_lease(run)
    assert "another process" not in str(refused.value)


def test_a_process_id_that_came_again_is_not_the_holder(run: Path, holding: Start) -> None:
    file = file_of(run, 1)
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_bytes(sealed({**content, "started": content["started"] - 1}))
    with take_lease(run) as taken:
        assert taken.token == 2


def test_a_released_run_is_taken_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in (1, 2):
        with take_lease(run) as taken:
            assert taken.token == token
    move(monkeypatch)
    with Watch() as watch, take_lease(run) as taken:
        assert taken.token == 3
    assert watch.slept < AT_ONCE_SECONDS
    assert capsys.readouterr().err == ""
    taken.release()
    with pytest.raises(RunInUseError, match=r"start 3 has released\b"):
        taken.check()


RACE = """
import json
for _ in range(15):
    ready, told, done = os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            os.close(done[1])
            os.read(ready[0], 1)
            try:
                word = str(take_lease(folder).token)
            except Exception as error:
                word = type(error).__name__
            os.write(told[1], (word + "\\n").encode())
            os.read(done[0], 1)
            os._exit(0)
        children.append(child)
    os.write(ready[1], b"x" * 8)
    text = b""
    while text.count(b"\\n") < 8:
        text += os.read(told[0], 1000)
    print(json.dumps(text.decode().split()), flush=True)
    for end in (*ready, *told, *done):
        os.close(end)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.promise("checkpoints.one-writer")
def test_of_racing_processes_one_wins_and_the_next_number_is_its(run: Path) -> None:
    """No winner releases it, so all but the first race for the run of a dead process."""
    start = Start(RACE, run)
    try:
        for token in range(1, 16):
            words = json.loads(start.line())
            assert sorted(words) == [str(token), *["RunInUseError"] * 7]
    finally:
        start.end()
    left = sorted(path.name for path in (run / "lease").iterdir())
    assert [int(name.partition("-")[0]) for name in left] == list(range(16 - MOST_KEPT, 16))


def test_a_forked_child_gives_nothing_back(run: Path) -> None:
    start = Start(
        "held = take_lease(folder)\n"
        "if os.fork() == 0:\n"
        "    held.release()\n"
        "    os.closerange(3, 100)\n"
        "    os._exit(0)\n"
        "os.wait()\nprint('forked', flush=True)\nsys.stdin.readline()\nheld.check()\n"
        "print('unharmed', flush=True)",
        run,
    )
    try:
        assert start.line() == "forked"
        refused(run)
        start.go_on()
        assert start.line() == "unharmed"
    finally:
        start.end()


def test_a_child_that_outlives_its_parent_does_not_hold_the_run(run: Path) -> None:
    start = Start(
        "held = take_lease(folder)\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "print(child, flush=True)\nos.kill(os.getpid(), 9)",
        run,
    )
    child = int(start.line())
    try:
        start.process.wait()
        with take_lease(run) as taken:
            assert taken.token == 2
    finally:
        os.kill(child, signal.SIGKILL)
        start.end()


# On two hosts


@pytest.mark.usefixtures("quick")
def test_a_run_released_meanwhile_is_taken_before_the_wait_is_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 10.0)
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 20.0)
    held = take_lease(run)
    move(monkeypatch)
    timer = threading.Timer(0.2, held.release)
    timer.start()
    with Watch() as watch, take_lease(run) as taken:
        assert taken.token == 2
    timer.join()
    assert watch.seconds >= 0.2
    assert watch.slept < 2.0
    assert capsys.readouterr().err.endswith(f" {run}; waiting 20 s\n")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lives", [True, False])
def test_where_no_system_tells_of_processes_heartbeats_decide(
    run: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """As on Windows, or where processes of others are hidden."""

    def unknown(pid: int) -> dict[str, Any]:
        return {"host": "here", "boot": None, "pid": pid, "started": None}

    monkeypatch.setattr(lease, "_process", unknown)
    if not lives:
        monkeypatch.setattr(Lease, "_renew", lambda self: None)
    taken = take_lease(run)
    if lives:
        refused(run)
    else:
        assert take_lease(run).token == 2
    taken.release()


# Two starts at once


class Raced:
    """A file of another start, which exists from one listing to another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path, at: int, until: int) -> None:
        self.listings, self.sleeps = 0, 0
        listdir = os.listdir

        def raced(folder: Path) -> list[str]:
            self.listings += 1
            if self.listings == at:
                file.write_text("{}")
            elif self.listings == until:
                file.unlink()
            return listdir(folder)

        def slept(seconds: float) -> None:
            self.sleeps += 1

        monkeypatch.setattr(os, "listdir", raced)
        monkeypatch.setattr(time, "sleep", slept)


@pytest.mark.parametrize("token", [1, 2])
def test_who_sees_another_after_its_own_file_withdraws(
    run: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    """Its own file is there at the second listing; the other withdraws as well, in the pause."""
    other = run / "lease" / f"{token:08d}-{'0' * 16}.json"
    raced = Raced(monkeypatch, other, 2, 3)
    with take_lease(run) as taken:
        assert taken.token == 1
        assert raced.sleeps == 1
        assert [path.name for path in (run / "lease").glob("*.json")] == [file_of(run, 1).name]


def test_another_that_is_late_and_will_withdraw_does_not_stop_the_holder(run: Path) -> None:
    with take_lease(run) as taken:
        (run / "lease" / f"00000001-{'0' * 16}.json").write_text("{}")
        taken.check()
        refused(run)


def test_a_start_that_is_slow_does_not_count_backwards(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = run / "lease" / f"00000012-{'0' * 16}.released"
    Raced(monkeypatch, late, 2, 99)
    with take_lease(run) as taken:
        assert taken.token == 13
