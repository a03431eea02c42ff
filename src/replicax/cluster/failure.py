"""How a process ends that cannot go on: it says why, tells the others, and waits for nobody."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from replicax.cluster import variables
from replicax.cluster.cluster_job import Linked, current_job
from replicax.cluster.link import Link
from replicax.cluster.patience import Patience
from replicax.cluster.pulse import Pulse
from replicax.cluster.verdict import SAVED, Verdict
from replicax.errors import AgreementError

_LONGEST = 500
"""Characters of an error that the others repeat; its own process has printed it whole."""
_SERVING_SECONDS = 0.3
"""How long process 0 outlives its verdict: JAX's own service goes with it, which aborts whoever has
not yet said why it stops."""
_ENDING_SECONDS = 10.0
"""How long the link's thread may take to end a process."""

_last_words: list[Callable[[Verdict], None]] = []


def say(line: str) -> None:
    """Print a line of Replicax's own to stderr, whatever has become of that."""
    with contextlib.suppress(OSError, ValueError):
        print(f"replicax: {line}", file=sys.stderr, flush=True)


def before_stopping(tell: Callable[[Verdict], None]) -> None:
    """Have `tell` called, in another thread, just before the others end this process."""
    _last_words.append(tell)


def stop_now(process: int, pulse: Pulse, verdict: Verdict) -> None:
    """End this process because of `verdict`, whatever its main thread waits for."""
    if verdict.stacks:
        say(f"process {process} {pulse.stand(Patience())}; its Python stacks:")
        with contextlib.suppress(Exception):  # a stderr without a file, in a notebook
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
    others = ", as the others do" if process in verdict.blames else ""
    say(f"process {process} stops{others}: {verdict.reason}")
    _write_verdict(process, verdict)
    for tell in _last_words:
        with contextlib.suppress(Exception):
            tell(verdict)
    if process == 0:
        time.sleep(_SERVING_SECONDS)
    leave_at_once(verdict.code)


def stop_all_now(reason: str, code: int = SAVED) -> NoReturn:
    """End this process and all others of its job with `code`, whatever their main threads do.

    Each says the line `reason`. A process that has not yet joined the others ends alone. One that a
    failure ends already ends with that.
    """
    link = _link()
    if link is not None and link.stop_all(reason, code) is not None:
        time.sleep(_ENDING_SECONDS)  # the link's thread ends this process meanwhile
    told = os.environ.get(variables.PROCESS_ID)
    where = "" if link is None and told is None else f"process {_own_process(link)} stops: "
    say(f"{where}{reason}")
    leave_at_once(code)


def report(error: BaseException) -> Verdict | None:
    """Tell the other processes, if there are any, that this one fails with `error`.

    Return why it really ends, where that is not a fault of its own.
    """
    link = _link()
    process = _own_process(link)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    verdict = None
    if link is not None and isinstance(error, AgreementError):  # then the others know
        link.part()
    else:
        verdict = fail(text, collateral=is_collateral(error))
    if verdict is None:
        write_failure(process, text, blames=None)
    else:
        say(f"process {process} stops: {verdict.reason}")
        _write_verdict(process, verdict)
    return verdict


def fail(error: str, *, collateral: bool) -> Verdict | None:
    """Tell the other processes that this one fails with a line, as a victim of another if so.

    Return why all stop, if that is another's fault.
    """
    link = _link()
    if link is None:
        return None
    verdict = link.verdict or link.fail(error, collateral=collateral)
    return verdict if verdict and link.process not in verdict.blames else None


def is_collateral(error: BaseException) -> bool:
    """Return whether `error` looks like another process's fault."""
    # What a device says when its peers are gone; the types are jaxlib's and have no public name.
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")


def has_joined() -> bool:
    """Return whether other processes may wait for this one."""
    return _link() is not None


def end(error: BaseException, code: int) -> None:
    """Report `error`, and where others would be waited for, end the process with `code`."""
    verdict = report(error)
    if has_joined():
        leave_at_once(verdict.code if verdict else code)


def watch_exceptions() -> None:
    """Report an exception that ends the program, and end it without waiting for the others."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end(error, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def write_failure(process: int, error: str, *, blames: list[int] | None) -> None:
    """Leave word for whoever started this process, where it asked for that.

    The first word stands: what comes later is a consequence.
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
    """End the process without its exit handlers, among them JAX's, which wait for the others."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(timeout=0.5)  # the main thread may hold the lock of a stream, for good
    os._exit(code)


def _write_verdict(process: int, verdict: Verdict) -> None:
    if verdict.code != SAVED:  # which is no failure
        write_failure(process, verdict.reason, blames=list(verdict.blames))


def _link() -> Link | None:
    job = current_job()
    return job.link if isinstance(job, Linked) else None


def _own_process(link: Link | None) -> int:
    if link is not None:
        return link.process
    told = os.environ.get(variables.PROCESS_ID, "0")
    return int(told) if told.isdigit() else 0
