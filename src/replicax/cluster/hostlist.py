"""Slurm's compressed lists: hosts `node[001-003,7],gpu1` and counts `2(x3),1`."""

import itertools
import math
import re

from replicax.errors import ConfigError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_MOST_HOSTS = 100_000


def expand_hosts(text: str, name: str) -> list[str]:
    """Every host of a Slurm host list, in order.

    Args:
        text: as in `node[001-003,7],gpu1` or `rack[0-1]node[0-3]`.
        name: the variable it came from, for the message.

    Raises:
        ConfigError: brackets or ranges that do not parse.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text, name):
        pieces = _BRACKETS.split(part)
        if any("[" in piece or "]" in piece or not piece.isprintable() for piece in pieces):
            raise _not_a_list(text, name)
        # re.split alternates plain text and what stood in brackets.
        choices = [
            _expand_ranges(piece, text, name) if i % 2 else [piece]
            for i, piece in enumerate(pieces)
        ]
        if len(hosts) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise _not_a_list(text, name)
        hosts += ["".join(combination) for combination in itertools.product(*choices)]
    return hosts


def expand_counts(text: str, name: str) -> list[int]:
    """Every count of a Slurm list of counts: `2(x3),1` is `[2, 2, 2, 1]`.

    Args:
        text: the list.
        name: the variable it came from, for the message.

    Raises:
        ConfigError: an entry that is not a count.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise ConfigError(
                f"{name}={text!r} is not a list of counts such as 2(x3),1; "
                "Slurm sets it: start the processes with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str, name: str) -> list[str]:
    parts = re.split(r",(?![^\[]*\])", text)
    if not all(part.strip() for part in parts):
        raise _not_a_list(text, name)
    return [part.strip() for part in parts]


def _expand_ranges(inside: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first > _MOST_HOSTS:
            raise _not_a_list(text, name)
        # The width of the first number holds for all: 001-003, 9-11.
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def _not_a_list(text: str, name: str) -> ConfigError:
    return ConfigError(
        f"{name}={text!r} is not a list of hosts such as node[001-003,7]; "
        "Slurm sets it: start the processes with srun"
    )
