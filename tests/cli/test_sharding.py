"""The output of `--show-sharding`: a line for each array, a drawing for each way to split one."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.cli.sharding import print_sharding

MODEL = {"a": jnp.zeros((8, 4)), "b": jnp.zeros(8), "c": jnp.zeros((2, 2)), "d": jnp.zeros(())}


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def printed(layout: Any, mesh: jax.sharding.Mesh) -> list[str]:
        dp = rx.DataParallel(lambda *_: None, optax.adam(1e-3), mesh=mesh, layout=layout)
        print_sharding(dp.init(MODEL), 8)
        return capsys.readouterr().out.splitlines()[1:]

    return printed


def boxes(lines: list[str]) -> list[list[str]]:
    """Texts of the boxes of all drawings, row by row."""
    return [[box.strip() for box in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_pipeline_stages_are_a_row_with_their_layers(printed: Any) -> None:
    rules = [("a", P("stage", "model")), ("b", P("stage")), ("", P())]
    lines = printed(rules, rx.make_mesh(model=2, stage=2))
    assert [line for line in lines if "layers" in line] == ["layers 0-3 | 4-7"] * 2
    assert boxes(lines) == [
        ["CPU 0,4", "CPU 2,6"],
        ["CPU 1,5", "CPU 3,7"],
        ["CPU 0,1,4,5", "CPU 2,3,6,7"],
        ["CPU 0,1,2,3,4,5,6,7"],
        ["CPU 0,1,2,3"],
        ["CPU 4,5,6,7"],
    ]


def test_a_copy_of_the_state_is_drawn_over_the_replicas_that_share_it(printed: Any) -> None:
    rules = [("a", P("stage")), ("", P())]
    lines = printed(rx.layout("fsdp", rules=rules), rx.make_mesh(stage=2, fsdp=2))
    assert lines[0] == "params['a']  float32[8, 4]  P('stage', 'fsdp')  32 B/device"
    assert boxes(lines[:7]) == [["CPU 0,4", "CPU 1,5"], ["CPU 2,6", "CPU 3,7"]]


def test_where_there_are_too_many_boxes_only_the_stages_are_drawn(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicax.cli.sharding.MOST_BOXES", 2)
    lines = printed([("a", P("stage", "model")), ("", P())], rx.make_mesh(model=4, stage=2))
    assert boxes(lines) == [["CPU 0,1,2,3", "CPU 4,5,6,7"], ["CPU 0,1,2,3,4,5,6,7"]]
    assert boxes(printed("fsdp", rx.make_mesh())) == [["CPU 0,1,2,3,4,5,6,7"]]


def test_of_those_that_lie_alike_the_largest_have_a_line(printed: Any) -> None:
    lines = printed("replicated", rx.make_mesh(1))
    assert [line.split()[0] for line in lines[:3]] == [f"params['{name}']" for name in "abc"]
    assert lines[3].startswith("and 1 more")
    assert lines[3].endswith(" 4 B/device")


def test_a_long_line_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    path = "a_parameter_with_a_name_of_so_many_columns_that_no_shape_fits"
    dp = rx.DataParallel(lambda *_: None, optax.sgd(1.0), mesh=rx.make_mesh(2), layout="fsdp")
    print_sharding(dp.init({path: jnp.zeros((8, 4))}), 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [f"params['{path}']", "       float32[8, 4]  P('data', None)  64 B/device"]
    assert max(map(len, lines)) <= 80


def test_optimizer_state_is_shown_where_it_lies_otherwise(printed: Any) -> None:
    for layout, count in (("zero1", 3), ("fsdp", 0), ("replicated", 0)):
        kept = [x for x in printed(layout, rx.make_mesh(2)) if x.startswith("opt_state")]
        assert len(kept) == count
        assert all("P('data'" in line for line in kept)
