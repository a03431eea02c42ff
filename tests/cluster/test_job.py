"""Collective questions: all processes continue with equal fields, or none does."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from support.cluster_jobs import Process, opened
from support.figures import assert_mentions

from replicax.cluster import cluster_job
from replicax.core.data.feed import Feed, Split
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Job
from replicax.core.placement.mesh import by_rows, make_mesh
from replicax.errors import AgreementError, CheckpointError


def asked(count: int, ask: Callable[[Job], Any]) -> list[Any]:
    """Return the answer to each of `count` processes; an error of Replicax as text."""

    def run(process: Process) -> Any:
        try:
            return ask(process.job)
        except (AgreementError, CheckpointError) as error:
            process.link.part()
            return str(error)

    with opened(count) as job:
        processes = job.start()
        told = [future.result(5.0) for future in [job.call(run, p) for p in processes]]
        assert not any(process.stopped.done() for process in processes)  # no process is blamed
    return told


def outcome(fields: list[Any]) -> list[Any]:
    """Return the error of each process, or None."""
    return asked(len(fields), lambda job: job.agree("the run", fields[job.process]))


def test_a_tuple_equals_a_list_as_json_has_them() -> None:
    assert outcome([{"a": (1, 2)}, {"a": [1, 2]}]) == [None, None]


@pytest.mark.promise("faults.another-number-of-steps")
def test_all_are_told_the_same() -> None:
    told = outcome([{"steps": 10}, {"steps": 10}, {"steps": 12}])
    (line,) = set(told)
    assert len(told) == 3
    assert_mentions(line, "the run: steps is 12 on process 2, 10 on processes 0 and 1: start all")


def test_the_first_few_of_many() -> None:
    told = outcome([{f"f{n}": p for n in range(9)} for p in range(2)])
    assert all("f2 is 1 on process 1, 0 on process 0; and 6 more: start" in text for text in told)
    assert "f3" not in told[0]


def test_where_an_object_lies_in_memory_is_no_difference() -> None:
    here, there = object(), object()
    assert outcome([{"a": here}, {"a": there}]) == [None, None]


def test_settings_that_change_after_the_start_are_found_before_a_program_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(job: Job) -> None:
        monkeypatch.setattr(
            cluster_job, "compared_environment", lambda env: {"jax_a": threading.get_ident()}
        )
        job.agree_on_text("the step", "a program")

    assert all("jax_a" in told and "the step" in told for told in asked(2, ask))


@pytest.mark.promise("faults.another-program")
def test_programs_that_differ_are_named_by_their_first_line() -> None:
    def ask(job: Job) -> None:
        job.agree_on_text("the step", f"begin\nrate {job.process // 2}\nthen {job.process}")

    (line,) = set(asked(3, ask))
    assert_mentions(line, "step: line 2 is rate 1 on process 2, rate 0 on processes 0 and 1: start")


@pytest.mark.promise("faults.another-batch-size")
def test_batch_sizes_that_differ_are_named_before_any_batch() -> None:
    def read(job: Job) -> None:
        source = as_source(np.zeros(8), 2 + job.process, job, shuffle=False, seed=0)
        next(iter(Feed(source, Split(1, 1), by_rows(make_mesh(1, devices=jax.devices()[:1])), job)))

    (line,) = set(asked(2, read))
    assert_mentions(line, "the data: batch_size is 3 on process 1, 2 on process 0: start")


def test_what_process_0_finds_out_is_known_to_all() -> None:
    def ask(job: Job) -> Any:
        return job.broadcast("the step", lambda: {"found by": job.process})

    assert asked(3, ask) == [{"found by": 0}] * 3


def test_an_error_of_process_0_is_raised_in_all() -> None:
    reason = "no checkpoint can be read"

    def find() -> Any:
        raise CheckpointError(reason)

    told = asked(2, lambda job: job.broadcast("the step", find))
    assert told == [reason] * 2


def test_names_that_are_used_once() -> None:
    with opened(2) as job:
        first, second = job.start()
        assert [first.job.unique("a"), first.job.unique("b"), first.job.unique("a")] == [
            "a (1)",
            "b (1)",
            "a (2)",
        ]
        assert second.job.unique("a") == "a (1)"


@pytest.mark.parametrize(("slow", "seconds"), [(False, 0.0), (True, 3600.0)])
def test_a_slow_process_is_waited_for(slow: bool, seconds: float) -> None:
    with opened(2) as job:
        first, _ = job.start()

        def patience() -> bool:
            gathers = job.hub._gathers  # type: ignore[union-attr]
            return any(
                list(each.timeout_seconds.values()) == [seconds] for each in gathers.values()
            )

        assert first.job.gather("the save", 1, slow=slow, cancelled=patience) == []
