"""The result of a verification: one row for each thing that was checked."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.verify.check import FAIL, Check
from replicax.verify.table import summary, table_text


@dataclasses.dataclass(frozen=True)
class Verification:
    """All checks of one step."""

    checks: Sequence[Check]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The subject, and the devices it was verified on: JSON values."""

    def __repr__(self) -> str:
        return f"Verification(ok={self.ok}, {summary(self.checks)})"

    def __str__(self) -> str:
        return table_text(self.checks)

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
