"""The devices that JAX uses, and those it does not."""

import dataclasses
from typing import Any

import jax
import pytest

from replicax.doctor.devices import Found, check_devices, check_mesh, judge_devices
from replicax.doctor.row import OK, PROBLEM, WARNING
from replicax.errors import ConfigError

CPU = Found("cpu", ["cpu"], [1], None, cores=4, gpus=0, tpus=0)
GPU = Found("gpu", ["NVIDIA H200"], [8, 8], 150 * 2**30, cores=64, gpus=8, tpus=0)


def changed(found: Found, **fields: Any) -> Found:
    return dataclasses.replace(found, **fields)


def test_the_devices_of_the_tests() -> None:
    (row,) = check_devices({"JAX_PLATFORMS": "cpu"})
    assert row.verdict == OK
    assert row.found.startswith("8 cpu devices · ")
    assert row.found.endswith("JAX_PLATFORMS=cpu")
    (mesh,) = check_mesh()
    assert mesh.found == "data 8 x model 1 x stage 1: 8 replicas"


def test_one_host_device_could_be_more() -> None:
    (row,) = judge_devices(CPU, {})
    assert "JAX_NUM_CPU_DEVICES=4 makes more" in row.found
    (row,) = judge_devices(changed(CPU, of_process=[4]), {})
    assert "makes more" not in row.found


def test_gpus_of_two_processes() -> None:
    (row,) = judge_devices(GPU, {})
    assert row.verdict == OK
    assert row.found == "16 NVIDIA H200 devices of 2 processes, 150 GiB each"


def test_processes_with_unequal_shares() -> None:
    _, row = judge_devices(changed(GPU, of_process=[8, 4]), {})
    assert row.verdict == PROBLEM
    assert "have 8, 4 devices" in row.found


def test_gpus_that_jax_leaves_alone() -> None:
    _, row = judge_devices(changed(CPU, gpus=2), {})
    assert row.verdict == PROBLEM
    assert "2 GPUs of this host are not used by JAX" in row.found
    assert "pip install -U 'jax[cuda13]'" in row.fix


@pytest.mark.parametrize(
    ("env", "cause"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES="),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES=-1"),
    ],
)
def test_gpus_that_a_variable_hides(env: dict[str, str], cause: str) -> None:
    _, row = judge_devices(changed(CPU, gpus=1), env)
    assert row.verdict == WARNING
    assert row.found.endswith(f"is not used because of {cause}")
    assert row.fix == f"unset {next(iter(env))}"


def test_tpus_that_jax_leaves_alone() -> None:
    _, row = judge_devices(changed(CPU, tpus=4), {})
    assert row.verdict == PROBLEM
    assert "jax[tpu]" in row.fix


def test_no_devices_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_at_all() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", none_at_all)
    with pytest.raises(ConfigError, match=r"no devices of JAX_PLATFORMS=cuda.*initialize backend"):
        check_devices({"JAX_PLATFORMS": "cuda"})
    with pytest.raises(ConfigError, match=r"jax\[tpu\]'; or unset JAX_PLATFORMS"):
        check_devices({"JAX_PLATFORMS": "tpu"})
