"""Liveness analysis: the memory in use while a sequence of operations runs.

Values inside a fused kernel take no memory. Following XLA's fusion
(xla/service/instruction_fusion.cc of github.com/openxla/xla), the value of an elementwise operation
is not stored if only fusible kernels read it and either there is one reader, or it is cheap and
computed from one array, which is then kept for the readers instead. All other values are stored
from their operation to their last reader.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from replicax.core.jaxprs.jaxpr import scan_counts
from replicax.plan.operations import IN_PLACE, Operation, TracedOperations

ELEMENTWISE = ("cheap", "expensive", "fill")
FUSING = (*ELEMENTWISE, "reduction", "store")


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes stored at one point of the program."""

    alive: Mapping[int, int]
    """Bytes by value."""
    inside: int = 0
    """Additional bytes stored inside a loop body."""

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(self.alive.values()) + self.inside


class Liveness:
    """The lifetimes of stored values.

    Args:
        program: the operations; arguments are not counted, as they are in memory beforehand.
        kept: bytes kept of each sharded value once it is computed; other devices hold the rest.
        gathered: sharded arguments, or values in `kept`, that are gathered where they are read,
            except by loops that read them slice by slice.
        carried: results of a loop body that reuse the memory of an argument after its last use.
    """

    def __init__(
        self,
        program: TracedOperations,
        kept: Mapping[int, int] | None = None,
        gathered: Collection[int] = (),
        carried: Mapping[int, int] | None = None,
    ) -> None:
        self._program, self._kept = program, kept or {}
        self._gathered, self._carried = gathered, carried or {}
        self._operations = _needed(program.operations, program.outputs)
        self._producer = {v: each for each in self._operations for v in each.outputs}
        self._at = {v: number for number, each in enumerate(self._operations) for v in each.outputs}
        self._readers: dict[int, list[Operation]] = defaultdict(list)
        for each in self._operations:
            for value in set(each.inputs):
                self._readers[value].append(each)
        self._stored = {value for value in self._producer if self._is_stored(value)}
        self._roots: dict[int, frozenset[int]] = {}
        self._last = self._last_uses()

    def peak(self) -> Moment:
        """Return the moment of peak memory."""
        return max(self._moments(), key=lambda moment: moment.bytes)

    def _moments(self) -> Iterator[Moment]:
        """Yield one moment for each operation that stores something."""
        alive: dict[int, int] = {}
        yield Moment({})
        dying: dict[int, list[int]] = defaultdict(list)
        for value, last in self._last.items():
            dying[last].append(value)
        for number, each in enumerate(self._operations):
            if not self._runs(each):
                continue
            for value in each.inputs:
                if value in self._gathered and not _takes_parts(each, value):
                    alive[value] = self._program.sizes[value]
            ends = [value for value in dying[number] if value in alive]
            self._start(number, each, alive, ends)
            yield Moment(dict(alive), self._inside(each))
            for value in ends:
                alive.pop(value, None)
            for value in each.outputs:
                if value in alive and value in self._kept:
                    alive[value] = self._kept[value]

    def alive_after(self, values: Collection[int]) -> dict[int, int]:
        """Return the bytes of each value that is still live once all of `values` are computed."""
        end = max((self._at[value] for value in values if value in self._at), default=-1)
        return {
            value: self._kept.get(value, self._program.sizes[value])
            for value in self._stored
            if self._at[value] <= end < self._last.get(value, -1)
        }

    def _start(self, number: int, each: Operation, alive: dict[int, int], ends: list[int]) -> None:
        """Store the results of `each`, in the memory of inputs that it reads last if possible."""
        sizes = self._program.sizes
        for place, value in enumerate(each.outputs):
            own = self._carried.get(value)
            if value not in self._stored or (own is not None and self._last.get(own, -1) <= number):
                continue
            loop = each.kind == "loop"
            size = self._kept.get(value, sizes[value]) if loop else sizes[value]
            reusable: Collection[int] = ()
            if each.kind in ELEMENTWISE:
                reusable = ends
            elif each.name in IN_PLACE:
                reusable = each.inputs[:1]
            elif loop:
                reusable = _initial(each, place)
            for old in reusable:
                if old in ends and alive.get(old) == size:
                    del alive[old]
                    ends.remove(old)
                    break
            alive[value] = size

    def _inside(self, each: Operation) -> int:
        if each.equation is None:
            return 0
        params, platform = each.equation.params, self._program.platform
        if each.kind == "branches":
            bodies = [TracedOperations(branch.jaxpr, platform) for branch in params["branches"]]
            return max(Liveness(body).peak().bytes for body in bodies)
        body = params["jaxpr"] if each.name == "scan" else params["body_jaxpr"]
        used = [value in self._stored for value in each.outputs]
        program = TracedOperations(body.jaxpr, platform)
        constants = params.get("body_nconsts", 0)
        if each.name == "scan":
            constants, carries = scan_counts(params)
            _write_parts(program, constants, carries, used)
        carried = dict(zip(program.outputs, program.inputs[constants:], strict=False))
        return Liveness(program, carried=carried).peak().bytes

    def _runs(self, each: Operation) -> bool:
        return each.kind == "store" or not self._stored.isdisjoint(each.outputs)

    def _is_stored(self, value: int) -> bool:
        producer, readers = self._producer[value], self._readers[value]
        if value in self._program.outputs:
            return True
        if producer.kind not in ELEMENTWISE:
            return bool(readers)
        if any(each.kind not in FUSING for each in readers):
            return True
        if len(readers) < 2 or self._is_cheap_again(producer, value):
            return False
        return not all(self._joins(each, value) for each in readers)

    def _joins(self, reader: Operation, value: int) -> bool:
        """Whether a kernel that computes `value` computes the result of this reader, too.

        Such kernels, with several results, reduce a value and store what is computed from it alone.
        """
        if reader.kind == "reduction":
            return True
        after = [each for result in reader.outputs for each in self._readers[result]]
        alone = set(reader.inputs) == {value} and reader.kind in ELEMENTWISE
        return alone and any(each.kind not in FUSING for each in after)

    def _is_cheap_again(self, producer: Operation, value: int) -> bool:
        """Whether a second reader may recompute it from an array that is no larger."""
        if producer.kind == "fill":
            return True
        if producer.kind == "expensive":
            return False
        large = 0
        for each in set(producer.inputs):
            made = self._producer.get(each)
            fills = made is not None and made.kind == "fill"
            large += not fills and self._program.elements[each] >= self._program.elements[value]
        return large <= 1

    def _made_of(self, value: int) -> frozenset[int]:
        """Return the stored values from which `value` is computed."""
        if value not in self._roots:
            producer = self._producer.get(value)
            if producer is None or value in self._stored:
                self._roots[value] = frozenset({value})
            else:
                made = (self._made_of(each) for each in producer.inputs)
                self._roots[value] = frozenset().union(*made)
        return self._roots[value]

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for number, each in enumerate(self._operations):
            if self._runs(each):
                for value in each.inputs:
                    last.update(dict.fromkeys(self._made_of(value), number))
                # Unused results are stored only while their operation runs.
                last.update({value: number for value in each.outputs if value in self._stored})
        end = len(self._operations)
        outputs = self._program.outputs
        last.update({root: end for value in outputs for root in self._made_of(value)})
        return last


def _needed(operations: list[Operation], outputs: list[int]) -> list[Operation]:
    wanted, needed = set(outputs), []
    for each in reversed(operations):
        if each.kind == "store" or wanted.intersection(each.outputs):
            wanted.update(each.inputs)
            needed.append(each)
    return needed[::-1]


def _initial(loop: Operation, place: int) -> list[int]:
    """Return the inputs that initialize a loop output, if any."""
    assert loop.equation is not None
    params = loop.equation.params
    if loop.name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return loop.inputs[first + place : first + place + 1]
    first, carried = scan_counts(params)
    return loop.inputs[first + place : first + place + 1] if place < carried else []


def _takes_parts(each: Operation, value: int) -> bool:
    """Whether `each` is a scan that iterates over `value`."""
    if each.name != "scan" or each.equation is None:
        return False
    return value not in each.inputs[: sum(scan_counts(each.equation.params))]


def _write_parts(program: TracedOperations, constants: int, carried: int, used: list[bool]) -> None:
    """Load each slice of a scan at its first use, and store each stacked result immediately."""
    stacked = program.outputs[carried:]
    program.outputs = program.outputs[:carried]
    stores: dict[int, list[Operation]] = defaultdict(list)
    made = {value for each in program.operations for value in each.outputs}
    for value, is_used in zip(stacked, used[carried:], strict=True):
        if is_used:
            stores[value if value in made else -1].append(Operation("store", "store", [value], []))
    loads = {
        value: Operation("cheap", "load", [], [value])
        for value in program.inputs[constants + carried :]
    }
    ordered: list[Operation] = []
    for each in [*stores.pop(-1, []), *program.operations]:
        ordered += [loads.pop(value) for value in each.inputs if value in loads]
        ordered.append(each)
        for value in each.outputs:
            ordered += stores.get(value, [])
    program.operations = ordered
