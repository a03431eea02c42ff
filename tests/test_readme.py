"""The programs of the README, then those of `PAGES`, run in order."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiers import EXHAUSTIVE
from support.waiting import until

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("index", "training", "audit", "noise-scale", "step", "run", "hooks", "gpus")
TEXTS = [README, *((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in PAGES)]
PROGRAMS = re.findall(r"^```python\n(.*?)^```", "".join(TEXTS), re.MULTILINE | re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_first_program_has_at_most_15_lines() -> None:
    assert len(PROGRAMS[0].strip().splitlines()) <= 15


@pytest.mark.promise("readme.programs-run")
@EXHAUSTIVE
def test_every_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, program in enumerate(PROGRAMS):
        exec(compile(program, f"README program {number}", "exec"), names)
        if number == 0:
            np.testing.assert_allclose(names["dp"].model(names["state"])["w"], [1, 2, 3], atol=1e-3)
    until((tmp_path / "runs/first/curves.png").exists)
