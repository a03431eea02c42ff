"""A search for other bits in mode `exact`: drawn models, optimizers and settings on 1 to 8 devices.

    python exact_search.py --draws 1000 --first 0 --processes-every 10 --workers 2

Each seed is a case of `tests/support/exact_draws.py`. Whole states after six steps, metrics, an
evaluation, and the programs must have one SHA-256 on 1, 2, 4 and 8 devices, and for every tenth
seed also in 2 processes. Aim: none that differs and none that crashes. It goes on where it was
stopped, and writes `results/exact_search.json`.
"""

import argparse
import collections
import concurrent.futures
import datetime
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.exact_bits import DEVICES, Differs, RefusedOnSome, compared, kind, outcome
from support.exact_draws import micro_shards_of, seeded
from timing import RESULTS, environment

import replicax as rx
from replicax.core.exact import THREADS_VARIABLE, fix_threads

RESULT = RESULTS / "exact_search.json"
LIMIT_SECONDS = 120
JOB_SECONDS = 300
"""Of two processes, with their start."""
PROCESSES = 2
WRITTEN_EVERY = CLEARED_EVERY = 10
TOLD = "RESULT "


def worker(micro_shards: int) -> None:
    """Compare the cases of the seeds that come in, one a line, and tell a verdict for each."""
    fix_threads(micro_shards)
    jax.config.update("jax_num_cpu_devices", min(micro_shards, max(DEVICES)))
    for number, line in enumerate(sys.stdin):
        if number % CLEARED_EVERY == CLEARED_EVERY - 1:
            jax.clear_caches()
        print(TOLD + json.dumps(_verdict(int(line))), flush=True)


def _verdict(seed: int) -> dict[str, Any]:
    try:
        found = compared(seeded(seed))
    except RefusedOnSome as error:
        return {"verdict": "refused on some", "why": str(error)[:240]}
    except Differs as error:
        return {"verdict": "differs", "why": str(error).partition(";")[0]}
    except Exception as error:  # any crash is one of the outcomes that are looked for
        return {"verdict": "crash", "why": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
    if kind(found):
        return {"verdict": "refused", "why": found["refused"][:160]}
    return {"verdict": "same", "sha256": _digest(found)}


def _digest(found: dict[str, str]) -> str:
    """One for what was computed; the programs are left out."""
    told = {name: each for name, each in found.items() if not name.startswith("program")}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def job(seed: int) -> None:
    """One of the processes that train the case of a seed together; the first tells the digest."""
    micro_shards = micro_shards_of(seed)
    fix_threads(micro_shards)
    together = rx.initialize(verbose=False)
    devices = min(micro_shards, max(DEVICES))
    jax.config.update("jax_num_cpu_devices", devices // together.processes)
    found = outcome(seeded(seed), devices, together)
    if together.process == 0:
        print(TOLD + json.dumps({"sha256": kind(found) or _digest(found)}), flush=True)


class Worker:
    """A process that compares, which is started anew after it was killed."""

    def __init__(self, micro_shards: int) -> None:
        self._micro_shards = micro_shards
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, seed: int) -> dict[str, Any]:
        """Return the verdict on the case of a seed."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        print(seed, file=self._process.stdin, flush=True)
        try:
            line = self._lines.get(timeout=LIMIT_SECONDS)
        except queue.Empty:
            self.stop()
            return {"verdict": "too slow"}
        if line:
            return dict(json.loads(line))
        code = self._process.wait()
        self.stop()
        return {"verdict": "crash", "why": f"the process ended with {code}"}

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, __file__, "--worker", str(self._micro_shards)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()


def _read(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str]") -> None:
    """Hand on what a process tells, and nothing once it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TOLD):
            lines.put(line.removeprefix(TOLD))
    lines.put("")


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    return {**own, "JAX_PLATFORMS": "cpu"}


def in_processes(seed: int, alone: str) -> str:
    """Return `same` where two processes find the digest of one, else what they found."""
    launch = [sys.executable, "-m", "replicax", "launch", "--processes", str(PROCESSES), "--"]
    command = [*launch, sys.executable, __file__, "--job", str(seed)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=JOB_SECONDS, env=_environment()
        )
    except subprocess.TimeoutExpired:
        return "too slow"
    lines = [line for line in done.stdout.splitlines() if TOLD in line]
    if done.returncode or not lines:
        return f"crash: ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    found = json.loads(lines[-1].partition(TOLD)[2])["sha256"]
    return "same" if found == alone else f"differs: {found}"


class Search:
    """The search: what was found, and the workers that go on with it."""

    def __init__(self, processes_every: int) -> None:
        known = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else []
        self.cases: dict[int, dict[str, Any]] = {case["seed"]: case for case in known}
        self._every, self._lock = processes_every, threading.Lock()
        self._workers = threading.local()
        self._started, self._done = time.monotonic(), 0

    def knows(self, seed: int) -> bool:
        """Whether there is a verdict; one that was too slow, on a busy machine say, has none."""
        return seed in self.cases and self.cases[seed]["verdict"] != "too slow"

    def run(self, seeds: list[int], workers: int) -> None:
        """Look at the cases of `seeds`, those of as many micro-shards after one another."""
        ordered = sorted(seeds, key=lambda seed: (seed // 100, micro_shards_of(seed), seed))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda seed: self._look(seed, len(ordered)), ordered):
                pass
        self.save()

    def _look(self, seed: int, count: int) -> None:
        begin, micro_shards = time.monotonic(), micro_shards_of(seed)
        if getattr(self._workers, "micro_shards", None) != micro_shards:
            if hasattr(self._workers, "worker"):
                self._workers.worker.stop()
            self._workers.worker, self._workers.micro_shards = Worker(micro_shards), micro_shards
        case = {"seed": seed, "draw": str(seeded(seed)), **self._workers.worker(seed)}
        case["seconds"] = round(time.monotonic() - begin, 1)
        if seed % self._every == 0 and case["verdict"] == "same":
            case["processes"] = in_processes(seed, case["sha256"])
        with self._lock:
            self.cases[seed] = case
            self._done += 1
            left = (time.monotonic() - self._started) / self._done * (count - self._done)
            told = " · ".join(str(case[name]) for name in ("verdict", "why") if name in case)
            print(
                f"{self._done}/{count} · seed {seed} · {case['seconds']} s · {told}"
                f" · processes {case.get('processes', '-')} · {left / 60:.0f} min left",
                flush=True,
            )
            if self._done % WRITTEN_EVERY == 0:
                self.save()

    def save(self) -> None:
        """Write what was found, whole or not at all."""
        cases = [self.cases[seed] for seed in sorted(self.cases)]
        together = [case["processes"].partition(":")[0] for case in cases if "processes" in case]
        result = {
            "date": datetime.date.today().isoformat(),
            "environment": environment(),
            "counts": dict(collections.Counter(case["verdict"] for case in cases)),
            "processes": dict(collections.Counter(together)),
            "seconds": round(sum(case["seconds"] for case in cases)),
        }
        head = json.dumps(result, indent=2).removesuffix("\n}")
        rows = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
        written = RESULT.with_suffix(".new")
        written.write_text(f'{head},\n  "cases": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
        written.replace(RESULT)


def main() -> None:
    """Run the search, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes-every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return worker(options.worker)
    if options.job is not None:
        return job(options.job)
    search = Search(options.processes_every)
    seeds = range(options.first, options.first + options.draws)
    search.run([seed for seed in seeds if not search.knows(seed)], options.workers)


if __name__ == "__main__":
    main()
