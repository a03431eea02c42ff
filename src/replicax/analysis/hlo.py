"""Parse the text of a compiled module into computations, and count how often instructions run.

Parses only what is needed: lines of the form `%name = shape opcode(%operand, ...), attributes`.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, lru_cache

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = "
    r"(?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDEX = re.compile(r"\bindex=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONTINUES = re.compile(r'"async_collective_fusion_config":\{"flag_start":"\d')
_BITS = re.compile(r"\d+")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_COPIES = ("bitcast", "copy", "copy-done", "copy-start")
SILENT = (
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
)
"""Instructions that take no time: they name part of a buffer or order other instructions."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, and how often one execution of the module runs it."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Shapes of the operands."""
    attributes: str
    runs: int = 1
    inputs: tuple[str, ...] = ()
    """Names of the operands."""
    argument: str = ""
    """Text in its parentheses, such as a parameter's number or a constant's value."""
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the result, tuples summed."""
        return shape_bytes(self.shape)

    @property
    def called(self) -> list[str]:
        """Names of the computations it refers to, including a reduction's combiner."""
        branches = ",".join(_BRANCHES.findall(self.attributes))
        return _CALLED.findall(self.attributes) + re.findall(r"[\w.\-]+", branches)

    @property
    def op_name(self) -> str:
        """Name scope in which it was traced, such as `jit(step)/update/mul`; empty if from XLA."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def continues(self) -> bool:
        """Whether it represents a collective that another instruction started.

        A TPU threads an asynchronous collective through the fusions that overlap with it, and each
        of them contains a copy of it.
        """
        return _CONTINUES.search(self.attributes) is not None


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a module, each in the order of its text."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    devices: int
    """Devices that it is compiled for; 1 if unspecified."""

    @cached_property
    def _named(self) -> dict[str, dict[str, Instruction]]:
        return {
            name: {each.name: each for each in instructions}
            for name, instructions in self.computations.items()
        }

    def find(self, computation: str, name: str) -> Instruction | None:
        """Return the instruction of a computation with a given name."""
        return self._named.get(computation, {}).get(name)

    def root(self, computation: str) -> Instruction | None:
        """Return the root instruction of a computation."""
        return next((each for each in self.computations.get(computation, ()) if each.is_root), None)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of all computations that one refers to, such as a fusion's."""
        for called in instruction.called:
            yield from self.computations.get(called, ())

    def running(self) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
        """Yield all instructions that run, with loop bodies multiplied by known trip counts.

        Each instruction comes with the instructions that enclose it, the outermost first.
        """
        pending: list[tuple[str, int, tuple[Instruction, ...]]] = [(self.entry, 1, ())]
        while pending:
            name, runs, callers = pending.pop()
            for each in self.computations.get(name, ()):
                times = runs * self.trips(each, name) if each.opcode == "while" else runs
                pending += [(called, times, (*callers, each)) for called in each.called]
                yield dataclasses.replace(each, runs=runs), callers

    def trips(self, loop: Instruction, around: str) -> int:
        """Return the trip count of a `while` in the computation `around`; 1 if unknown.

        XLA reports it for CPUs and GPUs. For TPUs it is derived from a counter that starts at a
        constant, increments by 1 and stays below another constant, as in `lax.scan`.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition, body = _CONDITION.search(loop.attributes), _BODY.search(loop.attributes)
        less = self.root(condition[1]) if condition else None
        if not (condition and body and less and "direction=LT" in less.attributes):
            return 1
        index = self._index(condition[1], less.inputs[0])
        last = self._constant(condition[1], less.inputs[1])
        first = self._constant(around, self._element(around, loop.inputs[0], index))
        if first is None or last is None or not self._grows_by_one(body[1], index):
            return 1
        return max(0, last - first)

    def _grows_by_one(self, body: str, index: int) -> bool:
        root = self.root(body)
        add = self.source(body, self._element(body, root.name if root else "", index))
        if add is None or add.opcode != "add":
            return False
        counter, step = add.inputs
        return self._index(body, counter) == index and self._constant(body, step) == 1

    def _index(self, computation: str, name: str) -> int:
        """Return the index of the tuple element that an instruction copies; -1 if there is none."""
        made = self.source(computation, name)
        index = _INDEX.search(made.attributes) if made else None
        is_element = made is not None and made.opcode == "get-tuple-element"
        return int(index[1]) if index and is_element else -1

    def _element(self, computation: str, name: str, index: int) -> str:
        made = self.find(computation, name)
        inputs = made.inputs if made is not None and made.opcode == "tuple" else ()
        return inputs[index] if 0 <= index < len(inputs) else ""

    def _constant(self, computation: str, name: str) -> int | None:
        made = self.source(computation, name)
        is_integer = made is not None and made.argument.lstrip("-").isdigit()
        return int(made.argument) if made and made.opcode == "constant" and is_integer else None

    def source(
        self, computation: str, name: str, through: Collection[str] = _COPIES
    ) -> Instruction | None:
        """Return the instruction that this one is a copy of, or itself."""
        made = self.find(computation, name)
        while made is not None and made.opcode in through:
            made = self.find(computation, made.inputs[0])
        return made


@lru_cache(maxsize=1)  # several questions are asked of one program
def read_module(text: str) -> Module:
    """Parse a module's text."""
    bodies: dict[str, list[re.Match[str]]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            bodies[name].append(instruction)
    devices = math.prod(map(int, _DEVICES.findall(text.partition("\n")[0])))
    return Module(entry, {name: _instructions(lines) for name, lines in bodies.items()}, devices)


def instructions(text: str) -> Iterator[Instruction]:
    """Return all instructions of a module's text that run; see `Module.running`."""
    return (instruction for instruction, _ in read_module(text).running())


def shape_bytes(shape: str) -> int:
    """Return the bytes of an array shape such as `f32[8,16]{1,0}`, or of a whole tuple shape."""
    return sum(_bits(dtype) * math.prod(dims) for dtype, dims in arrays(shape)) // 8


def memory_bytes(shape: str) -> int:
    """Return the bytes of arrays in the device's main memory: `S(1)` is a TPU's on-chip memory."""
    kept = [array for array in _ARRAY.finditer(shape) if not _OTHER_MEMORY.search(array[3] or "")]
    return sum(shape_bytes(array[0]) for array in kept)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtypes and dims of the arrays in a shape."""
    return [
        (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims, _ in _ARRAY.findall(shape)
    ]


def elements_in(shape: str) -> int:
    """Return the total number of elements of the arrays in a shape."""
    return sum(math.prod(dims) for _, dims in arrays(shape))


def elements(shape: str) -> list[str]:
    """Return the shapes of the arrays in a tuple shape, each with its layout."""
    return [array[0] for array in _ARRAY.finditer(shape)]


def _instructions(lines: list[re.Match[str]]) -> tuple[Instruction, ...]:
    shapes = {line["name"]: line["shape"] for line in lines}
    read = []
    for line in lines:
        argument, _, attributes = line["rest"].partition(")")
        # Modules that are only traced are printed without the %.
        inputs = tuple(_OPERAND.findall(argument)) or tuple(
            name for name in argument.split(", ") if name in shapes
        )
        read.append(
            Instruction(
                line["name"],
                line["shape"],
                line["opcode"],
                tuple(shapes.get(name, "") for name in inputs),
                attributes,
                inputs=inputs,
                argument=argument,
                is_root=line["root"] is not None,
            )
        )
    return tuple(read)


def _bits(dtype: str) -> int:
    """Return bits per element: the first number in the dtype's name (`f32`, `bf16`, `f8e4m3fn`)."""
    bits = _BITS.search(dtype)
    return int(bits[0]) if bits else 8 if dtype == "pred" else 0
