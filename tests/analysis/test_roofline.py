"""The roofline of a chip, from its data sheet."""

import pytest

from replicax.analysis.hardware import CHIPS, CPU
from replicax.analysis.roofline import roofline
from replicax.errors import ConfigError

V100 = CHIPS["v100"]


def test_bound_by_products() -> None:
    # 15.7 TFLOP/s and 900 GB/s by the data sheet.
    told = roofline(15.7e12, 90e9, V100, "float32")
    assert (told.seconds, told.bound) == (pytest.approx(1.0), "compute")


def test_bound_by_memory() -> None:
    told = roofline(15.7e11, 900e9, V100, "float32")
    assert (told.seconds, told.bound) == (pytest.approx(1.0), "memory")


def test_a_dtype_without_units() -> None:
    with pytest.raises(ConfigError, match=r"V100.*bfloat16.*float32"):
        roofline(1, 1, V100, "bfloat16")


def test_a_device_that_must_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"known: none.*bench"):
        roofline(1, 1, CPU, "float32")
