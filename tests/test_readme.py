"""The programs of the README, and of each of `PAGES`, run in order, and need no other page."""

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
PROGRAMS = [re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for text in TEXTS]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_first_program_has_at_most_15_lines() -> None:
    assert len(PROGRAMS[0][0].strip().splitlines()) <= 15


@pytest.mark.promise("readme.programs-run")
@EXHAUSTIVE
def test_every_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page, programs in zip(("README", *PAGES), PROGRAMS, strict=True):
        names: dict[str, Any] = {}
        for number, program in enumerate(programs):
            exec(compile(program, f"{page} program {number}", "exec"), names)
        if page == "index":
            np.testing.assert_allclose(names["dp"].model(names["state"])["w"], [1, 2, 3], atol=1e-3)
    until((tmp_path / "runs/first/curves.png").exists)
