"""A job on this host: environment of its processes, their end, and restarts."""

import os
import re
import sys
from pathlib import Path

import pytest
from launch.launching import environment, log, python, run
from support.figures import assert_mentions

from replicax.errors import ConfigError
from replicax.launch.compiled_folder import CACHE
from replicax.launch.supervisor import Outcome


def test_the_secret_of_a_job_is_in_the_environment_and_nowhere_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        for pid in (os.getpid(), os.getppid()):
            print(open(f"/proc/{pid}/cmdline").read().replace("\\0", " "))
        with open(os.path.join(FOLDER, f"secret-{me}"), "w") as file:
            file.write(os.environ["REPLICAX_SECRET"])
    """
    script = script.replace("FOLDER", repr(str(tmp_path)))
    drawn = set()
    for number in range(2):
        outcome = run(python(script), 2, tmp_path / str(number), quiet=False)
        assert outcome.exit_code == 0
        first, second = [(tmp_path / f"secret-{process}").read_text() for process in range(2)]
        assert first == second
        drawn.add(first)
    shown = "".join(capfd.readouterr()) + repr(outcome) + log(outcome, 0) + log(outcome, 1)
    assert "guard.py" in shown
    assert len(drawn) == 2
    assert not [secret for secret in drawn if secret in shown]


def test_each_process_gets_its_place(tmp_path: Path) -> None:
    script = """
        for name in sorted(os.environ):
            if name.startswith(("REPLICAX_", "JAX_", "PYTHONUNB", "MINE")):
                print(f"{name}={os.environ[name]}")
    """
    theirs = {"REPLICAX_PROCESS_ID": "7", "JAX_NUM_CPU_DEVICES": "9", "REPLICAX_SECRET_FILE": "x"}
    env = {**environment(MINE="kept"), **theirs}
    outcome = run(python(script), 3, tmp_path, devices_per_process=2, env=env)
    assert outcome.exit_code == 0
    assert outcome.message is None
    assert outcome.attempts == 1
    told = [dict(line.split("=", 1) for line in log(outcome, p).splitlines()) for p in range(3)]
    assert [each.pop("REPLICAX_PROCESS_ID") for each in told] == ["0", "1", "2"]
    files = [Path(each.pop("REPLICAX_FAILURE_FILE")) for each in told]
    assert all(path.is_absolute() and path.parent == tmp_path for path in files)
    assert len(set(files)) == 3
    assert told[0] == told[1] == told[2]
    assert told[0].pop("MINE") == "kept"
    host, port = told[0].pop("REPLICAX_COORDINATOR").split(":")
    assert host == "127.0.0.1"
    assert 1024 < int(port) < 65536
    assert len(told[0].pop("REPLICAX_JOB_ID")) == 16
    assert len(told[0].pop("REPLICAX_SECRET")) > 40
    assert told[0] == {
        "REPLICAX_PROCESSES": "3",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in os.environ.items() if name.startswith("JAX_")},
    }


def ignored_here() -> int:
    """The signals that this process ignores, a bit each."""
    return int(Path("/proc/self/status").read_text().partition("SigIgn:")[2].split()[0], 16)


def test_the_command_has_no_input_no_descriptor_and_signals_as_by_default(tmp_path: Path) -> None:
    script = """
        print(repr(sys.stdin.read()))
        print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
        print(open("/proc/self/status").read().partition("SigIgn:")[2].split()[0])
        print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getppid())
    """
    command = ("sh", "-c", f'exec "{sys.executable}" -S "$@"', "-", *python(script)[2:])
    lines = log(run(command, 2, tmp_path), 1).splitlines()
    assert lines[0] == "''"
    assert lines[1] == "[0, 1, 2]"
    # Python ignores SIGPIPE and SIGXFSZ; its parent may ignore others.
    assert int(lines[2], 16) & ~ignored_here() == 0
    assert lines[3] == "True True"


def again_and_again(tmp_path: Path, script: str, restarts: int, processes: int = 2) -> Outcome:
    return run(python(script), processes, tmp_path / "logs", restarts=restarts)


COUNTED = """
    path = {path!r} + str(me)
    with open(path, "a") as file:
        file.write(os.environ["REPLICAX_JOB_ID"] + " " + os.environ["REPLICAX_COORDINATOR"] + "\\n")
    starts = len(open(path).readlines())
"""


def test_all_are_started_again_as_another_job(tmp_path: Path) -> None:
    script = COUNTED.format(path=str(tmp_path / "starts"))
    script += """
    if me == 1 and starts < 3:
        fail(f"ValueError: bad value in {'abc'[starts]}")
        sys.exit(4)
    """
    outcome = again_and_again(tmp_path, script, restarts=5)
    assert (outcome.exit_code, outcome.attempts, outcome.message) == (0, 3, None)
    for process in range(2):
        starts = (tmp_path / f"starts{process}").read_text().splitlines()
        ids, places = zip(*(line.split() for line in starts), strict=True)
        assert len(set(ids)) == len(set(places)) == 3
    names = {path.name for path in (tmp_path / "logs").glob("*.log")}
    tries = ["", "-attempt-2", "-attempt-3"]
    assert names == {f"process-{process}{each}.log" for process in range(2) for each in tries}


@pytest.mark.parametrize("given", [{}, {"JAX_COMPILATION_CACHE_DIR": "/mine"}])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_may_restart_keeps_its_compiled_programs(
    given: dict[str, str], restarts: int, tmp_path: Path
) -> None:
    script = """
        print(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
        sys.exit(0 if "-attempt-2" in os.environ["REPLICAX_FAILURE_FILE"] else 7)
    """
    env = {name: each for name, each in os.environ.items() if name not in CACHE} | given
    outcome = run(python(script), 1, tmp_path, restarts=restarts, env=env)
    assert outcome.attempts == 1 + restarts
    folders = {path.read_text().strip() for path in tmp_path.glob("process-0*.log")}
    (folder,) = folders
    if given or not restarts:
        assert folder == given.get("JAX_COMPILATION_CACHE_DIR", "None")
    else:
        assert os.path.isabs(folder)
        assert not os.path.exists(folder)


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    script = "fail(f'ValueError: bad value at {hex(os.getpid())}', step=12); sys.exit(4)"
    outcome = again_and_again(tmp_path, script, restarts=9, processes=1)
    assert (outcome.exit_code, outcome.attempts) == (4, 3)
    assert_mentions(str(outcome.message), "same failure 3 times", "not help")


def test_processes_that_were_preempted_are_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = COUNTED.format(path=str(tmp_path / "starts")) + "    sys.exit(75 * (starts < 3))"
    outcome = run(python(script), 2, tmp_path / "logs", restarts=3, quiet=False)
    assert (outcome.exit_code, outcome.attempts, outcome.message) == (0, 3, None)
    said = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    saved = "replicax: stopped early with everything saved; restart"
    assert said == [f"{saved} 1 of 3", f"{saved} 2 of 3"]


def test_who_is_preempted_again_and_again_uses_up_the_restarts(tmp_path: Path) -> None:
    outcome = again_and_again(tmp_path, "sys.exit(75)", restarts=4)
    assert (outcome.exit_code, outcome.attempts, outcome.failure) == (75, 5, None)
    assert re.match(
        r"stopped early\b.*saved; start it\b.*; all 4 restarts\b.*used up$", outcome.message or ""
    )


LEFT = "if me == 0:\n    sys.exit(75)\n"


def test_one_that_saved_is_followed_by_those_that_blame_it(tmp_path: Path) -> None:
    """The others failed because it ended; failures of their own count."""
    blames = LEFT + "fail('process 0 is gone', blames=[0]); sys.exit(1)"
    outcome = run(python(blames), 3, tmp_path / "blames")
    assert (outcome.exit_code, outcome.failure) == (75, None)
    for how, words in (
        ("fail('OSError: no space left'); sys.exit(1)", "process 1 failed first: OSError: no spa"),
        ("fail('1 is late', blames=[1]); sys.exit(1)", "process 1 failed first: 1 is late"),
        ("sys.exit(1)", "process 1 failed first: exit code 1"),
    ):
        outcome = run(python(LEFT + how), 2, tmp_path / str(len(words)))
        assert outcome.exit_code == 1
        assert words in str(outcome.message)


@pytest.mark.parametrize(
    "rest",
    ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "sys.exit(0)"],
    ids=["dies of it", "deaf", "done"],
)
def test_a_job_that_goes_on_without_one_that_saved_says_so(
    rest: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"{LEFT}{rest}\ntime.sleep(60)"
    outcome = run(python(script), 3, tmp_path, quiet=False, grace_seconds=0.5)
    assert (outcome.exit_code, outcome.failure) == (75, None)
    assert 0.4 < outcome.seconds + 0.5 * (rest == "sys.exit(0)") < 5
    told = "stopped early; SIGTERM to processes 1 and 2, which have 0.5 s to exit"
    assert (told in capfd.readouterr().err) == (rest != "sys.exit(0)")


def test_a_failure_after_one_has_saved_ends_the_rest_at_once(tmp_path: Path) -> None:
    script = f"{LEFT}if me == 1: sys.exit(7)\ntime.sleep(60)"
    outcome = run(python(script), 3, tmp_path)
    assert outcome.exit_code == 7
    assert outcome.seconds < 5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no cores to give out")
def test_each_process_has_cores_of_its_own(tmp_path: Path) -> None:
    count = min(len(os.sched_getaffinity(0)), 4)
    outcome = run(python("print(*os.sched_getaffinity(0))"), count, tmp_path, pin=True)
    blocks = [set(log(outcome, process).split()) for process in range(count)]
    assert all(blocks)
    assert len(set.union(*blocks)) == sum(map(len, blocks))
    assert {int(core) for core in set.union(*blocks)} <= os.sched_getaffinity(0)


def refusal(tmp_path: Path, command: tuple[str, ...] = ("true",), **more: object) -> str:
    processes = more.pop("processes", 1)
    with pytest.raises(ConfigError) as refused:
        run(command, processes, tmp_path, **more)  # type: ignore[arg-type]
    return str(refused.value)


def test_what_cannot_be_started_is_refused_before_anything_is(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("")
    text = tmp_path / "mine"
    text.write_text("")
    logs = tmp_path / "logs"
    assert "no command" in refusal(logs, ())
    assert re.search(r"'no-such-program' is not\b.*the PATH", refusal(logs, ("no-such-program",)))
    assert re.search(r"\./no/such\b.*is not\b.*file", refusal(logs, ("./no/such",)))
    assert f"python {script}" in refusal(logs, (str(script),))
    assert "chmod +x" in refusal(logs, (str(text),))
    assert "--processes 0" in refusal(logs, processes=0)
    assert "--devices-per-process 0" in refusal(logs, devices_per_process=0)
    assert "--restarts -1" in refusal(logs, restarts=-1)
    most = len(os.sched_getaffinity(0))
    assert f"{most + 1} on {most} cores" in refusal(logs, processes=most + 1, pin=True)
    assert not logs.exists()


def test_logs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--logs" in refusal(tmp_path / "file" / "logs")
    (tmp_path / "process-0.log").write_text("kept")
    assert_mentions(refusal(tmp_path), str(tmp_path), "another job (process-0.log)")
    assert (tmp_path / "process-0.log").read_text() == "kept"
