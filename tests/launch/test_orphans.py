"""No process outlives a killed launcher or guard; signals are passed on."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch.launching import alive, launcher, pids, python, run
from support.waiting import HANG_SECONDS, until, within

NOTE = """
def note(name):
    with open(f"{folder}/pid-{{me}}-{{name}}", "w") as file:
        print(os.getpid(), file=file)
"""
FAMILY = """
if os.fork() == 0:
    if me == 1: os.setsid()
    note("child")
    time.sleep(600)
note("itself")
print("started", flush=True)
time.sleep(600)
"""


def family(folder: Path, rest: str = FAMILY) -> tuple[str, ...]:
    return python(NOTE.format(folder=folder) + rest)


def guard_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.promise("faults.launcher-leaves-nobody")
@pytest.mark.parametrize("stopped", [False, True])
def test_kill_9_of_the_launcher_leaves_no_orphan(stopped: bool, tmp_path: Path) -> None:
    with launcher(tmp_path, 2, family(tmp_path)) as started:
        running = pids(tmp_path, 4)
        guards = {guard_of(int((tmp_path / f"pid-{p}-itself").read_text())) for p in range(2)}
        if stopped:
            os.kill(running[0], signal.SIGSTOP)
        started.kill()
    until(lambda: not [pid for pid in [*running, *guards] if alive(pid)])


def test_a_shell_and_its_program_do_not_outlive_the_launcher(tmp_path: Path) -> None:
    inner = f"echo $$ > {tmp_path}/pid-inner; exec sleep 600"
    with launcher(tmp_path, 1, ("bash", "-c", f"bash -c '{inner}'; echo after")) as started:
        (running,) = pids(tmp_path, 1)
        started.kill()
    until(lambda: not alive(running))


def test_kill_9_of_a_guard_leaves_no_orphan(tmp_path: Path) -> None:
    with launcher(tmp_path, 2, family(tmp_path, FAMILY.replace("me == 1", "False"))) as started:
        running = pids(tmp_path, 4)
        os.kill(guard_of(int((tmp_path / "pid-1-itself").read_text())), signal.SIGKILL)
        _, err = started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 137
    assert re.search(r"process 1 failed first: killed\b.*SIGKILL", err.decode())
    assert not [pid for pid in running if alive(pid)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux alone")
def test_kill_9_of_a_guard_is_enough_where_the_launcher_is_stopped(tmp_path: Path) -> None:
    with launcher(tmp_path, 1, family(tmp_path, "note('itself'); time.sleep(600)")) as started:
        (running,) = pids(tmp_path, 1)
        started.send_signal(signal.SIGSTOP)
        os.kill(guard_of(running), signal.SIGKILL)
        until(lambda: not alive(running))
        started.kill()


@pytest.mark.parametrize(
    ("sent", "number"),
    [
        *((each, each) for each in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")),
        *((each, "SIGTERM") for each in ("SIGHUP", "SIGQUIT")),  # a terminal that closes; Ctrl-\\
    ],
)
def test_signals_are_passed_on(sent: str, number: str, tmp_path: Path) -> None:
    script = f"""
def heard(*_):
    print("heard {number}")
    sys.exit(75)
signal.signal(signal.{number}, heard)
note("itself")
time.sleep(600)
"""
    with launcher(tmp_path, 2, family(tmp_path, script), quiet=True) as started:
        pids(tmp_path, 2)
        started.send_signal(getattr(signal, sent))
        assert started.wait(HANG_SECONDS) == 75
    for process in range(2):
        assert (tmp_path / f"process-{process}.log").read_text() == f"heard {number}\n"


SAVES = """
heard = []
def hear(*_):
    heard.append(1)
    note(f"heard-{{len(heard)}}")
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGUSR1, hear)
note("itself")
while len(heard) < {signals}: time.sleep(0.01)
print("heard", len(heard), flush=True)
sys.exit(75)
"""


def test_a_second_sigterm_is_passed_on_and_does_no_harm(tmp_path: Path) -> None:
    command = family(tmp_path, SAVES.format(signals=2))
    with launcher(tmp_path, 2, command) as started:
        pids(tmp_path, 2)
        started.terminate()
        pids(tmp_path, 4)  # both have heard of it: two signals at once would be one
        started.terminate()
        _, err = started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 75
    assert re.match(r"stopped early\b.*saved; start", err.decode().splitlines()[-1])
    assert [(tmp_path / f"process-{p}.log").read_text() for p in range(2)] == ["heard 2\n"] * 2


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_who_told_the_launcher_to_stop_wants_no_restart(number: str, tmp_path: Path) -> None:
    command = family(tmp_path, SAVES.format(signals=1))
    with launcher(tmp_path, 2, command, restarts=3) as started:
        pids(tmp_path, 2)
        started.send_signal(getattr(signal, number))
        assert started.wait(HANG_SECONDS) == 75
    assert len(list(tmp_path.glob("process-*.log"))) == 2


def test_one_that_is_too_young_to_save_dies_of_the_signal(tmp_path: Path) -> None:
    script = "if me: note('itself'); time.sleep(600)\n" + SAVES.format(signals=1)
    with launcher(tmp_path, 2, family(tmp_path, script)) as started:
        pids(tmp_path, 2)
        started.terminate()
        assert started.wait(HANG_SECONDS) == 75


def test_who_does_not_save_within_the_grace_has_not_saved(tmp_path: Path) -> None:
    deaf = "if me: signal.signal(signal.SIGTERM, signal.SIG_IGN); note('itself'); time.sleep(600)\n"
    script = deaf + SAVES.format(signals=1)
    with launcher(tmp_path, 2, family(tmp_path, script), grace_seconds=1.0) as started:
        pids(tmp_path, 2)
        started.terminate()
        assert started.wait(HANG_SECONDS) == 143


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_ends_them_ends_the_job(number: str, tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL); note('itself'); time.sleep(600)"
    with launcher(tmp_path, 2, family(tmp_path, script)) as started:
        pids(tmp_path, 2)
        started.send_signal(getattr(signal, number))
        _, err = started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 128 + getattr(signal, number)
    assert err.decode().splitlines()[-1] == f"stopped by {number}"


def test_a_program_in_a_shell_hears_of_sigterm_once(tmp_path: Path) -> None:
    script = """
def heard(*_):
    print("heard", flush=True)
    time.sleep(0.1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, heard)
note("itself")
time.sleep(600)
"""
    command = ("bash", "-c", '"$@"; echo after', "-", *family(tmp_path, script))
    with launcher(tmp_path, 1, command) as started:
        pids(tmp_path, 1)
        started.terminate()
        started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 143
    assert (tmp_path / "process-0.log").read_text() == "heard\nsaved\n"


DEAF = """
for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)
note("itself")
time.sleep(600)
"""


def test_a_second_ctrl_c_ends_them_at_once(tmp_path: Path) -> None:
    with launcher(tmp_path, 2, family(tmp_path, DEAF), grace_seconds=600.0) as started:
        running = pids(tmp_path, 2)
        assert started.stderr
        started.send_signal(signal.SIGINT)
        said = started.stderr.readline().decode()
        assert re.search(r"SIGINT forwarded\b.*have 600 s to exit, .* kills", said)
        assert all(map(alive, running))
        started.send_signal(signal.SIGINT)
        assert started.wait(HANG_SECONDS) == 130
    assert not any(map(alive, running))


def test_a_failure_while_stopping_is_named(tmp_path: Path) -> None:
    script = """
def heard(*_):
    raise OSError("no space left") if me == 1 else SystemExit(75)
signal.signal(signal.SIGTERM, heard)
note("itself")
time.sleep(600)
"""
    with launcher(tmp_path, 2, family(tmp_path, script)) as started:
        pids(tmp_path, 2)
        started.terminate()
        _, err = started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 1
    last = err.decode().splitlines()[-1]
    assert re.match(r"stopped by\b.*SIGTERM; process 1: OSError: no space\b.*\(see ", last)


def test_a_closed_output_stops_the_job(tmp_path: Path) -> None:
    script = 'note("itself")\nwhile True: print("line", flush=True); time.sleep(0.01)'
    with launcher(tmp_path, 2, family(tmp_path, script)) as started:
        running = pids(tmp_path, 2)
        assert started.stdout
        assert started.stderr
        started.stdout.readline()
        started.stdout.close()
        assert started.wait(HANG_SECONDS) == 141
        assert re.search(rb"stopped: .*output\b.*closed", started.stderr.read())
    assert not any(map(alive, running))


def test_a_signal_comes_through_while_nobody_reads(tmp_path: Path) -> None:
    script = 'note("itself")\nwhile True: os.write(1, b"x" * 999 + b"\\n")'
    with launcher(tmp_path, 2, family(tmp_path, script), grace_seconds=600.0) as started:
        running = pids(tmp_path, 2)
        time.sleep(0.3)
        started.send_signal(signal.SIGINT)
        until(lambda: not any(map(alive, running)))
        started.send_signal(signal.SIGINT)  # what waits to be shown is given up
        assert started.wait(HANG_SECONDS) == 130


def test_the_guard_is_fast(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())
    within(0.3, lambda: run(("true",), 1, next(folders)).seconds)


def test_the_launcher_needs_no_jax() -> None:
    src = Path(__file__).resolve().parents[2] / "src" / "replicax"
    script = (
        "import sys, types\n"
        "sys.modules['replicax'] = types.ModuleType('replicax')\n"
        f"sys.modules['replicax'].__path__ = [{str(src)!r}]\n"
        "import replicax.launch.supervisor\n"
        "print(*{'jax', 'numpy'} & set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []
