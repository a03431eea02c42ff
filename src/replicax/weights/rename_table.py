"""A table of names: the place of a file's tensor, and the names of a model's leaves."""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import numpy as np

from replicax.errors import ConfigError, DataError
from replicax.weights.tensor_slices import (
    Groups,
    Leaf,
    PathOrPlace,
    TensorPlace,
    UnfitError,
    place_of,
)

Rename = Mapping[str, PathOrPlace | None]
"""Patterns of names in a file, which must match whole names, and their places; None for none."""
PlacedTensor = tuple[TensorPlace, Groups]
_GROUP = re.compile(r"\((?!\?)[^()]*\)")
_SPECIAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)[\^$*+?{}\[\]|()]")


class NoLeafError(Exception):
    """A name whose leaf, the argument, is not in the model."""


class RenameTable:
    """The rules of `rename=` and the patterns of `skip=`."""

    def __init__(self, rename: Rename, skip: Sequence[str]) -> None:
        places = {p: None if target is None else place_of(target) for p, target in rename.items()}
        self._rules = [(_compiled(pattern), place) for pattern, place in places.items()]
        self._skip = [_compiled(pattern) for pattern in skip]

    def skips(self, name: str) -> bool:
        """Whether a name of the file, or a path of the model, is left out on purpose."""
        return any(pattern.fullmatch(name) for pattern in self._skip)

    def placed(self, name: str, paths: Container[str]) -> PlacedTensor | None:
        """Return the place of a tensor: the first rule's that matches, or the leaf of its name.

        Returns None if it is left out on purpose.

        Raises:
            NoLeafError: no rule matches, or its leaf is none of `paths`.
        """
        if self.skips(name):
            return None
        place: TensorPlace | None = Leaf(name)
        groups: Groups = {}
        for pattern, of_rule in self._rules:
            if match := pattern.fullmatch(name):
                groups = dict(enumerate((text or "" for text in match.groups()), 1))
                place = of_rule
                break
        if place is None or all(self.skips(path) for path in place.paths(groups)):
            return None
        if missing := [path for path in place.paths(groups) if path not in paths]:
            raise NoLeafError(missing[0])
        return place, groups

    def names(
        self, leaves: Mapping[str, np.ndarray], otherwise: Sequence[str]
    ) -> dict[str, PlacedTensor]:
        """Return the names in a file of the leaves, by the rules; of the others `otherwise`, own.

        Of several rules for one leaf, the first writes it.

        Raises:
            ConfigError: a pattern stands for several names.
            DataError: a leaf has no such part as a rule says.
        """
        placed: dict[str, PlacedTensor] = {}
        filled = Counter[str]()
        for pattern, place in self._rules:
            try:
                every = [] if place is None else list(place.found_in(leaves))
                for groups in every:
                    assert place is not None
                    paths = place.paths(groups)
                    if all(filled[path] >= leaves[path].size for path in paths):
                        continue
                    name = _name(pattern.pattern, groups)
                    if self._leads_to(name, place, groups, leaves):
                        placed[name] = (place, groups)
                        for path, size in zip(paths, place.sizes(leaves, groups), strict=True):
                            filled[path] += size
            except UnfitError as error:
                raise DataError(
                    f"the leaf of {pattern.pattern!r} {error}; correct the rule of rename="
                ) from error
        for path in otherwise:
            if not filled[path] and self._leads_to(path, None, {}, leaves):
                placed[path] = (Leaf(path), {})
        return placed

    def _leads_to(
        self, name: str, place: TensorPlace | None, groups: Groups, leaves: Mapping[str, np.ndarray]
    ) -> bool:
        """Whether the name, in a file, is of this place; None for the leaf of its name."""
        try:
            placed = self.placed(name, leaves)
        except NoLeafError:
            return False
        if placed is None:
            return False
        if place is None:
            return isinstance(placed[0], Leaf) and placed[0].paths(placed[1]) == [name]
        return placed[0] is place and all(placed[1][key] == text for key, text in groups.items())


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a pattern ({error}); names are matched by Python's re: correct it"
        ) from error


def _name(pattern: str, groups: Groups) -> str:
    r"""Return the name that `pattern` matches with these groups; a dot is a dot, escaped or not.

    Raises:
        ConfigError: parts of the pattern outside of its groups match several texts.
    """
    plain = _GROUP.split(pattern)
    if any(_SPECIAL.search(piece) for piece in plain) or len(plain) - 1 > len(groups):
        raise ConfigError(
            f"{pattern!r} stands for several names, so a file cannot be written by it; outside of "
            "groups (...), each of which the place uses, a pattern must be plain text: change it, "
            "or pass like= a file with the names"
        )
    pieces = [re.sub(r"\\(.)", r"\1", piece) for piece in plain]
    texts = [*(groups[number] for number in range(1, len(pieces))), ""]
    return "".join(piece + text for piece, text in zip(pieces, texts, strict=True))
