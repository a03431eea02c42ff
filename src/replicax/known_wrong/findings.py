"""The rows that concern this process: the lines on them, and the refusal."""

import dataclasses
import functools

import jax

from replicax.errors import ConfigError
from replicax.known_wrong.avoidance import knows
from replicax.known_wrong.known_table import KnownWrong, installed_versions, rows_here
from replicax.known_wrong.self_tests import SELF_TESTS

_SAID: set[str] = set()
"""Names of the rows that this process has said."""


@dataclasses.dataclass(frozen=True)
class KnownFinding:
    """A row that concerns this process, and what its self-test computes here."""

    row: KnownWrong
    version: str
    """The version that is installed."""
    wrong: bool | None
    """Whether the self-test computes a wrong number; None if the row has none."""
    avoided: bool
    """Whether Replicax's programs are compiled with options that avoid it."""

    @property
    def matters(self) -> bool:
        """Whether a program of Replicax may compute a wrong number."""
        return not self.avoided and self.wrong is not False

    def __str__(self) -> str:
        return f"{self.found}: {self.row.fix}"

    @property
    def found(self) -> str:
        """The finding, in a line without the fix."""
        row = self.row
        return f"{row.package} {self.version} on {row.platform}: {row.wrong} ({row.link})"


@functools.cache
def finding_of(row: KnownWrong) -> KnownFinding:
    """Return what a row that concerns this process comes to, by its self-test if it has one."""
    test = SELF_TESTS.get(row.self_test)
    avoided = row.answer == "avoid" and knows(row.platform, row.options)
    wrong = None
    if test is not None:
        with jax.default_device(jax.local_devices(backend=row.platform)[0]):
            wrong = test({})
            avoided = avoided and not test(row.options)
    return KnownFinding(row, installed_versions()[row.package], wrong, avoided)


def refuse_known_wrong(platform: str) -> None:
    """Raise `ConfigError` if devices of `platform` compute wrong numbers that nothing avoids."""
    for row in rows_here(platform):
        if row.answer == "refuse" and (finding := finding_of(row)).wrong:
            raise ConfigError(str(finding))


def lines_once(platform: str) -> list[str]:
    """Return the lines to print before training on `platform`, each once in a process."""
    found = [finding_of(row) for row in rows_here(platform) if row.answer != "list"]
    lines = [str(each) for each in found if each.matters and each.row.name not in _SAID]
    _SAID.update(each.row.name for each in found)
    return lines
