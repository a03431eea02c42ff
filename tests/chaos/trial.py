"""Common to all trials: a run in a folder that is disturbed, and the checks that it violated."""

import contextlib
import dataclasses
import json
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.fork_server import Child, ForkServer

SAVED = 75
STEP = struct.Struct("<dq")
"""Time in seconds since 1970, and number of a step."""


@dataclasses.dataclass
class Reference:
    """The undisturbed run."""

    result: dict[str, Any]
    records: list[dict[str, Any]]
    """Records that must be the same, whatever happens."""


class Trial:
    """A run in `folder`, whose fault its seed determines, and the checks that it violated."""

    job: Path

    def __init__(
        self, server: ForkServer, folder: Path, fault: str, seed: int, env: Mapping[str, str]
    ) -> None:
        self.server, self.folder, self.env = server, folder, dict(env)
        self.fault, self.seed = fault, seed
        self.chance = random.Random(f"{fault} {seed}")
        self.wrong: list[str] = []
        self.missed = False
        """Whether the run was over before the fault."""
        self.told: list[str] = []
        """The fault, in words, for the report."""
        self.run = folder / "run"
        self.checkpoints = self.run / "checkpoints"
        self.notes = folder / "notes"
        self.children: list[Child] = []
        (folder / "out").mkdir(parents=True, exist_ok=True)
        self._saves: set[str] = set()

    def check(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    def say(self, what: str) -> None:
        """Note the fault for the report."""
        self.told.append(what)

    def fork(self, name: str, env: Mapping[str, str], *arguments: str) -> Child:
        """Start a process of the run, whose output goes to files of this name."""
        out = self.folder / "out" / name
        command = [str(self.job), str(self.folder), *arguments]
        files = out.with_suffix(".out"), out.with_suffix(".err")
        self.children.append(self.server.fork(command, env, *files))
        return self.children[-1]

    def launcher(self, *options: str, arguments: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
        """Start `replicax launch` with these options, for the job with these arguments."""
        command = [sys.executable, "-m", "replicax", "launch", *options]
        command += ["--logs", str(self.folder / "logs"), "--"]
        command += [sys.executable, str(self.job), str(self.folder), *arguments]
        env = {**self.server.env, **self.env}
        with (self.folder / "out" / "launch").open("wb") as told:
            return subprocess.Popen(command, env=env, stdout=told, stderr=told)

    def last_step(self, name: str) -> int:
        """Return the last step that a process has noted, or 0."""
        with contextlib.suppress(FileNotFoundError), (self.notes / f"{name}.steps").open("rb") as f:
            whole = f.seek(0, 2) // STEP.size
            if whole:
                f.seek((whole - 1) * STEP.size)
                return int(STEP.unpack(f.read(STEP.size))[1])
        return 0

    def results(self) -> dict[str, dict[str, Any]]:
        """Return what each process that completed the run says of it, by the process's name."""
        found = sorted(self.notes.glob("*.result"))
        return {path.stem: json.loads(path.read_text()) for path in found}

    def saves_begun(self) -> int:
        """Return the number of saves that were under way at one of the calls."""
        self._saves.update(path.name for path in self.checkpoints.glob(".saving-*"))
        return len(self._saves)


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run."""
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
