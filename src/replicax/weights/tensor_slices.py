"""Where a tensor of a file goes: a leaf of a model, part of one, or several."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from replicax.errors import ConfigError

Groups = Mapping[int, str]
"""The texts of a pattern's groups `(...)`, by number."""
HostLeaves = Mapping[str, np.ndarray]
"""Leaves of a model on the host, by their dotted paths."""
_REFERENCE = re.compile(r"\\(\d)")


class UnfitError(Exception):
    """A leaf that has no such part; its text goes on after the leaf's path."""


def filled_in(template: str, groups: Groups) -> str:
    r"""Return `template` with the texts of the groups for `\1`, `\2`, ..."""
    return _REFERENCE.sub(lambda reference: _text(groups, int(reference[1])), template)


def _text(groups: Groups, number: int) -> str:
    if number not in groups:
        raise ConfigError(
            f"a rule of rename= uses group {number} and its pattern has {len(groups)}; groups are "
            "what is in (...), counted from 1: correct it"
        )
    return groups[number]


def _along(array: np.ndarray, axis: int) -> np.ndarray:
    """Return a view with an axis first."""
    if not -array.ndim <= axis < array.ndim:
        raise UnfitError(f"has {array.ndim} dims, so no axis {axis}")
    return np.moveaxis(array, axis, 0)


class TensorPlace(Protocol):
    """A rule's place for a tensor; `take` and `give` see it in the tensor's shape."""

    def paths(self, groups: Groups) -> list[str]:
        """Return the leaves that it is in."""

    def sizes(self, leaves: HostLeaves, groups: Groups) -> list[int]:
        """Return how many numbers of each of these leaves it holds."""

    def take(self, leaves: HostLeaves, groups: Groups) -> np.ndarray:
        """Return what a file has of it, a view where possible; UnfitError if it has none."""

    def give(self, leaves: HostLeaves, groups: Groups, tensor: np.ndarray) -> None:
        """Write a file's tensor into the leaves."""

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        """Yield the groups of each such place in a model; none if it is not to be written."""


PathOrPlace = str | TensorPlace
"""A dotted path, or what the functions of this module return for it."""


class Leaf:
    """A whole leaf."""

    def __init__(self, template: str) -> None:
        self.template = template

    def paths(self, groups: Groups) -> list[str]:
        return [filled_in(self.template, groups)]

    def sizes(self, leaves: HostLeaves, groups: Groups) -> list[int]:
        return [self.take(leaves, groups).size]

    def take(self, leaves: HostLeaves, groups: Groups) -> np.ndarray:
        return leaves[filled_in(self.template, groups)]

    def give(self, leaves: HostLeaves, groups: Groups, tensor: np.ndarray) -> None:
        self.take(leaves, groups)[...] = tensor

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        pieces = _REFERENCE.split(self.template)
        pieces[::2] = map(re.escape, pieces[::2])
        seen: set[str] = set()
        for at in range(1, len(pieces), 2):
            number = pieces[at]
            pieces[at] = f"(?P=g{number})" if number in seen else f"(?P<g{number}>.+)"
            seen.add(number)
        pattern = re.compile("".join(pieces))
        for path in leaves:
            if match := pattern.fullmatch(path):
                yield {int(name[1:]): text for name, text in match.groupdict().items()}


def place_of(target: PathOrPlace) -> TensorPlace:
    """Return the place that a rule names."""
    return Leaf(target) if isinstance(target, str) else target


class _Within:
    """Part of another place, or another view of it."""

    def __init__(self, target: PathOrPlace) -> None:
        self.outer = place_of(target)

    def paths(self, groups: Groups) -> list[str]:
        return self.outer.paths(groups)

    def sizes(self, leaves: HostLeaves, groups: Groups) -> list[int]:
        return [self.take(leaves, groups).size]

    def take(self, leaves: HostLeaves, groups: Groups) -> np.ndarray:
        return self.view(self.outer.take(leaves, groups), groups)

    def give(self, leaves: HostLeaves, groups: Groups, tensor: np.ndarray) -> None:
        array = self.outer.take(leaves, groups)
        self.put(array, groups, tensor)
        (path,) = self.paths(groups)
        if not np.may_share_memory(array, leaves[path]):  # a copy, which was changed
            self.outer.give(leaves, groups, array)

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        return self.outer.found_in(leaves)

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        raise NotImplementedError

    def put(self, array: np.ndarray, groups: Groups, tensor: np.ndarray) -> None:
        self.view(array, groups)[...] = tensor


class Transposed(_Within):
    """A place whose dims a file has in another order."""

    def __init__(self, target: PathOrPlace, axes: Sequence[int]) -> None:
        super().__init__(target)
        self.axes = axes

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        if self.axes and len(self.axes) != array.ndim:
            raise UnfitError(f"has {array.ndim} dims, not {len(self.axes)}")
        return array.transpose(tuple(np.argsort(self.axes)) if self.axes else None)


class Stacked(_Within):
    """The entry of a place along an axis whose number is a group's text."""

    def __init__(self, target: PathOrPlace, group: int, axis: int) -> None:
        super().__init__(target)
        self.group, self.axis = group, axis

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        along, text = _along(array, self.axis), _text(groups, self.group)
        if not (text.isdecimal() and int(text) < len(along)):
            raise UnfitError(f"has {len(along)} entries stacked, from 0, so none is {text!r}")
        entry: np.ndarray = along[int(text)]
        return entry

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        for groups in self.outer.found_in(leaves):
            for number in range(len(_along(self.outer.take(leaves, groups), self.axis))):
                yield {**groups, self.group: str(number)}


class Part(_Within):
    """A range of an axis of a place."""

    def __init__(self, target: PathOrPlace, number: int, sizes: Sequence[int], axis: int) -> None:
        super().__init__(target)
        self.number, self.proportions, self.axis = number, sizes, axis

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        along = _along(array, self.axis)
        unit, rest = divmod(len(along), sum(self.proportions))
        if rest:
            raise UnfitError(f"has a dim of {len(along)}, no multiple of {sum(self.proportions)}")
        start = unit * sum(self.proportions[: self.number])
        mine = along[start : start + unit * self.proportions[self.number]]
        return np.moveaxis(mine, 0, self.axis)


class Rearranged(_Within):
    """A place whose dims a file has merged, split, or in another order."""

    def __init__(self, target: PathOrPlace, pattern: str, sizes: Mapping[str, int]) -> None:
        super().__init__(target)
        halves = [re.findall(r"\([^()]*\)|\w+", half) for half in pattern.split("->")]
        self._file, self._leaf = (
            [[name for name in dim.strip("()").split() if name != "1"] for dim in half]
            for half in halves
        )
        self._sizes, self._pattern = sizes, pattern
        names, of_leaf = (
            [name for dim in half for name in dim] for half in (self._file, self._leaf)
        )
        if sorted(names) != sorted(of_leaf) or len(set(names)) < len(names):
            raise ConfigError(
                f"{pattern!r}; it names each dim once on both sides of ->, as 'a b -> b a' does: "
                "correct it"
            )
        merged = [name for dim in self._leaf for name in dim if len(dim) > 1]
        if missing := [name for name in merged if name not in sizes]:
            raise ConfigError(
                f"{pattern!r} without the size of {missing[0]}, one of several in a dim of the "
                f"leaf: pass {missing[0]}=..."
            )
        self._order = [of_leaf.index(name) for name in names]

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        split = self._split(array)
        sizes = iter(split.shape)
        return split.reshape([math.prod(next(sizes) for _ in dim) for dim in self._file])

    def put(self, array: np.ndarray, groups: Groups, tensor: np.ndarray) -> None:
        split = self._split(array)
        split[...] = tensor.reshape(split.shape)

    def _split(self, array: np.ndarray) -> np.ndarray:
        """Return a view of the leaf with one dim for each name, in the file's order."""
        if len(self._leaf) != array.ndim:
            raise UnfitError(f"has {array.ndim} dims, not {len(self._leaf)} as in {self._pattern}")
        dims: list[int] = []
        for size, names in zip(array.shape, self._leaf, strict=True):
            parts = [self._sizes[name] for name in names] if len(names) != 1 else [size]
            if math.prod(parts) != size:
                raise UnfitError(f"has a dim of {size}, not {' x '.join(map(str, parts))}")
            dims += parts
        return array.reshape(dims).transpose(self._order)


class Tied(_Within):
    """A place that another tensor of the file fills, with the same numbers."""

    def view(self, array: np.ndarray, groups: Groups) -> np.ndarray:
        return array

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        return iter(())


class Joined:
    """Several places, side by side in one tensor of the file."""

    def __init__(self, targets: Sequence[PathOrPlace], axis: int) -> None:
        self.parts, self.axis = [place_of(target) for target in targets], axis

    def paths(self, groups: Groups) -> list[str]:
        return [path for part in self.parts for path in part.paths(groups)]

    def sizes(self, leaves: HostLeaves, groups: Groups) -> list[int]:
        return [size for part in self.parts for size in part.sizes(leaves, groups)]

    def take(self, leaves: HostLeaves, groups: Groups) -> np.ndarray:
        try:
            parts = [part.take(leaves, groups) for part in self.parts]
            return np.concatenate(parts, self.axis)
        except ValueError as error:
            raise UnfitError("are not alike except along that dim") from error

    def give(self, leaves: HostLeaves, groups: Groups, tensor: np.ndarray) -> None:
        dims = [part.take(leaves, groups).shape[self.axis] for part in self.parts]
        cuts = np.split(tensor, np.cumsum(dims)[:-1], self.axis)
        for part, cut in zip(self.parts, cuts, strict=True):
            part.give(leaves, groups, cut)

    def found_in(self, leaves: HostLeaves) -> Iterator[dict[int, str]]:
        for groups in self.parts[0].found_in(leaves):
            if all(path in leaves for path in self.paths(groups)):
                yield groups
