"""Trials of every kind of fault, and trials that fail without the defence against it."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.harness import Harness
from chaos.runs.corruption import KINDS, corrupt
from chaos.runs.defences import DEFENCES
from chaos.runs.faults import FAULTS
from chaos.runs.harness import RunsHarness
from support.fork_server import ForkServer
from support.tiers import EXHAUSTIVE, only

TRIALS = 2 * len(FAULTS)
JOBS = 2
MUTATED_TRIALS = 8


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with RunsHarness() as opened:
        yield opened


@pytest.mark.promise("run.kill-leaves-no-trace")
@pytest.mark.parametrize("seed", only((), (0, TRIALS), sampled=[0]))
def test_nobody_can_tell_what_happened_to_a_run(harness: Harness, seed: int) -> None:
    outcomes = harness.run(list(FAULTS), TRIALS, seed, jobs=JOBS)
    wrong = [outcome.line() for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)
    assert {outcome.fault for outcome in outcomes if not outcome.missed} == set(FAULTS)
    assert all(outcome.equal for outcome in outcomes)


@EXHAUSTIVE
def test_nobody_can_tell_that_a_run_was_killed(harness: Harness) -> None:
    outcomes = harness.run(["kill"], 2, seed=0, jobs=JOBS)
    assert [outcome.wrong for outcome in outcomes] == [[], []]
    assert all(outcome.equal and not outcome.missed for outcome in outcomes)


@EXHAUSTIVE
@pytest.mark.parametrize("name", DEFENCES)
def test_a_trial_fails_without(harness: Harness, name: str) -> None:
    defence = DEFENCES[name]
    outcomes = harness.run([defence.fault], MUTATED_TRIALS, seed=0, jobs=JOBS, without=name)
    assert any(outcome.wrong for outcome in outcomes), f"no trial needs {defence.what}"


def test_a_checkpoint_is_corrupted_in_every_way(tmp_path: Path) -> None:
    ways = set()
    for seed in range(100):
        folders = [tmp_path / str(seed) / name for name in ("newest", "older")]
        for number, folder in enumerate(folders):
            folder.mkdir(parents=True)
            for name in ("a", "b", "c"):
                (folder / name).write_bytes(f"{name}{number}".encode() * 9)
        before = _content(folders[0])
        what = corrupt(*folders, random.Random(seed))
        assert _content(folders[0]) != before, what
        ways.add(next(word for word in WORDS if word in what))
    assert len(ways) == len(KINDS)


WORDS = ("flipped", "truncated", "deleted", "swapped", "replaced", "added")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_forked_ends_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(
        "import atexit, os, sys, time\n"
        "atexit.register(print, 'bye')\n"
        "print(sys.argv[1:], os.environ['GREETING'], flush=True)\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(3)\n"
    )
    server = ForkServer({"PATH": "", "JAX_PLATFORMS": "cpu"}, preloaded=())
    try:
        ended, killed = (
            server.fork(
                [str(tmp_path / "hello.py"), seconds],
                {"GREETING": "hi"},
                tmp_path / f"{seconds}.out",
                tmp_path / f"{seconds}.err",
            )
            for seconds in ("0", "60")
        )
        assert server.wait([ended], 20.0)
        assert killed.status is None
        killed.signal(signal.SIGKILL)
        assert server.wait([killed], 20.0)
    finally:
        server.close()
    assert (ended.status, killed.status) == (3, -signal.SIGKILL)
    assert ended.out.read_text() == "['0'] hi\nbye\n"
    assert ended.err.read_text() == ""
