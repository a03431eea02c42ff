"""Sources: arrays, Grain datasets, iterables of batches; each row once an epoch."""

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.core.data.sources import Source, as_source, can_shuffle
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError, DataError


def opened(data: Any, size: int | None = 4, *, shuffle: bool = False, seed: int = 0) -> Source:
    return as_source(data, size, Alone(), shuffle=shuffle, seed=seed)


def order(source: Source, epoch: int = 0) -> list[int]:
    return [int(row) for _, index, _ in source.epoch(epoch) for row in index]


def values(source: Source, epoch: int = 0) -> list[Any]:
    return [row for data, *_ in source.epoch(epoch) for row in np.asarray(data).tolist()]


class Table:
    """Yields the names of its columns, as a `DataFrame` does."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns
        self.dtypes = {name: each.dtype for name, each in columns.items()}
        self.shape = (10, len(columns))

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def grain_rows(rows: int) -> grain.MapDataset:
    return grain.MapDataset.range(rows).map(lambda number: np.int32(number * 10))


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.arange(10)},
        (np.arange(10), np.zeros((10, 2))),
        np.arange(10),
        jnp.arange(10),
        UserDict(x=np.arange(10, dtype=">f8")),
        np.ma.masked_array(np.arange(10), mask=False),
        Table({"x": np.arange(10)}),
    ],
    ids=["dict", "tuple", "array", "jax array", "mapping", "mask", "table"],
)
def test_arrays_are_cut_in_order(data: Any) -> None:
    source = opened(data)
    assert (source.rows, source.batch_size) == (10, 4)
    assert [len(index) for _, index, _ in source.epoch(0)] == [4, 4, 2]
    assert order(source) == order(source, 5) == list(range(10))


def test_rows_stay_together_with_their_index_when_shuffled() -> None:
    data = {"x": np.arange(10) * 10, "y": {"z": np.arange(10) * 100}}
    for rows, index, _ in opened(data, shuffle=True).epoch(0):
        np.testing.assert_array_equal(rows["x"], index * 10)
        np.testing.assert_array_equal(rows["y"]["z"], index * 100)


@pytest.fixture(params=["arrays", "grain"])
def shuffled(request: pytest.FixtureRequest) -> Any:
    data = np.arange(50) * 10 if request.param == "arrays" else grain_rows(50)
    return lambda seed: opened(data, 8, shuffle=True, seed=seed)


def test_the_order_is_a_function_of_seed_and_epoch(shuffled: Any) -> None:
    assert order(shuffled(3), 2) == order(shuffled(3), 2)
    assert values(shuffled(3), 2) == [10 * row for row in order(shuffled(3), 2)]
    orders = {tuple(order(shuffled(seed), epoch)) for seed in (3, 4) for epoch in (0, 1)}
    assert len(orders) == 4
    assert tuple(range(50)) not in orders


def test_a_grain_iter_dataset_is_batched_in_its_own_order() -> None:
    source = opened(grain_rows(10).shuffle(seed=1).to_iter_dataset())
    assert source.rows is None
    assert order(source) == list(range(10))
    assert sorted(values(source)) == list(range(0, 100, 10))
    assert values(source, 0) == values(source, 1)


def test_a_generator_cannot_be_read_twice() -> None:
    source = opened(iter([np.arange(4)]))
    assert order(source, 0) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"epoch 1.*generator.* again"):
        list(source.epoch(1))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([np.arange(4), np.arange(0)], "after row 4 has 0 rows"),
        ([{"x": np.arange(4), "y": np.arange(3)}], r"\['x'\].*\['y'\]|\['y'\].*\['x'\]"),
        ([{"x": np.array(["a"])}], "<U1"),
    ],
)
def test_a_wrong_batch_is_refused_when_it_comes(batches: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(opened(batches).epoch(0))


@pytest.mark.parametrize(
    ("data", "size", "shuffle", "error", "words"),
    [
        (np.arange(4), None, False, ConfigError, "batch_size is missing"),
        (np.zeros((0, 3)), 4, False, DataError, "0 rows"),
        ({"x": np.arange(4), "y": np.arange(5)}, 4, False, DataError, "5 rows.*4"),
        ([np.arange(4)], 4, True, ConfigError, "shuffle=True with an iterable"),
        (17, 4, False, ConfigError, "the source is a int"),
        (grain_rows(4), None, False, ConfigError, "batch_size is missing"),
        (grain_rows(4).to_iter_dataset(), 4, True, ConfigError, "IterDataset"),
        (grain_rows(8).batch(4).map(lambda rows: rows), 4, False, ConfigError, r"\.batch"),
        (grain_rows(4).batch(2), None, False, ConfigError, r"\.batch"),
        (grain_rows(8).to_iter_dataset().batch(4), 4, False, ConfigError, r"\.batch"),
        (grain_rows(4).filter(bool).shuffle(seed=1), 4, False, ConfigError, "to_iter_dataset"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    data: Any, size: int | None, shuffle: bool, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        opened(data, size, shuffle=shuffle)
    assert "\n" not in str(caught.value)


def test_a_grain_iter_dataset_of_batches_is_an_iterable_of_them() -> None:
    found = opened(grain_rows(10).batch(4).to_iter_dataset(), None)
    assert [len(rows) for rows, *_ in found.epoch(0)] == [4, 4, 2]


def test_a_batch_of_grain_may_be_a_row() -> None:
    windows = opened(grain_rows(16).batch(8), 2)
    assert [rows.shape for rows, *_ in windows.epoch(0)] == [(2, 8)]


def test_arrays_and_map_datasets_can_be_shuffled() -> None:
    given = {"x": np.arange(4)}, grain_rows(4), grain_rows(4).to_iter_dataset(), [np.arange(4)]
    assert [can_shuffle(data) for data in given] == [True, True, False, False]
