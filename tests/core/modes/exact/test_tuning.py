"""Recorded kernels of mode `exact` on GPUs, as far as it can be told without one."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.core.modes.exact import tuning
from replicax.core.modes.exact.tuning import recorded_kernels, unrecorded_refused

CHOICES = b"version: 3\n"
COMPLETE = "xla_gpu_require_complete_aot_autotune_results"
LOADED = "xla_gpu_load_autotune_results_from"


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch @ model) ** 2


def exact(**more: Any) -> rx.DataParallel:
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    return rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, mode="exact", **more)


class Text(str):
    def as_text(self) -> str:
        return self


def test_the_file_is_named_by_what_xla_wrote_and_checked_to_be_complete(tmp_path: Path) -> None:
    given: list[Mapping[str, Any]] = []

    def compiled(options: Mapping[str, Any]) -> Sequence[Text]:
        given.append(options)
        if path := options.get("xla_gpu_dump_autotune_results_to"):
            Path(path).write_bytes(CHOICES)
        return [Text("dot")]

    path = recorded_kernels(compiled, tmp_path / "kernels")
    assert path.stem == hashlib.sha256(CHOICES).hexdigest()[:16]
    assert [*path.parent.iterdir()] == [path]
    measuring, checking = given
    assert not measuring["xla_gpu_deterministic_ops"]
    assert "xla_gpu_exclude_nondeterministic_ops" not in measuring  # it ends the tuning
    assert checking["xla_gpu_exclude_nondeterministic_ops"]
    assert checking[COMPLETE]
    own = {"xla_gpu_dump_autotune_results_to"}
    assert set(checking) >= set(measuring) - own


@pytest.mark.parametrize("text", ["dot", 'custom_call_target="__cudnn$convForward"'])
def test_nothing_is_left_of_a_file_that_would_not_do(tmp_path: Path, text: str) -> None:
    def compiled(options: Mapping[str, Any]) -> Sequence[Text]:
        if "conv" in text:
            Path(options["xla_gpu_dump_autotune_results_to"]).write_bytes(CHOICES)
        return [Text(text)]

    with pytest.raises(
        rx.errors.ConfigError, match="convolutions" if "conv" in text else "1 programs"
    ):
        recorded_kernels(compiled, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_kernels_that_are_not_recorded_are_refused() -> None:
    error = "NOT_FOUND: Failed to get configs for: 3 out of 13 instructions. See logs"
    with (
        pytest.raises(rx.errors.ConfigError, match=r"3 of 13 kernels"),
        unrecorded_refused("step.0"),
    ):
        raise jax.errors.JaxRuntimeError(error)
    duplicate = "INTERNAL: Duplicate autotuning result for <key ...>"
    with pytest.raises(rx.errors.ConfigError, match="new process"), unrecorded_refused("step.0"):
        raise jax.errors.JaxRuntimeError(duplicate)
    with pytest.raises(jax.errors.JaxRuntimeError), unrecorded_refused("step.0"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")


def test_a_tuning_is_of_the_mode_of_gpus_and_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.ones((8, 3), np.float32)
    with pytest.raises(rx.errors.ConfigError, match="cpu"):
        exact(tuning=tmp_path / "a")
    with pytest.raises(rx.errors.ConfigError, match="cpu"):
        exact().record_tuning(np.ones(3, np.float32), rows, tmp_path)
    monkeypatch.setattr(tuning, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(tuning, "_read_here", set())
    with pytest.raises(rx.errors.ConfigError, match="mode='jit'"):
        rx.DataParallel(loss, optax.sgd(0.1), tuning=tmp_path / "a")
    with pytest.raises(rx.errors.ConfigError, match="record_tuning"):
        exact(tuning=tmp_path / "a")
    name = hashlib.sha256(CHOICES).hexdigest()[:16]
    (tmp_path / "a").write_bytes(CHOICES)
    with pytest.raises(rx.errors.ConfigError, match=name):
        exact(tuning=tmp_path / "a")
    path = tmp_path / f"{name}.textproto"
    path.write_bytes(CHOICES)
    dp = exact(tuning=path)
    assert dp.configuration.names()["tuning"] == name
    options = dp.program(np.ones(3, np.float32)).step_spec().compiler_options
    assert options is not None
    assert options[COMPLETE]
    assert options[LOADED] == str(path)
    assert "tuning" not in dp.replace(mode="jit").configuration.names()
    other = CHOICES + b"\n"
    second = tmp_path / f"{hashlib.sha256(other).hexdigest()[:16]}.textproto"
    second.write_bytes(other)
    with pytest.raises(rx.errors.ConfigError, match=name):
        exact(tuning=second)


def test_options_of_the_compiler_reach_the_programs_of_micro_shards() -> None:
    dp = exact(compiler_options={"no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        dp.step(dp.init(np.ones(3, np.float32)), np.ones((8, 3), np.float32))
