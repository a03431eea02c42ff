"""Kernels at rates that were measured by shape."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from replicax.analysis.hardware import CHIPS
from replicax.analysis.rates import RATES, MeasuredRates
from replicax.analysis.roofline import kernel_roofline
from replicax.analysis.schedule import Kernel

CHIP = dataclasses.replace(
    CHIPS["h100"], flops_per_second={"bfloat16": 1000, "float32": 500}, memory_bytes_per_second=100
)
MEASURED = MeasuredRates(
    source="made up",
    bytes_per_second=50,
    products={(1024, 64, 512): 800, (1024, 512, 512): 400, (1024, 64, 509): 10},
    attention={"forward": 200, "backward": 100},
)


def kernel(**fields: object) -> Kernel:
    return dataclasses.replace(Kernel("k", 4000, 100, 1, "", "bf16"), **fields)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"product": (1024, 64, 512)}, 4000 / 800),
        ({"product": (512, 1024, 64)}, 4000 / 800),  # the gradient of the weights
        ({"product": (4096, 512, 1024)}, 4000 / 400),
        ({"product": (1024, 64, 511)}, 4000 / 10),  # rows are not aligned to 16 bytes
        ({"attends": "forward"}, 4000 / 200),
        ({"attends": "backward"}, 4000 / 100),
        ({}, 4000 / 1000),  # a convolution: nothing like it was measured
        ({"product": (1024, 64, 512), "dtype": "f32"}, 4000 / 500),
        ({"flops": 0, "dtype": ""}, 100 / 50),
    ],
)
def test_a_kernel_has_the_rate_of_the_most_similar_one(
    fields: dict[str, object], seconds: float
) -> None:
    assert kernel_roofline(kernel(**fields), CHIP, rates=MEASURED).seconds == seconds


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    gpu_rates, ceilings = map(importlib.import_module, ("gpu_rates", "gpu_ceilings"))
    figures = json.loads((benchmarks / "results" / "gpu.json").read_text())["parts"]["ceilings"]
    entry = gpu_rates.rates(RATES["h100"].source, figures, ceilings.PRODUCTS)
    known = json.loads(gpu_rates.TABLE.read_text())
    assert entry == known["h100"]
    (tmp_path / "table").write_text(json.dumps({"a100-80": {}}))
    gpu_rates.write("h100", entry, tmp_path / "table")
    assert json.loads((tmp_path / "table").read_text()) == {"a100-80": {}, "h100": entry}
    # 2 and 5 of 7 products, one after the other, take what both ways took.
    passes = entry["attention"]
    both = 1e12 * figures["attention, both ways (cuDNN), TFLOP/s"]
    assert 7 / (2 / passes["forward"] + 5 / passes["backward"]) == pytest.approx(both)
