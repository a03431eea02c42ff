"""Runs stopped by a signal: what they raise or return, also while a loader waits."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.cluster_jobs import opened
from support.resumable import data_parallel, fit, model, rows, steps_saved
from support.training import slices

import replicax as rx
from replicax.core.data.feed import Feed, GaveUpError, Split
from replicax.core.data.sources import as_source
from replicax.errors import StateError, Terminated

STEPS, BATCH = 3, 10


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    return data_parallel(1)


class Stuck(rx.Hook):
    """A source whose batch after `most` never comes; the run that waits for it gets a signal."""

    def __init__(self, number: int, most: int) -> None:
        self.free, self._waited_for = threading.Event(), threading.Event()
        self.most, self._number = most, number

    def dispatched(self, run: Any, step: Any) -> None:
        if step.place.step == self.most:
            self._waited_for.set()

    def __iter__(self) -> Iterator[Any]:
        yield from slices(rows(), BATCH)[: self.most]
        if self.most:
            self._waited_for.wait()
        time.sleep(0.05)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, self._number)
        self.free.wait()


@pytest.fixture
def stuck(request: pytest.FixtureRequest) -> Iterator[Stuck]:
    made = Stuck(*getattr(request, "param", (signal.SIGTERM, STEPS)))
    yield made
    made.free.set()


@pytest.mark.promise("checkpoints.signals")
@pytest.mark.parametrize(
    "stuck", [(n, STEPS) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)], indirect=True
)
def test_a_signal_ends_the_program_with_75_while_the_loader_waits(
    dp: rx.DataParallel, tmp_path: Path, stuck: Stuck
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit(dp, tmp_path / "run", source=stuck, batch_size=None, save_every=100, hooks=[stuck])
    assert isinstance(stopped.value, Terminated)
    assert (stopped.value.code, stopped.value.result.step) == (75, STEPS)
    assert steps_saved(tmp_path / "run") == [str(STEPS)]
    assert stopped.value.result.goodput.seconds["waiting"] > 0.05


@pytest.mark.promise("checkpoints.signals")
@pytest.mark.parametrize("stuck", [(signal.SIGINT, STEPS), (signal.SIGINT, 0)], indirect=True)
def test_ctrl_c_raises_as_usual_and_the_model_is_kept(dp: rx.DataParallel, stuck: Stuck) -> None:
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(dp, source=stuck, batch_size=None, hooks=[stuck])
    assert type(stopped.value) is KeyboardInterrupt  # with a subclass Python exits with 1
    result = stopped.value.result
    assert (result.interrupted, result.saved) == (True, False)
    assert int(result.state.step) == result.step == stuck.most


@pytest.mark.promise("run.same-call-resumes")
def test_the_same_call_resumes_with_a_state_that_is_used_up(
    dp: rx.DataParallel, tmp_path: Path, stuck: Stuck
) -> None:
    """As a notebook's cell that is run again."""
    state = dp.init(model())
    with pytest.raises(SystemExit):
        fit(dp, tmp_path, state=state, source=stuck, batch_size=None, hooks=[stuck])
    with pytest.raises(StateError):
        fit(dp, tmp_path / "other", state=state)
    more = stuck.most + 1
    after = fit(dp, tmp_path, state=state, steps=more, accept_changes=True)
    assert (after.steps, after.step) == (1, more)


def test_a_run_within_a_run_leaves_the_outer_one_to_save_and_raise(
    dp: rx.DataParallel, tmp_path: Path, stuck: Stuck
) -> None:
    settings = {"batch_size": BATCH, "steps": 9, "progress": False}
    other = data_parallel(1)

    def outer() -> None:
        with rx.Run(dp, dp.init(model()), rows(), run_dir=tmp_path / "outer", **settings) as run:
            for batch in run:
                run.step(batch)
                inner = fit(other, tmp_path / "inner", source=stuck, batch_size=None, hooks=[stuck])
                assert (inner.interrupted, inner.step) == (True, STEPS)

    with pytest.raises(Terminated) as stopped:
        outer()
    assert (stopped.value.code, stopped.value.result.step) == (75, 1)
    assert steps_saved(tmp_path / "outer") == ["1"]


@pytest.mark.parametrize("stuck", [(signal.SIGTERM, 0)], indirect=True)
def test_an_evaluation_that_waits_is_done_later(
    dp: rx.DataParallel, tmp_path: Path, stuck: Stuck
) -> None:
    with pytest.raises(SystemExit):
        fit(dp, tmp_path / "run", steps=2, eval_source=stuck)
    result = fit(dp, tmp_path / "run", steps=2, eval_source=rows(20, 2))
    assert (result.steps, [r.kind for r in result.records][-1]) == (0, "eval")


def test_processes_give_up_together_when_one_of_them_waits() -> None:
    """With a real hub: process 1 waits for its loader, and learns that all stop."""
    free, told = threading.Event(), threading.Event()
    sharding = NamedSharding(rx.make_mesh(1), PartitionSpec("data"))

    def own(process: int) -> Iterator[Any]:
        if process == 1:
            told.set()
            free.wait()
        yield np.ones((2, 3), np.float32)

    with opened(2) as job:
        processes = job.start()

        def feed(number: int) -> None:
            alone = processes[number].job
            source = rx.ProcessLocal(own(number))
            made = Feed(
                as_source(source, None, alone, shuffle=False, seed=0),
                Split(replicas=1, micro_batches=1),
                sharding,
                alone,
            )
            made.stops = told.is_set if number == 1 else lambda: False
            list(made)

        with ThreadPoolExecutor(2) as threads:
            passes = [threads.submit(feed, number) for number in range(2)]
            try:
                for each in passes:
                    with pytest.raises(GaveUpError):
                        each.result(timeout=60)
            finally:
                free.set()
