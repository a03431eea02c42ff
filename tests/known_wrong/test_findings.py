"""Lines on rows that concern this process, once, and refusals."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.errors import ConfigError
from replicax.known_wrong import avoidance, findings, known_table
from replicax.known_wrong.known_table import KnownWrong
from replicax.verify.step import verify_step
from replicax.verify.verify_program import verify_program

ROW = KnownWrong(
    name="sums",
    package="jaxlib",
    first="",
    fixed="",
    platform="cpu",
    answer="say",
    wrong="sums are wrong",
    link="https://example.com/1",
    fix="use another version",
    self_test="sums",
)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return batch @ model


def put(monkeypatch: pytest.MonkeyPatch, row: KnownWrong, *, wrong: bool = True) -> list[Any]:
    """Let `row` be the table, with a self-test; return the options of each of its runs."""
    seen: list[Any] = []

    def test(options: Any) -> bool:
        seen.append(dict(options))
        return wrong and not options

    monkeypatch.setattr(known_table, "known_table", lambda: (row,))
    monkeypatch.setattr(findings, "SELF_TESTS", {"sums": test})
    return seen


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = known_table.rows_here, avoidance._avoiding, findings.finding_of
    monkeypatch.setattr(findings, "_SAID", set())
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_line_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, ROW)
    [line] = findings.lines_once("cpu")
    assert all(text in line for text in (ROW.wrong, ROW.link, ROW.fix, "jaxlib"))
    assert findings.lines_once("cpu") == []


def test_who_passes_the_self_test_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = put(monkeypatch, ROW, wrong=False)
    assert findings.lines_once("cpu") == []
    assert seen == [{}]


def test_another_platform_is_not_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, dataclasses.replace(ROW, platform="tpu"))
    assert findings.lines_once("cpu") == findings.lines_once("tpu") == []


@pytest.mark.parametrize("known", [True, False])
def test_an_option_that_the_compiler_does_not_know_is_left_out_and_said(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = {"xla_backend_optimization_level" if known else "xla_no_such_option": "2"}
    seen = put(monkeypatch, dataclasses.replace(ROW, answer="avoid", options=option))
    assert avoidance.avoiding("cpu") == (option if known else {})
    assert len(findings.lines_once("cpu")) == (0 if known else 1)
    assert seen == ([{}, option] if known else [{}])


@pytest.mark.parametrize("wrong", [True, False])
def test_what_nothing_avoids_is_refused(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, dataclasses.replace(ROW, answer="refuse"), wrong=wrong)
    raised = pytest.raises(ConfigError, match=ROW.fix) if wrong else contextlib.nullcontext()
    with raised:
        rx.DataParallel(loss, optax.sgd(0.1))


def test_the_line_comes_at_the_start_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, ROW)
    rows = np.ones((8, 2), np.float32)
    dp = rx.DataParallel(loss, optax.sgd(0.1))
    rx.fit(dp, dp.init(jnp.ones(2)), rows, batch_size=8, steps=1, progress=False)
    assert ROW.fix in capsys.readouterr().err


@pytest.mark.parametrize("verify", [verify_program, verify_step])
def test_the_line_comes_at_the_start_of_verify(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Said(BaseException):
        pass

    def said(platform: str) -> None:
        raise Said(platform)

    monkeypatch.setitem(inspect.unwrap(verify).__globals__, "lines_once", said)
    dp = rx.DataParallel(loss, optax.sgd(0.1))
    given = [dp, jnp.ones(2)] if verify is verify_program else [loss, loss, jnp.ones(2)]
    with pytest.raises(Said, match="cpu"):
        verify(*given, np.ones((8, 2), np.float32))
