import numpy as np
import pytest

from replicax.cli.step_options import data_lines, first_rows
from replicax.errors import ConfigError


def test_a_recipe_need_not_describe_its_data() -> None:
    assert data_lines(object()) == []


def test_first_rows() -> None:
    source = {"x": np.arange(10)}
    assert first_rows(source, 4)["x"].tolist() == [0, 1, 2, 3]
    batches = [{"x": np.arange(3)}, {"x": np.arange(3, 6)}]
    assert first_rows(batches, 4)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="has 10 rows"):
        first_rows(source, 11)
