"""The stages of a verification, one after the other, with what is left."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from replicax.checks import Check

Show = Callable[[str], None]
Stage = tuple[str, Callable[[], Iterable[Check]]]
"""What a stage checks, in a few words, and its rows."""


def run_stages(stages: Sequence[Stage], show: Show) -> Iterator[Check]:
    """Yield the rows of all stages; show each as it begins, with the number of those left."""
    for number, (name, checks) in enumerate(stages):
        show(f"{name} · {number + 1} of {len(stages)}")
        yield from checks()
