"""`rx.verify`: its rows, and its errors."""

import numpy as np
import pytest
from support.training import parallel
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.core.modes.mode_table import MODES
from replicax.verify.subject import Subject
from replicax.verify.verification import Verification
from replicax.verify.verify_program import modes_of


@pytest.fixture(scope="module")
def plain() -> Verification:
    return zoo.Entry().verify(modes=["jit", "exact"])


def test_it_checks_everything(plain: Verification) -> None:
    assert [*dict.fromkeys(check.subject for check in plain.checks)] == [
        "parity",
        "reduction",
        "traffic",
        "redundant work",
        "gradient",
        "parameters",
        "replicas",
        "determinism",
        "recompilation",
    ]
    assert plain.ok, [c for c in plain.checks if c.verdict == "fail"]


def test_parity_has_a_row_for_each_batch(plain: Verification) -> None:
    cases = [check.case for check in plain.checks if check.subject == "parity"]
    batches = ("full", "padded", "unequal weights")
    names = [
        "rows left out",
        *(f"jit, {batch}" for batch in batches),
        *(f"jit, 2 micro-batches, {batch}" for batch in batches),
        *(f"exact, {batch}" for batch in batches),
        "exact, 1, 2, 4 devices",
        "exact, 3 islands",
    ]
    assert cases == names


@pytest.mark.promise("exact.digests-are-compared")
def test_exact_gives_one_digest(plain: Verification) -> None:
    (check,) = (check for check in plain.checks if check.case == "exact, 1, 2, 4 devices")
    assert len(set(check.figures["sha256"].values())) == 1
    assert check.figures["sha256"]["1"][:12] in check.found


def test_about(plain: Verification) -> None:
    assert plain.about["devices"] == 4
    assert plain.about["rows"] == zoo.ROWS
    assert plain.about["other_modes"] == []


@pytest.mark.parametrize(("modes", "count"), [(None, 1), ("all", len(MODES)), ("jit", 1)])
def test_modes(modes: str | None, count: int) -> None:
    dp = parallel(zoo.good, zoo.Entry().optimizer(), mode="shard_map")
    chosen = modes_of(dp, modes)
    assert len(chosen) == count
    assert (dp.mode in chosen) == (modes != "jit")


def test_the_first_row_comes_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(Subject, "warm", fails)
    dp = parallel(zoo.good, zoo.Entry().optimizer(), devices=2)
    found = rx.verify(dp, zoo.network(), zoo.data(), micro_batches=1)
    assert [check.verdict for check in found.checks] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (7, {}, "need 8"),
        (32, {"modes": ["jt"]}, "did you mean 'jit'"),
        (32, {"micro_batches": 0}, "micro_batches=0"),
    ],
)
def test_refusals(rows: int, options: dict[str, object], said: str) -> None:
    dp = parallel(zoo.good, zoo.Entry().optimizer())
    batch = {"x": np.zeros((rows, 6), np.float32), "y": np.zeros((rows, 4), np.float32)}
    with pytest.raises(rx.errors.ConfigError, match=said):
        rx.verify(dp, zoo.network(), batch, **options)  # type: ignore[arg-type]
