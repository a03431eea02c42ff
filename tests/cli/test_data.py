from types import SimpleNamespace

import numpy as np
import pytest

from replicax.cli.step_options import first_rows, print_data
from replicax.errors import ConfigError


def test_a_long_description_stays_within_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(["a-long-path/of/some/length"] * 9)
    print_data(SimpleNamespace(data_description=lambda: words))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("data   a-long")
    assert all(line.startswith(" " * 7) for line in lines[1:])
    assert " ".join(line[7:] for line in lines) == words


def test_a_recipe_need_not_describe_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    print_data(object())
    assert capsys.readouterr().out == ""


def test_first_rows() -> None:
    source = {"x": np.arange(10)}
    assert first_rows(source, 4)["x"].tolist() == [0, 1, 2, 3]
    batches = [{"x": np.arange(3)}, {"x": np.arange(3, 6)}]
    assert first_rows(batches, 4)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="has 10 rows"):
        first_rows(source, 11)
