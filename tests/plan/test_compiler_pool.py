"""Threads that share one compiler, and one that ends it while others wait."""

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from support.small_steps import mlp
from support.tiers import EXHAUSTIVE
from support.waiting import HANG_SECONDS

import replicax as rx
from replicax.errors import CompilerError
from replicax.plan.compilation import Compilation, Description
from replicax.plan.compiler import MOST_PROCESSES, CompilerPool
from replicax.plan.exported import export_step

CPU = Description("cpu", 1, {})


def asked(pool: CompilerPool, threads: ThreadPoolExecutor) -> Future[Any]:
    step = mlp(8, mesh=rx.make_mesh(1))
    program = export_step(step.on(1).dp, step.model, step.batch, "cpu", None)
    return threads.submit(pool.compile, program)


@EXHAUSTIVE
def test_two_threads_have_a_process_each_and_a_third_waits() -> None:
    with ThreadPoolExecutor(3) as threads, closing(CompilerPool(CPU)) as pool:
        found = [asked(pool, threads) for _ in range(3)]
        answers = [each.result() for each in found]
        assert all(isinstance(each, Compilation) for each in answers)
        assert len({each.memory for each in answers}) == 1
        assert 1 <= len(pool._started) <= MOST_PROCESSES
    assert all(process._process.poll() is not None for process in pool._started)


def test_who_waits_for_a_compiler_that_is_ended_gets_an_error() -> None:
    with ThreadPoolExecutor(1) as threads, closing(CompilerPool(CPU)) as pool:
        pool._started[0]._process.send_signal(signal.SIGSTOP)  # it never answers
        waiting = asked(pool, threads)
        time.sleep(0.5)
        started = time.monotonic()
        pool.close()
        with pytest.raises(CompilerError, match=r"ended\b.*signal SIGKILL"):
            waiting.result(timeout=HANG_SECONDS)
        assert time.monotonic() - started < 10
        with pytest.raises(CompilerError, match="closed before"):
            asked(pool, threads).result(timeout=HANG_SECONDS)
