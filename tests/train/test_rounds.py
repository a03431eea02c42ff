"""Runs whose islands take several steps between two exchanges, each in a thread."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.bit_flips import flip_leaf, leaf_names
from support.figures import assert_mentions
from support.island_networks import places
from support.island_runs import (
    SOURCE,
    STEPS,
    At,
    Island,
    started,
    with_one_that_comes_back,
    with_one_that_dies,
)
from support.tiers import only

import replicax as rx
from replicax.islands.messages import Done
from replicax.train.files.fingerprint import sha256

SETTINGS = [
    {"every": 5},
    {"every": 8, "send": "int4", "fragments": 2, "delay": 1},
]


def run(
    count: int,
    rounds: dict[str, Any],
    hooks: dict[int, list[rx.Hook]] | None = None,
    **more: Any,
) -> list[Island]:
    """Return the islands of a run, once it is over."""
    settings = {"mode": "jit", "rounds": rx.Rounds(**rounds), "eval_source": SOURCE, **more}
    return [island.join() for island in started(count, hooks, **settings)]


def agreed(island: Island) -> str:
    """Return a checksum of what all islands must agree on."""
    if island.error is not None:
        raise island.error
    assert island.result is not None
    state = island.result.state
    return sha256((state.params, state.opt_state, state.extras, state.losses, state.step))


def figures(island: Island) -> list[Any]:
    """Return the evaluations, and the losses of all islands."""
    assert island.result is not None
    return [
        (r.kind, r.step, r.metrics[name])
        for r in island.result.records
        for name in ({"train": "round_loss", "eval": "loss"}.get(r.kind, ""),)
        if name in r.metrics
    ]


def assert_alike(ended: list[Island]) -> None:
    assert len({agreed(island) for island in ended}) == 1
    assert all(figures(island) == figures(ended[0]) for island in ended)
    assert {island.result.step for island in ended if island.result is not None} == {STEPS}


@pytest.fixture(scope="module", params=only(SETTINGS[1:], SETTINGS), ids=["every", "fragments"])
def undisturbed(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[Island]]:
    """Return the settings of three islands, and the islands at the end."""
    ended = run(3, request.param)
    assert_alike(ended)
    return request.param, ended


class Stop(At):
    """Lets an island have a signal before a step."""

    def __init__(self, step: int) -> None:
        self.interrupt = rx.types.Interrupt()
        super().__init__(step, self._signal)

    def _signal(self) -> None:
        self.interrupt.signal = signal.SIGTERM


def stopped(
    count: int,
    rounds: dict[str, Any],
    folder: Path,
    step: int,
    hooks: dict[int, list[rx.Hook]] | None = None,
) -> list[Island]:
    """Return islands that all got a signal before a step, and have saved."""
    found = []
    for place in places(count):
        stop = Stop(step)
        own: dict[str, Any] = {
            "hooks": [stop, *(hooks or {}).get(place.index, [])],
            "interrupt": stop.interrupt,
        }
        own |= {"eval_source": SOURCE, "run_dir": folder}
        found.append(Island(place, mode="jit", rounds=rx.Rounds(**rounds), **own))
    ended = [island.join() for island in found]
    assert len({agreed(island) for island in ended}) == 1
    steps = {island.result.step for island in ended if island.result is not None}
    assert len(steps) == 1
    assert step < max(steps) < STEPS
    return ended


def test_islands_that_all_stop_resume_with_the_same_bits(
    undisturbed: tuple[dict[str, Any], list[Island]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds, usual = undisturbed
    stopped(3, rounds, tmp_path / "run", 12)
    capsys.readouterr()
    again = run(3, rounds, run_dir=tmp_path / "run")
    assert [agreed(island) for island in again] == [agreed(island) for island in usual]
    assert all(figures(island) == figures(usual[0]) for island in again)
    own = [sha256(island.result.state) for island in (*usual, *again) if island.result is not None]
    assert own[:3] == own[3:]
    assert len(set(own)) == 3
    assert "optimizer state" not in capsys.readouterr().err


class Deaf(rx.Hook):
    """Lets an island not hear that the others have saved the end of the run, as they are gone."""

    def saving(self, run: Any) -> None:
        of = run.dp.job.group.agreement
        hear = of.hear
        of.hear = lambda island, told: hear(island, Done()) if type(told) is Done else None


def test_who_does_not_hear_that_the_end_is_saved_keeps_the_states_of_others(
    tmp_path: Path,
) -> None:
    stopped(3, SETTINGS[0], tmp_path / "run", 12, {2: [Deaf()]})
    records = (tmp_path / "run" / "records.jsonl").read_text()
    assert '"live": 1.0' in records  # the last one took over
    again = run(3, SETTINGS[0], run_dir=tmp_path / "run")
    assert {agreed(island) for island in again} == {agreed(run(3, SETTINGS[0])[0])}


@pytest.mark.parametrize(("before", "after"), only([(2, 3)], [(3, 2), (2, 3)]))
def test_another_number_of_islands_goes_on(
    before: int, after: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(before, SETTINGS[0], tmp_path / "run", 12)
    capsys.readouterr()
    assert_alike(run(after, SETTINGS[0], run_dir=tmp_path / "run"))
    lines = [line for line in capsys.readouterr().err.splitlines() if "ALARM" in line]
    told = [line for line in lines if "optimizer state" in line]
    assert len(told) == max(after - before, 0)


@pytest.mark.parametrize(("dying", "step"), only([(0, 13)], [(0, 13), (2, 13), (0, 15), (2, 15)]))
def test_an_island_that_dies_costs_its_round(dying: int, step: int, tmp_path: Path) -> None:
    """In a round, or where it ends; also the one that writes."""
    settings: dict[str, Any] = {"eval_source": SOURCE, "run_dir": tmp_path / "run"}
    settings |= {"mode": "jit", "rounds": rx.Rounds(every=5, send="int8")}
    islands = with_one_that_dies(3, dying, step, **settings)
    ended = [island.join() for island in islands if island.place.index != dying]
    assert_alike(ended)


def test_an_island_that_comes_back_takes_the_outer_state(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_source": SOURCE, "run_dir": tmp_path / "run"}
    settings |= {"mode": "jit", "rounds": rx.Rounds(every=5, send="int4")}
    assert_alike(with_one_that_comes_back(2, 12, **settings))


class Flip(rx.Hook):
    """Flips a bit of a leaf after a step; `Audit` comes after it."""

    def __init__(self, leaf: str, step: int) -> None:
        self._leaf, self._step = leaf, step

    def dispatched(self, run: Any, step: Any) -> None:
        if step.place.step == self._step:
            number = leaf_names(run.state).index(self._leaf)
            run.state = flip_leaf(run.state, number, run.dp.mesh.devices.flat[0], 2, 3)


def test_an_audit_compares_what_islands_agree_on() -> None:
    audits = [rx.hooks.Audit(every=4) for _ in range(3)]
    flip = Flip("islands.inner.params['w']", 8)
    ended = run(3, SETTINGS[0], {n: [*[flip][: n == 1], audits[n]] for n in range(3)})
    assert_alike(ended)
    assert [audit.clean for audit in audits] == [STEPS // 4] * 3


def test_an_audit_finds_other_outer_parameters() -> None:
    audits = [rx.hooks.Audit(every=4) for _ in range(3)]
    flip = Flip("params['w']", 8)
    ended = run(3, SETTINGS[0], {n: [*[flip][: n == 1], audits[n]] for n in range(3)})
    assert isinstance(ended[1].error, rx.errors.IslandLeftError)
    assert_mentions(str(ended[1].error), "params['w']", "step 8", "2 of 3")
    assert_alike([ended[0], ended[2]])
