"""When transfers are ready and needed by documented schedules, against timelines drawn by hand."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published_schedules import Layer, Timeline, bucketed, fused, sharded

from replicax.plan.forecast import Transfer

# 12 s: forward passes of 1, 2 and 1 s, backward passes twice as long, from 4 s on.
THREE = Timeline([Layer(10, 1.0), Layer(20, 2.0), Layer(30, 1.0)], 12.0)


@dataclass(frozen=True)
class Slow:
    """A network on which a byte takes `seconds`."""

    seconds: float
    devices: int = 4

    def time(self, kind: str, size: float) -> float:
        return self.seconds * size


def test_a_step() -> None:
    assert THREE.forward() == [(0, 1), (1, 3), (3, 4)]
    assert THREE.backward() == [(10, 12), (6, 10), (4, 6)]


def test_a_step_that_recomputes() -> None:
    again = Timeline(THREE.layers, 16.0, recomputed=True)
    assert again.forward() == [(0, 1), (1, 3), (3, 4)]
    assert again.backward() == [(13, 16), (7, 13), (4, 7)]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (bucketed(THREE, 0, 4), [(120, 6), (80, 10), (40, 12)]),  # a bucket for every layer
        (fused(THREE, 1000, 4, Slow(0.001)), [(120, 6), (80, 10), (40, 12)]),  # each when ready
        (bucketed(THREE, 120, 4), [(120, 6), (120, 12)]),  # one that is just full goes
        (bucketed(THREE, 130, 4), [(200, 10), (40, 12)]),
        (bucketed(THREE, 1e9, 4), [(240, 12)]),
        # The buffer is full with each. The second could go at 18 s, after the computation.
        (fused(THREE, 100, 4, Slow(0.1)), [(120, 6), (80, 12), (40, 12)]),
        # 120 bytes from 6 s to 12 s; by then both others are ready, and joined.
        (fused(THREE, 1000, 4, Slow(0.05)), [(120, 6), (120, 12)]),
    ],
)
def test_buckets_go_once_they_are_full(
    sent: list[Transfer], expected: list[tuple[int, int]]
) -> None:
    assert sent == [Transfer("all-reduce", size, ready, 12) for size, ready in expected]


def test_sharded_layers_are_gathered_one_ahead() -> None:
    sent = sharded(THREE, devices=4, gather_bytes=2, reduce_bytes=4)
    gathers = [each for each in sent if each.kind == "all-gather"]
    assert gathers == [
        Transfer("all-gather", 20, 0, 0),
        Transfer("all-gather", 40, 0, 1),
        Transfer("all-gather", 60, 1, 3),
        # Backward: the last is still there.
        Transfer("all-gather", 40, 4, 6),
        Transfer("all-gather", 20, 6, 10),
    ]
    assert [each for each in sent if each.kind == "reduce-scatter"] == [
        Transfer("reduce-scatter", 30, 6, 12),
        Transfer("reduce-scatter", 20, 10, 12),
        Transfer("reduce-scatter", 10, 12, 12),
    ]


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    bucket=st.integers(0, 400),
    rate=st.floats(0, 1),
)
def test_every_gradient_is_sent_once(sizes: list[int], bucket: int, rate: float) -> None:
    timeline = Timeline([Layer(size, float(size)) for size in sizes], 10.0)
    for sent in (bucketed(timeline, bucket, 4), fused(timeline, bucket, 4, Slow(rate))):
        assert sum(each.bytes for each in sent) == 4 * sum(sizes)
        assert all(each.ready_seconds <= 10.0 for each in sent)
