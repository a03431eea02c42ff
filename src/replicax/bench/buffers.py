"""A compiled step -> the schedule of its instructions, and the memory that each of them touches.

XLA serialises a compiled module and the buffers it assigned as protocol buffers. The few fields
needed here are read by their numbers in XLA's `hlo.proto`; protocol buffers never renumber.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from replicax.errors import ConfigError

# Instructions that run others, and those that only name a buffer or a part of one. None of them
# takes time of its own.
CONTROL = ("while", "conditional", "call", "async-start")
SILENT = (
    *CONTROL,
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "tuple",
)
_FILLING = ("bitcast", "broadcast", "constant", "copy", "iota", "parameter", "tuple")
_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the schedule."""

    name: str
    opcode: str
    op_name: str
    """Where it was traced: `jit(step)/update/mul`, say; empty where XLA made it by itself."""
    operands: tuple[str, ...]
    """Names of the instructions that it reads."""
    called: tuple[int, ...]
    """Computations it runs."""
    trips: int
    """How often it runs them; 1 where XLA does not know."""
    fills: bool
    """Whether all it does is to fill or copy an array."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of memory for one purpose. Later in the step its addresses may serve another."""

    allocation: int
    offset: int
    """In its allocation, in bytes."""
    size: int
    """In bytes."""
    touched: frozenset[str]
    """Names of the instructions that write or read it."""
    is_output: bool
    """Whether it outlives the step."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled step: what runs in which order, and what memory it touches."""

    name: str
    entry: int
    """The computation that the step starts with."""
    computations: dict[int, tuple[Instruction, ...]]
    """Those that run one instruction after the other, each in the order of its schedule."""
    buffers: tuple[Buffer, ...]
    """Temporaries, and outputs that reuse no argument's memory."""
    argument_bytes: int
    """On one device, kept during the whole step."""

    @cached_property
    def path(self) -> dict[int, tuple[int, ...]]:
        """The computations around each one, from the entry to itself."""
        found: dict[int, tuple[int, ...]] = {self.entry: (self.entry,)}
        pending = [self.entry]
        while pending:
            outer = pending.pop()
            for instruction in self.computations[outer]:
                for inner in instruction.called:
                    found[inner] = (*found[outer], inner)
                    pending.append(inner)
        return found

    @cached_property
    def place(self) -> dict[str, int]:
        """The computation of each instruction that takes time, by name."""
        return {
            instruction.name: computation
            for computation, instructions in self.computations.items()
            for instruction in instructions
            if instruction.opcode not in SILENT
        }

    def in_order(self, computation: int | None = None) -> Iterator[Instruction]:
        """What takes time in one execution, loops unrolled."""
        for instruction in self.computations[self.entry if computation is None else computation]:
            if instruction.opcode not in SILENT:
                yield instruction
            for _ in range(instruction.trips):
                for called in instruction.called:
                    yield from self.in_order(called)


def read_module(compiled: jax.stages.Compiled) -> Module:
    """The schedule and the buffers of a compiled function.

    Raises:
        ConfigError: the backend does not tell them.
    """
    stats = compiled.memory_analysis()
    assignment = getattr(stats, "serialized_buffer_assignment_proto", b"")
    if not assignment:
        raise ConfigError(
            f"{jax.default_backend()} gives 0 bytes of buffer assignment for this step, and memory "
            "over time is read from it: use a CPU or a GPU"
        )
    executable: Any = compiled.runtime_executable()
    (hlo,) = executable.hlo_modules()
    return _module(hlo.as_serialized_hlo_module_proto(), assignment)


@dataclasses.dataclass(frozen=True)
class _Node:
    """An instruction with what only the flow of buffers needs."""

    instruction: Instruction
    computation: int
    operands: list[int]
    number: int
    """Of a parameter, or of the element that a get-tuple-element takes."""


def _module(hlo: bytes, assignment: bytes) -> Module:
    module = _message(hlo)
    computations = {
        _number(message, 5): message for message in map(_message, _submessages(module, 3))
    }
    filling = {
        number: {_text(_message(each), 2) for each in _submessages(message, 2)} <= set(_FILLING)
        for number, message in computations.items()
    }
    nodes = {}
    for number, message in computations.items():
        instructions = list(map(_message, _submessages(message, 2)))
        names = {_number(each, 35): _text(each, 1) for each in instructions}
        for each in instructions:
            nodes[_number(each, 35)] = _node(each, number, names, filling)
    order = {}
    for sequence in map(_message, _submessages(_message(_submessages(module, 7)[0]), 1)):
        ids = _numbers(_message(_submessages(sequence, 2)[0]), 1)
        order[_number(sequence, 1)] = tuple(nodes[each].instruction for each in ids)
    entry = _number(module, 6)
    reached, pending = {entry}, [entry]
    while pending:
        called = {each for step in order[pending.pop()] for each in step.called} - reached
        reached |= called
        pending += called
    flow = _Flow(
        {each: node for each, node in nodes.items() if node.computation in reached},
        {number: _number(computations[number], 6) for number in reached},
    )
    buffers, argument_bytes = _buffers(_message(assignment), flow)
    return Module(
        _text(module, 1),
        entry,
        {number: order[number] for number in reached},
        buffers,
        argument_bytes,
    )


def _node(
    message: "_Message", computation: int, names: dict[int, str], filling: dict[int, bool]
) -> _Node:
    opcode, called = _text(message, 2), tuple(_numbers(message, 38))
    operands, metadata = _numbers(message, 36), _submessages(message, 7)
    trips = _TRIPS.search(b"".join(_submessages(message, 43)))
    instruction = Instruction(
        _text(message, 1),
        opcode,
        _text(_message(metadata[0]), 2) if metadata else "",
        tuple(names[operand] for operand in operands),
        called if opcode in CONTROL else (),
        int(trips[1]) if opcode == "while" and trips else 1,
        opcode in _FILLING or (opcode == "fusion" and all(filling[each] for each in called)),
    )
    number = _number(message, 9 if opcode == "parameter" else 13)
    return _Node(instruction, computation, operands, number)


_Place = tuple[int, tuple[int, ...]]
"""An instruction, and the path to one array in the tuple that it results in."""


class _Flow:
    """Through which results an array passes without being copied."""

    def __init__(self, nodes: dict[int, _Node], roots: dict[int, int]) -> None:
        self.nodes = nodes
        self._users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._parameters: dict[tuple[int, int], int] = {}
        self._caller: dict[int, int] = {}
        self._returning = {root: computation for computation, root in roots.items()}
        for each, node in nodes.items():
            for position, operand in enumerate(node.operands):
                self._users[operand].append((each, position))
            for called in node.instruction.called:
                self._caller[called] = each
            if node.instruction.opcode == "parameter":
                self._parameters[node.computation, node.number] = each

    def follow(self, defined: set[_Place]) -> tuple[frozenset[str], bool]:
        """Names of all that write or read an array, given where it is defined; whether it stays."""
        stays = False
        seen = set(defined)
        pending = [place for place in defined if place[0] in self.nodes]
        names = {self.nodes[each].instruction for each, _ in pending}
        while pending:
            each, path = pending.pop()
            for user, position in self._users[each]:
                names.add(self.nodes[user].instruction)
                onward = set(self._through(user, position, path)) - seen
                seen |= onward
                pending += onward
            if each not in self._returning:
                continue
            caller = self._caller.get(self._returning[each])
            if caller is None:
                stays = True
            else:
                wrapped = self.nodes[caller].instruction.opcode == "async-start"
                place = (caller, (1, *path) if wrapped else path)
                if place not in seen:
                    seen.add(place)
                    pending.append(place)
        return frozenset(each.name for each in names if each.opcode not in SILENT), stays

    def _through(self, user: int, position: int, path: tuple[int, ...]) -> Iterator[_Place]:
        """Where an array is found again that `user` has as operand number `position`."""
        node = self.nodes[user]
        opcode = node.instruction.opcode
        if opcode == "tuple":
            yield user, (position, *path)
        elif opcode == "get-tuple-element":
            if path[:1] == (node.number,):
                yield user, path[1:]
        elif opcode in ("bitcast", "optimization-barrier", "all-reduce-done"):
            yield user, path
        elif opcode.endswith("-done"):
            if path[:1] == (0 if opcode == "copy-done" else 1,):
                yield user, path[1:]
        elif opcode == "while":
            yield user, path
            for called in node.instruction.called:
                yield self._parameters[called, 0], path
        elif opcode == "conditional":
            if position:
                yield self._parameters[node.instruction.called[position - 1], 0], path
        elif opcode in CONTROL:
            for called in node.instruction.called:
                yield self._parameters[called, position], path


def _buffers(message: "_Message", flow: _Flow) -> tuple[tuple[Buffer, ...], int]:
    defined: dict[int, set[_Place]] = defaultdict(set)
    """Where the values are defined that share the buffer of each value."""
    for value in map(_message, _submessages(message, 1)):
        defined[_number(value, 1)].add(_place(_submessages(value, 3)[0]))
    for alias in map(_message, _submessages(message, 2)):
        defined[_number(alias, 1)].add(_place(_submessages(alias, 2)[0]))
    found: list[Buffer] = []
    argument_bytes = 0
    for allocation in map(_message, _submessages(message, 3)):
        if _number(allocation, 5):
            argument_bytes += _number(allocation, 2)
        if any(_number(allocation, field) for field in (3, 5, 12)):
            continue  # of a single thread, an argument, a constant
        found += _of_allocation(allocation, defined, flow)
    return tuple(found), argument_bytes


def _place(location: bytes) -> _Place:
    message = _message(location)
    return _number(message, 4), tuple(_numbers(message, 3))


def _of_allocation(
    allocation: "_Message", defined: dict[int, set[_Place]], flow: _Flow
) -> Iterator[Buffer]:
    """One buffer for all values that must share it: what a loop carries, its start and its end."""
    values: dict[tuple[int, int], list[set[_Place]]] = defaultdict(list)
    for assigned in map(_message, _submessages(allocation, 9)):
        where = (_number(assigned, 2), _number(assigned, 3))
        values[where].append(defined[_number(assigned, 1)])
    for (offset, size), groups in values.items():
        for places in _joined(groups):
            names, stays = flow.follow(places)
            if names:
                yield Buffer(_number(allocation, 1), offset, size, names, stays)


def _joined(groups: list[set[_Place]]) -> list[set[_Place]]:
    """Unions of the sets that have an element in common, directly or through others."""
    joined: list[set[_Place]] = []
    for group in groups:
        apart = [other for other in joined if not other & group]
        joined = [*apart, group.union(*(other for other in joined if other & group))]
    return joined


_Message = dict[int, list[int | bytes]]


def _message(data: bytes) -> _Message:
    """The fields of a serialised message, by number."""
    fields: _Message = defaultdict(list)
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            fields[tag >> 3].append(value)
            continue
        if kind == 2:
            length, at = _varint(data, at)
        else:
            length = {1: 8, 5: 4}[kind]
        fields[tag >> 3].append(data[at : at + length])
        at += length
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _number(message: _Message, field: int) -> int:
    """A single number; 0 is not written."""
    values = message.get(field, [0])
    assert isinstance(values[-1], int)
    return values[-1]


def _numbers(message: _Message, field: int) -> list[int]:
    """A repeated number, packed or not."""
    numbers: list[int] = []
    for value in message.get(field, []):
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return numbers


def _text(message: _Message, field: int) -> str:
    return b"".join(_submessages(message, field)[-1:]).decode()


def _submessages(message: _Message, field: int) -> list[bytes]:
    return [value for value in message.get(field, []) if isinstance(value, bytes)]
