"""The memory that a step needs on each device of a target."""

import dataclasses

from replicax.core.mesh import AnyMesh, is_data_only


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory of one step on one device."""

    rows: int
    """Rows a replica, padding included."""
    bytes: int
    """That must be there for it, its state and batch included. Where the compiler refuses the step,
    what it says, which can be less, or by formula."""
    fits: bool
    compiled: bool
    """Whether a compiler has said so; else it is by formula."""
    temporaries: int | None = None
    """Of the bytes, what is neither state nor batch, where the compiler tells."""

    @property
    def is_least(self) -> bool:
        """Whether it may be more: the compiler has refused the step, and no more is known."""
        return self.compiled and self.temporaries is None


def holder(mesh: AnyMesh) -> str:
    """Return what rows are counted of: a `device`, or a `replica` where several devices are one."""
    return "device" if is_data_only(mesh) else "replica"
