"""Plans that are compiled in this process."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from replicax.analysis.hardware import Chip, Interconnect
from replicax.plan import sizes
from replicax.plan.compilation import Compiler
from replicax.plan.compiler import AttachedCompiler
from replicax.plan.target import Target

planner: Any = importlib.import_module("replicax.plan.planner")  # rx.plan is the function


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in this process, for made-up speeds: a compiler process takes seconds to start."""

    @contextlib.contextmanager
    def compiler_for(
        target: Target, by_formula: bool = False
    ) -> Iterator[tuple[Compiler | None, tuple[str, ...]]]:
        assert not by_formula
        yield AttachedCompiler(jax.devices()[: target.devices]), ()

    def measured(chip: Chip, devices: int) -> Chip:
        return dataclasses.replace(
            chip,
            flops_per_second={"float32": 1e12, "bfloat16": 1e12},
            memory_bytes_per_second=1e11,
            inside=Interconnect(1e10, 0.0, "made up"),
        )

    monkeypatch.setattr(planner, "compiler_for", compiler_for)
    monkeypatch.setattr(planner, "measured", measured)


@pytest.fixture
def alone(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in this process, and compare with nothing."""
    monkeypatch.setattr(sizes, "alternatives", lambda *_: ((), ()))
