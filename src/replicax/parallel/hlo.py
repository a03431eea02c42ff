"""The text of a compiled module -> how often each instruction runs, and with what shapes.

Only what counting needs: instruction lines are `%name = shape opcode(%operand, ...), attributes`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = "
    r"(?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, and how often one execution of the module runs it."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Shapes of the operands."""
    attributes: str
    runs: int

    @property
    def bytes(self) -> int:
        """Bytes of the result, tuples summed."""
        return shape_bytes(self.shape)


def shape_bytes(shape: str) -> int:
    """Bytes of an array shape such as `f32[8,16]{1,0}`, or of all arrays of a tuple shape."""
    return sum(_bits(dtype) * math.prod(dims) for dtype, dims in arrays(shape)) // 8


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and dims of the arrays in a shape."""
    return [
        (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(shape)
    ]


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction that runs, from the entry on; a loop's body as often as it is known to."""
    computations, entry = _computations(text)
    pending = [(entry, 1)]
    while pending:
        name, runs = pending.pop()
        lines = computations.get(name, [])
        shapes = {line["name"]: line["shape"] for line in lines}
        for line in lines:
            rest = line["rest"]
            trips = _TRIPS.search(rest)
            times = runs * int(trips[1]) if line["opcode"] == "while" and trips else runs
            pending += [(called, times) for called in _called(rest)]
            operands, _, attributes = rest.partition(")")
            names = re.findall(r"%([\w.\-]+)", operands)
            yield Instruction(
                line["name"],
                line["shape"],
                line["opcode"],
                tuple(shapes.get(operand, "") for operand in names),
                attributes,
                runs,
            )


def _computations(text: str) -> tuple[dict[str, list[re.Match[str]]], str]:
    found: dict[str, list[re.Match[str]]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            found[name].append(instruction)
    return found, entry


def _called(rest: str) -> list[str]:
    branches = ",".join(_BRANCHES.findall(rest))
    return _CALLED.findall(rest) + re.findall(r"[\w.\-]+", branches)


def _bits(dtype: str) -> int:
    """Bits of an element: the first number in the dtype's name (`f32`, `bf16`, `f8e4m3fn`)."""
    bits = _BITS.search(dtype)
    return int(bits[0]) if bits else 8 if dtype == "pred" else 0
