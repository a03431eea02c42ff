"""One job written six ways, each run: uneven batches, masks, micro-batches, a killed process.

After `make peers`: `.venv/bin/python benchmarks/five_ways/compare.py`. Weights are compared with
those of `reference.py`, which uses the exact mean of each batch on one device. Results go to
`benchmarks/results/five_ways.json`.
"""

import argparse
import ast
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results/five_ways.json"
VARIANTS = {
    "even": {"ROWS": "960"},
    "uneven last batch": {"ROWS": "1001"},
    "masked": {"ROWS": "960", "MASKED": "1"},
    "masked, 2 micro-batches": {"ROWS": "960", "MASKED": "1", "ACCUMULATE": "2"},
}
BY_HAND = ("pmap_by_hand", "jit_by_hand", "flax_nnx", "keras_distribution")
PROGRAMS = (*BY_HAND, "with_accelerate", "with_replicax")
PACKAGES = ("jax", "flax", "keras", "optax", "orbax-checkpoint", "torch", "accelerate")
KILL_AFTER = 40
"""Batches: within the third epoch, of 15 batches each."""
LONGEST = 300.0
"""Seconds to wait for the survivors after a process was killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PROGRAMS, nargs="+", default=PROGRAMS)
    parser.add_argument("--no-kill", action="store_true", help="kill no process")
    parser.add_argument("--save", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    if asked.save.exists() and set(asked.only) != set(PROGRAMS):
        found = json.loads(asked.save.read_text())["programs"]
    with tempfile.TemporaryDirectory() as folder:
        references = {name: once("reference", Path(folder), env) for name, env in VARIANTS.items()}
        for program in asked.only:
            found[program] = {"lines": lines(program), "difference": {}}
            for name, env in VARIANTS.items():
                weights = once(program, Path(folder), env)
                share = None if isinstance(weights, str) else apart(weights, references[name])
                found[program]["difference"][name] = weights if share is None else share
                print(f"{program}: {name}: {weights if share is None else f'{share:.1e}'}")
            if not asked.no_kill:
                found[program]["killed"] = killed(program, Path(folder) / program)
                print(f"{program}: {found[program]['killed']}", flush=True)
            about = {
                "python": platform.python_version(),
                **{each: version(each) for each in PACKAGES},
            }
            about |= {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine()}
            asked.save.write_text(json.dumps({"about": about, "programs": found}, indent=2) + "\n")


def lines(program: str) -> int:
    """Count lines of code without imports, docstring, blank lines, and calls of `pause`."""
    text = (HERE / f"{program}.py").read_text(encoding="utf-8")
    left = {
        at for at, line in enumerate(text.splitlines(), 1) if line.strip() and "pause()" not in line
    }
    tree = ast.parse(text)
    for node in (tree.body[0], *tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]:
            left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


def apart(weights: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest difference in an array, relative to its largest value."""
    pairs = zip(weights, reference, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def once(program: str, folder: Path, env: dict[str, str]) -> list[np.ndarray] | str:
    """Return the final weights of `program` on 2 devices, or its last line if it fails."""
    out = folder / "weights.npz"
    out.unlink(missing_ok=True)
    command = [sys.executable, f"{HERE}/{program}.py"]
    if program == "with_accelerate":  # one process per device
        command = [*torchrun(), *command[1:]]
    settings = settings_of({**env, "OUT": str(out), "JAX_NUM_CPU_DEVICES": "2"})
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if re.match(r"\S+(Error|Exception): ", line)
        ]
        return (errors or done.stderr.splitlines())[-1]
    with np.load(out) as arrays:
        return [arrays[name] for name in arrays.files]


def settings_of(env: dict[str, str]) -> dict[str, str]:
    usual = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**os.environ, **usual, "PYTHONPATH": f"{HERE.parents[1]}/src", **env}


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass
class Watched:
    """Commands of one job, and their output as it arrives."""

    commands: list[subprocess.Popen[str]]

    def __post_init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.batches = [0, 0]
        self.said: list[str] = []
        self._readers = [threading.Thread(target=self._read, args=[each]) for each in self.commands]
        for reader in self._readers:
            reader.start()

    def _read(self, command: subprocess.Popen[str]) -> None:
        assert command.stdout is not None
        for line in command.stdout:
            told = re.findall(r"batch of (\d) pid (\d+)", line)  # two may share a line
            for rank, pid in told:
                self.pids[int(rank)] = int(pid)
                self.batches[int(rank)] += 1
            if line.strip() and not told:
                self.said.append(line.strip())

    def wait(self, longest: float) -> list[int | None]:
        """Return the exit codes; None for a process that had to be killed."""
        until = time.monotonic() + longest
        codes: list[int | None] = []
        for command in self.commands:
            try:
                codes.append(command.wait(max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()
        for reader in self._readers:
            reader.join()
        return codes


def start(program: str, folder: Path, port: int) -> Watched:
    """Start a job of two processes with one device each, with `program`'s own launcher."""
    base = settings_of(
        {
            "ROWS": "960",
            "EPOCHS": "5",
            "PAUSE": "0.2",
            "JAX_NUM_CPU_DEVICES": "1",
            "FOLDER": str(folder / "kept"),
            "OUT": str(folder / "weights.npz"),
        }
    )
    file = f"{HERE}/{program}.py"
    if program == "with_accelerate":
        jobs = [([*torchrun(), file], base)]
    elif program == "with_replicax":
        launch = [
            "-m",
            "replicax",
            "launch",
            "--processes",
            "2",
            "--devices-per-process",
            "1",
            "--",
        ]
        jobs = [([sys.executable, *launch, sys.executable, file], base)]
    else:
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        jobs = [([sys.executable, file], {**base, **job, "RANK": str(rank)}) for rank in range(2)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Watched(
        [subprocess.Popen(each, env=env, start_new_session=True, **options) for each, env in jobs]
    )


def killed(program: str, folder: Path) -> dict[str, Any]:
    """Kill process 1 of a job; say how the rest ends, and what a second start makes of it."""
    (folder / "kept").mkdir(parents=True)
    whole = start(program, folder, 29701)
    if whole.wait(LONGEST) != [0] * len(whole.commands):
        return {"fails undisturbed": whole.said[-1]}
    with np.load(folder / "weights.npz") as arrays:
        expected = [arrays[name] for name in arrays.files]
    shutil.rmtree(folder)
    (folder / "kept").mkdir(parents=True)
    job = start(program, folder, 29702)
    while min(job.batches) < KILL_AFTER:
        time.sleep(0.05)
    begun = time.monotonic()
    os.kill(job.pids[1], signal.SIGKILL)
    codes = job.wait(LONGEST)
    result: dict[str, Any] = {"seconds until all had ended": round(time.monotonic() - begun, 1)}
    result |= {"exit codes": codes, "last line": job.said[-1] if job.said else ""}
    again = start(program, folder, 29703)
    result["exit codes when started again"] = again.wait(LONGEST)
    result["batches done twice"] = job.batches[0] + again.batches[0] - whole.batches[0]
    if (folder / "weights.npz").exists():
        with np.load(folder / "weights.npz") as arrays:
            result["difference"] = apart([arrays[name] for name in arrays.files], expected)
    return result


if __name__ == "__main__":
    main()
