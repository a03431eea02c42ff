"""docs/same-job.md: its programs run, and its figures are those of benchmarks/five_ways."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE, only

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "pmap_by_hand": ["orbax.checkpoint"],
    "jit_by_hand": ["orbax.checkpoint"],
    "flax_nnx": ["flax", "orbax.checkpoint"],
    "keras_distribution": ["keras"],
    "with_accelerate": ["accelerate", "torch"],
    "with_replicax": [],
}
WITH_REPLICAX = [("with_replicax", name) for name in ("uneven last batch", "masked")]
CASES = [
    *((program, "even") for program in NEEDED),
    *WITH_REPLICAX,
    ("with_replicax", "masked, 2 micro-batches"),
]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/five_ways")
    return importlib.import_module("compare")


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """The weights of one device, by variant, which all programs are compared with."""
    return {}


@EXHAUSTIVE
@pytest.mark.parametrize(("program", "variant"), only(WITH_REPLICAX[:1], CASES))
def test_weights_are_those_of_one_device(
    compare: ModuleType, references: dict[str, Any], program: str, variant: str, tmp_path: Path
) -> None:
    for package in NEEDED[program]:
        pytest.importorskip(package)
    env = compare.VARIANTS[variant]
    if variant not in references:
        references[variant] = compare.once("reference", tmp_path, env)
    weights = compare.once(program, tmp_path, env)
    assert not isinstance(weights, str), weights
    assert compare.apart(weights, references[variant]) < 1e-6


def test_the_page_shows_what_was_measured(compare: ModuleType) -> None:
    page = (ROOT / "docs/same-job.md").read_text(encoding="utf-8")
    found = json.loads(compare.RESULTS.read_text(encoding="utf-8"))
    assert all(found["about"][package] in page for package in ("jax", "keras", "accelerate"))
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for program, result in found["programs"].items():
        assert result["lines"] == compare.lines(program)
        shown = [row for row in rows if row[1] == str(result["lines"])]
        shares = [share for share in result["difference"].values() if not isinstance(share, str)]
        assert any(
            all(f"{share:.0e}".replace("e-0", "e-") in "".join(row) for share in shares)
            for row in shown
        )
        seconds = result["killed"]["seconds until all had ended"]
        assert any(f"{seconds:.0f} s" in row for row in rows)
