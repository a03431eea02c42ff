"""`replicax train` splits a batch into micro-batches if the devices' memory is too small."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Main, done

from replicax.cli import train as command

LINE = [
    *("train", "mlp", "--layers", "6", "--hidden", "64", "--rows", "1024", "--batch-size", "1024"),
    *("--epochs", "1", "--devices", "1"),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of 1.8 MB; the step takes 3.4."""
    real = command.attached_target

    def target(*arguments: Any) -> Any:
        found = real(*arguments)
        chip = dataclasses.replace(found.chip, usable_bytes=1_800_000)
        return dataclasses.replace(found, chip=chip)

    monkeypatch.setattr(command, "attached_target", target)


def options(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"runs/{run}/config.json").read_text())
    return found["options"]


@pytest.mark.usefixtures("small")
def test_train_takes_as_few_as_fit_and_says_so(main: Main, folder: Path) -> None:
    out = done(main, *LINE, "--run", "a")
    (line,) = (line for line in out.splitlines() if line.startswith("parts "))
    assert options(folder, "a")["accumulate"] == 4
    assert line.split()[1:5] == ["4", "micro-batches", "of", "256"]
    out = done(main, *LINE, "--run", "b", "--accumulate", "2")
    assert options(folder, "b")["accumulate"] == 2
    assert "parts " not in out
