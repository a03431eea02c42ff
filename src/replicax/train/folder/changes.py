"""Compare the configuration of a resumed run with its original one."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec

from replicax.core.modes.mode_table import MODES
from replicax.errors import ConfigError
from replicax.text.table import width
from replicax.text.wording import shortened
from replicax.train.files.places import read_bytes
from replicax.train.files.records import plain_config
from replicax.train.files.sealed import unsealed

HARMLESS = (
    # How the work is distributed. Batches and mathematics are unchanged, but sums are rounded in a
    # different order, and per-replica data (keys, statistics) is split differently. Only bitwise
    # modes guarantee the same bits.
    *("options.devices", "options.layout", "options.accumulate", "options.model_parallel"),
    *("options.stages", "options.fsdp_size", "options.schedule", "options.steps_per_call"),
    *("options.mode", "options.micro_shards", "parallel.mode", "parallel.micro_shards"),
    *("parallel.layout", "parallel.accumulate", "parallel.mesh", "parallel.device_kind"),
    *("parallel.processes", "parallel.compiler_options", "data.padding", "data.evaluation"),
    # Length of the run, monitoring, output, checkpoints, and stopping.
    *("options.steps", "options.run", "options.log_every", "options.show_sharding"),
    *("options.audit_every", "options.on_divergence", "options.max_bad_steps"),
    *("options.measure_noise_scale", "options.save_every", "options.save_minutes"),
    *("options.keep", "options.keep_every", "options.keep_best", "options.early_stopping"),
    *("options.eval_every", "options.eval_every_epochs", "options.eval_rows"),
    *("options.eval_at_start", "options.log_to", "options.gradient_norm", "options.profile"),
    "options.dump_hlo",
    "preset",  # a name for field values, each of which is compared
    "settings",  # of JAX and XLA, which may round differently; but see `CHOOSING`
    "versions",  # an upgrade may round differently; the requested computation is the same
    "start",  # who started it, where, when, and with which code; the program itself is compared
)
"""Dotted paths of settings that cannot alter a run's results beyond rounding, including everything
below them. All other settings matter."""
CHOOSING = (
    *("jax_default_prng_impl", "jax_enable_custom_prng", "jax_high_dynamic_range_gumbel"),
    *("jax_random_seed_offset", "jax_threefry_partitionable"),  # the random numbers
    *("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion"),  # dtypes
)
"""Settings of JAX that matter: they choose random numbers or dtypes."""
LENGTHS = frozenset((("fields", "epochs"), ("epochs",), ("steps",)))
"""Lengths of a run; harmless if its program is the same, as no schedule then depends on them."""

PROGRAM = {
    "loss": "the loss, or the model's code",
    "optimizer": "the optimizer, its rate or schedule",
    "model": "the model's arrays",
    "step": "the step's code",
    "batch": "the batch's arrays",
}
"""The digests of `replicax.train.folder.program_fingerprint`, and what a change of each means."""
_OF_ONE_START = tuple(
    ("start", name) for name in ("command", "host", "time", "run", "epochs", "steps")
)
_NO_TRACER = ("python", "numpy")
"""Packages whose versions do not affect the traced program."""
_MOST_NAMED, _MOST_LINES = 6, 20
_LONGEST_FIELD, _LONGEST_VALUE = 36, 40
ABSENT: Final = object()
"""Placeholder for a field missing from a configuration; null is a value."""
_Keys = tuple[str, ...]
_HARMLESS = frozenset(tuple(path.split(".")) for path in HARMLESS)
_IF_BOTH = "data", "evaluation"
"""Compared only if both have it: evaluation may begin later."""
_MODES = (("options", "mode"), ("parallel", "mode"))
_MICRO_SHARDS = (("options", "micro_shards"), ("parallel", "micro_shards"))
_DERIVED = ("parallel.", "data.")


@dataclasses.dataclass(frozen=True)
class Change:
    """A field in which two configurations differ."""

    field: str
    """Dotted path."""
    old: Any
    """JSON value, or `ABSENT`."""
    new: Any
    matters: bool
    """Whether it can alter results beyond rounding."""


class _Sections(TypedDict, total=False):
    """The parts of a configuration that Replicax writes itself."""

    parallel: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, str]
    start: dict[str, Any]
    program: dict[str, str]
    bits: dict[str, str]


def read_config(path: Path, kind: type[Any] = _Sections, *, edited: bool = False) -> dict[str, Any]:
    """Return the configuration in `path`, the `config.json` of a run's folder.

    Args:
        path: the file.
        kind: a `TypedDict` of sections, each of which must have its type if it is there.
        edited: whether the file may be a copy that a person has changed.

    Raises:
        ConfigError: it is damaged, or not a configuration.
    """
    try:
        config = unsealed(read_bytes(path), dict[str, Any], edited=edited)
        msgspec.convert(config, kind)
        if not edited and not config.keys() & _Sections.__annotations__.keys():
            raise ValueError("it has no section that Replicax writes")
    except (OSError, ValueError, msgspec.ValidationError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"{path} is not a configuration ({shortened(cause, 100)}): it is damaged or does not "
            "belong to a run; remove it, and the newest checkpoint has a copy, or choose another"
        ) from error
    return config


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two configurations, field by field; a list is one field.

    Both are compared as written to `config.json`, so a tuple equals a list, and 1 differs from 1.0.
    Memory addresses in objects' text, and the command, host and time of a start, are ignored. The
    program is compared only if both have it.
    """
    was, now = _as_written(old), _as_written(new)
    before = was.get("program")
    # If the program is known only from the first batch, it is compared then.
    program = now.get("program", before)
    same_program = before is not None and program | before == before | program
    same_tracer = _tracer(was) == _tracer(now)
    bitwise = all(_is_bitwise(each.get("parallel", {}).get("mode")) for each in (was, now))

    def matters(path: _Keys, old: Any, new: Any) -> bool:
        if path in _MODES and (_is_bitwise(old) or _is_bitwise(new)):  # the bits change then
            return True
        if path in _MICRO_SHARDS and bitwise:
            return True
        if path in LENGTHS:
            return not same_program
        if path[0] == "settings":
            return path[-1] in CHOOSING
        if path[0] == "program":
            return same_tracer
        return not any(path[:length] in _HARMLESS for length in range(1, len(path) + 1))

    return [
        Change(".".join(path), then, since, matters(path, then, since))
        for path, then, since in _differences((), was, now)
        if path not in _OF_ONE_START
        and path[0] != "bits"  # determined by the first step, not a setting
        and (path[0] != "program" or None not in (before, now.get("program")))
        and (path[:2] != _IF_BOTH or ABSENT not in (then, since))
    ]


def run_id(config: Mapping[str, Any]) -> str | None:
    """Return the id drawn at the first start of a run; None if there is none."""
    start = config.get("start")
    found = start.get("run") if isinstance(start, dict) else None
    return found if isinstance(found, str) else None


def another_run(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return in words that a checkpoint's configuration is that of another run, if it is."""
    ours, its = run_id(own), run_id(saved)
    if None in (ours, its) or ours == its:
        return None
    return f"was saved by another run (its id is {its}, the id here is {ours})"


def check_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Return one line per change, in 80 columns; raise `ConfigError` for unaccepted ones."""
    changes = _once(config_changes(old, new))
    matter = [change for change in changes if change.matters]
    matter.sort(key=lambda change: not change.field.startswith("settings."))  # they change programs
    if matter and not accept:
        more = f", and {len(matter) - _MOST_NAMED} more" if len(matter) > _MOST_NAMED else ""
        named = []
        for change in matter[:_MOST_NAMED]:
            section, _, part = change.field.partition(".")
            meaning = f" ({PROGRAM[part]})" if section == "program" and part in PROGRAM else ""
            named.append(f"{_text(change, _LONGEST_VALUE)}{meaning}")
        sections = {change.field.partition(".")[0] for change in matter}
        if _hashes_differ() and "program" in sections and "settings" not in sections:
            more += "; if the order of a set can change it, set PYTHONHASHSEED=0"
        raise ConfigError(
            f"this run began with another configuration: {', '.join(named)}{more}; use a new "
            "folder (--run), or continue with the new configuration (--accept-changes, or "
            "accept_changes=True)"
        )
    ordered = sorted(changes, key=lambda change: not change.matters)
    lines = [_line(change) for change in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"change ... and {len(ordered) - _MOST_LINES:,} more")
    return lines


def _as_written(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` as in `config.json`, without the memory addresses in objects' text."""
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


def _hashes_differ() -> bool:
    """Whether sets of strings have another order in every start."""
    return os.environ.get("PYTHONHASHSEED", "random") == "random"


def _json(value: Any) -> str | None:
    return None if value is ABSENT else json.dumps(value, sort_keys=True)


def _is_bitwise(mode: Any) -> bool:
    return mode in MODES and MODES[mode].bitwise


def _tracer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the versions of the packages that affect the traced program."""
    versions = config.get("versions", {})
    return {name: each for name, each in versions.items() if name not in _NO_TRACER}


def _once(changes: list[Change]) -> list[Change]:
    """Return `changes` without derived fields that repeat the change of an option or field."""
    asked, kept = set(), []
    for change in sorted(changes, key=lambda change: change.field.startswith(_DERIVED)):
        last = change.field.rpartition(".")[2]
        said = last, _json(change.old), _json(change.new), change.matters
        if not change.field.startswith(_DERIVED):
            asked.add(said)
        if not change.field.startswith(_DERIVED) or said not in asked:
            kept.append(change)
    return kept


def _line(change: Change) -> str:
    """Return a line such as `change fields.rows 8 -> 9`, marked if it had to be accepted."""
    end = " (accepted)" if change.matters else ""
    if change.field.startswith("program.") and not change.matters:
        end = " (versions differ: not comparable)"
    room = width() - len("change   -> ") - min(len(change.field), _LONGEST_FIELD) - len(end)
    return f"change {_text(change, room // 2)}{end}"


def _text(change: Change, width: int) -> str:
    """Return field, old and new value, each of the values in at most `width` columns."""
    old, new = _shown(change.old), _shown(change.new)
    if old == new:  # a string that looks like a number or like absent
        old, new = _json(change.old) or "absent", _json(change.new) or "absent"
    pairs = zip(f"{old}\0", f"{new}\1", strict=False)
    same = next(at for at, (one, other) in enumerate(pairs) if one != other)
    if max(len(old), len(new)) > width and same > width // 2:  # such as paths with different ends
        old, new = (f"...{text[same - width // 4 :]}" for text in (old, new))
    field = shortened(change.field, _LONGEST_FIELD)
    return f"{field} {shortened(old, width)} -> {shortened(new, width)}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    plain = isinstance(value, str) and value.isprintable() and value.strip()
    return value if plain else json.dumps(value)
