"""The configuration of a run that is continued, against the one it began with."""

import dataclasses
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from replicax.core.modes import MODES
from replicax.errors import ConfigError

HARMLESS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Where the work is done. The batches and the mathematics stay: sums are rounded in another "
        "order, and what each replica has of its own (keys, statistics) is cut elsewhere. Only "
        "bitwise modes promise bits: see _matters.": (
            *("options.devices", "options.layout", "options.accumulate"),
            *("options.mode", "options.micro_shards", "parallel.mode", "parallel.micro_shards"),
            *("parallel.layout", "parallel.accumulate", "parallel.mesh", "parallel.device_kind"),
            *("parallel.processes", "data.padding"),
        ),
        "How far it goes. A recipe's own fields.epochs matters: schedules may depend on it.": (
            *("options.steps", "options.epochs"),
        ),
        "What is watched, shown and kept, and when it gives up.": (
            *("options.run", "options.log_every", "options.show_sharding"),
            *("options.audit_every", "options.on_divergence", "options.max_bad_steps"),
            *("options.measure_noise_scale", "options.accept_changes"),
            *("options.save_every", "options.save_seconds", "options.save_minutes"),
            *("options.keep", "options.keep_every"),
        ),
        "A name for values of fields, each of which is compared.": ("preset",),
        "What computes. An update may round differently; nothing that was asked for changes.": (
            "versions",
        ),
    }
)
"""Dotted paths of what cannot alter a run's results beyond rounding, under the reason why. What
lies below one of them is harmless too; all else matters."""

LARGEST_BYTES = 16 << 20
"""A larger `config.json` is none."""

_DEEPEST = 64
_MOST_NAMED = 6
_MOST_LINES = 20
_COLUMNS = 80
_LONGEST_FIELD = 36
_LONGEST_VALUE = 40
"""Of a value in an error, in characters."""


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()
"""In place of a value where a configuration has no such field; null is a value."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A field that two configurations differ in."""

    field: str
    """Dotted path."""
    old: Any
    """JSON value, or `ABSENT`."""
    new: Any
    matters: bool
    """Whether it can alter what is computed, beyond rounding."""


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in `path`, the `config.json` of a run's folder.

    Raises:
        ConfigError: it is not a regular file of at most 16 MiB with a JSON object in it, nested at
            most 64 deep, no key twice.
    """
    try:
        value = json.loads(
            _read(path).decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=lambda _: None,  # NaN in a list, which write_config leaves as it is
        )
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}, where an object belongs")
        checked: dict[str, Any] = _plain(value)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no configuration ({_cause(error)}): this folder is no run, or it was "
            "damaged; choose another --run"
        ) from error
    return checked


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs between two configurations, field by field; a list is one field.

    Both are compared as `config.json` has them, so a tuple equals a list; 1 is not 1.0. Where in
    memory an object lies that was written as text does not count.

    Raises:
        ConfigError: one of them cannot be written as JSON.
    """
    was, now = _as_json(old), _as_json(new)
    bitwise = all(_is_bitwise(_mode(config)) for config in (was, now))
    return [
        Change(
            ".".join(map(_printable, path)), before, after, _matters(path, before, after, bitwise)
        )
        for path, before, after in _differences((), was, now)
    ]


def check_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, accept: bool) -> list[str]:
    """What to say about the changes, a line each in 80 columns.

    Args:
        old: what the run began with, of `read_config`.
        new: what it is to go on with.
        accept: whether what matters may change.

    Raises:
        ConfigError: something that matters has changed, and is not accepted.
    """
    found = _once(changes(old, new))
    matter = [change for change in found if change.matters]
    if matter and not accept:
        more = f", and {len(matter) - _MOST_NAMED} more" if len(matter) > _MOST_NAMED else ""
        named = ", ".join(_text(change, _LONGEST_VALUE) for change in matter[:_MOST_NAMED])
        raise ConfigError(
            f"this run began with another configuration: {named}{more}; give it a folder of its "
            "own (--run), or go on with the new one (--accept-changes, or accept_changes=True)"
        )
    ordered = matter + [change for change in found if not change.matters]
    lines = [_line(change) for change in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"change ... and {len(ordered) - _MOST_LINES:,} more")
    return lines


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=_open_here) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"more than {LARGEST_BYTES >> 20} MiB")
    return text


def _open_here(path: str, flags: int) -> int:
    """Not through a link out of the folder, and not waiting for the other end of a pipe."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, name, 0)  # Windows has neither
    return os.open(path, flags)


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "a symbolic link"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start:,} is not UTF-8"
    if isinstance(error, RecursionError):
        return f"nested more than {_DEEPEST} deep"
    return _shortened(str(error), 100)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as it is after it was written by `RunFolder.write_config` and read again."""
    try:
        text = json.dumps(dict(config), default=str)
        plain: dict[str, Any] = _plain(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"this configuration cannot be written as JSON ({_cause(error)}); use numbers, texts, "
            "lists, and dicts with texts as keys"
        ) from error
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    """`value`, with null for what is not finite, and no text that says where in memory it lay."""
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, str):
        return re.sub(r" at 0x[0-9a-f]+", "", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


_Found = tuple[tuple[str, ...], Any, Any]


def _differences(path: tuple[str, ...], old: Any, new: Any) -> Iterator[_Found]:
    """Path, old and new value of each field that differs."""
    if isinstance(old, dict) and new is ABSENT and old:
        new = {}
    if isinstance(new, dict) and old is ABSENT and new:
        old = {}
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences((*path, key), old.get(key, ABSENT), new.get(key, ABSENT))
    elif _json(old) != _json(new):  # as text: to Python, 1 equals 1.0 and True
        yield path, old, new


def _json(value: Any) -> str | None:
    return None if value is ABSENT else json.dumps(value, sort_keys=True)


def _mode(config: dict[str, Any]) -> Any:
    for section in ("parallel", "options"):
        fields = config.get(section)
        if isinstance(fields, dict) and "mode" in fields:
            return fields["mode"]
    return None


_HARMLESS = frozenset(tuple(path.split(".")) for paths in HARMLESS.values() for path in paths)


_MODES = (("options", "mode"), ("parallel", "mode"))
_MICRO_SHARDS = (("options", "micro_shards"), ("parallel", "micro_shards"))


_BEFORE: Mapping[tuple[str, ...], Any] = {
    ("options", "reduction"): "float32",
    ("parallel", "reduction"): "float32",
}
"""What runs did that began before there was such a field."""


def _is_bitwise(mode: Any) -> bool:
    """Whether `mode`, read from a file, is the name of one that promises bits."""
    return isinstance(mode, str) and mode in MODES and MODES[mode].bitwise


def _matters(path: tuple[str, ...], old: Any, new: Any, bitwise: bool) -> bool:
    """Whether the field may not change; `bitwise`: the run's bits were, and are to be, fixed."""
    if path in _MODES and (_is_bitwise(old) or _is_bitwise(new)):  # those bits are others then
        return True
    if path in _MICRO_SHARDS and bitwise:
        return True
    if old is ABSENT and _BEFORE.get(path) == new:
        return False
    return not any(path[:length] in _HARMLESS for length in range(1, len(path) + 1))


def _once(found: list[Change]) -> list[Change]:
    """Without what is derived from an option or a field, and says the same again."""
    asked, kept = set(), []
    for change in sorted(found, key=lambda change: change.field.startswith(_DERIVED)):
        last = change.field.rpartition(".")[2]
        said = last, _json(change.old), _json(change.new), change.matters
        if not change.field.startswith(_DERIVED):
            asked.add(said)
        elif said in asked:
            continue
        kept.append(change)
    return kept


_DERIVED = ("parallel.", "data.")


def _line(change: Change) -> str:
    """`change fields.rows 8 -> 9`; accepted where it would have been refused."""
    end = " (accepted)" if change.matters else ""
    field = _shortened(change.field, _LONGEST_FIELD)
    room = _COLUMNS - len("change   -> ") - len(field) - len(end)
    return f"change {_text(change, room // 2)}{end}"


def _text(change: Change, width: int) -> str:
    """Field, old and new value, each of which takes at most `width` columns."""
    old, new = _shown(change.old), _shown(change.new)
    if old == new:  # a text that reads like a number, or as absent
        old, new = _json(change.old) or "absent", _json(change.new) or "absent"
    if max(len(old), len(new)) > width:
        pairs = enumerate(zip(old, new, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
        if same > width // 2:  # paths, say, that end differently
            old, new = (f"...{text[same - width // 4 :]}" for text in (old, new))
    field = _shortened(change.field, _LONGEST_FIELD)
    return f"{field} {_shortened(old, width)} -> {_shortened(new, width)}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    return _printable(value) if isinstance(value, str) else json.dumps(value)


def _printable(text: str) -> str:
    """`text` as it is, or quoted where it would disturb a terminal or vanish."""
    return text if text.isprintable() and text.strip() else json.dumps(text)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
