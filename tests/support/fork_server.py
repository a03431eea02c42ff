"""Python processes that have imported everything, in milliseconds.

A server imports once what the job needs, makes no devices, and forks for each start. What it
forks goes on as `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` would: it runs that and
ends with the interpreter, exit handlers and all. JAX's variables are those of its start.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PRELOADED = ("jax", "jax.experimental.multihost_utils", "optax", "orbax.checkpoint", "replicax")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclasses.dataclass
class Child:
    """A process that the server has forked."""

    pid: int
    out: Path
    err: Path
    started_at: float
    """Seconds since the epoch, as all times here."""
    status: int | None = None
    """Its exit code; negative, the signal that ended it."""
    ended_at: float = 0.0
    cpu_seconds: float = 0.0

    def signal(self, number: int) -> None:
        """Send it a signal, where it still runs: the server reaps it only afterwards."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """Forks processes, each in a session of its own, and tells how they end.

    Many threads may use it. All that it forked is killed when it is closed, and dies with it.

    Args:
        env: of the server, and of all that it forks.
        preloaded: modules that it imports.
    """

    def __init__(self, env: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        self.env = dict(env)
        ours, its = socket.socketpair()
        with its:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(its.fileno()), *preloaded],
                env=dict(env),
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._lines = ours.makefile("r")
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._forked: dict[int, int] = {}
        self._children: dict[int, Child] = {}
        self._ended: dict[int, dict[str, Any]] = {}
        self._sending = threading.Lock()
        self._open = True
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def fork(self, command: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Child:
        """`python COMMAND` with `env` added to the environment; its output goes to files."""
        number = next(self._numbers)
        order = {"number": number, "command": list(command), "env": dict(env), "cwd": os.getcwd()}
        line = json.dumps({**order, "out": str(out), "err": str(err)}) + "\n"
        started_at = time.time()
        with self._sending:
            self._socket.sendall(line.encode())
        with self._changed:
            self._changed.wait_for(lambda: number in self._forked or not self._open, 30.0)
            if number not in self._forked:
                raise RuntimeError("the fork server does not answer")
            child = Child(self._forked.pop(number), out, err, started_at)
            self._children[child.pid] = child
            self._settle()
        return child

    def wait(self, children: Sequence[Child], timeout_seconds: float) -> bool:
        """Until all `children` have ended; whether they have."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(child.status is not None for child in children), timeout_seconds
            )

    def wait_any(self, children: Sequence[Child], timeout_seconds: float) -> bool:
        """Until one of `children` has ended; whether one has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(child.status is not None for child in children), timeout_seconds
            )

    def close(self) -> None:
        """Kill what still runs, and the server."""
        for child in list(self._children.values()):
            child.signal(signal.SIGKILL)
        self._server.kill()
        self._server.wait()
        self._socket.shutdown(socket.SHUT_RDWR)  # a killed child may still have the other end
        self._listening.join()
        self._socket.close()

    def _listen(self) -> None:
        with self._lines, contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                told = json.loads(line)
                with self._changed:
                    if "number" in told:
                        self._forked[told["number"]] = told["pid"]
                    else:
                        self._ended[told.pop("pid")] = told
                        self._settle()
                    self._changed.notify_all()
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _settle(self) -> None:
        """Bring together the children and the news of their ends, whichever came first."""
        for pid in self._ended.keys() & self._children.keys():
            child = self._children.pop(pid)
            for name, value in self._ended.pop(pid).items():
                setattr(child, name, value)


def _serve(connection: socket.socket) -> None:
    """Fork as ordered; returns in the child, with its command in `sys.argv`."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    unread = b""
    while True:
        readable, _, _ = select.select([connection, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _tell_ended(connection)
        if connection not in readable:
            continue
        received = connection.recv(65536)
        if not received:
            sys.exit(0)
        *orders, unread = (unread + received).split(b"\n")
        for line in orders:
            order = json.loads(line)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (connection, woken, wake):
                    each.close()
                _become(order)
                return
            _send(connection, {"number": order["number"], "pid": pid})


def _tell_ended(connection: socket.socket) -> None:
    while True:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        cpu_seconds = used.ru_utime + used.ru_stime
        told = {"pid": pid, "status": code, "ended_at": time.time(), "cpu_seconds": cpu_seconds}
        _send(connection, told)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _become(order: dict[str, Any]) -> None:
    """Set up the child: session, files, environment and arguments."""
    os.setsid()
    for path, number in ((order["out"], 1), (order["err"], 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    jax = sys.modules.get("jax")
    for name, value in order["env"].items():
        if jax and name.startswith("JAX_"):  # which jax read when it was imported
            known = jax.config.values[name.lower()]
            jax.config.update(name.lower(), value if known is None else type(known)(value))
    sys.argv[:] = order["command"]


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _main() -> None:
    _die_with_parent()
    import importlib

    connection, *preloaded = sys.argv[1:]
    for name in preloaded:
        importlib.import_module(name)
    jax = sys.modules.get("jax._src.xla_bridge")
    if (jax and jax._backends) or threading.active_count() > 1:
        raise RuntimeError("a preloaded module has made devices or threads: nothing may be forked")
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(connection)))
    _die_with_parent()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = ""
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
