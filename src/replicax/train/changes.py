"""The configuration of a run that is continued, against the one it began with."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from replicax.core.modes import MODES
from replicax.errors import ConfigError
from replicax.train.places import read_bytes
from replicax.train.records import plain_config
from replicax.wording import shortened

HARMLESS = (
    # Where the work is done. The batches and the mathematics stay: sums are rounded in another
    # order, and what each replica has of its own (keys, statistics) is cut elsewhere. Only bitwise
    # modes promise bits.
    *("options.devices", "options.layout", "options.accumulate", "options.model_parallel"),
    *("options.stages", "options.fsdp_size", "options.schedule"),
    *("options.mode", "options.micro_shards", "parallel.mode", "parallel.micro_shards"),
    *("parallel.layout", "parallel.accumulate", "parallel.mesh", "parallel.device_kind"),
    *("parallel.processes", "data.padding"),
    # How far it goes, what is watched, shown and kept, and when it gives up.
    *("options.steps", "options.run", "options.log_every", "options.show_sharding"),
    *("options.audit_every", "options.on_divergence", "options.max_bad_steps"),
    *("options.measure_noise_scale", "options.save_every", "options.save_minutes"),
    *("options.keep", "options.keep_every", "options.keep_best", "options.early_stopping"),
    *("options.eval_every", "options.eval_every_epochs", "options.eval_rows"),
    *("options.eval_at_start", "options.log_to", "options.gradient_norm", "options.profile"),
    "preset",  # a name for values of fields, each of which is compared
    "versions",  # an update may round differently; nothing that was asked for changes
    "start",  # who asked, where, when, with which code: what that computes is compared
)
"""Dotted paths of what cannot alter a run's results beyond rounding. What lies below one of them is
harmless too; all else matters."""
LENGTHS = frozenset((("fields", "epochs"), ("epochs",), ("steps",)))
"""How far a run goes, which is harmless where its program is the same: no schedule follows."""

PROGRAM = {
    "loss": "the loss, or the model's code",
    "optimizer": "the optimizer, its rate or schedule",
    "model": "the model's arrays",
    "step": "the step's code",
}
"""The digests of `replicax.train.program_fingerprint`, and what another one means."""
_OF_ONE_START = (("start", "command"), ("start", "host"), ("start", "time"))
_NO_TRACER = ("python", "numpy")
"""Versions of what has no say in which operations a program is traced to."""
_MOST_NAMED, _MOST_LINES = 6, 20
_COLUMNS, _LONGEST_FIELD, _LONGEST_VALUE = 80, 36, 40
ABSENT: Final = object()
"""In place of a value where a configuration has no such field; null is a value."""
_Keys = tuple[str, ...]
_HARMLESS = frozenset(tuple(path.split(".")) for path in HARMLESS)
_MODES = (("options", "mode"), ("parallel", "mode"))
_MICRO_SHARDS = (("options", "micro_shards"), ("parallel", "micro_shards"))
_DERIVED = ("parallel.", "data.")


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
    """The configuration in `path`, the `config.json` of a run's folder."""
    try:
        value = json.loads(read_bytes(path))
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}, where an object belongs")
    except (OSError, ValueError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"{path} is no configuration ({shortened(cause, 100)}): it is not of a run, or was "
            "damaged; choose another"
        ) from error
    return value


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two configurations, field by field; a list is one field.

    Both are compared as `config.json` has them, so a tuple equals a list; 1 is not 1.0. Where in
    memory an object lies that was written as text does not count, nor what is of one start alone.
    A program that one of them does not have is not compared.
    """
    was, now = _as_written(old), _as_written(new)
    before = was.get("program")
    # Where only the first batch will tell the program, it is compared then.
    same_program = before is not None and now.get("program", before) == before
    same_tracer = _tracer(was) == _tracer(now)
    bitwise = all(_is_bitwise(each.get("parallel", {}).get("mode")) for each in (was, now))

    def matters(path: _Keys, old: Any, new: Any) -> bool:
        if path in _MODES and (_is_bitwise(old) or _is_bitwise(new)):  # those bits are others then
            return True
        if path in _MICRO_SHARDS and bitwise:
            return True
        if path in LENGTHS:
            return not same_program
        if path[0] == "program":
            return same_tracer
        return not any(path[:length] in _HARMLESS for length in range(1, len(path) + 1))

    return [
        Change(".".join(path), one, other, matters(path, one, other))
        for path, one, other in _differences((), was, now)
        if path not in _OF_ONE_START
        and path[0] != "bits"  # told by the first step, and no choice of anybody's
        and (path[0] != "program" or None not in (before, now.get("program")))
    ]


def check_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Return what to say about the changes, a line each in 80 columns."""
    found = _once(changes(old, new))
    matter = [change for change in found if change.matters]
    if matter and not accept:
        more = f", and {len(matter) - _MOST_NAMED} more" if len(matter) > _MOST_NAMED else ""
        told = []
        for change in matter[:_MOST_NAMED]:
            section, _, part = change.field.partition(".")
            meaning = f" ({PROGRAM[part]})" if section == "program" and part in PROGRAM else ""
            told.append(f"{_text(change, _LONGEST_VALUE)}{meaning}")
        raise ConfigError(
            f"this run began with another configuration: {', '.join(told)}{more}; give it a folder "
            "of its own (--run), or go on with the new one (--accept-changes, or "
            "accept_changes=True)"
        )
    ordered = sorted(found, key=lambda change: not change.matters)
    lines = [_line(change) for change in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"change ... and {len(ordered) - _MOST_LINES:,} more")
    return lines


def _as_written(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as `config.json` has it, but for the addresses of objects written as text."""
    text = json.dumps(plain_config(dict(config)))
    return dict(json.loads(re.sub(r" at 0x[0-9a-f]+", "", text)))


def _differences(path: _Keys, old: Any, new: Any) -> Iterator[tuple[_Keys, Any, Any]]:
    if isinstance(old, dict) and old and new is ABSENT:
        new = {}
    if isinstance(new, dict) and new and old is ABSENT:
        old = {}
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences((*path, key), old.get(key, ABSENT), new.get(key, ABSENT))
    elif _json(old) != _json(new):  # as text: to Python, 1 equals 1.0 and True
        yield path, old, new


def _json(value: Any) -> str | None:
    return None if value is ABSENT else json.dumps(value, sort_keys=True)


def _is_bitwise(mode: Any) -> bool:
    return mode in MODES and MODES[mode].bitwise


def _tracer(config: dict[str, Any]) -> dict[str, Any]:
    """Versions of what has a say in which operations a program is traced to."""
    versions = config.get("versions", {})
    return {name: each for name, each in versions.items() if name not in _NO_TRACER}


def _once(found: list[Change]) -> list[Change]:
    """Without what is derived from an option or a field, and says the same again."""
    asked, kept = set(), []
    for change in sorted(found, key=lambda change: change.field.startswith(_DERIVED)):
        last = change.field.rpartition(".")[2]
        said = last, _json(change.old), _json(change.new), change.matters
        if not change.field.startswith(_DERIVED):
            asked.add(said)
        if not change.field.startswith(_DERIVED) or said not in asked:
            kept.append(change)
    return kept


def _line(change: Change) -> str:
    """`change fields.rows 8 -> 9`; accepted where it would have been refused."""
    end = " (accepted)" if change.matters else ""
    if change.field.startswith("program.") and not change.matters:
        end = " (other versions: cannot be told)"
    room = _COLUMNS - len("change   -> ") - min(len(change.field), _LONGEST_FIELD) - len(end)
    return f"change {_text(change, room // 2)}{end}"


def _text(change: Change, width: int) -> str:
    """Field, old and new value, each of which takes at most `width` columns."""
    old, new = _shown(change.old), _shown(change.new)
    if old == new:  # a text that reads like a number, or as absent
        old, new = _json(change.old) or "absent", _json(change.new) or "absent"
    pairs = zip(f"{old}\0", f"{new}\1", strict=False)
    same = next(at for at, (one, other) in enumerate(pairs) if one != other)
    if max(len(old), len(new)) > width and same > width // 2:  # paths, say, that end differently
        old, new = (f"...{text[same - width // 4 :]}" for text in (old, new))
    field = shortened(change.field, _LONGEST_FIELD)
    return f"{field} {shortened(old, width)} -> {shortened(new, width)}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    plain = isinstance(value, str) and value.isprintable() and value.strip()
    return value if plain else json.dumps(value)
