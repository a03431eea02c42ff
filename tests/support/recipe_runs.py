"""Short runs of `replicax train`, and their results."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import replicax as rx
from replicax import cli
from replicax.train.run.fit import fit

MLP = ["mlp", "--layers", "2", "--hidden", "16", "--rows", "200", "--epochs", "2"]
TINY_GPT2 = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16"]
LINE = b"one two three four five six seven eight nine ten\n"


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run in `folder`, and what `fit` returned."""

    folder: Path
    result: rx.types.Fit


def write_texts(folder: Path) -> Path:
    """20 documents; the last is held out."""
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_bytes(LINE * 10)
    return folder


def train(name: str, *arguments: object) -> Ended:
    """`replicax train ... --run NAME` in the working directory."""
    results: list[rx.types.Fit] = []

    def kept(*given: Any, **settings: Any) -> rx.types.Fit:
        results.append(fit(*given, **settings))
        return results[-1]

    with patch.object(rx, "fit", kept):
        assert cli.main(["train", *map(str, arguments), "--run", name]) == 0
    return Ended(Path("runs", name).resolve(), results[0])
