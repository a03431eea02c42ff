"""Device groups, as compiled programs write them."""

import pytest

from replicax.analysis.collectives import axes_of_group, first_group

SIZES = {"data": 2, "fsdp": 2, "model": 1}


@pytest.mark.parametrize(
    ("attributes", "group", "axes"),
    [
        ("replica_groups={{0,1},{2,3}}", (0, 1), ("fsdp",)),
        ("replica_groups={{0,2},{1,3}}", (0, 2), ("data",)),
        ("replica_groups=[2,2]<=[4]", (0, 1), ("fsdp",)),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", (0, 2), ("data",)),
        ("replica_groups=[1,4]<=[4]", (0, 1, 2, 3), None),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", (0, 1), ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", (0, 1), ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", (0, 2), ("data",)),
        ("source_target_pairs={{0,1},{2,3}}", (0, 1), ("fsdp",)),
        ("channel_id=1", None, None),
    ],
)
def test_who_takes_part(
    attributes: str, group: tuple[int, ...] | None, axes: tuple[str, ...] | None
) -> None:
    assert first_group(attributes) == group
    assert axes_of_group(group, SIZES) == axes
