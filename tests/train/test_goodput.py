"""The ledger of a run's time: buckets that add up to it, over kills and restarts."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax.train.goodput import BUCKETS, FILE, Goodput, Ledger, read_goodput

NOTHING = dict.fromkeys(BUCKETS, 0.0)


class Clock:
    """Eighths of seconds, which floats add exactly."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def unix(self) -> float:
        return self.time + 1.75e9

    def ledger(self, folder: Path, token: int, step: int | None) -> Ledger:
        ledger = self.unopened(folder, token)
        ledger.restored(step)
        return ledger

    def unopened(self, folder: Path, token: int) -> Ledger:
        return Ledger(folder / FILE, token, clock=self, now=self.unix)

    def spend(self, ledger: Ledger, **seconds: float) -> None:
        for bucket, spent in seconds.items():
            ledger.enter(bucket)
            self.time += spent


def spent(goodput: Goodput) -> dict[str, float]:
    return {bucket: seconds for bucket, seconds in goodput.seconds.items() if seconds}


def test_the_buckets_add_up_to_the_time_since_the_ledger_was_made() -> None:
    clock = Clock()
    ledger = Ledger(None, clock=clock, now=clock.unix)
    clock.time += 2.5
    clock.spend(ledger, compiling=10, productive=30)
    with ledger.spending("saving"):
        clock.time += 0.25
        with ledger.spending("waiting"):
            clock.time += 0.5
    clock.time += 1
    with contextlib.suppress(KeyError), ledger.spending("restoring"):
        clock.time += 4
        raise KeyError
    clock.time += 0.125
    goodput = ledger.summary()
    assert spent(goodput) == {
        "starting": 2.5,
        "compiling": 10,
        "productive": 31.125,
        "saving": 0.25,
        "waiting": 0.5,
        "restoring": 4,
    }
    assert goodput.wall_seconds == clock.time - 1000
    assert goodput.productive_fraction == 31.125 / 48.375
    assert (goodput.starts, goodput.down_seconds) == (1, 0)


def test_what_is_moved_is_there_and_no_more() -> None:
    clock = Clock()
    ledger = Ledger(None, clock=clock)
    clock.spend(ledger, productive=8)
    ledger.move("productive", "waiting", 3)
    assert spent(ledger.summary()) == {"productive": 5, "waiting": 3}
    ledger.move("productive", "waiting", -1)
    ledger.move("productive", "waiting", 50)
    clock.time += 1  # still in the bucket it was in
    assert spent(ledger.summary()) == {"productive": 1, "waiting": 8}


def test_a_kill_loses_what_was_done_after_the_mark_that_is_restored(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, starting=1, compiling=8, productive=16)
    first.mark(10)
    clock.spend(first, saving=0.5, productive=6, waiting=1)
    first.beat()
    clock.time += 2  # until the kill: nobody knows of it
    second = clock.ledger(tmp_path, 2, 10)
    assert spent(second.summary()) == {
        "starting": 1,
        "compiling": 8,
        "productive": 16,
        "saving": 0.5,
        "lost": 7,
    }
    assert second.summary().down_seconds == 2
    assert second.summary().starts == 2


def test_an_older_checkpoint_loses_several_starts(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    clock.spend(first, productive=20)
    first.mark(20)
    second = clock.ledger(tmp_path, 2, 20)
    clock.spend(second, restoring=1, compiling=5, productive=40)
    second.mark(30)
    third = clock.ledger(tmp_path, 3, 30)
    assert spent(third.summary()) == {"productive": 70, "restoring": 1, "compiling": 5}
    fourth = clock.ledger(tmp_path, 4, 10)  # 20 and 30 were refused
    assert spent(fourth.summary()) == {"productive": 10, "restoring": 1, "lost": 65}
    clock.spend(fourth, productive=80)
    fourth.mark(20)
    fifth = clock.ledger(tmp_path, 5, 20)  # the new 20: what the old one had stays lost
    assert spent(fifth.summary()) == {"productive": 90, "restoring": 1, "lost": 65}
    sixth = clock.ledger(tmp_path, 6, None)
    assert spent(sixth.summary()) == {"restoring": 1, "lost": 155}


def test_nothing_is_lost_until_the_start_knows_what_it_goes_on_from(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    clock.spend(first, productive=5)
    first.close()
    second = clock.unopened(tmp_path, 2)
    clock.spend(second, restoring=3)
    assert spent(second.summary()) == {"productive": 15, "restoring": 3}
    second.close()  # killed while it verified: it has thrown nothing away
    third = clock.unopened(tmp_path, 3)
    assert spent(third.summary()) == {"productive": 15, "restoring": 3}
    third.restored(10)
    assert spent(third.summary()) == {"productive": 10, "lost": 5, "restoring": 3}


@pytest.mark.parametrize("kept", [True, False])
def test_what_follows_a_last_checkpoint_is_kept_where_the_start_says_so(
    tmp_path: Path, kept: bool
) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    clock.spend(first, productive=4)
    first.close(kept=kept)
    first.close()
    first.mark(11)  # is over
    second = clock.ledger(tmp_path, 2, 10)
    assert spent(second.summary()) == (
        {"productive": 14} if kept else {"productive": 10, "lost": 4}
    )


def test_what_was_never_saved_is_lost_however_the_start_ended(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.close(kept=True)
    assert spent(clock.ledger(tmp_path, 2, None).summary()) == {"lost": 10}


def test_seconds_moved_after_a_mark_are_not_lost_twice(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    clock.time += 2
    first.move("productive", "waiting", 5)
    first.close()
    assert spent(clock.ledger(tmp_path, 2, 10).summary()) == {"productive": 10, "lost": 2}


def test_what_was_moved_to_saving_after_a_mark_stays_there(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    first.move("productive", "saving", 4)
    first.close()
    assert spent(clock.ledger(tmp_path, 2, 10).summary()) == {"productive": 6, "saving": 4}


class Model:
    """The same in other words: pieces of time, each of which is thrown away or not."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, float]] = []
        self.marks: list[tuple[int, int]] = []
        self.written = 0

    def restart(self, step: int | None) -> None:
        del self.pieces[self.written :]
        while self.marks and self.marks[-1][0] != step:
            self.marks.pop()
        kept = self.marks[-1][1] if self.marks else 0
        for number, (bucket, seconds) in enumerate(self.pieces):
            if number >= kept and bucket not in ("saving", "restoring", "lost"):
                self.pieces[number] = ("lost", seconds)

    def seconds(self) -> dict[str, float]:
        total = dict(NOTHING)
        for bucket, seconds in self.pieces:
            total[bucket] += seconds
        return total


actions = st.one_of(
    st.tuples(st.just("spend"), st.sampled_from(BUCKETS), st.integers(0, 200)),
    st.tuples(st.just("mark"), st.integers(1, 5)),
    st.tuples(st.just("beat")),
    st.tuples(st.just("restart"), st.integers(0, 6), st.sampled_from(["", "end", "torn", "kept"])),
)


def run_through(folder: Path, sequence: list[tuple[Any, ...]]) -> None:
    clock, model, token, step = Clock(), Model(), 1, 0
    path = folder / FILE
    path.unlink(missing_ok=True)
    began, ledger = clock.time, clock.ledger(folder, 1, None)
    for action, *values in sequence:
        size = path.stat().st_size
        if action == "spend":
            clock.spend(ledger, **{values[0]: values[1] / 8})
            model.pieces.append((values[0], values[1] / 8))
        elif action == "mark":
            step += values[0]
            ledger.mark(step)
            model.marks.append((step, len(model.pieces)))
        elif action == "beat":
            ledger.beat()
        else:
            number, end = values
            if end in ("end", "kept"):
                ledger.close(kept=end == "kept")
                model.written = len(model.pieces)
                if end == "kept" and model.marks:
                    model.marks.append((model.marks[-1][0], len(model.pieces)))
            elif end == "torn":
                with path.open("ab") as file:
                    file.write(path.read_bytes().splitlines()[0][:-2])
            steps = [None, *(mark for mark, _ in model.marks)]
            restored = steps[-1 - number % len(steps)]
            model.restart(restored)
            clock.time += 3
            token, step = token + 1, restored or 0
            ledger = clock.ledger(folder, token, restored)
            size = 0
        if path.stat().st_size > size:
            model.written = len(model.pieces)
    goodput = ledger.summary()
    assert goodput.seconds == model.seconds()
    assert goodput.wall_seconds == sum(seconds for _, seconds in model.pieces)
    assert goodput.wall_seconds + goodput.down_seconds == clock.time - began
    assert goodput.starts == token


quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(quick, max_examples=300)
@given(st.lists(actions, max_size=30))
def test_kills_at_any_point_leave_sums_that_are_exact(
    tmp_path: Path, sequence: list[tuple[Any, ...]]
) -> None:
    run_through(tmp_path, sequence)


def test_a_killed_start_is_known_to_within_five_seconds(tmp_path: Path) -> None:
    clock = Clock()
    ledger = clock.ledger(tmp_path, 1, None)
    ledger.enter("productive")
    for _ in range(1001):
        clock.time += 0.125
        ledger.beat()
        known = clock.unopened(tmp_path, 2).summary().down_seconds if clock.time % 7 == 0 else 0
        assert known <= 5.125
    assert len((tmp_path / FILE).read_text().splitlines()) < 1001 / 8 / 5 + 40


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
    """A folder with a start of 10 s, marked at step 10."""
    clock = Clock()
    ledger = clock.ledger(folder, 1, None)
    clock.spend(ledger, productive=10)
    ledger.mark(10)
    ledger.close()
    return clock


def test_a_start_that_was_replaced_and_goes_on_writing_is_not_counted(tmp_path: Path) -> None:
    clock = Clock()
    first = clock.ledger(tmp_path, 1, None)
    clock.spend(first, productive=10)
    first.mark(10)
    second = clock.ledger(tmp_path, 2, 10)
    clock.time += 7
    first.mark(20)  # it was frozen, and wakes
    clock.spend(second, productive=1)
    second.mark(20)
    third = clock.ledger(tmp_path, 3, 20)
    assert spent(third.summary()) == {"productive": 11, "starting": 7}


def test_a_line_that_a_kill_broke_does_not_break_the_next(tmp_path: Path) -> None:
    clock = started(tmp_path)
    path = tmp_path / FILE
    text = path.read_bytes()
    for cut in range(1, len(text.splitlines()[-1]) + 1):
        path.write_bytes(text[:-cut])
        second = clock.ledger(tmp_path, 2, 10)
        clock.spend(second, productive=4)
        second.mark(14)
        second.close()
        assert spent(clock.ledger(tmp_path, 3, 14).summary()) == {"productive": 14}


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


def test_hooks_take_their_share_of_the_productive_time() -> None:
    clock = Clock()
    ledger = Ledger(None, clock=clock)
    ledger.hooks = {"Draw": 1.0, "Count": 3.0}
    clock.spend(ledger, productive=8)
    assert spent(ledger.summary()) == {"productive": 4, "hooks": 4}
    (line,) = ledger.summary().lines()
    assert line == "time   8.0 s: productive 50.0% · hooks 50.0% (most Count)"


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
    assert all(line.startswith("       · ") for line in lines[1:])
    text = " ".join(lines)
    of_clock = "productive 83.8% of the clock"
    for part in ("lost 3.1%", "saving 0.4%", "waiting 0.5%", "1 min 20 s between", of_clock):
        assert part in text
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
    clock.spend(ledger, productive=5, compiling=5)
    ledger.mark(15)
    ledger.close()
    spent = ledger.summary()
    assert (spent.productive_fraction, spent.clock_fraction) == (15 / 20, 15 / 50)
    assert json.loads((tmp_path / FILE).read_text().splitlines()[-1])["of_clock"] == 0.3
    assert read_goodput(tmp_path / FILE) == spent
    assert read_goodput(tmp_path / "none") is None
    assert Goodput(NOTHING, 1, 0.0).clock_fraction == 0.0
