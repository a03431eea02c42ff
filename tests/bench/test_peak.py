"""What devices can do at most, as far as that is known."""

import pytest

from replicax.bench.peak import peak_flops_per_second


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32", "float16"),
    [
        ("Tesla V100-SXM2-16GB", None, 15.7e12, 125e12),
        ("Tesla V100-PCIE-32GB", None, 14e12, 112e12),
        ("Tesla P100-SXM2-16GB", None, 10.6e12, None),
        ("Tesla T4", None, 8.1e12, 65e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12, 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 156e12, 312e12),
        ("NVIDIA A10G", 70e12, 35e12, 70e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 989.4e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12, 756e12),
        ("NVIDIA H200", 989.4e12, 494.7e12, 989.4e12),
        ("NVIDIA B200", 2250e12, 1125e12, 2250e12),
        ("NVIDIA L4", 121e12, 60e12, 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12, 165.2e12),
        ("TPU v4", 275e12, 275e12, None),
        ("TPU v5 lite", 197e12, 197e12, None),
        ("TPU v5", 459e12, 459e12, None),
        ("TPU v6 lite", 918e12, 918e12, None),
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
