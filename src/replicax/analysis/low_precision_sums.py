"""Find sums in 16-bit floats, where each addition rounds to 8 or 11 bits.

A long sum stops growing in such a dtype: 256 ones in bfloat16 are 256, and so are 300. Covers
scatter-adds, reductions, and reductions between devices; products accumulate in float32.
"""

import dataclasses
import functools
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
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).* line=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", re.MULTILINE)
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")


class _Frames:
    def __init__(self, text: str) -> None:
        files = dict(_FILE.findall(text.partition("FunctionNames")[0]))
        places = {at: (files.get(file, ""), line) for at, file, line in _LOCATION.findall(text)}
        self._frames = {
            int(frame): (places.get(at, ("", "0")), int(parent))
            for frame, at, parent in _FRAME.findall(text)
        }
        # XLA numbers parents from 1, and 1 means none: the first frame has no parent.
        self._first = self._frames[1][1] if 1 in self._frames else 0

    def source(self, frame: int) -> str:
        """Return the innermost line outside of libraries, as `train.py:12`; empty if unknown."""
        stack = []
        while frame in self._frames:
            place, parent = self._frames[frame]
            if place[0]:
                stack.append(place)
            above = parent - self._first
            frame = above if above < frame else 0  # a stack ends
        own = (place for place in stack if _is_users(place[0]))
        file, line = next(own, stack[0] if stack else ("", ""))
        return f"{_shown(file)}:{line}" if file else ""


def _is_users(file: str) -> bool:
    """Whether a file belongs neither to a library nor to Replicax's own step."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_OWN_MODELS)
    return not any(each in file for each in _LIBRARIES)


def _shown(file: str) -> str:
    """Return a path relative to the working directory if it is below, else its name."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


DTYPES = {"bf16": "bfloat16", "f16": "float16"}
MANY = 256
"""Minimum terms of a reported sum: 2 ** 8, where bfloat16 can no longer add 1."""
SCATTER, REDUCE = "scatter", "reduce"
BETWEEN_DEVICES = ("all-reduce", "reduce-scatter")

_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")
_AROUND_A_SUM = {"bitcast", "convert", "copy", "parameter"}
_ANY = re.compile(rf"\b(?:{'|'.join(DTYPES)})\[")


@dataclasses.dataclass(frozen=True)
class Sum:
    """One sum, or several identical ones."""

    kind: str
    """`scatter`, `reduce`, or one of `BETWEEN_DEVICES`."""
    shape: str
    """Type of the result, such as `bf16[50257,768]`."""
    terms: int
    """Terms per element of the result; for a scatter, the maximum."""
    op_name: str
    """See `Instruction.op_name`."""
    source: str
    """The line of code where it, or its primal operation, was traced; may be empty."""
    count: int = 1
    """Number of such sums in one step, loops unrolled."""
    group: tuple[int, ...] | None = None
    """The devices of its group; None for all devices or a single one."""

    @property
    def dtype(self) -> str:
        """`bfloat16` or `float16`."""
        return DTYPES[self.shape.partition("[")[0]]


def has_16_bits(text: str) -> bool:
    """Return whether a module's text contains any 16-bit floats."""
    return _ANY.search(text) is not None


def sums_in_16_bits(text: str) -> tuple[Sum, ...]:
    """Return the long sums in bfloat16 or float16, in descending order of terms.

    Args:
        text: the text of a module: `compiled.as_text()`, or, for a program that is only traced,
            `lowered.as_text(dialect="hlo", debug_info=True)`.
    """
    module, frames = hlo.read_module(text), _Frames(text)
    sums: list[Sum] = []
    for op, callers in module.running():
        for shape, terms in _terms(module, op):
            kind = collective_kind(op) or op.opcode
            group = first_group(op.attributes) if kind in BETWEEN_DEVICES else None
            # In a separately traced function, names start at that function.
            named = (*(caller for caller in callers if caller.opcode == "call"), op)
            name = functools.reduce(_joined_names, (inner.op_name for inner in named), "")
            traced = (_FRAME_OF.search(inner.attributes) for inner in (op, *reversed(callers)))
            frame = next(filter(None, (int(number[1]) for number in traced if number)), 0)
            sums.append(Sum(kind, shape, terms, name, frames.source(frame), op.runs, group))
    between = [added for added in sums if added.kind in BETWEEN_DEVICES]
    inside = _joined(added for added in sums if added.kind not in BETWEEN_DEVICES)
    counts: Counter[Sum] = Counter()
    for added in [*between, *(added for added in inside if added.terms >= MANY)]:
        counts[dataclasses.replace(added, count=1)] += added.count
    alike = (dataclasses.replace(added, count=count) for added, count in counts.items())
    return tuple(sorted(alike, key=lambda added: -added.terms))


def _terms(module: Module, op: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the arrays that an instruction sums in 16 bits, and the terms per element."""
    kind = collective_kind(op) or op.opcode
    if kind not in (SCATTER, REDUCE, *BETWEEN_DEVICES) or op.continues:
        return
    shapes = [shape.partition("{")[0] for shape in hlo.elements(op.shape)]
    shapes = [shape for shape in shapes if shape.partition("[")[0] in DTYPES]
    if not shapes or not _adds(module, op):
        return
    if kind in BETWEEN_DEVICES:
        group = first_group(op.attributes)
        terms = module.devices if group is None else len(group)
        yield from ((shape, terms) for shape in shapes if terms > 1)
    elif kind == SCATTER and len(op.operands) == 3:
        yield shapes[0], _updates_of_a_place(op)
    elif kind == REDUCE and len(op.operands) == 2:
        yield shapes[0], hlo.elements_in(op.operands[0]) // max(1, hlo.elements_in(shapes[0]))


def _adds(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction's combiner is an addition that rounds to 16 bits."""
    applied = _APPLIED.search(instruction.attributes)
    computation = module.computations.get(applied[1], ()) if applied else ()
    root = module.root(applied[1]) if applied else None
    added = [inner.opcode for inner in computation if inner.opcode not in _AROUND_A_SUM]
    return root is not None and root.shape.partition("[")[0] in DTYPES and added == ["add"]


def _updates_of_a_place(scatter: Instruction) -> int:
    """Return the most updates that can hit one element of the result.

    In an index with several components, such as `x[arange(rows), labels]`, all but the last are
    assumed to enumerate rows, each with separate updates.
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


def _numbers(instruction: Instruction, attribute: str) -> list[int]:
    match = re.search(rf"\b{attribute}=\{{?([\d,]*)", instruction.attributes)
    return [int(number) for number in match[1].split(",") if number] if match else []


def _joined(sums: Iterable[Sum]) -> Iterator[Sum]:
    """Yield the sums, merging each reduction that XLA splits into partial and final reductions."""
    rest = sorted(sums, key=_read)
    while rest:
        added = last = rest.pop(0)
        while part := next((each for each in rest if _goes_on(each, last)), None):
            rest.remove(part)
            added = dataclasses.replace(added, terms=added.terms * part.terms)
            last = part
        yield added


def _goes_on(part: Sum, last: Sum) -> bool:
    """Whether one reduction reads the results of another."""
    same = (part.kind, part.op_name, part.source) == (REDUCE, last.op_name, last.source)
    return same and last.kind == REDUCE and part.terms > 1 and _left(part) == _read(last)


def _left(each: Sum) -> int:
    return hlo.elements_in(each.shape)


def _read(each: Sum) -> int:
    return each.terms * _left(each) if each.kind == REDUCE else 0


def _joined_names(around: str, name: str) -> str:
    inside = bool(around) and name.partition("/")[0] != around.partition("/")[0]
    return "/".join(filter(None, (around, name))) if inside else name
