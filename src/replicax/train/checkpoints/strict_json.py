"""JSON as the standard has it, read from files that nobody vouches for."""

import json
import math
from typing import Any, NoReturn

from replicax.errors import CheckpointError

_LONGEST_SHOWN = 120


def parse(data: bytes, name: str) -> Any:
    """What the JSON in `data` says.

    Args:
        data: UTF-8.
        name: of the file it comes from, for messages.

    Raises:
        CheckpointError: it is no JSON, or says something twice or that JSON cannot say.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_refuse,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{name} is no JSON: {error.msg} at {error.pos}") from error
    except ValueError as error:
        raise CheckpointError(f"{name} is no strict JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply") from error
    except MemoryError as error:
        raise CheckpointError(f"{name} says more than fits into memory") from error


def canonical(value: Any) -> str:
    """The one way in which `value` is written: ASCII, sorted keys, no spaces.

    Two values are written alike only if they are of the same types: 1, 1.0 and true differ.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot say it.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def shown(text: str) -> str:
    """`text` from an untrusted source, as a part of one line: printable, and not too long."""
    line = text if text.isprintable() else ascii(text)
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is no finite number")
    return number
