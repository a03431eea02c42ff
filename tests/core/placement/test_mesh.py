"""Meshes with the axes data, model and stage."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from support.figures import refused

from replicax.core.ground.job import Alone
from replicax.core.placement.mesh import (
    abstract_like,
    abstract_mesh,
    check_mesh,
    check_processes,
    is_data_only,
    make_mesh,
    replica_count,
)
from replicax.errors import ConfigError


def test_devices_keep_their_order() -> None:
    devices = jax.devices()[::-1][:4]
    assert list(make_mesh(devices=devices).devices.flat) == devices
    assert list(make_mesh(data=2).devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": 16}, ["16", "8", "JAX_NUM_CPU_DEVICES=16"]),
        ({"data": 4, "model": 4}, ["16", "8"]),
        ({"data": 0}, ["data=0", "at least 1"]),
        ({"data": -2}, ["data=-2", "at least 1"]),
        ({"model": 0}, ["model=0", "at least 1"]),
        ({"stage": -1}, ["stage=-1", "at least 1"]),
        ({"model": 3}, ["8", "model=3", "divide"]),
        ({"model": 2, "stage": 8}, ["8", "16", "divide"]),
        ({"devices": []}, ["0"]),
        ({"data": 1, "devices": []}, ["0"]),
    ],
)
def test_a_mesh_that_cannot_be_made_is_refused(arguments: dict[str, Any], words: list[str]) -> None:
    with refused(ConfigError, *words):
        make_mesh(**arguments)


def test_a_users_mesh_needs_a_data_axis() -> None:
    devices = np.asarray(jax.devices())
    with pytest.raises(ConfigError, match=r"x, y .*'data'"):
        check_mesh(Mesh(devices.reshape(4, 2), ("x", "y")))
    mesh = check_mesh(Mesh(devices.reshape(4, 2), ("data", "y")))
    assert replica_count(mesh) == 4
    assert not is_data_only(mesh)


def test_explicit_axes_become_automatic() -> None:
    mesh = check_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)))
    assert set(mesh.axis_types) == {AxisType.Auto}


class Pair(Alone):
    """A job of two processes."""

    processes = 2


@pytest.mark.parametrize(("job", "count"), [(Alone(), 2), (Pair(), 1), (Pair(), 3)])
def test_a_job_has_the_processes_that_jax_runs_in(
    job: Alone, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh()
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(ConfigError, match=r"\d processes .*rx\.initialize\(\)"):
        check_processes(mesh, job)


def test_each_process_takes_part_with_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="8 of process 0, 0 of process 1"):
        check_processes(mesh, Pair())


def test_further_devices_are_further_replicas() -> None:
    mesh = make_mesh(2, model=2, devices=jax.devices()[:4])
    assert dict(abstract_like(mesh, 16).shape) == {"data": 8, "model": 2, "stage": 1}
    staged = abstract_like(mesh, 16, stage=4, fsdp=2)
    assert dict(staged.shape) == {"data": 1, "model": 2, "stage": 4, "fsdp": 2}
    with pytest.raises(ConfigError, match=r"6 devices .*model=4; .*\b4\b.*divide"):
        abstract_like(abstract_mesh(2, model=4), 6)


@pytest.mark.parametrize(
    ("inner", "strides"),
    [
        ({"model": 2, "stage": 2}, {"data": 4, "stage": 2, "model": 1}),
        ({"fsdp": 2, "model": 2}, {"data": 4, "fsdp": 2, "model": 1}),
        ({"fsdp": 2, "stage": 2}, {"data": 4, "fsdp": 2, "stage": 1}),
    ],
)
def test_a_mesh_has_model_innermost_then_stage_then_fsdp_then_data(
    inner: dict[str, int], strides: dict[str, int]
) -> None:
    mesh = make_mesh(data=2, **inner)
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    for axis, stride in strides.items():
        assert (np.diff(ids, axis=mesh.axis_names.index(axis)) == stride).all(), axis
