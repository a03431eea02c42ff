"""What a verification has found: one row for each thing that was checked."""

import dataclasses
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Verification:
    """All checks of one step."""

    checks: Sequence[Check]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was verified, and on what: what JSON can hold."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.verdict == FAIL]

    def to_json(self) -> dict[str, Any]:
        """As what `json.dumps` takes."""
        return {
            "ok": self.ok,
            "about": dict(self.about),
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }
