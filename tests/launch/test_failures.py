"""The first failure is named with its cause, and the other processes end fast."""

import itertools
import re
import time
from pathlib import Path

import pytest
from launch.launching import alive, pids, python, run
from support.waiting import HANG_SECONDS, within

from replicax.launch import attempt


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have unlimited time to end by themselves, however busy the machine is."""
    monkeypatch.setattr(attempt, "TERM_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(attempt, "KILL_SECONDS", HANG_SECONDS)


def message(script: str, folder: Path, processes: int = 3) -> str:
    outcome = run(python(script), processes, folder)
    assert outcome.exit_code != 0
    assert outcome.failure
    return str(outcome.message)


def named(process: int, cause: str, folder: Path) -> str:
    return f"process {process} failed first: {cause} (see {folder}/process-{process}.log)"


NAMED = {
    "its own report comes first": (
        """
        here()
        found(1)
        if me == 0: fail("PeerFailed: process 1 failed", blames=[1], late=-5.0)
        if me == 1: fail("ValueError: bad\\n  value", step=12)
        if me == 2: fail("KeyError: later", late=60.0)
        if me == 1: gone(0), gone(2)
        print("RuntimeError: something else", file=sys.stderr)
        sys.exit(3 + me)
        """,
        (1, "ValueError: bad value", 4, 12),
    ),
    "one killed without a word is named by those that blame it": (
        """
        here()
        if me == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        gone(2)
        fail("PeerFailed: process 2 was lost", blames=[2], step=4)
        sys.exit(1)
        """,
        (2, r"killed\b.*SIGKILL \(out of\b.*memory\?\)", 137, 4),
    ),
    "one killed before the others fail of it comes first": (
        """
        here()
        if me == 1:
            sys.exit(7)
        gone(1)
        fail("JaxRuntimeError: connection reset")
        sys.exit(1)
        """,
        (1, "exit code 7", 7, None),
    ),
    "a frozen process": (
        """
        here()
        if me == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        stopped(2)
        fail("nothing from process 2 for 10 s", blames=[2])
        sys.exit(9)
        """,
        (2, r".*no progress \(nothing from process 2 for 10 s\)", 1, None),
    ),
    "one that blames itself is named with its words": (
        """
        fail("process 1 stands in step 5 for 20 s", blames=[1])
        sys.exit(1)
        """,
        (1, "process 1 stands in step 5 for 20 s", 1, None),
    ),
    "one that left early": (
        """
        here()
        if me == 1:
            sys.exit(0)
        gone(1)
        fail("process 1 left", blames=[1])
        sys.exit(1)
        """,
        (1, r"it ended early, exit code 0 \(process 1 left\)", 1, None),
    ),
    "a report that makes no sense is none": (
        """
        here()
        if me == 1:
            open(os.environ["REPLICAX_FAILURE_FILE"], "w").write('{"process": [')
            sys.exit(7)
        gone(1)
        """,
        (1, "exit code 7", 7, None),
    ),
}


@pytest.mark.parametrize(("script", "expected"), NAMED.values(), ids=NAMED)
def test_who_failed_first_and_why(
    script: str,
    expected: tuple[int, str, int, int | None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if "SIGSTOP" not in script:
        request.getfixturevalue("patient")
    process, cause, code, step = expected
    outcome = run(python(script), 3, tmp_path)
    whole = re.escape(named(process, "?", tmp_path)).replace(re.escape("?"), cause)
    assert re.fullmatch(whole, str(outcome.message))
    assert outcome.exit_code == code
    assert outcome.failure
    assert outcome.failure.step == step


@pytest.mark.promise("faults.aborted-by-jax")
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("late", [-60.0, 60.0])
def test_one_that_aborts_after_it_was_blamed_is_named_with_the_words_of_the_others(
    late: float, tmp_path: Path
) -> None:
    """JAX aborts a frozen process once its job has ended."""
    script = f"""
        here()
        if me == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        gone(1)
        fail("no heartbeat from process 1 for 3 s", blames=[1], late={late})
        sys.exit(1)
    """
    cause = "no heartbeat from process 1 for 3 s" if late < 0 else "killed by SIGABRT"
    assert message(script, tmp_path) == named(1, cause, tmp_path)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("fails", "cause"),
    [
        ("raise ValueError('bad value')", "ValueError: bad value"),
        (
            "try: {}[1]\n    except KeyError as error: raise ValueError('two\\nlines') from error",
            "ValueError: two",
        ),
        ("exec('1 +')", "SyntaxError: invalid syntax"),
        ("print('replicax: no such flag', file=sys.stderr); sys.exit(2)", "no such flag"),
        ("sys.exit('said at the end')", "exit code 1 (said at the end)"),
        ("sys.exit(7)", "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of memory?)"),
        (
            "print('Traceback (most recent call last):\\nOld: logged', file=sys.stderr)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL (out of memory?)",
        ),
    ],
)
def test_without_reports_the_first_that_ended_badly(fails: str, cause: str, tmp_path: Path) -> None:
    script = f"here()\nif me == 0:\n    {fails}\ngone(0)\nsys.exit(5)"
    assert message(script, tmp_path, processes=2) == named(0, cause, tmp_path)


def test_within_2_seconds_all_are_gone(tmp_path: Path) -> None:
    """Processes that ignore signals, stopped ones, grandchildren, and those in other groups."""
    script = """
        def note(name):
            with open(os.path.join(FOLDER, f"pid-{me}-{name}"), "w") as file:
                print(os.getpid(), file=file)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if me == 0:
            wait(lambda: len([name for name in os.listdir(FOLDER) if "pid-" in name]) == 6)
            open(os.path.join(FOLDER, "failed"), "w").write(str(time.time()))
            sys.exit(7)
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                note("grandchild")
                time.sleep(600)
            note("child")
            time.sleep(600)
        note("itself")
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    """
    folders = (tmp_path / str(number) for number in itertools.count())

    def seconds_until_all_are_gone() -> float:
        folder = next(folders)
        folder.mkdir()
        outcome = run(python(script.replace("FOLDER", repr(str(folder)))), 3, folder)
        ended = time.time()
        assert outcome.message == named(0, "exit code 7", folder)
        assert not [pid for pid in pids(folder, 6) if alive(pid)]
        return ended - float((folder / "failed").read_text())

    within(2, seconds_until_all_are_gone)


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    script = """
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), file=open(f"{beside}left", "w"))
            time.sleep(600)
        found("left")
    """
    folders = (tmp_path / str(number) for number in itertools.count())

    def seconds_of_the_job() -> float:
        folder = next(folders)
        outcome = run(python(script), 1, folder)
        assert outcome.exit_code == 0
        assert not alive(int((folder / "here-left").read_text()))
        return outcome.seconds

    within(2, seconds_of_the_job)
