"""The roofline of a chip, from its data sheet."""

import pytest

from replicax.analysis.hardware import CHIPS, CPU, Chip
from replicax.analysis.roofline import roofline
from replicax.errors import ConfigError

V100 = CHIPS["v100"]


@pytest.mark.parametrize(
    ("flops", "size", "bound"), [(15.7e12, 90e9, "compute"), (15.7e11, 900e9, "memory")]
)
def test_the_longer_of_products_and_bytes_is_the_bound(
    flops: float, size: float, bound: str
) -> None:
    # 15.7 TFLOP/s and 900 GB/s by the data sheet.
    told = roofline(flops, size, V100, "float32")
    assert (told.seconds, told.bound) == (pytest.approx(1.0), bound)


@pytest.mark.parametrize(
    ("chip", "dtype", "said"),
    [(V100, "bfloat16", "V100.*bfloat16.*float32"), (CPU, "float32", "known: none.*bench")],
)
def test_a_dtype_without_units(chip: Chip, dtype: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        roofline(1, 1, chip, dtype)
