"""What every process must have the same of, and who differs in what."""

import json
import re
from collections.abc import Mapping
from typing import Any

from replicax.cluster.differences import differences
from replicax.cluster.link import current_link
from replicax.errors import AgreementError

_SHOWN = 3
"""Differing fields named in the message; the first ones are usually the cause of the rest."""


def agree(topic: str, fields: Mapping[str, Any]) -> None:
    """Return once all processes have called this with equal `fields`; at once in a lone process.

    Args:
        topic: what it is about, the same in all processes.
        fields: JSON values and nested mappings of them.

    Raises:
        AgreementError: in every process, with the field and the processes that differ.
    """
    link = current_link()
    if link is None:
        return
    found = differences(link.gather(link.unique(topic), _plain(fields)))
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise AgreementError(
            f"the processes disagree on {topic}: {'; '.join(found[:_SHOWN])}{more}: "
            "start all with the same code, data and arguments"
        )


def _plain(fields: Any) -> Any:
    """`fields` as JSON has them, so that a tuple here equals the list that comes back."""
    return json.loads(json.dumps(fields, default=_text))


def _text(value: Any) -> str:
    """`value` without where it lies in memory, which is another place in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
