"""Real signals to processes whose main thread does not run Python's signal handlers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import free_port
from support.tiers import EXHAUSTIVE, only
from support.waiting import HANG_SECONDS, within

SRC = Path(__file__).resolve().parents[2] / "src" / "replicax"
PROLOGUE = f"""
import sys, types
package = types.ModuleType("replicax")  # its public names, which load jax, are left out
package.__path__ = [{str(SRC)!r}]
sys.modules["replicax"] = package
import hashlib, os, threading, time
from replicax.cluster.failure import stop_all_now
from replicax.train.run.stopping import Interrupt, shown_signal

def say(line):
    print(line, flush=True)

def compile():  # for minutes, without the GIL, and deaf to signals
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def at_once(number):
    reason = f"{{shown_signal(number)}} before the first step; start it again to continue"
    stop_all_now(reason)
"""
JOIN = """
from functools import partial
from replicax.cluster.failure import stop_now
from replicax.cluster.cluster_job import Linked, set_job
from replicax.cluster.hub import Hub
from replicax.cluster.link import Link
from replicax.cluster.rendezvous import meet
from replicax.cluster.watchdog import Timeouts
from replicax.cluster.place import find_place
from replicax.cluster.watchdog import LoopProgress
from replicax.cluster.wire import Hello
from replicax.core.ground.in_flight import InFlight

def join():
    place = find_place(os.environ)
    if place.process == 0:
        Hub(place, Timeouts(), 30.0, lambda hellos: ())
    told = place.job, place.process, place.processes
    wire, go = meet(place.coordinator, Hello(*told), place.secret, 30.0, say)
    progress = LoopProgress(InFlight())
    stop = partial(stop_now, place.process, progress)
    set_job(Linked(place, Link(wire, place.process, go.names, Timeouts(), progress, stop)))
"""
SAID = "SIGTERM before the first step; start it again to continue"


class Jobs:
    """Starts processes, and kills them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, process: int = 0, processes: int = 1) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("REPLICAX_")}
        if processes > 1:
            env |= {
                "REPLICAX_PROCESS_ID": str(process),
                "REPLICAX_PROCESSES": str(processes),
                "REPLICAX_COORDINATOR": f"127.0.0.1:{self.port}",
                "REPLICAX_JOB_ID": "test",
            }
        env["REPLICAX_FAILURE_FILE"] = str(self.folder / f"failure-{process}.json")
        started = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + JOIN + textwrap.dedent(script)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(started)
        return started


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)  # it is inside now


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl")])
def test_a_lone_process_ends_while_it_compiles(number: int, name: str, jobs: Jobs) -> None:
    def seconds_to_end() -> float:
        process = jobs.start("""
            with Interrupt(at_once=at_once):
                say("ready")
                compile()
        """)
        ready(process)
        began = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=HANG_SECONDS)
        seconds = time.monotonic() - began
        assert process.returncode == 75
        assert err.startswith(f"replicax: {name}")
        assert not list(jobs.folder.iterdir())
        return seconds

    within(1.0, seconds_to_end)


COMPILES = """
with Interrupt(at_once=at_once):
    join()
    say("ready")
    compile()
"""


@pytest.mark.parametrize("victim", only([1], [0, 1, 2]))
def test_all_of_a_job_end_when_one_is_told_to(victim: int, jobs: Jobs) -> None:
    def seconds_to_end() -> float:
        processes = [jobs.start(COMPILES, process, 3) for process in range(3)]
        for process in processes:
            ready(process)
        began = time.monotonic()
        processes[victim].terminate()
        texts = [process.communicate(timeout=HANG_SECONDS) for process in processes]
        seconds = time.monotonic() - began
        assert [process.returncode for process in processes] == [75] * 3
        said = [f"replicax: process {number} stops: {SAID}\n" for number in range(3)]
        assert [err for _, err in texts] == said
        assert not list(jobs.folder.iterdir())  # no report of a failure
        return seconds

    within(3.0, seconds_to_end)


@EXHAUSTIVE
def test_all_may_be_told_at_once(jobs: Jobs) -> None:
    processes = [jobs.start(COMPILES, process, 3) for process in range(3)]
    for process in processes:
        ready(process)
    for process in processes:
        process.terminate()
    texts = [process.communicate(timeout=HANG_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [75] * 3
    assert [err for _, err in texts] == [f"replicax: process {n} stops: {SAID}\n" for n in range(3)]


def test_one_that_waits_for_the_others_to_come_ends_alone(jobs: Jobs) -> None:
    process = jobs.start("with Interrupt(at_once=at_once):\n    say('ready')\n    join()", 0, 2)
    ready(process)
    process.terminate()
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 75
    assert err == f"replicax: process 0 stops: {SAID}\n"
