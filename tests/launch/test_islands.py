"""Islands on this host: who is started again, who is given up, and how it ends."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launch.launching import launcher, pids, python, run
from support.figures import assert_mentions
from support.waiting import until

from replicax.launch import island_supervisor, process
from replicax.launch.compiled_folder import CACHE
from replicax.launch.island_supervisor import Island, island_labels

COUNT = """
    island = int(os.environ["REPLICAX_ISLAND"])
    path = f"{os.path.dirname(os.environ['REPLICAX_FAILURE_FILE'])}/starts-{island}"
    with open(path, "a") as file:
        file.write(f"{time.monotonic()}\\n")
    starts = len(open(path).readlines())
"""


def starts(folder: Path, island: int) -> list[float]:
    return [float(line) for line in (folder / f"starts-{island}").read_text().split()]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "died (signal 9)"),
        ("sys.exit(7)", "died (exit code 7)"),
        ("sys.exit(75)", "everything saved"),
    ],
)
def test_one_that_dies_is_started_again_and_the_others_never_stop(
    how: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other island waits for the second start of the one that died."""
    script = f"""{COUNT}
    if island == 1 and starts == 1:
        {how}
    other = path[:-1] + "1"
    wait(lambda: os.path.exists(other) and len(open(other).readlines()) == 2)
    print("over", starts)
    """
    outcome = run(python(script), 1, tmp_path, islands=2, restarts=3, quiet=False)
    assert (outcome.exit_code, outcome.attempts, outcome.message) == (0, 2, None)
    assert len(starts(tmp_path, 0)) == 1
    out, err = capfd.readouterr()
    assert {"[island 0] over 1", "[island 1] over 2"} <= set(out.splitlines())
    (line,) = err.splitlines()
    assert line.startswith("replicax: island 1 ")
    assert words in line
    assert line.endswith("; started again (restart 1)")
    logs = {path.name for path in tmp_path.glob("*.log")}
    assert logs == {"island-0.log", "island-1.log", "island-1-attempt-2.log"}


def test_all_processes_of_an_island_are_one_failure_unit(tmp_path: Path) -> None:
    script = """
        logs = os.path.dirname(os.environ["REPLICAX_FAILURE_FILE"])
        if os.environ["REPLICAX_ISLAND"] == "0":
            wait(lambda: os.path.exists(f"{logs}/island-1.1-attempt-2.log"))
        elif "attempt-2" not in os.environ["REPLICAX_FAILURE_FILE"]:
            sys.exit(5) if me == 0 else time.sleep(60)
    """
    outcome = run(python(script), 2, tmp_path, islands=2, restarts=3)
    assert (outcome.exit_code, outcome.attempts) == (0, 2)
    assert outcome.seconds < 20
    again = {path.name for path in tmp_path.glob("*attempt*.log")}
    assert again == {"island-1.0-attempt-2.log", "island-1.1-attempt-2.log"}


def test_one_with_a_wrong_configuration_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"{COUNT}\n    sys.exit(2 if island == 1 else time.sleep(0.5))"
    outcome = run(python(script), 1, tmp_path, islands=2, restarts=9, quiet=False)
    assert (outcome.exit_code, outcome.attempts) == (2, 1)
    assert len(starts(tmp_path, 1)) == 1
    assert_mentions(str(outcome.message), "island 1 died", "given up", "code 2", "island-1.log")
    assert outcome.message in capfd.readouterr().err


def test_one_that_keeps_dying_early_waits_longer_and_is_given_up(tmp_path: Path) -> None:
    script = f"{COUNT}\n    sys.exit(4)"
    outcome = run(python(script), 1, tmp_path, islands=1, restarts=2)
    assert (outcome.exit_code, outcome.attempts) == (4, 3)
    assert_mentions(str(outcome.message), "3 ends", "within 60 s", "island-0-attempt-3.log")
    first, second, third = starts(tmp_path, 0)
    assert second - first >= 0.2
    assert third - second >= 0.4


def test_one_that_the_system_cannot_start_again_has_ended_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, again = subprocess.Popen, tmp_path / "starts-0"
    monkeypatch.setattr(
        process.subprocess,
        "Popen",
        lambda command, **options: start("/no/such" if again.exists() else command, **options),
    )
    outcome = run(python(f"{COUNT}\n    sys.exit(4)"), 1, tmp_path, islands=1, restarts=1)
    assert (outcome.exit_code, outcome.attempts, outcome.failure) == (1, 2, None)
    assert_mentions(str(outcome.message), "ulimit", "2 ends")


def test_the_wait_doubles_to_five_seconds_and_is_reset_by_a_long_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(island_supervisor.time, "monotonic", lambda: clock[0])
    island = Island(0, lambda _: None, None)  # type: ignore[arg-type]
    waits = []
    for _ in range(7):
        assert island.lived() == 0.0
        waits.append(island.wait_seconds)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    clock[0] = 60.0
    assert island.lived() == 60.0
    assert (island.early, island.wait_seconds) == (0, 0.2)


@pytest.mark.parametrize("deaf", [False, True])
def test_the_rest_is_stopped_once_one_is_done(
    deaf: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """None is started again then."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else "pass"
    script = f"""{COUNT}
    if island > 0:
        {ignore}
        time.sleep(60)
    """
    outcome = run(python(script), 1, tmp_path, islands=2, grace_seconds=0.3, quiet=False)
    assert (outcome.exit_code, outcome.attempts, outcome.message) == (0, 1, None)
    assert outcome.seconds < 20
    first, second = capfd.readouterr().err.splitlines()
    assert_mentions(first, "SIGTERM", "island 1", "0.3 s")
    assert second.startswith("replicax: island 1 died")


SAVES = f"""{COUNT}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if island in SAVING else 3))
    with open(f"{{os.path.dirname(path)}}/pid-{{island}}", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(60)
"""


@pytest.mark.parametrize(("saving", "code"), [((0, 1), 75), ((0,), 3)])
def test_a_signal_stops_all_and_none_is_started_again(
    saving: tuple[int, ...], code: int, tmp_path: Path
) -> None:
    command = python(SAVES.replace("SAVING", str(saving)))
    with launcher(tmp_path, 1, command, islands=2, restarts=9) as started:
        pids(tmp_path, 2)
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) == code
    assert [len(starts(tmp_path, island)) for island in range(2)] == [1, 1]


def test_a_signal_that_the_islands_do_not_handle_is_the_exit_code(tmp_path: Path) -> None:
    script = SAVES.replace("signal.signal", "int or print")
    with launcher(tmp_path, 1, python(script), islands=2, restarts=9) as started:
        pids(tmp_path, 2)
        started.send_signal(signal.SIGINT)
        assert started.wait(20) == 128 + signal.SIGINT


def test_one_that_waits_for_its_start_is_not_started_after_a_signal(tmp_path: Path) -> None:
    script = f"{COUNT}\n    sys.exit(4)"
    with launcher(tmp_path, 1, python(script), islands=1, restarts=50) as started:
        until(lambda: (tmp_path / "starts-0").exists() and len(starts(tmp_path, 0)) == 4)
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) in (4, 128 + signal.SIGTERM)  # dying, or waiting for 1.6 s
    assert len(starts(tmp_path, 0)) == 4


def test_islands_share_the_compiled_programs(tmp_path: Path) -> None:
    script = 'print(os.environ["JAX_COMPILATION_CACHE_DIR"])'
    env = {name: each for name, each in os.environ.items() if name not in CACHE}
    assert run(python(script), 1, tmp_path, islands=2, env=env).exit_code == 0
    (folder,) = {path.read_text().strip() for path in tmp_path.glob("island-*.log")}
    assert os.path.isabs(folder)
    assert not os.path.exists(folder)


def test_labels_have_one_width() -> None:
    assert island_labels(2, 1) == ["island 0", "island 1"]
    assert island_labels(1, 2) == ["island 0.0", "island 0.1"]
    assert {len(label) for label in island_labels(11, 1)} == {9}
