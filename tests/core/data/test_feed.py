"""A feed: an epoch as batches of one size on all devices, each row exactly once."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock import Clock, clock_of, is_waiting
from support.waiting import HANG_SECONDS, until

from replicax.core.data import feed as feed_module
from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed, Split
from replicax.core.data.sources import ProcessLocal, as_source
from replicax.core.ground.job import Alone
from replicax.core.placement.mesh import by_rows, make_mesh
from replicax.errors import ConfigError, DataError

clock = clock_of(feed_module)
MESHES = {count: make_mesh(devices=jax.devices()[:count]) for count in (1, 2, 4, 8)}


def feed(
    data: Any,
    batch_size: int | None = 16,
    *,
    replicas: int = 8,
    micro_batches: int = 1,
    shuffle: bool = False,
    epoch: int = 0,
    first: int = 0,
    prefetch: int = 2,
) -> Feed:
    source = as_source(data, batch_size, Alone(), shuffle=shuffle, seed=0)
    split = Split(replicas, micro_batches)
    where = by_rows(MESHES[replicas])
    return Feed(source, split, where, Alone(), epoch=epoch, first=first, prefetch=prefetch)


def counted(batches: list[Batch]) -> list[int]:
    """Return the indices of the rows that count."""
    return [
        int(row)
        for batch in batches
        for row, mask in zip(np.asarray(batch.index), np.asarray(batch.mask), strict=True)
        if mask
    ]


@pytest.mark.promise("feed.each-row-once")
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60),
    extra=st.integers(0, 40),
    replicas=st.sampled_from([1, 2, 4, 8]),
    micro_batches=st.integers(1, 3),
    shuffle=st.booleans(),
    kind=st.sampled_from(["arrays", "grain", "batches"]),
)
def test_every_row_counts_once_in_batches_of_one_size(
    rows: int, extra: int, replicas: int, micro_batches: int, shuffle: bool, kind: str
) -> None:
    size = replicas * micro_batches + extra
    values = np.arange(rows, dtype=np.int32) * 3
    data: Any = values
    if kind == "grain":
        data = grain.MapDataset.source(values)
    if kind == "batches":
        data = [values[start : start + size] for start in range(0, rows, size)]
    made = feed(
        data,
        size,
        replicas=replicas,
        micro_batches=micro_batches,
        shuffle=shuffle and kind != "batches",
    )
    batches = list(made)
    assert sorted(counted(batches)) == list(range(rows))
    (padded,) = {batch.size for batch in batches}
    assert padded % (replicas * micro_batches) == 0
    assert size <= padded < size + replicas * micro_batches
    for batch in batches:
        np.testing.assert_array_equal(batch.data, np.asarray(batch.index) * 3)
        assert batch.rows == np.sum(batch.mask)
    most = max(batch.size - (batch.rows or 0) for batch in batches)
    assert made.padding == (None if kind == "batches" else most)
    if kind != "batches":
        assert len(made) == len(batches)


@pytest.mark.parametrize(
    ("size", "micro_batches", "words"),
    [
        (7, 1, ["7 rows", "8 replicas", "at least 8"]),
        (31, 4, ["31 rows", "4 micro", "at least 32"]),
    ],
)
def test_a_batch_with_too_few_rows_is_refused_before_any_is_made(
    size: int, micro_batches: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        feed(np.arange(100), size, micro_batches=micro_batches)
    for word in words:
        assert word in str(caught.value)


def test_batches_lie_on_all_devices_by_rows_and_keep_their_dtype() -> None:
    images = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    made = feed({"image": images, "label": np.arange(20)})
    batches = list(made)
    for batch in batches:
        for array in (*batch.data.values(), batch.mask, batch.index):
            assert len(array.sharding.device_set) == 8
            assert {shard.data.shape[0] for shard in array.addressable_shards} == {2}
        assert batch.data["image"].dtype == np.uint8
        assert batch.data["label"].dtype == np.int32
    assert batches[1].mask.tolist() == [1] * 4 + [0] * 12
    np.testing.assert_array_equal(batches[1].data["image"][:4], images[16:])
    assert counted(list(made)) == counted(batches)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["arrays", "map dataset", "iter dataset", "batches", "unsized"])
def test_a_pass_can_begin_at_any_batch_of_its_epoch(kind: str, first: int) -> None:
    rows = np.arange(40)
    dataset = grain.MapDataset.source(rows)
    batches = [rows[:16], rows[16:32], rows[32:]]
    data: Any = {
        "arrays": rows,
        "map dataset": dataset,
        "iter dataset": dataset.to_iter_dataset(),
        "batches": batches,
        "unsized": batches,
    }[kind]
    size = None if kind == "unsized" else 16
    shuffle = kind in ("arrays", "map dataset")
    whole = list(feed(data, size, shuffle=shuffle, epoch=3))
    part = list(feed(data, size, shuffle=shuffle, epoch=3, first=first))
    assert len(part) == 3 - first
    if kind in ("arrays", "map dataset"):
        assert len(feed(data, size, first=first)) == len(part)
    for expected, found in zip(whole[first:], part, strict=True):
        assert counted([expected]) == counted([found])
        assert (np.asarray(expected.data) == np.asarray(found.data)).all()
        assert (expected.size, expected.rows) == (found.size, found.rows)


def test_a_pass_over_rows_of_each_process_can_begin_at_any_batch() -> None:
    own = ProcessLocal({"x": np.arange(40)})
    assert counted(list(feed(own, 16, first=1))) == list(range(16, 40))
    assert list(feed(own, 16, first=3)) == []


@pytest.mark.parametrize("first", [-1, 4])
def test_a_pass_cannot_begin_outside_its_epoch(first: int) -> None:
    with pytest.raises(ConfigError, match=rf"first={first}\b.*3 batches"):
        feed(np.arange(40), first=first)


class TestIterable:
    @pytest.mark.parametrize("size", [None, 16])
    def test_a_batch_larger_than_the_batch_size_is_refused(self, size: int | None) -> None:
        with pytest.raises(DataError, match=r"20 rows.*\b16\b"):
            list(feed([np.arange(16), np.arange(20)], size))

    def test_a_first_batch_with_too_few_rows_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"5 rows on 8 replicas"):
            list(feed([np.arange(5)], None))

    def test_a_loader_may_reuse_its_buffer_while_batches_wait(self) -> None:
        def loader() -> Iterator[np.ndarray]:
            buffer = np.zeros((16, 256), np.float32)
            for number in range(6):
                buffer[:] = number
                yield buffer
            buffer[:] = -1

        batches = list(feed(loader(), prefetch=6))
        assert [float(batch.data.min()) for batch in batches] == [0, 1, 2, 3, 4, 5]
        assert [float(batch.data.max()) for batch in batches] == [0, 1, 2, 3, 4, 5]


def test_waiting_for_a_slow_source_is_most_of_the_time(clock: Clock) -> None:
    consumer, taken = threading.current_thread(), threading.Semaphore(1)

    def slow() -> Iterator[np.ndarray]:
        for _ in range(4):
            taken.acquire()
            until(lambda: is_waiting(consumer))
            clock.now += 0.05
            yield np.arange(16)

    made = feed(slow())
    for _ in made:
        clock.now += 0.01
        taken.release()
    assert made.wait_seconds == pytest.approx(0.2)


def test_batches_that_are_ready_cost_no_waiting(clock: Clock) -> None:
    one_is_taken, all_are_made = threading.Event(), threading.Event()

    def loader() -> Iterator[np.ndarray]:
        yield np.arange(16)
        one_is_taken.wait(HANG_SECONDS)
        for _ in range(3):
            clock.now += 10.0  # while nobody waits for it
            yield np.arange(16)
        all_are_made.set()

    made = feed(loader(), prefetch=3)
    batches = iter(made)
    next(batches)
    one_is_taken.set()
    assert all_are_made.wait(HANG_SECONDS)
    assert len(list(batches)) == 3
    assert made.wait_seconds == 0.0


def test_a_source_without_a_batch_is_refused() -> None:
    rows = grain.MapDataset.source(np.arange(8))
    for empty in ([], rows[8:], rows.filter(lambda _: False).to_iter_dataset()):
        with pytest.raises(DataError, match="at least 1"):
            list(feed(empty))


LEFT_OPEN = """
import sys, numpy as np, optax, replicax as rx
dp = rx.DataParallel(lambda m, b, k: b["x"] * m["w"], optax.sgd(0.1))
made = [iter(dp.feed(source, 8)) for source in ({"x": np.ones(80)}, [{"x": np.ones(8)}] * 9)]
print([next(each).size for each in made])
sys.exit(3)
"""


def test_a_pass_that_is_left_open_ends_with_the_program() -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "[8, 8]\n", "")
