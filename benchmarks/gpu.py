"""Benchmark Replicax and its peers on this machine's NVIDIA GPU, in at most eight minutes.

    make gpu                            # all parts
    make gpu ARGS="--only torch"        # parts whose name contains "torch"; may be repeated
    make gpu ARGS=--tiny                # sizes for a CPU, to try the parts without a GPU

Each part is a separate process with a time limit, most important first. A part that fails or hangs
is reported with its reason, and the others continue. gpu.json is rewritten after each part. The
figures are explained in the parts, `gpu_*.py`. Exits with 1 if a part failed.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu_table import disagreements, reason, state, summary

HERE = Path(__file__).resolve().parent
LEAST_SECONDS = 15.0
"""Parts with less time than this are not started."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    """Time limit."""
    command: tuple[str, ...]
    """A script in this folder, and its options."""


MACHINE = Part("machine", 60, ("gpu_machine.py",))
PARTS = (
    Part("ceilings", 45, ("gpu_ceilings.py",)),
    Part("gpt2, single", 120, ("gpu_gpt.py", "--mode", "single")),
    Part("gpt2, torch compile", 100, ("gpu_torch.py", "--how", "compile")),
    Part("gpt2, single, by kernel", 70, ("gpu_gpt.py", "--mode", "single", "--profile")),
    Part("gpt2, 1.3b, 8 rows", 120, ("gpu_gpt.py", "--mode", "single", "--preset", "1.3b")),
    Part("gpt2, exact", 80, ("gpu_gpt.py", "--mode", "exact")),
    Part("gpt2, exact, tuned", 100, ("gpu_gpt.py", "--mode", "exact", "--recorded")),
    Part("same bits in mode exact", 120, ("gpu_bits.py",)),
    Part("plan of gpt2, single", 70, ("gpu_plan.py",)),
    Part("parity with single, GPT-2", 90, ("gpu_parity.py", "--model", "gpt2")),
    Part("parity with single, LeNet", 90, ("gpu_parity.py", "--model", "lenet")),
    Part("gpt2, jit", 70, ("gpu_gpt.py", "--mode", "jit")),
    Part("gpt2, shard_map", 70, ("gpu_gpt.py", "--mode", "shard_map")),
    Part("gpt2, jax by hand", 90, ("gpu_gpt.py", "--mode", "by hand")),
    Part("overhead", 60, ("gpu_overhead.py",)),
    Part("lenet", 90, ("gpu_images.py", "--model", "lenet")),
    Part("cnn", 90, ("gpu_images.py", "--model", "cnn")),
    Part("gpt2, torch compile, padded", 80, ("gpu_torch.py", "--how", "compile", "--padded")),
    Part("gpt2, jax by hand, padded", 70, ("gpu_gpt.py", "--mode", "by hand", "--padded")),
    Part("gpt2, torch eager", 50, ("gpu_torch.py", "--how", "eager")),
)
"""Most important first: the last ones may run out of time."""


def main() -> None:
    args = arguments()
    chosen = [part for part in PARTS if any(name in part.name for name in args.only)]
    end = time.monotonic() + args.budget
    result: Row = {"environment": {}, "tiny": args.tiny, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of_parts(args.tiny, folder)
        machine = run(MACHINE, options(MACHINE, args, ""), environment, end)
        if problem := unfit(machine, args.tiny):
            sys.exit(f"nothing measured: {problem}")
        result["environment"] = machine
        measure(chosen, args, environment, end, result)
    print(*summary(result), f"see {save(args.out, result)}", sep="\n")
    failed = [name for name, row in result["parts"].items() if state(row) == "failed"]
    sys.exit(bool(failed or disagreements(result["parts"])))


def arguments() -> argparse.Namespace:
    description = (__doc__ or "").replace("%", "%%")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of gpu.json (default: "
        "benchmarks/results, or build for partial runs with --tiny or --only)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=480.0,
        metavar="SECONDS",
        help="time for all parts together (default: 480)",
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, on the CPU")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PART",
        help="run parts whose name contains this, or one of these if given several times: "
        + "; ".join(part.name for part in PARTS),
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter with torch (default: this one)",
    )
    args = parser.parse_args()
    partial = args.tiny or args.only
    args.only = args.only or [""]
    for name in args.only:
        if not any(name in part.name for part in PARTS):
            parser.error(f"no part's name contains {name!r}; --help lists them")
    args.out = args.out or (HERE.parent / "build" if partial else HERE / "results")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def environment_of_parts(tiny: bool, folder: str) -> dict[str, str]:
    """Return the parts' environment, with a compilation cache in `folder` to tune kernels once."""
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "JAX_COMPILATION_CACHE_DIR": folder,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # otherwise JAX reserves PyTorch's memory
    }
    if tiny:
        environment |= {"JAX_PLATFORMS": "cpu", "NPROC": "8"}  # the threads that mode exact needs
    return environment


def unfit(machine: Row, tiny: bool) -> str | None:
    """Return why the machine cannot be measured, or None."""
    if state(machine) != "done":
        return reason(machine)
    if machine["platform"] not in ("gpu", "cuda") and not tiny:
        return f"JAX finds no GPU here, but {machine['device']}; --tiny tries the parts on a CPU"
    return None


def measure(
    parts: Iterable[Part],
    args: argparse.Namespace,
    environment: dict[str, str],
    end: float,
    result: Row,
) -> None:
    """Run one part after the other, and save and report each as soon as it ends."""
    for part in parts:
        more = options(part, args, result["environment"]["device"])
        row = run(part, more, environment, end)
        result["parts"][part.name] = row
        save(args.out, result)
        line = f"{part.name:<28} {row['seconds']:>6.1f} s  {state(row)}"
        print(line if state(row) == "done" else f"{line}: {reason(row)}", flush=True)


def options(part: Part, args: argparse.Namespace, device: str) -> list[str]:
    """Return the options of a part that depend on this run and the machine."""
    told = {
        "gpu_machine.py": ["--torch-python", args.torch_python],
        "gpu_torch.py": ["--torch-python", args.torch_python, "--device", device],
        "gpu_plan.py": ["--device", device],
    }
    return [*told.get(part.command[0], []), *(["--tiny"] if args.tiny else [])]


def run(part: Part, more: list[str], environment: dict[str, str], end: float) -> Row:
    """Return the part's answer and its duration in seconds; or `left_out`, or `error`."""
    started = time.monotonic()
    limit = min(part.seconds, end - started)
    if limit < LEAST_SECONDS:
        return {"left_out": "no time left", "seconds": 0.0}
    script, *given = part.command
    row = answer_of([sys.executable, str(HERE / script), *given, *more], environment, limit)
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def answer_of(command: list[str], environment: dict[str, str], limit: float) -> Row:
    """Return the last line that a process prints, and kill the process and its children.

    Output goes to files, because a surviving child would keep a pipe open.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {limit:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed, said = (text_of(file).strip().splitlines() for file in (out, err))
    try:
        row = json.loads(printed[-1])
    except (IndexError, ValueError):
        row = {"error": f"exited with {code}: {said[-1] if said else 'no output'}"}
    return {**row, "said": said[-30:]} if "error" in row else row


def text_of(file: Any) -> str:
    file.seek(0)
    return file.read()


def save(folder: Path, result: Row) -> Path:
    """Write gpu.json atomically."""
    path, new = folder / "gpu.json", folder / "gpu.json.new"
    new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    shutil.move(new, path)
    return path


if __name__ == "__main__":
    main()
