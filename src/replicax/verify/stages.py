"""The stages of a verification, one after the other, with what is left."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from replicax.text.checks import Check, checks_summary

Show = Callable[[str], None]
"""A function that is called with a few words on what is checked next."""
OnCheck = Callable[[Check], None]
"""A function that is called with each row as soon as it is known."""
VerifyStage = tuple[str, Callable[[], Iterable[Check]]]
"""A few words on what a stage checks, and its rows."""


def run_stages(stages: Sequence[VerifyStage], show: Show) -> Iterator[Check]:
    """Yield the rows of all stages; show each as it begins, its number and the verdicts so far."""
    found: list[Check] = []
    for number, (name, checks) in enumerate(stages, start=1):
        verdicts = checks_summary(found).partition(": ")[2]
        show(" · ".join(filter(None, [name, f"{number} of {len(stages)}", verdicts])))
        for check in checks():
            found.append(check)
            yield check
