"""Sums that a program does in 16-bit floats, where each addition rounds to 8 or 11 bits.

A sum of many terms stops growing there: 256 ones in bfloat16 are 256, and so are 300. Read are
scatters that add, reductions, and reductions between devices; products accumulate in float32.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from replicax.analysis import hlo
from replicax.analysis.collectives import first_group
from replicax.analysis.compiled import collective_kind
from replicax.analysis.hlo import Instruction, Module

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN_MODELS = _PACKAGE / "recipes"
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", "<string>")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).* line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}")
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")


class Frames:
    """The stacks of a compiled module.

    Args:
        text: of the module.
    """

    def __init__(self, text: str) -> None:
        self._files: dict[int, str] = {}
        self._locations: dict[int, tuple[int, int]] = {}
        self._frames: dict[int, tuple[int, int]] = {}
        table = ""
        for line in text.splitlines():
            if line.endswith("{"):  # computations follow
                break
            if line[:1].isalpha():
                table = line
            elif table == "FileNames" and (found := _FILE.match(line)):
                self._files[int(found[1])] = found[2]
            elif table == "FileLocations" and (found := _LOCATION.match(line)):
                self._locations[int(found[1])] = int(found[2]), int(found[3])
            elif table == "StackFrames" and (found := _FRAME.match(line)):
                self._frames[int(found[1])] = int(found[2]), int(found[3])
        # XLA counts parents from 1 on, and 1 stands for none: the first frame has no other.
        self._first = self._frames.get(1, (0, 0))[1]

    def source(self, frame: int) -> str:
        """Return `train.py:12`, the innermost line that is of no library; empty if unknown."""
        stack = [place for place in self._stack(frame) if place[0]]
        own = (place for place in stack if _is_users(place[0]))
        found = next(own, stack[0] if stack else None)
        return f"{_shown(found[0])}:{found[1]}" if found else ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            yield self._files.get(file, ""), line
            above = parent - self._first
            frame = above if above < frame else 0  # a stack ends


def frame_of(attributes: str) -> int:
    """Return the number of an instruction's innermost frame, by its attributes; 0 for none."""
    found = _FRAME_OF.search(attributes)
    return int(found[1]) if found else 0


def _is_users(file: str) -> bool:
    """Whether a file is neither of a library nor of the step around a model."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_OWN_MODELS)
    return not any(each in file for each in _LIBRARIES)


def _shown(file: str) -> str:
    """A path from here on where it is below, and else its name."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


DTYPES = {"bf16": "bfloat16", "f16": "float16"}
MANY = 256
"""Terms from which on a sum counts: 2 ** 8, where bfloat16 can no longer add 1."""
SCATTER, REDUCE = "scatter", "reduce"
BETWEEN_DEVICES = ("all-reduce", "reduce-scatter")

_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_AROUND_A_SUM = {"bitcast", "convert", "copy", "parameter"}
_ANY = re.compile(rf"\b(?:{'|'.join(DTYPES)})\[")


@dataclasses.dataclass(frozen=True)
class Sum:
    """One sum, or several that are alike."""

    kind: str
    """`scatter`, `reduce`, or one of `BETWEEN_DEVICES`."""
    shape: str
    """Type of the result: `bf16[50257,768]`."""
    terms: int
    """Terms added for one number of it; for a scatter, the most there can be."""
    op_name: str
    """See `Instruction.op_name`."""
    source: str
    """The line of code that it, or what it is the gradient of, was traced at; may be empty."""
    count: int = 1
    """How many there are in one step, loops multiplied out."""
    group: tuple[int, ...] | None = None
    """The devices it is between; None where it is all, or one."""

    @property
    def dtype(self) -> str:
        """`bfloat16` or `float16`."""
        return DTYPES[self.shape.partition("[")[0]]


@dataclasses.dataclass(frozen=True)
class _Found:
    sum: Sum
    read: int
    """Elements that a reduction reads."""
    left: int
    """Elements that it leaves."""


def has_16_bits(text: str) -> bool:
    """Return whether a module's text has floats of 16 bits at all."""
    return _ANY.search(text) is not None


def sums_in_16_bits(text: str) -> tuple[Sum, ...]:
    """Return the sums of many terms in bfloat16 or float16, those of the most terms first.

    Args:
        text: of a module: as `compiled.as_text()` gives it, or of a program that is only traced, as
            `lowered.as_text(dialect="hlo", debug_info=True)` does.
    """
    module, frames = hlo.read_module(text), Frames(text)
    devices = math.prod(map(int, _DEVICES.findall(text.partition("\n")[0])))
    found = list(_found(module, frames, devices))
    between = [each.sum for each in found if each.sum.kind in BETWEEN_DEVICES]
    inside = _joined(each for each in found if each.sum.kind not in BETWEEN_DEVICES)
    counts: Counter[Sum] = Counter()
    for each in [*between, *(each for each in inside if each.terms >= MANY)]:
        counts[dataclasses.replace(each, count=1)] += each.count
    alike = (dataclasses.replace(each, count=count) for each, count in counts.items())
    return tuple(sorted(alike, key=lambda each: -each.terms))


def _found(module: Module, frames: Frames, devices: int) -> Iterator[_Found]:
    pending = [(module.entry, 1, "", 0)]
    while pending:
        computation, runs, around, frame = pending.pop()
        for each in module.computations.get(computation, ()):
            name, own = _joined_names(around, each.op_name), frame_of(each.attributes) or frame
            times = runs * module.trips(each, computation) if each.opcode == "while" else runs
            # What is traced as a function of its own has names that begin there.
            begin = name if each.opcode == "call" else around
            pending += [(called, times, begin, own) for called in each.called]
            for shape, terms in _terms(module, each, devices):
                kind = collective_kind(each) or each.opcode
                group = first_group(each.attributes) if kind in BETWEEN_DEVICES else None
                added = Sum(kind, shape, terms, name, frames.source(own), runs, group)
                read = hlo.elements_in(each.operands[0]) if kind == REDUCE else 0
                yield _Found(added, read, hlo.elements_in(shape))


def _terms(module: Module, each: Instruction, devices: int) -> Iterator[tuple[str, int]]:
    """The arrays that an instruction sums up in 16 bits, and how many terms each number has."""
    kind = collective_kind(each) or each.opcode
    if kind not in (SCATTER, REDUCE, *BETWEEN_DEVICES) or each.continues:
        return
    shapes = [shape.partition("{")[0] for shape in hlo.elements(each.shape)]
    shapes = [shape for shape in shapes if shape.partition("[")[0] in DTYPES]
    if not shapes or not _adds(module, each):
        return
    if kind in BETWEEN_DEVICES:
        group = first_group(each.attributes)
        terms = devices if group is None else len(group)
        yield from ((shape, terms) for shape in shapes if terms > 1)
    elif kind == SCATTER and len(each.operands) == 3:
        yield shapes[0], _updates_of_a_place(each)
    elif kind == REDUCE and len(each.operands) == 2:
        yield shapes[0], hlo.elements_in(each.operands[0]) // max(1, hlo.elements_in(shapes[0]))


def _adds(module: Module, each: Instruction) -> bool:
    """Whether what an instruction applies is an addition that rounds to 16 bits."""
    applied = _APPLIED.search(each.attributes)
    computation = module.computations.get(applied[1], ()) if applied else ()
    root = next((inner for inner in computation if inner.is_root), None)
    added = [inner.opcode for inner in computation if inner.opcode not in _AROUND_A_SUM]
    return root is not None and root.shape.partition("[")[0] in DTYPES and added == ["add"]


def _updates_of_a_place(scatter: Instruction) -> int:
    """Most updates that can fall on one place of the result.

    An index of several numbers, as in `x[arange(rows), labels]`, counts the rows in all but one:
    each of those has its own updates.
    """
    if "unique_indices=true" in scatter.attributes:
        return 1
    ((_, places),) = hlo.arrays(scatter.operands[0])
    ((_, indices),) = hlo.arrays(scatter.operands[1])
    along = _numbers(scatter, "index_vector_dim")
    apart = {*along, *_numbers(scatter, "scatter_indices_batching_dims")}
    updates = math.prod(size for dim, size in enumerate(indices) if dim not in apart)
    *rows, _ = _numbers(scatter, "scatter_dims_to_operand_dims") or [0]
    for dim in rows:
        if updates % places[dim] == 0:
            updates //= places[dim]
    return updates


def _numbers(each: Instruction, attribute: str) -> list[int]:
    found = re.search(rf"\b{attribute}=\{{?([\d,]*)", each.attributes)
    return [int(number) for number in found[1].split(",") if number] if found else []


def _joined(found: Iterable[_Found]) -> Iterator[Sum]:
    """Sums, each reduction that XLA splits in two (of parts, and of what these give) as one."""
    rest = sorted(found, key=lambda each: each.read)
    while rest:
        last = rest.pop(0)
        added, read = last.sum, last.read
        while part := next((each for each in rest if _goes_on(each, added, read)), None):
            rest.remove(part)
            added, read = dataclasses.replace(added, terms=added.terms * part.sum.terms), part.read
        yield added


def _goes_on(part: _Found, added: Sum, read: int) -> bool:
    same = part.sum.kind == added.kind == REDUCE and part.sum.op_name == added.op_name
    return same and part.left == read and part.sum.terms > 1 and part.sum.source == added.source


def _joined_names(around: str, name: str) -> str:
    inside = bool(around) and name.partition("/")[0] != around.partition("/")[0]
    return "/".join(filter(None, (around, name))) if inside else name
