"""Describe the values on which processes differ."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LONGEST = 80
_SHOWN = 3
"""Differing fields in a message; the first ones usually cause the rest."""


def field_differences(
    values: Sequence[Mapping[str, Any]], whose: Callable[[Sequence[int]], str] | None = None
) -> list[str]:
    """Return a phrase for each field that differs among `values`, which has one per process.

    `whose` names those with some places in `values`, if they are no processes.
    """
    whose = whose or processes_text
    flat = [_flat(value) for value in values]
    names = list(dict.fromkeys(name for fields in flat for name in fields))
    phrases = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for process, fields in enumerate(flat):
            groups.setdefault(json.dumps(fields.get(name, "nothing")), []).append(process)
        if len(groups) > 1:
            # Outliers first.
            rarest = sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
            told = [f"{_short(value)} on {whose(who)}" for value, who in rarest]
            phrases.append(f"{name} is {', '.join(told)}")
    return phrases


def first_of(phrases: Sequence[str]) -> str:
    """Return the first of `phrases`, and how many more there are."""
    more = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
    return "; ".join(phrases[:_SHOWN]) + more


def processes_text(processes: Sequence[int]) -> str:
    """Return `process 1`, `processes 0 and 2`, `processes 0 to 5`, ..."""
    return _numbered("process", "processes", processes)


def islands_text(islands: Sequence[int]) -> str:
    """Return `island 1`, `islands 0 and 2`, ..."""
    return _numbered("island", "islands", islands)


def _numbered(one: str, several: str, numbers: Sequence[int]) -> str:
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"{one} {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{several} {ordered[0]} to {ordered[-1]}"
    shown = list(map(str, ordered[:8]))
    if len(ordered) > 8:
        return f"{several} {', '.join(shown)} and {len(ordered) - 8} more"
    return f"{several} {', '.join(shown[:-1])} and {shown[-1]}"


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _short(value: str) -> str:
    text = value.strip('"')
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
