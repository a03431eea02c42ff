"""The ledger's file, and the summary of a run's time that is read from it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.figures import figures
from support.ledgers import NOTHING, Clock, spent, worked

from replicax.train.folder.goodput import BUCKETS, FILE, Goodput, read_goodput


def test_a_month_leaves_a_file_of_megabytes(tmp_path: Path) -> None:
    clock = Clock()
    ledger = clock.ledger(tmp_path, 1, None)
    ledger.enter("productive")
    for _ in range(86_400):
        clock.time += 30
        ledger.beat()
    ledger.close()
    assert (tmp_path / FILE).stat().st_size < 4e6
    assert clock.ledger(tmp_path, 2, None).summary().wall_seconds == 86_400 * 30


def started(folder: Path) -> Clock:
    """A folder with a start of 10 s that has ended, marked at step 10."""
    clock, ledger = worked(folder)
    ledger.close()
    return clock


def test_a_start_that_was_replaced_and_goes_on_writing_is_not_counted(tmp_path: Path) -> None:
    clock, first = worked(tmp_path)
    second = clock.ledger(tmp_path, 2, 10)
    clock.time += 7
    first.mark(20)  # it was frozen, and wakes
    clock.spend(second, productive=1)
    second.mark(20)
    third = clock.ledger(tmp_path, 3, 20)
    assert spent(third.summary()) == {"productive": 11, "starting": 7}


@pytest.mark.promise("outside.full-disk")
@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{}", '{"seconds": null}', "\0\0\0", '{"start": 1, ', "[" * 10**5),
        '{"start": 1, "mark": false, "seconds": {}}',
        '{"start": [], "mark": true, "at": 1, "seconds": {}}',
        '{"start": 1, "mark": true, "at": "x", "seconds": {"productive": {}}}',
        '{"start": 1, "mark": false, "at": 1e308, "seconds": {"productive": 1e308}}',
    ],
)
def test_a_line_that_is_none_is_skipped(tmp_path: Path, text: str) -> None:
    clock = started(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write(text + "\n")
    ledger = clock.ledger(tmp_path, 2, 10)
    assert spent(ledger.summary()) == {"productive": 10}
    assert ledger.summary().starts == 2


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / FILE).mkdir()
    ledger = clock.ledger(tmp_path, 1, None)
    clock.spend(ledger, productive=10)
    ledger.mark(10)
    assert str(tmp_path / FILE) in str(ledger.fault)
    (tmp_path / FILE).rmdir()
    clock.spend(ledger, productive=2)
    ledger.mark(12)
    assert ledger.fault is None
    assert spent(clock.ledger(tmp_path, 2, 12).summary()) == {"productive": 12}


def test_a_line_that_knows_fewer_buckets_is_read(tmp_path: Path) -> None:
    line = {"start": 1, "restored": None, "step": None, "mark": False, "at": 1.75e9}
    (tmp_path / FILE).write_text(json.dumps({**line, "seconds": {"productive": 3.0}}) + "\n")
    assert spent(Clock().unopened(tmp_path, 2).summary()) == {"productive": 3}


def test_the_closing_summary() -> None:
    seconds = NOTHING | {"productive": 674.0, "compiling": 14.5, "lost": 22.4}
    seconds |= {"saving": 2.9, "restoring": 4.3, "waiting": 3.6, "starting": 2.3}
    lines = Goodput(seconds, starts=3, down_seconds=80.0).lines()
    assert lines[0].startswith(
        "time   12 min 04 s over 3 starts: productive 93.1% · compiling 2.0%"
    )
    *shares, down = lines[1:]
    assert all(line.startswith("       · ") for line in shares)
    text = " ".join([lines[0], *shares])
    for part in ("lost 3.1%", "saving 0.4%", "waiting 0.5%"):
        assert part in text
    assert figures(down) == ["1", "20", "83.8"]
    assert "(" not in text
    assert Goodput(NOTHING, 1, 0.0).lines() == ["time   0.0 s"]
    alone = Goodput(NOTHING | {"productive": 5.0}, 1, 0.0)
    assert alone.lines() == ["time   5.0 s: productive 100.0%"]


@given(
    st.lists(st.floats(0, 1e9), min_size=len(BUCKETS), max_size=len(BUCKETS)),
    st.integers(1, 10**6),
    st.floats(0, 1e10),
)
def test_any_summary_fits_80_columns(spent: list[float], starts: int, down: float) -> None:
    goodput = Goodput(dict(zip(BUCKETS, spent, strict=True)), starts, down)
    assert all(len(line) <= 80 for line in goodput.lines())
    assert 0 <= goodput.productive_fraction <= 1


def test_the_share_of_the_clock_counts_the_time_between_starts(tmp_path: Path) -> None:
    clock = started(tmp_path)  # 10 s of work
    clock.time += 30
    ledger = clock.ledger(tmp_path, 2, 10)
    clock.spend(ledger, productive=3, evaluating=2, compiling=5)
    ledger.mark(15)
    ledger.close()
    spent = ledger.summary()
    assert (spent.productive_fraction, spent.clock_fraction) == (15 / 20, 15 / 50)
    assert json.loads((tmp_path / FILE).read_text().splitlines()[-1])["of_clock"] == 0.3
    assert read_goodput(tmp_path / FILE) == spent
    assert read_goodput(tmp_path / "none") is None
    assert Goodput(NOTHING, 1, 0.0).clock_fraction == 0.0
