"""What devices can do at most, as far as that is known."""

import pytest

from replicax.bench.bench_result import peak_flops_per_second


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32", "float16"),
    [
        ("Tesla V100-SXM2-16GB", None, 15.7e12, 125e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12, 312e12),
        ("TPU v5 lite", 197e12, 197e12, None),
    ],
)
def test_data_sheets(
    kind: str, bfloat16: float | None, float32: float, float16: float | None
) -> None:
    assert peak_flops_per_second(kind, "bfloat16") == bfloat16
    assert peak_flops_per_second(kind, "float32") == float32
    assert peak_flops_per_second(kind, "float16") == float16


@pytest.mark.parametrize(
    "kind",
    ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40S", ""],
)
def test_a_device_that_only_looks_like_a_known_one_has_no_figure(kind: str) -> None:
    assert peak_flops_per_second(kind, "float32") is None
