"""Jobs of several processes in turn, with made-up measurements."""

import dataclasses
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from bench.results import CASE, make_bench
from support.figures import refused

from replicax.analysis.compiled import Collectives
from replicax.bench import machine
from replicax.bench.bench_result import Bench
from replicax.bench.processes import bench_processes, check_counts
from replicax.bench.save import write_bench
from replicax.cli.bench import job_measure
from replicax.errors import ClusterError, ConfigError


def part(count: int, seconds: float) -> Bench:
    """Return a bench of two modes, in which one run takes twice as long as the others."""
    runs = (seconds, seconds, 2 * seconds)
    reduced = (Collectives("all-reduce", 1, 4008),) if count > 1 else ()
    case = dataclasses.replace(
        CASE,
        devices=count,
        global_batch=128 * count,
        rows_per_device=128,
        seconds_per_step=runs,
        rows_per_second=tuple(128 * count / each for each in runs),
        collectives=reduced,
        least_sent_bytes=4000 if count > 1 else 0,
        product_flops_per_second=4e10 / seconds,
    )
    return make_bench(case, dataclasses.replace(case, mode="shard_map"), batch_size=128 * count)


def measured(counts: tuple[int, ...] = (1, 2), rounds: int = 3) -> tuple[Bench, list[int]]:
    order = []

    def measure(count: int, number: int) -> Bench:
        order.append(count)
        return part(count, (0.1 if count == 1 else 0.125) * (1 + number))

    return bench_processes(measure, counts, rounds=rounds, notes=["a"], progress=False), order


def test_a_round_is_the_median_of_its_runs_and_is_compared_with_itself() -> None:
    result, _ = measured()
    cases = {(case.mode, case.devices): case for case in result.scaling("weak")}
    assert len(cases) == 4
    assert cases["jit", 1].seconds_per_step == pytest.approx((0.1, 0.2, 0.3))
    two = cases["jit", 2]
    assert two.seconds_per_step == pytest.approx((0.125, 0.25, 0.375))
    assert two.rows_per_second == pytest.approx((2048, 1024, 256 / 0.375))
    assert two.efficiency == {"weak": pytest.approx((0.8, 0.8, 0.8))}
    assert two.sent_bytes == 4008
    assert (result.batch_size, result.pinned, result.scaled_over) == (256, True, "processes")
    assert result.rounds == 3
    assert result.notes[0] == "a"


def test_one_count_alone_is_no_scaling() -> None:
    result, _ = measured((2,))
    assert result.scaling("weak") == []
    assert [case.efficiency for case in result.cases] == [{"strong": (1.0, 1.0, 1.0)}] * 2


def test_text_and_pictures_speak_of_processes(tmp_path: Path) -> None:
    result, _ = measured()
    lines = str(result).splitlines()
    assert any(re.fullmatch(r"weak scaling: 128 rows .*process", line) for line in lines)
    assert any(line.split()[:2] == ["mode", "processes"] for line in lines)
    assert "4.01 kB" in "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert not any("a device" in line for line in lines[:-8])
    paths = write_bench(result, tmp_path)
    assert [path.name for path in paths] == ["bench.json", "bench.md", "scaling.png"]
    assert '"scaled_over": "processes"' in paths[0].read_text()


@pytest.mark.parametrize(
    ("counts", "modes", "platform", "says"),
    [
        ([1, 3], ["jit"], "linux", "--processes 3 on 2 cores"),
        ([0], ["jit"], "linux", "--processes 0"),
        ([1], ["jit", "single"], "linux", "mode 'single' with --processes"),
        ([1], ["jti"], "linux", "did you mean 'jit'"),
        ([1], ["jit"], "darwin", "--processes 1 on darwin"),
    ],
)
def test_what_this_host_cannot_run_is_refused(
    counts: list[int], modes: list[str], platform: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "own_cores", lambda: [0, 1])
    monkeypatch.setattr(sys, "platform", platform)
    with refused(ConfigError, says):
        check_counts(counts, modes)


linux = pytest.mark.skipif(sys.platform != "linux", reason="cores are given out on Linux")


@linux
def test_a_job_gets_a_core_and_a_device_for_each_process(tmp_path: Path) -> None:
    """The fake process writes its environment in place of its part, which is no valid part."""
    shown = "print(len(os.sched_getaffinity(0)), *(os.environ[n] for n in "
    shown += "('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES', 'REPLICAX_PROCESSES')))"
    with pytest.raises(ClusterError, match=r"no part\.json .*; see .*1-processes-round-3"):
        job_measure([sys.executable, "-c", f"import os; {shown}"], tmp_path)(1, 2)
    log = (tmp_path / "1-processes-round-3" / "process-0.log").read_text()
    assert log.split() == ["1", "cpu", "1", "1"]


@linux
def test_a_job_that_fails_is_named_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"1-processes-round-1: process 0 .*bad") as e:
        job_measure([sys.executable, "-c", "raise ValueError('bad')"], tmp_path)(1, 0)
    assert "\n" not in str(e.value)


@linux
def test_ctrl_c_ends_the_bench(tmp_path: Path) -> None:
    program = "import os, signal, time; os.kill(int(os.environ['TOLD']), signal.SIGINT); "
    program += "time.sleep(60)"
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOLD", str(os.getpid()))
        with pytest.raises(KeyboardInterrupt):
            job_measure([sys.executable, "-c", program], tmp_path)(1, 0)
    assert signal.getsignal(signal.SIGINT) is before
