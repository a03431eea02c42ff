"""Where arrays live, as text: one line an array, one drawing for all that are split alike."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import replicax as rx
from replicax.core.mesh import by_rows, replicated
from replicax.errors import DataError
from replicax.train import sharding_view as view
from replicax.train.sharding_view import abstract_batch, sharding_view

MODEL = {"a": jnp.zeros((8, 4)), "b": jnp.zeros(8), "c": jnp.zeros((2, 2)), "d": jnp.zeros(())}
SOURCE = {"x": np.zeros((5, 3)), "y": np.zeros(5, np.int64)}
HEAD = "shards a box is a part, with the devices that hold it; dim 0 runs down"


def state(layout: Any, mesh: jax.sharding.Mesh, model: Any = MODEL) -> rx.TrainState:
    dp = rx.DataParallel(lambda *_: None, optax.adam(1e-3), mesh=mesh, layout=layout)
    return dp.init(model)


def drawn(shape: tuple[int, ...], sharding: Any) -> str:
    """The drawing of one array."""
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    lines = sharding_view(rx.TrainState(None, {"w": array}, {}, {}, None), {})
    return "\n".join(lines[2:])


def test_a_split_state_and_batch() -> None:
    mesh = rx.make_mesh(2)
    lines = sharding_view(state("fsdp", mesh), abstract_batch(SOURCE, 6, by_rows(mesh)))
    assert (
        "\n".join(lines)
        == f"""{HEAD}
params['a']  float32[8, 4]  P('data', None)  64 B/device
params['b']  float32[8]     P('data')        16 B/device
params['c']  float32[2, 2]  P('data', None)  8 B/device
batch['x']   float32[6, 3]  P('data')        36 B/device
batch['y']   int32[6]       P('data')        12 B/device
┌────────────────────────┐
│           0            │
├────────────────────────┤
│           1            │
└────────────────────────┘"""
    )


def test_optimizer_state_is_shown_where_it_lies_otherwise() -> None:
    mesh = rx.make_mesh(2)
    for layout, count in (("zero1", 6), ("fsdp", 0), ("replicated", 0)):
        lines = sharding_view(state(layout, mesh), {})
        kept = [line for line in lines if line.startswith("opt_state")]
        assert len(kept) == count
        assert all(line.endswith("B/device") and "P('data'" in line for line in kept)
    paths = [line.split()[0] for line in sharding_view(state("zero1", mesh), {}) if "[0]." in line]
    assert paths[:3] == ["opt_state[0].mu['a']", "opt_state[0].nu['a']", "opt_state[0].mu['b']"]


def test_rules_on_two_axes_are_a_grid() -> None:
    mesh = rx.make_mesh(2, model=2)
    rules = [("a", PartitionSpec("data", "model")), ("b", PartitionSpec("model"))]
    lines = sharding_view(state(rules, mesh), abstract_batch(SOURCE, 6, by_rows(mesh)))
    assert (
        "\n".join(lines)
        == f"""{HEAD}
params['a']  float32[8, 4]  P('data', 'model')  32 B/device
┌────────────────────────┬────────────────────────┐
│           0            │           1            │
├────────────────────────┼────────────────────────┤
│           2            │           3            │
└────────────────────────┴────────────────────────┘
params['b']  float32[8]  P('model')  16 B/device
┌────────────────────────┐
│          0 2           │
├────────────────────────┤
│          1 3           │
└────────────────────────┘
params['c']  float32[2, 2]  P()  16 B/device
┌────────────────────────┐
│          0-3           │
└────────────────────────┘
batch['x']  float32[6, 3]  P('data')  36 B/device
batch['y']  int32[6]       P('data')  12 B/device
┌────────────────────────┐
│          0 1           │
├────────────────────────┤
│          2 3           │
└────────────────────────┘"""
    )


@pytest.mark.parametrize(
    ("shape", "spec", "cells"),
    [
        ((), (), [["0-7"]]),
        ((8,), ("data",), [["0 1"], ["2 3"], ["4 5"], ["6 7"]]),
        ((3, 8), (None, "model"), [["0 2 4 6", "1 3 5 7"]]),
        ((3, 8), (None, ("data", "model")), [list("01234567")]),
        ((3, 8, 2), (None, "model"), [["0 2 4 6", "1 3 5 7"]]),
        ((8, 3, 2, 4), ("model", None, None, "data"), [list("0246"), list("1357")]),
        ((3, 8, 2, 4), (None, "model", None, "data"), [list("0246"), list("1357")]),
    ],
)
def test_any_number_of_dims(shape: Any, spec: Any, cells: list[list[str]]) -> None:
    sharding = NamedSharding(rx.make_mesh(4, model=2), PartitionSpec(*spec))
    lines = drawn(shape, sharding).splitlines()
    assert [[cell.strip() for cell in line[1:-1].split("│")] for line in lines[1::2]] == cells
    assert len({len(line) for line in lines}) == 1


def test_of_three_split_dims_two_are_drawn() -> None:
    mesh = rx.make_mesh(2, model=2, stage=2)
    text = drawn((4, 4, 4), NamedSharding(mesh, PartitionSpec("data", "model", "stage")))
    assert [line.replace(" ", "") for line in text.splitlines()[1::2]] == ["│01│23│", "│45│67│"]


def test_one_device() -> None:
    for sharding in (replicated(rx.make_mesh(1)), SingleDeviceSharding(jax.devices()[3])):
        lines = drawn((4, 4), sharding).splitlines()
        (device,) = sharding.device_set
        assert lines[1].strip("│ ") == str(device.id)
        assert len(lines) == 3


def test_only_the_largest_parameters_are_shown() -> None:
    model = {f"p{size}": jnp.zeros(size) for size in (1, 5, 3, 4, 2)}
    lines = sharding_view(state("replicated", rx.make_mesh(1), model), {})
    assert [line.split()[0] for line in lines[1:-3]] == [
        "params['p5']",
        "params['p4']",
        "params['p3']",
    ]


@pytest.mark.parametrize("width", [72, 80])
def test_lines_fit_and_a_path_keeps_its_end(width: int) -> None:
    model = {"a_block_with_a_long_name" * 3: {"kernel": jnp.zeros((1024, 16))}}
    mesh = rx.make_mesh(8)
    lines = sharding_view(state("zero1", mesh, model), {}, width)[1:]
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("…") and "name']['kernel']  " in line]


def test_many_parts_are_shortened() -> None:
    column = view._drawing(tuple(((device,),) for device in range(64)), 80)
    assert [line.strip("│ ") for line in column[1::2]] == [*"012345", "⋮", "63"]
    (_, row, _) = view._drawing((tuple((device,) for device in range(64)),), 40)
    assert row.replace(" ", "") == "│0│1│2│3│4│…│63│"
    assert len(row) <= 40
    assert view._label(tuple(range(0, 512, 2))) == "0 2 … 510"
    assert view._label(tuple(range(512))) == "0-511"


def test_shapes_alone_are_enough() -> None:
    mesh = rx.make_mesh(8)
    arrays = state("zero1", mesh)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays
    )
    assert sharding_view(shapes, {}) == sharding_view(arrays, {})


def test_a_source_that_must_be_read_stays_unread() -> None:
    def batches() -> Iterator[Any]:
        raise AssertionError("it was read")
        yield

    mesh = rx.make_mesh(2)
    assert abstract_batch(batches(), 6, by_rows(mesh)) is None
    *_, last = sharding_view(state("fsdp", mesh), None)
    assert last == "batch  split by rows; this source does not tell its shapes before it is read"
    assert len(last) <= 80


def test_what_is_no_batch_is_refused() -> None:
    sharding = by_rows(rx.make_mesh(2))
    with pytest.raises(DataError, match="4 rows"):
        abstract_batch({"x": np.zeros((5, 2)), "y": np.zeros(4)}, 6, sharding)
    with pytest.raises(DataError, match="<U1"):
        abstract_batch({"x": np.array(["a", "b"])}, 6, sharding)
