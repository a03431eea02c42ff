"""The README's programs run as printed, in the order they are printed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_program_has_at_most_15_lines() -> None:
    assert len(PROGRAMS[0].strip().splitlines()) <= 15


def test_every_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, program in enumerate(PROGRAMS):
        exec(compile(program, f"README program {number}", "exec"), names)
        if number == 0:
            np.testing.assert_allclose(names["dp"].model(names["state"])["w"], [1, 2, 3], atol=1e-3)
    assert (tmp_path / "runs/first/curves.png").exists()
