"""Jobs of tiny commands, for the tests."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.waiting import until

from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import Outcome, launch

PROLOGUE = """
import json, os, signal, sys, time
me = int(os.environ["REPLICAX_PROCESS_ID"])
def fail(error, blames=None, step=None, late=0.0):
    with open(os.environ["REPLICAX_FAILURE_FILE"], "x") as file:
        json.dump({"process": me, "time": time.time() + late, "error": error, "step": step,
                   "blames": blames}, file)
beside = os.path.join(os.path.dirname(os.environ["REPLICAX_FAILURE_FILE"]), "here-")
def wait(true):
    while not true():
        time.sleep(0.005)
def here():
    with open(f"{beside}{me}.part", "w") as file:
        print(os.getpid(), os.getppid(), file=file)
    os.rename(f"{beside}{me}.part", f"{beside}{me}")
def found(process):
    wait(lambda: os.path.exists(f"{beside}{process}"))
    return open(f"{beside}{process}").read().split()
def gone(process):
    guard = found(process)[1]
    wait(lambda: not os.path.exists(f"/proc/{guard}"))
def stopped(process):
    pid = found(process)[0]
    wait(lambda: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "T")
"""


def python(script: str) -> tuple[str, ...]:
    """A command that runs `script`.

    It knows `me`, and `fail` to leave a report. After `here()` of a process the others can wait
    for what becomes of it: `gone(process)`, once the launcher knows of its end, `stopped(process)`.
    """
    return (sys.executable, "-S", "-c", PROLOGUE + textwrap.dedent(script))


def run(command: Sequence[str], processes: int, folder: Path, **more: Any) -> Outcome:
    """Launch in `folder`, in silence."""
    of_job = {"pin", "restarts", "devices_per_process", "islands"} & more.keys()
    fields = {name: more.pop(name) for name in of_job}
    job = JobSpec(tuple(command), processes, **fields)
    return launch(job, logs=folder, **{"quiet": True, **more})


@contextlib.contextmanager
def launcher(
    folder: Path, processes: int, command: Sequence[str], **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, gone at the latest when the block is left.

    Replicax's public names, which load jax, are left out.
    """
    of_job = {name: more.pop(name) for name in ("restarts", "islands") if name in more}
    src = Path(__file__).resolve().parents[2] / "src"
    script = f"""
import sys, types
package = types.ModuleType("replicax")
package.__path__ = [{str(src / "replicax")!r}]
sys.modules["replicax"] = package
from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import launch
job = JobSpec({tuple(command)!r}, {processes}, **{of_job!r})
outcome = launch(job, logs={str(folder)!r}, **{more!r})
print(outcome.message, file=sys.stderr)
sys.exit(outcome.exit_code)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; zombies do not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids(folder: Path, count: int) -> list[int]:
    """Return what `count` processes wrote to files `pid-*` in `folder`."""

    def written() -> list[int]:
        found = [path.read_text() for path in folder.glob("pid-*")]
        complete = [int(text) for text in found if text.endswith("\n")]
        return complete if len(complete) == count else []

    found: list[int] = until(written)
    return found


def log(outcome: Outcome, process: int) -> str:
    return (outcome.logs / f"process-{process}.log").read_text()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}
