"""Describe the values on which processes differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 80
_SHOWN = 3
"""Differing fields in a message; the first ones usually cause the rest."""


def field_differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a phrase for each field that differs among `values`, which has one per process."""
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
            told = [f"{_short(value)} on {processes_text(who)}" for value, who in rarest]
            phrases.append(f"{name} is {', '.join(told)}")
    return phrases


def first_of(phrases: Sequence[str]) -> str:
    """Return the first of `phrases`, and how many more there are."""
    more = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
    return "; ".join(phrases[:_SHOWN]) + more


def processes_text(processes: Sequence[int]) -> str:
    """Return `process 1`, `processes 0 and 2`, `processes 0 to 5`, ..."""
    ordered = sorted(processes)
    if len(ordered) == 1:
        return f"process {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"processes {ordered[0]} to {ordered[-1]}"
    shown = [str(process) for process in ordered[:8]]
    if len(ordered) > 8:
        return f"processes {', '.join(shown)} and {len(ordered) - 8} more"
    return f"processes {', '.join(shown[:-1])} and {shown[-1]}"


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
