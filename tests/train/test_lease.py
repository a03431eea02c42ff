"""The lease: one start holds a run, and one that no longer does is told so."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax
from replicax.errors import CheckpointError, ConfigError, ReplicaxError, RunInUseError
from replicax.train import holder, lease, lease_file
from replicax.train.holder import Holder, parse_holder
from replicax.train.lease import Lease, take_lease
from replicax.train.lease_file import MOST_KEPT

# Without `replicax/__init__.py`, which loads jax: a second of each process, and threads that a fork
# must not meet.
PRELUDE = f"""
import os, sys, time, types
package = types.ModuleType("replicax")
package.__path__ = [{str(Path(replicax.__file__).parent)!r}]
sys.modules["replicax"] = package
from pathlib import Path
from replicax.train import lease
from replicax.train.lease import take_lease
assert not {{"jax", "numpy"}} & set(sys.modules)
folder = Path(sys.argv[1])
"""
HOLDS = """
held = take_lease(folder)
print(held.token, flush=True)
sys.stdin.readline()
held.check()
print("unharmed", flush=True)
"""
AT_ONCE_SECONDS = 1.0
OTHER = ("other-host", "another-boot")


class Start:
    """A process that runs a program with the run's folder as its argument."""

    def __init__(self, program: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


@pytest.fixture
def holding(run: Path) -> Iterator[Start]:
    start = Start(HOLDS, run)
    assert start.line() == "1"
    yield start
    start.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life every 20 ms, and a look every 50."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.05)


def move(monkeypatch: pytest.MonkeyPatch, host: tuple[str, str | None] = OTHER) -> None:
    """From here on this process is on another host."""
    monkeypatch.setattr(holder, "this_host", lambda: host)


def file_of(run: Path, token: int) -> Path:
    return run / "lease" / f"{token:08d}.json"


def refused(run: Path, **arguments: Any) -> str:
    with pytest.raises(RunInUseError) as error:
        take_lease(run, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


class Watch:
    """The seconds that a block took."""

    seconds = 0.0

    def __enter__(self) -> "Watch":
        self.since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.since


# On one host


def test_a_second_start_is_refused_at_once_and_the_first_is_unharmed(
    run: Path, holding: Start
) -> None:
    with Watch() as watch:
        said = refused(run)
    assert watch.seconds < AT_ONCE_SECONDS
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
    assert watch.seconds < AT_ONCE_SECONDS
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
    assert watch.seconds < AT_ONCE_SECONDS
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
    assert watch.seconds < AT_ONCE_SECONDS
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
        assert watch.seconds < AT_ONCE_SECONDS
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
    refused(run, wait_seconds=0.3)  # nor has the old one's release given the new one's run back
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
    assert 0.2 <= watch.seconds < 2.0


def test_a_wait_that_could_not_see_a_sign_of_life_is_refused(run: Path) -> None:
    for seconds in (0.0, 9.9, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="every 5 s: wait at least 10"):
            take_lease(run, wait_seconds=seconds)
    assert not run.exists()


# Storage


@pytest.mark.usefixtures("quick")
def test_without_locks_the_signs_of_life_decide(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    start = Start(
        "import fcntl\n"
        "def none(*_): raise OSError(37, 'No locks available')\n"
        "fcntl.lockf = none\nlease.RENEW_SECONDS = 0.02\n"
        "held = take_lease(folder, wait_seconds=1)\nprint('held', flush=True)\n"
        "sys.stdin.readline()",
        run,
    )
    try:
        assert start.line() == "held"
        assert f"pid {start.pid}" in refused(run, wait_seconds=0.3)
    finally:
        start.end()
    capsys.readouterr()
    with Watch() as watch, take_lease(run, wait_seconds=0.3) as taken:
        assert taken.token == 2
    assert watch.seconds >= 0.3
    assert "has no locks (No locks available)" in capsys.readouterr().err


def test_without_hard_links_a_number_is_still_given_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with take_lease(run) as taken:
        assert taken.token == 1
        assert lease_file.publish(run, 1) is None
        refused(run)
        taken.check()
        assert sorted(os.listdir(run / "lease")) == ["00000001.json"]


@pytest.mark.parametrize("call", ["link", "fsync", "listdir"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    take_lease(run).release()
    before = sorted((run / "lease").iterdir())
    turns = iter([False, True] if call == "listdir" else [True])  # once there is a file to leave
    real = getattr(os, call)

    def full(*arguments: Any) -> Any:
        if next(turns):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ConfigError, match=r"^\S+ cannot be written \(No space left on device\)"):
        take_lease(run)
    monkeypatch.undo()
    assert sorted((run / "lease").iterdir()) == before
    take_lease(run).release()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        take_lease(tmp_path / "file" / "x")


def test_a_lease_that_is_no_folder_is_refused(run: Path, tmp_path: Path) -> None:
    run.mkdir(parents=True)
    (run / "lease").touch()
    with pytest.raises(ConfigError, match="lease is no folder"):
        take_lease(run)
    (run / "lease").unlink()
    outside = tmp_path / "outside"
    outside.mkdir()
    for target in (outside, tmp_path / "nowhere"):
        (run / "lease").symlink_to(target)
        with pytest.raises(ConfigError, match="lease is no folder"):
            take_lease(run)
        (run / "lease").unlink()
    assert list(outside.iterdir()) == []


def test_a_removed_or_replaced_folder_is_noticed(run: Path) -> None:
    first = take_lease(run)
    shutil.rmtree(run)
    with pytest.raises(RunInUseError, match="folder was removed or replaced; this start stops"):
        first.check()
    with take_lease(run) as second:
        assert second.token == first.token == 1
        with pytest.raises(RunInUseError, match="folder was removed or replaced"):
            first.check()
        first.release()
        second.check()
        refused(run)


def test_a_folder_that_cannot_be_read_commits_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take_lease(run) as taken:

        def broken(_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", broken)
            with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)"):
                taken.check()
        taken.check()


def test_a_failing_renewal_is_not_fatal(
    run: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def broken(_: object) -> None:
        tried.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", broken)
    with take_lease(run, wait_seconds=1) as taken:
        assert tried.wait(5)
        tried.clear()
        assert tried.wait(5)
        taken.check()


# Junk


def test_names_that_are_no_tokens_are_passed_over(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    names = ["00000000.json", "7.json", "000000009.json", "00000009.json.bak", "x", ".hidden"]
    names += ["٠٠٠٠٠٠٠٩.json", "-0000009.json", "9" * 200 + ".json", "00000009.JSON", "a\nb"]
    for name in names:
        (run / "lease" / name).touch()
    with take_lease(run) as taken:
        assert taken.token == 1
        taken.check()
    assert {path.name for path in (run / "lease").iterdir()} > set(names)


def test_what_a_killed_taker_left_goes_after_an_hour(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    old, young = (run / "lease" / f".taking-{digit * 16}" for digit in "0a")
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    take_lease(run).release()
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize(
    "kind", ["empty", "huge", "deep", "folder", "pipe", "link", "dangling", "text"]
)
@pytest.mark.usefixtures("quick")
def test_a_newest_file_that_tells_nothing_is_waited_for(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outside = file_of(run, 4), tmp_path / "outside"
    path.parent.mkdir(parents=True)
    outside.write_bytes(Holder.this_process(4).to_json())
    before = outside.stat()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("link", "dangling"):
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    else:
        content = {"empty": b"", "huge": b" " * 10**6, "deep": b"[" * 4000, "text": b"\xff{"}
        path.write_bytes(content[kind])
    with Watch() as watch, take_lease(run, wait_seconds=0.2) as taken:
        assert taken.token == 5
        taken.check()
    assert watch.seconds >= 0.2
    assert "on an unknown host, may be alive" in capsys.readouterr().err
    assert (outside.stat().st_mtime_ns, outside.stat().st_ino) == (
        before.st_mtime_ns,
        before.st_ino,
    )
    assert {each.name for each in tmp_path.iterdir()} == {"runs", "outside"}


def test_a_number_once_given_back_is_not_given_out_again(run: Path) -> None:
    """Else a start would be born with its mark of release beside it."""
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "00000007.released").touch()
    with take_lease(run) as taken:
        assert taken.token == 8
        refused(run)


def test_a_start_that_is_slow_does_not_count_backwards(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "00000012.released").touch()
    assert lease_file.publish(run, 3) is None
    assert os.listdir(run / "lease") == ["00000012.released"]


def test_a_release_follows_no_link(run: Path, tmp_path: Path) -> None:
    with take_lease(run):
        (run / "lease" / "00000001.released").symlink_to(tmp_path / "outside")
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("quick")
def test_the_last_number_is_one_line(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "99999999.released").touch()
    take_lease(run).release()
    assert (run / "lease" / "100000000.released").exists()
    (run / "lease" / f"{10**12 - 1}.released").touch()
    with pytest.raises(ConfigError, match="999999999999 starts and no further"):
        take_lease(run)


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(Holder.this_process(1).to_json()), **changes}


def test_a_lease_file_says_who_holds_the_run(run: Path) -> None:
    with take_lease(run):
        content = json.loads(file_of(run, 1).read_bytes())
    assert content["token"] == 1
    assert content["host"] == os.uname().nodename
    assert content["pid"] == os.getpid()
    assert abs(content["started_at"] - time.time()) < 60
    read = parse_holder(json.dumps(content).encode(), 1)
    assert read is not None
    assert read.is_on_this_host
    assert read.is_running


@pytest.mark.parametrize(
    "changes",
    [
        {"token": 2},
        {"token": True},
        {"token": 1.0},
        {"host": ""},
        {"host": "h\x1b[2J"},
        {"host": "a\nb"},
        {"host": "h" * 256},
        {"host": None},
        {"boot_id": 3},
        {"pid": -1},
        {"pid": "1"},
        {"pid": True},
        {"pid": 2**63},
        {"process_started": 1.5},
        {"started_at": 1e300},
        {"started_at": float("nan")},
        {"started_at": -1},
        {"started_at": None},
        {"more": 1},
    ],
)
def test_a_holder_with_a_wrong_field_is_none(changes: dict[str, Any]) -> None:
    assert parse_holder(json.dumps(fields()).encode(), 1) is not None
    assert parse_holder(json.dumps(fields(**changes)).encode(), 1) is None


def test_a_process_id_that_came_again_is_not_the_holder() -> None:
    own = Holder.this_process(1)
    if own.process_started is None:
        pytest.skip("this system does not tell when a process began")
    earlier = parse_holder(json.dumps(fields(process_started=own.process_started - 1)).encode(), 1)
    assert own.is_running
    assert earlier is not None
    assert not earlier.is_running


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
contents = (
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(sorted(fields())), json_values).map(
        lambda changes: json.dumps(fields(**changes)).encode()
    )
)


@settings(max_examples=150, deadline=None)
@given(content=contents)
def test_whatever_a_lease_file_holds_the_run_is_taken_or_refused(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as parent:
        patch.setattr(lease, "RENEW_SECONDS", 0.001)
        patch.setattr(lease, "_LOOK_SECONDS", 0.001)
        run = Path(parent) / "x"
        file_of(run, 1).parent.mkdir(parents=True)
        file_of(run, 1).write_bytes(content)
        with take_lease(run, wait_seconds=0.002) as taken:
            assert taken.token == 2
            taken.check()
        assert file_of(run, 1).read_bytes() == content
        assert os.listdir(parent) == ["x"]
        assert os.listdir(run) == ["lease"]
