"""Operations in order -> the memory that is in use while they run.

What a kernel computes for itself takes no memory. As XLA fuses (xla/service/instruction_fusion.cc
of github.com/openxla/xla), a value of an element-by-element operation is never stored where only
kernels of the kind read it, and either one does, or it is cheap and made of one array: that array
is then kept for the readers instead. All else is stored from its operation to its last reader.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from replicax.core.equations import scan_counts
from replicax.plan.operations import IN_PLACE, Operation, TracedOperations

ELEMENTWISE = ("cheap", "expensive", "fill")
FUSING = (*ELEMENTWISE, "reduction", "store")


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes stored at some time."""

    alive: Mapping[int, int]
    """Bytes by value."""
    inside: int = 0
    """Bytes that the body of a loop has stored beside them."""

    @property
    def bytes(self) -> int:
        """Bytes of all together."""
        return sum(self.alive.values()) + self.inside


class Liveness:
    """Which values are stored, and when.

    Args:
        program: arguments are not counted: they lie in memory before it starts.
        kept: values of which only this many bytes are kept once they are computed, the rest
            being on other devices.
        gathered: arguments, or values in `kept`, that lie on several devices and are put together
            where they are read, except by loops that read them part by part.
        carried: results of a loop's body that take the place of an argument, which is read no more.
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
        """Return the moment when most is stored."""
        return max(self._moments(), key=lambda moment: moment.bytes)

    def _moments(self) -> Iterator[Moment]:
        """Yield one for each operation that stores something."""
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
        """Bytes by value of what is stored once all of `values` are computed, for later."""
        end = max((self._at[value] for value in values if value in self._at), default=-1)
        return {
            value: self._kept.get(value, self._program.sizes[value])
            for value in self._stored
            if self._at[value] <= end < self._last.get(value, -1)
        }

    def _start(self, number: int, each: Operation, alive: dict[int, int], ends: list[int]) -> None:
        """Store what `each` computes, in the place of what it reads last, if it may."""
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
        return len(readers) > 1 and not self._is_cheap_again(producer, value)

    def _is_cheap_again(self, producer: Operation, value: int) -> bool:
        """Whether a second reader may compute it again, from an array that is no larger."""
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
        """The stored values that reading `value` reads."""
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
                # What nobody reads is stored for a moment.
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
    """Return the inputs that a loop's output starts as, if any."""
    assert loop.equation is not None
    params = loop.equation.params
    if loop.name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return loop.inputs[first + place : first + place + 1]
    first, carried = scan_counts(params)
    return loop.inputs[first + place : first + place + 1] if place < carried else []


def _takes_parts(each: Operation, value: int) -> bool:
    """Whether `each` is a scan over `value`."""
    if each.name != "scan" or each.equation is None:
        return False
    return value not in each.inputs[: sum(scan_counts(each.equation.params))]


def _write_parts(program: TracedOperations, constants: int, carried: int, used: list[bool]) -> None:
    """Read the parts that a scan runs over where they are wanted; write results where they go."""
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
