"""The lease: one start holds a run, and one that no longer does is told so."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from support.lease_starts import AT_ONCE_SECONDS, Start, Watch, file_of, move, refused

from replicax.errors import ConfigError, ReplicaxError, RunInUseError
from replicax.train import lease, lease_file
from replicax.train.lease import Lease, take_lease
from replicax.train.lease_file import MOST_KEPT

# On one host


def test_a_second_start_is_refused_at_once_and_the_first_is_unharmed(
    run: Path, holding: Start
) -> None:
    with Watch() as watch:
        said = refused(run)
    assert watch.slept < AT_ONCE_SECONDS
    assert f"{run} is held by another start of it (start 1, host " in said
    assert f"pid {holding.pid}, since " in said
    refused(run)  # nor has looking unlocked it
    holding.go_on()
    assert holding.line() == "unharmed"


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


@pytest.mark.parametrize("dies", [True, False])
def test_a_start_that_is_being_taken_down_is_given_time_to_end(
    run: Path, holding: Start, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its memory goes before its locks; here the file names a process that is no more."""
    monkeypatch.setattr(lease, "_ENDING_SECONDS", 10.0 if dies else 0.3)
    gone = {**json.loads(file_of(run, 1).read_bytes()), "process_started": 1}
    file_of(run, 1).write_text(json.dumps(gone))
    if dies:
        timer = threading.Timer(0.2, os.kill, (holding.pid, signal.SIGKILL))
        timer.start()
        with Watch() as watch, take_lease(run) as taken:
            assert taken.token == 2
        timer.join()
        assert 0.2 <= watch.seconds < 5
    else:
        refused(run)


def test_a_stopped_start_still_holds_its_run(run: Path, holding: Start) -> None:
    os.kill(holding.pid, signal.SIGSTOP)
    with Watch() as watch:
        refused(run)
    assert watch.slept < AT_ONCE_SECONDS
    os.kill(holding.pid, signal.SIGCONT)
    holding.go_on()
    assert holding.line() == "unharmed"


def test_a_run_is_taken_once_in_a_process_too(run: Path) -> None:
    """POSIX locks do not keep a process from itself, and looking must not lose the lock."""
    with take_lease(run) as taken:
        assert f"pid {os.getpid()}" in refused(run)
        taken.check()
        other = Start("try: take_lease(folder)\nexcept Exception as e: print(repr(e))", run)
        assert "RunInUseError" in other.line()
        other.end()


def test_a_lock_that_got_lost_does_not_make_a_living_start_dead(
    run: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever copies the run's folder within its process closes the lease file."""
    start = Start(
        "lease.RENEW_SECONDS = 0.02\nheld = take_lease(folder, wait_seconds=1)\n"
        "(folder / 'lease' / '00000001.json').read_bytes()\n"
        "print('lost', flush=True)\nsys.stdin.readline()",
        run,
    )
    try:
        assert start.line() == "lost"
        assert lease_file.look(run, 1).is_locked is False
        assert f"pid {start.pid}" in refused(run)
        assert "may be alive" in capsys.readouterr().err
    finally:
        start.end()


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
    with pytest.raises(RunInUseError, match="start 3 has given the run back"):
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


def test_of_racing_processes_one_wins_and_the_next_number_is_its(run: Path) -> None:
    """Every winner ends without giving back, so all but the first race for a dead one's run."""
    start = Start(RACE, run)
    try:
        for token in range(1, 16):
            words = json.loads(start.line())
            assert sorted(words) == [str(token), *["RunInUseError"] * 7]
    finally:
        start.end()
    left = sorted(path.name for path in (run / "lease").iterdir())
    assert left == [f"{token:08d}.json" for token in range(16 - MOST_KEPT, 16)]


def test_of_racing_threads_one_wins(run: Path) -> None:
    barrier = threading.Barrier(8)
    taken: list[Lease] = []
    errors: list[BaseException] = []

    def race() -> None:
        barrier.wait()
        try:
            taken.append(take_lease(run))
        except ReplicaxError as error:
            errors.append(error)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.token for each in taken] == [1]
    assert [type(error) for error in errors] == [RunInUseError] * 7
    taken[0].release()


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
def test_a_start_on_another_host_that_moves_holds_its_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with take_lease(run) as taken:
        move(monkeypatch)
        with Watch() as watch:
            assert "(start 1, host " in refused(run, wait_seconds=20)
        assert watch.slept < AT_ONCE_SECONDS
        taken.check()
    said = capsys.readouterr().err
    assert said.startswith("replicax: start 1 of ")
    assert said.endswith(" may be alive; waiting 20 s to see\n")
    assert said.count("\n") == 1


def test_a_start_on_another_host_that_stands_still_is_followed_and_told_so(
    run: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1000.0)
    frozen = take_lease(run, wait_seconds=2000)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    move(monkeypatch)
    with Watch() as watch:
        taken = take_lease(run, wait_seconds=0.3)
    assert watch.seconds >= 0.3
    assert taken.token == 2
    with pytest.raises(RunInUseError) as error:
        frozen.check()
    assert str(error.value) == (
        f"start 2 of this run, on host other-host (pid {os.getpid()}), has taken over; "
        "this one stops"
    )
    frozen.release()
    taken.check()
    refused(run, wait_seconds=20)  # nor has the old one's release given the new one's run back
    taken.release()


@pytest.mark.usefixtures("quick")
def test_a_run_released_meanwhile_is_taken_before_the_wait_is_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 10.0)
    held = take_lease(run)
    move(monkeypatch)
    timer = threading.Timer(0.2, held.release)
    timer.start()
    with Watch() as watch, take_lease(run) as taken:
        assert taken.token == 2
    timer.join()
    assert watch.seconds >= 0.2
    assert watch.slept < 2.0


def test_a_wait_that_could_not_see_a_sign_of_life_is_refused(run: Path) -> None:
    for seconds in (0.0, 9.9, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="every 5 s: wait at least 10"):
            take_lease(run, wait_seconds=seconds)
    assert not run.exists()
