"""Broken run folders, configurations, command lines and environments."""

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replicax import cli

LONGEST_SECONDS = 60.0
CODES = {0, 1, 2, 75}
SMALL = ["linear_regression", "--points", "32", "--batch-size", "8", "--devices", "2"]
TRAIN = ["train", *SMALL, "--epochs", "2", "--save-every", "4"]
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, 10**400, 1e300, "", "x", "\ud800", "../..", [], [[]], {}, {"a": 1}),
    *("nan", "\x00", "a\nb", "gpt2", "/dev/zero", 2**63, -(2**63), ["a"] * 3, 1e-320),
)
FLAGS = (
    *("--epochs", "--steps", "--batch-size", "--points", "--noise", "--slope", "--seed", "--run"),
    *("--devices", "--mode", "--layout", "--accumulate", "--micro-shards", "--precision"),
    *("--reduction", "--eval-every", "--eval-rows", "--keep-best", "--early-stopping", "--keep"),
    *("--log-every", "--log-to", "--profile", "--save-every", "--save-minutes", "--keep-every"),
    *("--audit-every", "--on-divergence", "--max-bad-steps", "--config", "--preset", "--stages"),
    *("--model-parallel", "--fsdp-size", "--schedule", "--learning-rate", "--no-such-flag"),
)
WORDS = (
    *("", "-1", "0", "1", "2.5", "nan", "inf", "1e400", "99999999999999999999", "True", "none"),
    *("x", "é", "a b", "..", "/dev/null", "-", "--", "a:b", ":", "1:2", "2:1", "loss", "loss:0"),
    *("jit", "exact", "zero1", "bfloat16", "csv", "csv,csv", "None", "[1]", "{}", "\t", "0x10"),
)
ENVIRONMENTS = {
    "PYTHONIOENCODING": ("ascii", "utf-16"),
    "COLUMNS": ("0", "-1", "x", "1", "100000"),
    "TERM": ("", "dumb", "nonsense"),
    "LC_ALL": ("POSIX", "tr_TR.UTF-8", "nonsense"),
    "HOME": ("", "/nowhere"),
    "TMPDIR": ("/nowhere",),
    "JAX_PLATFORMS": ("cpu", "nonsense"),
    "JAX_NUM_CPU_DEVICES": ("0", "3"),  # otherwise JAX refuses it at import
    "XLA_FLAGS": ("--nonsense", "nonsense"),
    "MPLBACKEND": ("nonsense",),
    "MALLOC_MMAP_MAX_": ("x",),
    "REPLICAX_STALL_SECONDS": ("0", "nan", "x", "1e9"),
    "REPLICAX_COORDINATOR": ("", "nowhere", "127.0.0.1:0", ":::", "\x01"),
    "REPLICAX_PROCESSES": ("0", "-1", "x", "1"),
    "REPLICAX_PROCESS": ("-1", "7", "x"),
    "SLURM_JOB_ID": ("x", "1"),
    "SLURM_NTASKS": ("0", "x", "2"),
    "OMPI_COMM_WORLD_SIZE": ("x", "0"),
    "WORLD_SIZE": ("x", "-3"),
    "PYTHONWARNINGS": ("nonsense",),
}


def make_run(at: Path) -> None:
    """A complete run in `at/runs/a`."""
    code, said = _in_process([*TRAIN, "--run", "a", "--keep-best", "loss"], at)
    assert code == 0, said


def trial(kind: str, seed: int, original: Path, at: Path) -> str | None:
    """Do the `seed`th thing of `kind`; returns what is wrong with its end, or None."""
    chance = random.Random(f"{kind} {seed}")
    shutil.copytree(original, at, symlinks=True)
    started = time.monotonic()
    try:
        about, code, said = KINDS[kind](chance, at)
    finally:
        shutil.rmtree(at, ignore_errors=True)
    seconds = time.monotonic() - started
    if seconds > LONGEST_SECONDS:
        return f"{about}: {seconds:.0f} s"
    if code not in CODES:
        return f"{about}: exit code {code}: {said[-500:]}"
    if "Traceback" in said:
        return f"{about}: {said[-700:]}"
    errors = [line for line in said.splitlines() if line.startswith("replicax: ")]
    if code in (1, 2) and len(errors) != 1:
        return f"{about}: {len(errors)} lines of error: {said[-500:]}"
    return None


def _folder(chance: random.Random, at: Path) -> tuple[str, int, str]:
    """Put something else in place of a file of a run."""
    files = [path for path in (at / "runs/a").rglob("*") if path.is_file()]
    small = [path for path in files if "/default/" not in path.as_posix()]
    done = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        path = chance.choice(small)
        done.append(f"{path.relative_to(at)} {_harm(path, chance)}")
    commands = (
        [*TRAIN, "--run", "a"],
        ["runs"],
        ["evaluate", "a"],
        ["export", "a", "out.safetensors"],
        [*TRAIN, "--run", "a", "--accept-changes"],
        ["evaluate", "a", "--step", "best"],
    )
    command = chance.choice(commands)
    return f"{done}, {command}", *_in_process(command, at)


def _harm(path: Path, chance: random.Random) -> str:
    kind = chance.choice(("pipe", "folder", "device", "link", "gone", "deep", "value", "bytes"))
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b"{}"
    if path.is_dir() and not path.is_symlink():  # by an earlier one
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "link"):
        path.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    elif kind == "deep":
        path.write_text("[" * 100_000)
    elif kind == "value":
        path.write_text(json.dumps(_altered(content, chance)))
    elif kind == "bytes":
        path.write_bytes(chance.randbytes(chance.choice([0, 1, 100])))
    return kind


def _altered(content: bytes, chance: random.Random) -> Any:
    """The JSON in `content` with one value replaced."""
    try:
        value = json.loads(content.splitlines()[0] if content.count(b"}\n{") else content)
    except (ValueError, RecursionError):
        return chance.choice(ODD)
    inner = value
    while isinstance(inner, dict) and inner:
        key = chance.choice(list(inner))
        if not isinstance(inner[key], dict) or chance.random() < 0.3:
            inner[key] = chance.choice(ODD)
            break
        inner = inner[key]
    return value


def _config(chance: random.Random, at: Path) -> tuple[str, int, str]:
    config = at / "given.json"
    value = _altered((at / "runs/a/config.json").read_bytes(), chance)
    for _ in range(chance.choice([0, 1, 2])):
        value = _altered(json.dumps(value).encode(), chance)
    config.write_text(json.dumps(value))
    harm = _harm(config, chance) if chance.random() < 0.2 else ""
    flags = ["--epochs", "1", "--run", "b", *(["--points", "32"] * chance.choice([0, 1]))]
    command = ["train", "linear_regression", "--config", "given.json", *flags]
    return f"config {json.dumps(value)[:400]} {harm}", *_in_process(command, at)


def _command_line(chance: random.Random, at: Path) -> tuple[str, int, str]:
    flags = [
        word
        for _ in range(chance.choice([1, 1, 2, 3]))
        for word in (chance.choice(FLAGS), chance.choice(WORDS))
    ]
    command = [*TRAIN, "--run", "b", *flags]
    if chance.random() < 0.3:
        name = chance.choice(("evaluate", "runs", "export", "launch", "plan", "lint", "verify"))
        command = [name, *chance.sample([*WORDS, *FLAGS, "a", "linear_regression"], 3)]
    return f"{command}", *_in_process(command, at)


def _environment(chance: random.Random, at: Path) -> tuple[str, int, str]:
    names = chance.sample(sorted(ENVIRONMENTS), chance.choice([1, 2, 3]))
    more = {name: chance.choice(ENVIRONMENTS[name]) for name in names}
    done = subprocess.run(
        [sys.executable, "-m", "replicax", *TRAIN, "--run", "b"],
        cwd=at,
        env={**os.environ, "REPLICAX_JOIN_SECONDS": "5", **more},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=4 * LONGEST_SECONDS,
    )
    return f"{more}", done.returncode, done.stderr


KINDS: dict[str, Callable[[random.Random, Path], tuple[str, int, str]]] = {
    "folder": _folder,
    "config": _config,
    "command line": _command_line,
    "environment": _environment,
}


def _in_process(command: list[str], at: Path) -> tuple[int, str]:
    """Run the command in `at`; returns its exit code and standard error."""
    printed = io.StringIO()
    with (
        contextlib.chdir(at),
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            code = cli.main(command)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, printed.getvalue()
