"""The ledger of a run's time: buckets that add up to it, over kills and restarts."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ledgers import NOTHING, Clock, spent, worked

from replicax.train.folder.goodput import BUCKETS, FILE, Ledger


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


def test_nothing_is_lost_until_the_start_knows_what_it_goes_on_from(tmp_path: Path) -> None:
    clock, first = worked(tmp_path)
    clock.spend(first, productive=5)
    first.close()
    second = clock.unopened(tmp_path, 2)
    clock.spend(second, restoring=3)
    assert spent(second.summary()) == {"productive": 15, "restoring": 3}
    second.close()  # killed during verification: it has lost nothing yet
    third = clock.unopened(tmp_path, 3)
    assert spent(third.summary()) == {"productive": 15, "restoring": 3}
    third.restored(10)
    assert spent(third.summary()) == {"productive": 10, "lost": 5, "restoring": 3}


def test_seconds_moved_after_a_mark_are_not_lost_twice(tmp_path: Path) -> None:
    clock, first = worked(tmp_path)
    clock.time += 2
    first.move("productive", "waiting", 5)
    first.close()
    assert spent(clock.ledger(tmp_path, 2, 10).summary()) == {"productive": 10, "lost": 2}


def test_what_was_moved_to_saving_after_a_mark_stays_there(tmp_path: Path) -> None:
    clock, first = worked(tmp_path)
    first.move("productive", "saving", 4)
    first.close()
    assert spent(clock.ledger(tmp_path, 2, 10).summary()) == {"productive": 6, "saving": 4}


class Model:
    """A model of the ledger: pieces of time, each of which is lost or not."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, float]] = []
        self.marks: list[tuple[int, int]] = []
        self.written = self.begun = 0
        self.starts = 1
        """Starts that did a step, and the current one."""

    def restart(self, step: int | None) -> None:
        del self.pieces[self.written :]
        self.starts += any(name == "productive" and s for name, s in self.pieces[self.begun :])
        self.begun = len(self.pieces)
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
    assert goodput.starts == model.starts


quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.promise("checkpoints.time-adds-up")
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


def test_hooks_take_their_share_of_the_productive_time() -> None:
    clock = Clock()
    ledger = Ledger(None, clock=clock)
    ledger.hooks = {"Draw": 1.0, "Count": 3.0}
    clock.spend(ledger, productive=8)
    assert spent(ledger.summary()) == {"productive": 4, "hooks": 4}
    (line,) = ledger.summary().lines()
    assert line == "time   8.0 s: productive 50.0% · hooks 50.0% (most Count)"
