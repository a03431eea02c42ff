"""End a process that cannot continue: print the cause, notify the others, and exit at once."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from replicax.cluster import variables
from replicax.cluster.cluster_job import Linked, current_job
from replicax.cluster.link import Link
from replicax.cluster.watchdog import SAVED, LoopProgress, StuckVerdict, Timeouts
from replicax.errors import AgreementError, IslandLeftError

_LONGEST = 500
"""Characters of an error that the others repeat; the failing process prints all of it."""
_SERVING_SECONDS = 0.3
"""How long process 0 outlives its verdict: when its JAX service ends, JAX aborts the processes that
have not yet printed why they stop."""
_ENDING_SECONDS = 10.0
"""How long the link's thread may take to end a process."""

_RAISED_IN_ALL = AgreementError, IslandLeftError
"""Errors that all processes of a job raise together."""

_last_words: list[Callable[[StuckVerdict], None]] = []


def say(line: str) -> None:
    """Print a line from Replicax to stderr; ignore a broken stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"replicax: {line}", file=sys.stderr, flush=True)


def before_stopping(tell: Callable[[StuckVerdict], None]) -> None:
    """Register `tell`, to be called in another thread just before the others end this process."""
    _last_words.append(tell)


def stop_now(process: int, progress: LoopProgress, verdict: StuckVerdict) -> None:
    """End this process because of `verdict`, even if its main thread is blocked."""
    if verdict.stacks:
        say(f"process {process} {progress.heartbeat(Timeouts())}; Python stack traces:")
        with contextlib.suppress(Exception):  # a stderr without a file, in a notebook
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
    others = ", like the others" if process in verdict.blames else ""
    say(f"process {process} stops{others}: {verdict.reason}")
    _write_verdict(process, verdict)
    for tell in _last_words:
        with contextlib.suppress(Exception):  # the process must end, whatever a hook does
            tell(verdict)
    if process == 0:
        time.sleep(_SERVING_SECONDS)
    leave_at_once(verdict.code)


def stop_all_now(reason: str, code: int = SAVED) -> NoReturn:
    """End all processes of the job with `code`, even if their main threads are blocked.

    Each prints the line `reason`. A process that has not yet joined the others ends alone. One that
    is already ending because of a failure keeps that failure's code.
    """
    link = _link()
    if link is not None and link.stop_all(reason, code) is not None:
        time.sleep(_ENDING_SECONDS)  # the link's thread ends this process meanwhile
    rank = os.environ.get(variables.PROCESS_ID)
    where = "" if link is None and rank is None else f"process {_own_process(link)} stops: "
    say(f"{where}{reason}")
    leave_at_once(code)


def report(error: BaseException) -> StuckVerdict | None:
    """Notify the other processes, if any, that this one fails with `error`.

    Return the actual cause if it lies in another process.
    """
    link = _link()
    process = _own_process(link)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    verdict = None
    if link is not None and isinstance(error, _RAISED_IN_ALL):
        link.part()
    else:
        verdict = fail(text, collateral=is_collateral(error))
    if verdict is None:
        write_failure(process, text, blames=None)
    else:
        say(f"process {process} stops: {verdict.reason}")
        _write_verdict(process, verdict)
    return verdict


def fail(error: str, *, collateral: bool) -> StuckVerdict | None:
    """Notify the other processes that this one fails, and whether as a victim of another.

    Return why all stop, if another process is at fault.
    """
    link = _link()
    if link is None:
        return None
    # A verdict that is there came first: this failure is a consequence of what it names.
    verdict = link.verdict or link.fail(error, collateral=collateral)
    return verdict if verdict and link.process not in verdict.blames else None


def is_collateral(error: BaseException) -> bool:
    """Return whether `error` looks like another process's fault."""
    # Raised when a device's peers are gone; the types are jaxlib's and have no public name, and
    # a program that waits for others while it is dispatched raises a ValueError.
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or "Gloo" in str(error)


def has_joined() -> bool:
    """Return whether other processes may wait for this one."""
    return _link() is not None


def end(error: BaseException, code: int) -> None:
    """Report `error`; if exiting would wait for other processes, exit at once with `code`."""
    verdict = report(error)
    if has_joined():
        leave_at_once(verdict.code if verdict else code)


def watch_exceptions() -> None:
    """Report an uncaught exception, and exit without waiting for the others."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and hasattr(error, "result"):
            _leave_together(error, error.result.exit_code)
        link = _link()
        if not (link and link.verdict and is_collateral(error)):  # its cause has been printed
            print_uncaught(before, kind, error, trace)
        code = error.exit_code if isinstance(error, _RAISED_IN_ALL) else 1
        end(error, 130 if issubclass(kind, KeyboardInterrupt) else code)

    sys.excepthook = hook


def print_uncaught(
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print an error as `before` does; one of what processes were started with is one line."""
    if isinstance(error, AgreementError):
        say(str(error))
    else:
        before(kind, error, trace)


def _leave_together(error: BaseException, code: int) -> None:
    """Exit after a Ctrl-C on which all processes have stopped: no process has failed."""
    link = _link()
    if link is not None:
        say(f"process {link.process} {error}")
        link.part()
        leave_at_once(code)


def write_failure(process: int, error: str, *, blames: list[int] | None) -> None:
    """Write a failure report for the launcher, if it requested one.

    Only the first report is kept: later failures are consequences.
    """
    path, job = os.environ.get(variables.FAILURE_FILE), current_job()
    if not path:
        return
    word = {
        "process": process,
        "time": time.time(),
        "error": error,
        "step": job.in_flight.finished if job else 0,
        "blames": blames,
    }
    with contextlib.suppress(OSError), open(path, "x") as file:
        json.dump(word, file)


def leave_at_once(code: int) -> NoReturn:
    """Exit without running exit handlers; JAX's wait for the other processes."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(timeout=0.5)  # the main thread may hold a stream's lock forever
    os._exit(code)


def _write_verdict(process: int, verdict: StuckVerdict) -> None:
    if verdict.code != SAVED:  # not a failure
        write_failure(process, verdict.reason, blames=list(verdict.blames))


def _link() -> Link | None:
    job = current_job()
    return job.link if isinstance(job, Linked) else None


def _own_process(link: Link | None) -> int:
    if link is not None:
        return link.process
    rank = os.environ.get(variables.PROCESS_ID, "0")
    return int(rank) if rank.isdigit() else 0
