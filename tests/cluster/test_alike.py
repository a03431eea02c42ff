"""Versions, flags and settings that must be the same in all processes."""

from pathlib import Path

import jax
import pytest
from support.cluster_jobs import opened
from support.figures import assert_mentions
from support.waiting import HANG_SECONDS

from replicax.cluster import alike
from replicax.cluster.alike import beyond_common, compared_environment, parse_flags, processor
from replicax.cluster.differences import field_differences
from replicax.errors import AgreementError


def found(*texts: str, name: str = "XLA_FLAGS") -> list[str]:
    return field_differences([compared_environment({name: text}) for text in texts])


def test_versions_as_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = alike.versions()
    assert versions["jax"] == jax.__version__
    assert set(versions) == {"python", *alike._PACKAGES}
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert alike.versions()["jax"] == "0.0.1"
    monkeypatch.setattr(alike, "_PACKAGES", ["no-such-package"])
    assert alike.versions()["no-such-package"] == "not installed"


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_a_flag_that_differs_is_named(name: str) -> None:
    (line,) = found("--xla_a=1 --xla_b", "--xla_a=2 --xla_b", name=name)
    assert line == f"{name} --xla_a is 2 on process 1, 1 on process 0"
    (line,) = found("", "--xla_cpu_enable_fast_math=true", name=name)
    assert line.startswith(f"{name} --xla_cpu_enable_fast_math is 1 on process 1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--xla_a=1 --xla_b=x", "--xla_b=x   --xla_a=1"),
        ("--xla_a", "--xla_a=true"),
        ("--xla_a=false", "--xla_a=False"),
        ("--xla_a=1 --xla_a=2", "--xla_a=2"),
        ("--xla_a='1 2'", '--xla_a="1 2"'),
        ("", "--xla_dump_to=/tmp/1 --xla_dump_hlo_as_text --xla_gpu_dump_llvmir"),
        ("--xla_force_host_platform_device_count=1", "--xla_force_host_platform_device_count=2"),
        ("--xla_gpu_per_fusion_autotune_cache_dir=a", "--xla_gpu_per_fusion_autotune_cache_dir=b"),
        ("--xla_tpu_memory_fraction=0.5", "--xla_tpu_memory_fraction=0.6"),
        ("--megascale_slice_id=0 --megascale_port=1", "--megascale_slice_id=1"),
    ],
)
def test_flags_that_may_differ(one: str, other: str) -> None:
    assert found(one, other) == []


def test_flags_in_a_file_are_read_as_xla_does(tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b\n")
    assert parse_flags(str(file)) == {"--xla_a": "1", "--xla_b": "1"}
    assert parse_flags("--xla_a='1") == {"--xla_a": "'1"}


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_NUM_CPU_DEVICES"])
def test_variables_that_may_differ(name: str) -> None:
    assert found("1", "2", name=name) == []


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "NCCL_ALGO"])
def test_variables_that_may_not(name: str) -> None:
    assert found("1", "2", name=name) == [f"{name} is 2 on process 1, 1 on process 0"]


@pytest.mark.promise("faults.another-environment")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", None),
        ("jax_default_matmul_precision", "highest"),
        ("jax_threefry_partitionable", None),
        ("jax_default_prng_impl", "rbg"),
        ("jax_disable_most_optimizations", None),
        ("jax_debug_nans", None),
    ],
)
def test_a_setting_of_jax_that_differs_is_named(name: str, value: object) -> None:
    before, here = jax.config.values[name], compared_environment({})
    value = not before if value is None else value
    jax.config.update(name, value)
    try:
        (line,) = field_differences([here, compared_environment({})])
    finally:
        jax.config.update(name, before)
    assert line == f"{name} is {value} on process 1, {before} on process 0"


@pytest.mark.promise("faults.another-environment")
def test_a_job_whose_flags_differ_does_not_start() -> None:
    with opened(2) as job:
        flags = [compared_environment({"XLA_FLAGS": f"--xla_a={process}"}) for process in range(2)]
        for coming in [job.come(p, versions=flags[p]) for p in range(2)]:
            with pytest.raises(AgreementError, match="XLA_FLAGS --xla_a is 1 on process 1, 0 on"):
                coming.result(timeout=HANG_SECONDS)


def test_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, model, vectors in (
        ("model name : A 1\nflags : fpu avx2 fma\n\nmodel name : B", "A 1", "avx2 fma"),
        ("CPU part : 0xd0c\nFeatures : fp asimd sve", "0xd0c", "asimd sve"),
    ):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(alike, "_CPU", tmp_path / "cpuinfo")
        assert processor() == {"processor": model, "vectors": vectors}
    monkeypatch.setattr(alike, "_CPU", tmp_path / "missing")
    assert processor()["processor"]


def test_processors_are_compared_by_what_only_some_have() -> None:
    one, other = (
        {"processor": "A", "vectors": "avx2"},
        {"processor": "A", "vectors": "avx2 avx512f"},
    )
    assert field_differences(beyond_common([one, one])) == []
    (line,) = field_differences(beyond_common([one, other]))
    assert_mentions(line, "avx512f on", "process 1, none on")
    assert field_differences(beyond_common([{}, {}])) == []
