"""The output of `--show-sharding`: a line an array, a drawing for all that are split alike."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import replicax as rx
from replicax.commands.sharding import print_sharding

MODEL = {"a": jnp.zeros((8, 4)), "b": jnp.zeros(8), "c": jnp.zeros((2, 2)), "d": jnp.zeros(())}


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def printed(layout: Any, mesh: jax.sharding.Mesh) -> list[str]:
        dp = rx.DataParallel(lambda *_: None, optax.adam(1e-3), mesh=mesh, layout=layout)
        print_sharding(dp.init(MODEL), 6)
        return capsys.readouterr().out.splitlines()[1:]

    return printed


def test_what_is_split_alike_has_one_drawing(printed: Any) -> None:
    lines = printed("fsdp", rx.make_mesh(2))
    assert lines[:4] == [
        "params['a']  float32[8, 4]  P('data', None)  64 B/device",
        "params['b']  float32[8]  P('data')  16 B/device",
        "params['c']  float32[2, 2]  P('data', None)  8 B/device",
        "batch  6 rows  P('data')",
    ]
    assert [line.strip("│ ") for line in lines[5::2]] == ["CPU 0", "CPU 1"]


def test_rules_on_two_axes_are_a_grid(printed: Any) -> None:
    rules = [("a", PartitionSpec("data", "model")), ("b", PartitionSpec(None))]
    lines = printed(rules, rx.make_mesh(2, model=2))
    grid = [[box.strip() for box in line.split("│")[1:-1]] for line in lines[2:5:2]]
    assert grid == [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]
    assert any("CPU 0,1,2,3" in line for line in lines)
    assert [line.strip("│ ") for line in lines[-4::2]] == ["CPU 0,1", "CPU 2,3"]


def test_optimizer_state_is_shown_where_it_lies_otherwise(printed: Any) -> None:
    for layout, count in (("zero1", 6), ("fsdp", 0), ("replicated", 0)):
        kept = [x for x in printed(layout, rx.make_mesh(2)) if x.startswith("opt_state")]
        assert len(kept) == count
        assert all("P('data'" in line for line in kept)


def test_the_smallest_parameters_are_left_out(printed: Any) -> None:
    assert not any("['d']" in line for line in printed("replicated", rx.make_mesh(1)))
