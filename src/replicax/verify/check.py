"""One thing that was checked, and what was found."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

Verdict = Literal["pass", "fail", "note", "skip"]
PASS: Final[Literal["pass"]] = "pass"
FAIL: Final[Literal["fail"]] = "fail"
NOTE: Final[Literal["note"]] = "note"
SKIP: Final[Literal["skip"]] = "skip"

Topic = Literal[
    "parity",
    "replicas",
    "traffic",
    "redundant work",
    "parameters",
    "determinism",
    "recompilation",
    "sums",
]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was checked in one case."""

    subject: Topic
    case: str
    """Where: "full batch", "shard_map, 2 micro-batches"."""
    verdict: Verdict
    found: str
    """What was seen, with its figures; for `skip`, why it was not looked at."""
    cause: str = ""
    """The likely cause of a failure, and its fix."""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same as numbers, for programs; what JSON can hold."""
