"""Methods side by side, between islands whose links have a limited rate.

Utilization is the time of steps without any exchange, divided by that of the same steps with it:
the same islands on the same cores, one after the other in each repetition.
"""

import contextlib
import dataclasses
import json
import os
import random
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from shaped_links import ShapedLinks, shaped_links
from slow_links_island import ALONE, LINK_CONTROL
from slow_links_methods import LinkMethod

from replicax.bench.machine import Neighbours, environment, notes_on_neighbours, own_cores
from replicax.bench.measurement import Display
from replicax.bench.numbers import ratios
from replicax.cluster import variables
from replicax.errors import ClusterError
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.net.secret import SECRET
from replicax.text.wording import counted

LinkForecast = Callable[[LinkMethod, Sequence[Any], float], float]
"""`forecast(method, arrays, step_seconds)`: the utilization that is expected."""
OWN_STEPS = 10
"""Steps in which the own work of an island is timed."""
_PATIENT = {"REPLICAX_STALL_SECONDS": "600", "REPLICAX_SILENT_SECONDS": "120"}
"""An exchange over a slow link is no stall, and may delay heartbeats."""


@dataclasses.dataclass(frozen=True)
class LinkCase:
    """One method."""

    method: LinkMethod
    step_seconds: tuple[float, ...]
    """Mean time of a step, over the islands, in each repetition."""
    utilization: tuple[float, ...]
    """Time without an exchange, divided by that with it, in each repetition."""
    forecast: float
    """Utilization as planned, from the bytes and the rate of the links."""
    own_seconds_per_step: float
    """Time of a step in which an island encodes, decodes and applies what it would send, without
    sending it: the median."""
    forecast_with_own: float
    """The forecast with this work, which no network hides."""
    bytes_per_step: float
    """Bytes that an island sent in a step, counted on its sockets, with headers: the median."""
    formula_bytes_per_step: float
    """The same, by the formula for the payload."""


@dataclasses.dataclass(frozen=True)
class LinkBench:
    """All methods over one network, between a number of islands."""

    network: str
    islands: int
    bytes_per_second: float
    shaped_by: str
    why_relay: str
    """Why no namespaces were used; empty if they were."""
    parameters: int
    alone_step_seconds: tuple[float, ...]
    """Mean time of a step without an exchange, in each repetition."""
    cases: tuple[LinkCase, ...]
    repetitions: int
    environment: Mapping[str, Any]
    seed: int
    seconds: float
    notes: tuple[str, ...]


def bench_links(
    command: Sequence[str],
    islands: int,
    network: str,
    bytes_per_second: float,
    methods: Sequence[LinkMethod],
    forecast: LinkForecast,
    *,
    logs: Path,
    repetitions: int = 5,
    seed: int = 0,
    relay: bool = False,
    progress: bool = True,
) -> LinkBench:
    """Measure all methods; an island is a process of `command`.

    Raises:
        ClusterError: an island has ended.
    """
    started, neighbours, display = time.perf_counter(), Neighbours(), Display(progress)
    with contextlib.closing(display):
        links, why = shaped_links(islands, bytes_per_second, relay=relay)
        with contextlib.closing(links), _island_processes(command, links, islands, logs) as told:
            display.show(f"{counted(islands, 'island')}: compiling")
            shapes = told.ask({})[0]["shapes"]
            arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
            runs = _repeated(told, methods, islands, repetitions, seed, display)
    alone, cases = _cases(islands, methods, runs, arrays, forecast)
    return LinkBench(
        network=network,
        islands=islands,
        bytes_per_second=bytes_per_second,
        shaped_by=links.kind,
        why_relay=why,
        parameters=sum(array.size for array in arrays),
        alone_step_seconds=alone,
        cases=tuple(cases),
        repetitions=repetitions,
        environment=environment(),
        seed=seed,
        seconds=time.perf_counter() - started,
        notes=tuple(notes_on_neighbours(neighbours.cores())),
    )


_Key = tuple[str, bool]
"""Name of a method, and whether it sends."""
_Runs = dict[_Key, list[tuple[int, list[dict[str, float]]]]]
"""The steps and the answers of all islands, in each repetition."""


def _repeated(
    told: "_Islands",
    methods: Sequence[LinkMethod],
    islands: int,
    repetitions: int,
    seed: int,
    display: Display,
) -> _Runs:
    """Run every method once to compile it, then in each repetition, in random order."""
    alone_steps = max(method.measured_steps for method in methods)
    runs = [(ALONE, alone_steps, True)]
    runs += [(method.name, method.measured_steps, True) for method in methods]
    runs += [(method.name, OWN_STEPS, False) for method in methods]
    order, found = random.Random(seed), _Runs()
    for turn in range(1 + repetitions):
        chosen = order.sample(runs, len(runs)) if turn else runs
        for place, (name, steps, sends) in enumerate(chosen):
            what = f"repetition {turn}/{repetitions}" if turn else "warm-up"
            left = display.left(turn * len(runs) + place, (1 + repetitions) * len(runs))
            kind = "" if sends else ", own work"
            display.show(f"{counted(islands, 'island')}, {what}: {name}{kind}", left)
            answers = told.ask({"method": name, "steps": steps, "sends": sends})
            if turn:
                found.setdefault((name, sends), []).append((steps, answers))
    return found


def _cases(
    count: int,
    methods: Sequence[LinkMethod],
    runs: _Runs,
    arrays: Sequence[Any],
    forecast: LinkForecast,
) -> tuple[tuple[float, ...], list[LinkCase]]:
    """Return the times of a step without an exchange, and the case of each method."""

    def seconds(name: str, sends: bool = True) -> list[float]:
        """Return the mean time of a step in each repetition, over steps and islands."""
        each = [(n, [told["seconds"] for told in answers]) for n, answers in runs[name, sends]]
        return [float(np.mean(of_islands)) / steps for steps, of_islands in each]

    def of(method: LinkMethod) -> LinkCase:
        mine, usual = seconds(method.name), float(np.median(alone))
        answers = runs[method.name, True]
        sent = [told["sent_bytes"] / steps for steps, of in answers for told in of]
        longer = np.subtract(seconds(method.name, sends=False), alone)
        often, usually = method.own_work.schedule.interval, method.schedule.interval
        own = max(float(np.median(longer)), 0.0) * often / usually
        share = forecast(method, arrays, usual)
        payload = sum(method.schedule.payload_bytes(arrays)) / method.schedule.every
        return LinkCase(
            method=method,
            step_seconds=tuple(mine),
            utilization=tuple(ratios(alone, mine)),
            forecast=share,
            own_seconds_per_step=own,
            forecast_with_own=1 / (1 / share + own / usual),
            bytes_per_step=float(np.median(sent)),
            formula_bytes_per_step=(count - 1) * payload,
        )

    alone = seconds(ALONE)
    return tuple(alone), [of(method) for method in methods]


class _Islands:
    """The processes of all islands, as those that are told what to run."""

    def __init__(self, ends: Sequence[socket.socket], logs: Sequence[Path]) -> None:
        self._ends, self._logs = ends, logs

    def ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the answer of each island; `ClusterError` as soon as one has ended."""
        text = json.dumps(question).encode() + b"\n"
        answers, waiting = dict[int, bytes](), selectors.DefaultSelector()
        with waiting:
            for number, end in enumerate(self._ends):
                with contextlib.suppress(OSError):  # its end is read below
                    end.sendall(text)
                waiting.register(end, selectors.EVENT_READ, number)
            while waiting.get_map():
                for key, _ in waiting.select():
                    end, number = self._ends[key.data], key.data
                    data = _received(end)
                    if not data:
                        raise ClusterError(self._cause(number))
                    answers[number] = answers.get(number, b"") + data
                    if answers[number].endswith(b"\n"):
                        waiting.unregister(end)
        return [json.loads(answers[number]) for number in range(len(self._ends))]

    def _cause(self, number: int) -> str:
        log = self._logs[number]
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"island {number} has ended: {lines[-1] if lines else 'no output'}; see {log}"


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@contextlib.contextmanager
def _island_processes(
    command: Sequence[str], links: ShapedLinks, count: int, logs: Path
) -> Iterator[_Islands]:
    """Start the islands, each on cores of its own as far as there are enough; kill them after."""
    secret, job = secrets.token_urlsafe(), secrets.token_hex(8)
    started, ends = list[subprocess.Popen[bytes]](), list[socket.socket]()
    files = [logs / f"island-{number}.log" for number in range(count)]
    try:
        for number, path in enumerate(files):
            ours, theirs = socket.socketpair()
            ends.append(ours)
            env = {
                **os.environ,
                **_PATIENT,
                "JAX_PLATFORMS": "cpu",
                variables.JOB_ID: job,
                SECRET: secret,
                variables.PROCESS_ID: "0",
                variables.PROCESSES: "1",
                ISLAND: str(number),
                ISLANDS: links.addresses(number),
                LINK_CONTROL: f"{theirs.fileno()} {','.join(map(str, _cores_of(number, count)))}",
            }
            with theirs, path.open("wb") as log:
                options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
                options |= {"env": env, "pass_fds": [theirs.fileno()]}
                started.append(links.start(number, command, **options))
        yield _Islands(ends, files)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
        for end in ends:
            end.close()


def _cores_of(island: int, islands: int) -> list[int]:
    """Return the cores of an island: equal shares, or one that several islands share."""
    cores = own_cores()
    each = max(len(cores) // islands, 1)
    first = island * each % len(cores)
    return cores[first : first + each]
