"""Who takes part in a collective, read from what XLA writes."""

import pytest

from replicax.analysis.groups import axes_of_group, first_group

SIZES = {"data": 2, "model": 2, "stage": 4}


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,1},{2,3}}", (0, 1)),
        ("replica_groups={}", None),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", (0, 2)),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5}}", (0, 1, 2, 3)),
        ("source_target_pairs={{2,0},{6,4},{4,2}}", (0, 2, 4, 6)),
    ],
)
def test_the_first_group(written: str, group: tuple[int, ...] | None) -> None:
    assert first_group(f"channel_id=1, {written}, use_global_device_ids=true") == group


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        (None, None),
        (tuple(range(16)), None),
        ((0, 1, 2, 3), ("stage",)),
        ((0, 4), ("model",)),
        ((0, 8), ("data",)),
        ((3, 7, 11, 15), ("data", "model")),
        ((5,), ()),
    ],
)
def test_the_axes_that_a_group_spans(
    group: tuple[int, ...] | None, axes: tuple[str, ...] | None
) -> None:
    assert axes_of_group(group, SIZES) == axes
