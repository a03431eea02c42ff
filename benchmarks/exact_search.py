"""Search for differing bits in mode `exact`: random models and settings on 1 to 8 devices.

    python exact_search.py --draws 1000 --first 0 --processes-every 10 --workers 2

Each seed is a case of `benchmarks/exact_draws.py`. The state after six steps, metrics, an
evaluation, and the programs must have one SHA-256 on 1, 2, 4 and 8 devices, and for every tenth
seed also in 2 processes. Goal: no case differs or crashes. The search resumes where it was stopped,
and writes `results/exact_search.json`.
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
from typing import Any

import jax
from exact_bits import DEVICES, Differs, RefusedOnSome, compared, kind, outcome
from exact_draws import micro_shards_of, seeded
from timing import RESULTS, environment

import replicax as rx
from replicax.core.modes.exact.fixed_tree import THREADS_VARIABLE, fix_threads

RESULT = RESULTS / "exact_search.json"
LIMIT_SECONDS = 120
JOB_SECONDS = 300
"""Timeout for two processes, including their start."""
PROCESSES = 2
WRITTEN_EVERY = CLEARED_EVERY = 10
TOLD = "RESULT "


def worker(micro_shards: int) -> None:
    """Read seeds from stdin, one per line, and print a verdict for each."""
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
    except Exception as error:  # crashes are an expected outcome
        return {"verdict": "crash", "why": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
    if kind(found):
        return {"verdict": "refused", "why": found["refused"][:160]}
    return {"verdict": "same", "sha256": _digest(found)}


def _digest(found: dict[str, str]) -> str:
    """Return one digest of the computed values, excluding the programs."""
    told = {name: each for name, each in found.items() if not name.startswith("program")}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def job(seed: int) -> None:
    """Run one of the processes that train a seed's case together; process 0 prints the digest."""
    micro_shards = micro_shards_of(seed)
    fix_threads(micro_shards)
    together = rx.initialize(verbose=False)
    devices = min(micro_shards, max(DEVICES))
    jax.config.update("jax_num_cpu_devices", devices // together.processes)
    found = outcome(seeded(seed), devices, together)
    if together.process == 0:
        print(TOLD + json.dumps({"sha256": kind(found) or _digest(found)}), flush=True)


class Worker:
    """A process that compares cases, and is restarted after it was killed."""

    def __init__(self, micro_shards: int) -> None:
        self._micro_shards = micro_shards
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, seed: int) -> dict[str, Any]:
        """Return the verdict for a seed's case."""
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
        """Stop the process, if it is running."""
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
    """Forward the lines a process prints, and an empty one once it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TOLD):
            lines.put(line.removeprefix(TOLD))
    lines.put("")


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    return {**own, "JAX_PLATFORMS": "cpu"}


def in_processes(seed: int, alone: str) -> str:
    """Return `same` if two processes find the digest of one, otherwise what they found."""
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
    """The search: its results so far, and its workers."""

    def __init__(self, processes_every: int) -> None:
        known = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else []
        self.cases: dict[int, dict[str, Any]] = {case["seed"]: case for case in known}
        self._every, self._lock = processes_every, threading.Lock()
        self._workers = threading.local()
        self._started, self._done = time.monotonic(), 0

    def knows(self, seed: int) -> bool:
        """Return whether the seed has a verdict; cases that were too slow are repeated."""
        return seed in self.cases and self.cases[seed]["verdict"] != "too slow"

    def run(self, seeds: list[int], workers: int) -> None:
        """Check the cases of `seeds`, grouped by number of micro-shards."""
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
        """Write the results atomically."""
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
