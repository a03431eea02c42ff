"""The public bugs of `benchmarks/caught.py`: each broken form is caught, each mended one is not."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support.tiers import only

from replicax.lint.batch_means import check_batch_means
from replicax.lint.parsed import ParsedFile

ROOT = Path(__file__).resolve().parents[2]
caught = importlib.import_module("caught")
PROGRAMS = {program.__name__: program for program in caught.programs()}
RESULT: dict[str, Any] = json.loads((caught.RESULTS / "caught.json").read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in RESULT["rows"]}
MISSED = {"MegatronBridge6103"}
"""Its loss is what it says, on one device too."""
OFTEN = ("OpenTSLM49", "JAXFinufft226", "ShortLastBatch")


@pytest.mark.parametrize("name", only(OFTEN, PROGRAMS))
def test_the_same_ways_find_the_broken_form_and_none_the_mended(name: str) -> None:
    if name not in OFTEN:
        jax.clear_caches()
    found = {form: caught.found(PROGRAMS[name], form) for form in caught.FORMS}
    assert found["mended"] == {}
    assert list(found["broken"]) == list(ROWS[name]["caught"])


def test_the_first_step_refuses_a_mean_of_its_own_tokens() -> None:
    program = PROGRAMS["Transformers24725"]
    assert caught.by_first_step(program, "broken").startswith("LossError: ")
    assert caught.by_first_step(program, "mended") == ""


def test_the_table_has_every_program_and_nine_of_ten_are_caught() -> None:
    assert list(ROWS) == list(PROGRAMS)
    assert {name for name, row in ROWS.items() if not row["caught"]} == MISSED
    assert not any(row["false alarms"] for row in ROWS.values())
    assert len(ROWS) - len(MISSED) >= 0.9 * len(ROWS)
    page = caught.PAGE.read_text(encoding="utf-8")
    assert caught.table(RESULT) in page
    assert caught.counts(RESULT) in page


def test_lint_finds_no_mean_of_batches_in_examples_recipes_and_benchmarks() -> None:
    for folder in ("examples", "src/replicax/recipes", "benchmarks"):
        for path in (ROOT / folder).glob("*.py"):
            program = ParsedFile(path.read_text(encoding="utf-8"), path)
            check_batch_means(program)
            assert program.findings() == [], path
