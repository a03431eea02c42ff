"""The devices of JAX, unused ones, and their all-reduce: exact, and timed."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from replicax.core.first_step import memory_check
from replicax.core.ground.job import Alone
from replicax.doctor import device_checks
from replicax.doctor.device_checks import (
    FoundDevices,
    check_attached_devices,
    check_reduction,
    judge_devices,
    judge_reduction,
    sizes,
    timed_all_reduce,
    timing,
)
from replicax.errors import ConfigError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP

KB, MB = 2**10, 2**20
CPU = FoundDevices("cpu", ["cpu"], [1], None, cores=4, gpus=0, tpus=0)
GPU = FoundDevices("gpu", ["NVIDIA H200"], [8, 8], 150 * 2**30, cores=64, gpus=8, tpus=0)


def changed(found: FoundDevices, **fields: Any) -> FoundDevices:
    return dataclasses.replace(found, **fields)


@pytest.mark.parametrize(
    ("found", "env", "verdicts", "words", "cause"),
    [
        (CPU, {}, [PASS], "JAX_NUM_CPU_DEVICES=4 creates more", ""),
        (GPU, {}, [PASS], r"^16 NVIDIA H200 devices of 2 processes, 150 GiB each$", ""),
        (changed(GPU, of_process=[8, 4]), {}, [PASS, FAIL], "have 8, 4 devices", ""),
        (changed(CPU, gpus=2), {}, [PASS, FAIL], r"2 GPUs on\b.*host are .*JAX", "'jax[cuda13]'"),
        (changed(CPU, tpus=4), {}, [PASS, FAIL], "", "jax[tpu]"),
        *(
            (changed(CPU, gpus=1), env, [PASS, NOTE], rf"not used\b.* of {set_to}$", unset)
            for env, set_to, unset in (
                ({"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS"),
                ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=", "unset CUDA_VISIBLE_DEV"),
                ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES=-1", "unset CUDA_VISIBLE"),
            )
        ),
    ],
)
def test_devices_and_those_that_jax_leaves_alone(
    found: FoundDevices, env: dict[str, str], verdicts: list[str], words: str, cause: str
) -> None:
    rows = judge_devices(found, env)
    assert [row.verdict for row in rows] == verdicts
    assert re.search(words, rows[-1].found)
    assert cause in rows[-1].cause


def test_no_devices_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_at_all() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", none_at_all)
    with pytest.raises(ConfigError, match=r"no devices .* JAX_PLATFORMS=cuda.*initialize backend"):
        check_attached_devices({"JAX_PLATFORMS": "cuda"})
    with pytest.raises(ConfigError, match=r"jax\[tpu\]'; or\b.*unset JAX_PLATFORMS"):
        check_attached_devices({"JAX_PLATFORMS": "tpu"})


def test_one_device_has_nothing_to_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    (row,) = check_reduction(Alone(), MB)
    assert row.verdict == SKIP


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_a_wrong_sum_is_counted_on_every_device(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, right = Mesh(np.asarray(jax.devices()), ("devices",)), jax.lax.psum
    assert timed_all_reduce(mesh, 4 * KB, dtype)[0] == 0
    monkeypatch.setattr(jax.lax, "psum", lambda *given: right(*given).at[0, 5].add(1))
    assert timed_all_reduce(mesh, 4 * KB, dtype)[0] == 8


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(64 * MB, [4 * KB, 64 * KB, MB, 16 * MB, 64 * MB]), (MB, [4 * KB, 64 * KB, MB]), (100, [100])],
)
def test_sizes_grow_to_the_largest(largest: int, expected: list[int]) -> None:
    assert sizes(largest) == expected


def test_wrong_sums_are_a_problem_of_their_process() -> None:
    (row,) = judge_reduction([timing(MB, 1e-3, 4)], [0, 3], 4, "cpu", None)
    assert row.verdict == FAIL
    assert "wrong" in row.found
    assert row.found.endswith("3 on process 1")


def test_gpus_on_a_slow_network() -> None:
    assert len(judge_reduction([timing(MB, 0.1, 16)], [0, 0], 16, "cpu", None)) == 1
    assert len(judge_reduction([timing(MB, 1e-5, 16)], [0, 0], 16, "gpu", None)) == 1
    _, row = judge_reduction([timing(MB, 0.1, 16)], [0, 0], 16, "gpu", None)
    assert row.verdict == NOTE
    assert "NCCL_DEBUG=INFO" in row.cause


def test_what_takes_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "BUDGET_SECONDS", 0.0)
    (row,) = check_reduction(Alone(), MB)
    assert [each["size_bytes"] for each in row.figures["sizes"]] == [4 * KB]
    assert re.search(r"65\.5 kB and .*skipped", row.found)


def test_what_takes_too_much_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 8 * MB)
    (row,) = check_reduction(Alone(), MB)
    assert [each["size_bytes"] for each in row.figures["sizes"]] == [4 * KB, 64 * KB]
    assert re.search(r"1\.05 MB and .*skipped: .* 33\.6 MB of .*", row.found)
