"""A real, small bench on simulated devices."""

import itertools
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bench import small
from bench.small import MODEL, MODEL_BYTES, ROWS, SOURCE, loss, parallel, short
from support.figures import refused

from replicax.bench import machine, runner
from replicax.bench import run as run_module
from replicax.bench.bench_result import Bench
from replicax.bench.run import bench
from replicax.bench.runner import own_peak
from replicax.errors import ConfigError, LossError

__all__ = ["short"]


def run(**options: Any) -> Bench:
    return small.run(**{"devices": (1, 2), **options})


@pytest.fixture(scope="module")
def result() -> Bench:
    return run()


def test_every_mode_is_measured_in_every_round(result: Bench) -> None:
    found = [(case.mode, case.devices, case.global_batch) for case in result.cases]
    assert sorted(found) == sorted(
        [
            ("single", 1, 8),
            *itertools.product(("jit", "shard_map", "pmap"), (1,), (8, 4)),
            *itertools.product(("jit", "shard_map", "pmap"), (2,), (8,)),
        ]
    )
    for case in result.cases:
        assert len(case.seconds_per_step) == len(case.rows_per_second) == 2
        assert min(case.seconds_per_step) > 0
        assert all(0 <= wait <= 1 for wait in case.input_wait_fraction)
        assert min(case.trace_seconds, case.compile_seconds) > 0
        assert case.rows_per_device * case.devices == case.global_batch
        assert case.tokens_per_second is None


def test_a_rounded_gradient_is_half_the_bytes() -> None:
    result = run(devices=(2,), modes=["jit", "shard_map"], reduction="bfloat16", mode="shard_map")
    (case,) = result.cases
    assert (case.sent_bytes, case.least_sent_bytes) == (MODEL_BYTES / 2 + 12, MODEL_BYTES / 2)
    assert re.match(r"jit .*skipped: reduction='bfloat16'", result.notes[0])


def test_flops_are_of_all_devices(result: Bench) -> None:
    forward_and_weights = 2 * (2 * 8 * 6 * 4)
    strong = {case.flops_per_step for case in result.scaling("strong") if case.mode != "jit"}
    assert strong == {forward_and_weights}
    assert all(case.share_of_peak is None for case in result.cases)
    assert all(case.share_of_product for case in result.cases)


def test_only_real_rows_are_counted() -> None:
    """Epochs of 8, 8 and 4 rows: a run of 3 steps has each of them once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "FEWEST_STEPS", 3)
        (case,) = run(devices=(2,), modes=["jit"], tokens_per_row=5).cases
    assert case.steps_per_round == 3
    for seconds, rate in zip(case.seconds_per_step, case.rows_per_second, strict=True):
        assert rate * seconds * 3 == pytest.approx(ROWS)
    assert case.tokens_per_second == tuple(5 * rate for rate in case.rows_per_second)


def test_batches_that_cannot_be_cut_have_no_weak_scaling() -> None:
    result = run(source=[SOURCE, SOURCE], batch_size=ROWS, modes=["jit"])
    assert result.scaling("weak") == []
    assert any(note.startswith("no weak") for note in result.notes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"tokens_per_row": 0}, "tokens_per_row=0"),
        ({"modes": ["jti"]}, "did you mean 'jit'"),
        ({"batch_size": 1}, "a batch of 1 rows on 2 replicas"),
        ({"layout": "fdsp"}, "did you mean 'fsdp'"),
        ({"source": iter([SOURCE])}, "read only once"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_compiles(
    options: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "Measurement", None)
    with refused(ConfigError, says):
        run(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": (1, 8)}, "devices=1,8 in 2 processes with 8 devices"),
        ({"devices": None, "pin": True, "modes": ["jit"]}, "pin in 2 processes"),
        ({"devices": None, "modes": ["pmap"]}, "mode='pmap' on 2 processes"),
    ],
)
def test_several_processes_measure_all_devices_and_nothing_else(
    options: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dp = parallel()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused(ConfigError, says):
        run(**{"dp": dp, "modes": ["jit"], **options})


def test_only_host_devices_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = parallel()
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    with pytest.raises(ConfigError, match=r"pin with\b.*gpu devices"):
        run(dp=dp, devices=(1,), modes=["jit"], pin=True)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are given out on Linux")
def test_pinned_runs_have_as_many_cores_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    own = machine.own_cores()
    before, seen = os.sched_getaffinity(0), set()
    step = runner.Runner.run

    def watched(self: Any, state: Any) -> Any:
        seen.add((self.case.devices, len(os.sched_getaffinity(0))))
        return step(self, state)

    monkeypatch.setattr(runner.Runner, "run", watched)
    counts = (1, 2) if len(own) > 1 else (1,)
    result = run(devices=counts, modes=["jit"], pin=True)
    assert seen == {(count, count) for count in counts}
    assert os.sched_getaffinity(0) == before
    assert result.pinned
    assert not any("share" in note for note in result.notes)


def test_an_error_ends_threads_and_frees_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def broken(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key) * jnp.nan

    before = set(threading.enumerate())
    with pytest.raises(LossError, match=r"loss is\b.* nan"):
        bench(parallel(broken), MODEL, SOURCE, batch_size=4, devices=(1,), progress=False)
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((100, 300), 360, 360 - (100 - 30)),  # 70 bytes were in use before
        ((100, 300), 300, None),
        (None, None, None),
    ],
)
def test_the_measured_peak_is_the_steps_own(before: Any, after: Any, expected: int | None) -> None:
    stats = None if before is None else {"bytes_in_use": before[0], "peak_bytes_in_use": before[1]}
    later = None if after is None else {"bytes_in_use": 0, "peak_bytes_in_use": after}
    assert own_peak(stats, later, arguments=30) == expected
