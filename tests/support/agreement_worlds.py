"""Islands that agree in one process: whatever the order of messages, whoever dies, whenever."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from replicax.core.ground.job import Parts
from replicax.islands.agreement import Agreement, founded
from replicax.islands.local_parts import LocalParts
from replicax.islands.messages import Frame, InView, State, View
from replicax.islands.parts import assigned

EXCHANGES, PARTS = 4, 4
"""Exchanges that a run completes, and parts of each."""
MOST_TURNS = 4000
UP, READY, DOWN = "up", "ready", "down"
"""A connection begins; its sender asks to join; it has ended."""


class Fault(NamedTuple):
    """Something that happens to islands at a turn of a world."""

    turn: int
    kind: str
    """`kill`, `leave` after an exchange, `restart`, or `part`: connections end."""
    islands: Sequence[int]
    """Whose it is; of `part` one side, the others are the other."""


class Island:
    """A start of an island, which does with its agreement what a group does."""

    def __init__(self, world: "World", start: tuple[int, str], view: View | None) -> None:
        self.world, self.start, self.index = world, start, start[0]
        self.agreement = Agreement(start, self._send, world.is_gone(self))
        self.peers: dict[int, Island] = {}
        self.asks: dict[int, str] = {}
        self.dead = self.leaves = self.writes = self._announced = False
        self.history: list[Any] | None = None
        """The state: the members of each exchange, and who computed which part of it."""
        self.expected: dict[int, list[int]] = {}
        """Between whom the rows of an exchange are divided."""
        self._frames: dict[int, dict[int, list[Any]]] = {}
        self._sent: set[tuple[int, int]] = set()
        self._own: LocalParts[Any] | None = None
        if view is not None:
            self.agreement.begin(view)
            self.history, self._announced = [], True

    def __repr__(self) -> str:
        return "".join(map(str, self.start))

    @property
    def runs(self) -> bool:
        return not self.dead and self.history is not None

    @property
    def is_due(self) -> bool:
        """Whether it can compute or send parts, or decides a tie."""
        of = self.agreement
        if self.dead or self.history is None or of.view is None:
            return False
        key = of.committed + 1, of.view.number
        if of.tie:
            return self.index == of.first
        return of.settled and key not in self._sent and key[0] < EXCHANGES

    def work(self) -> None:
        """Compute a part, send all, or decide a tie."""
        of = self.agreement
        assert of.view is not None
        if of.tie:
            of.go_on(self.world.gets_lease(self))
            return self.look()
        view, exchange = of.view, of.committed + 1
        if self._own is None:
            compute = lambda part: (part, *self.start)  # noqa: E731
            parts = Parts(PARTS, compute, None, lambda value: [value], lambda given: given[0])
            self._own = LocalParts(parts, of.parts.append)
            self.expected[exchange] = [*of.expected]
            self._give(view, exchange)
        chosen = assigned(view, exchange, PARTS)[self.index]
        if self.world.pick(3) == 0 and (left := sorted(chosen - {*of.parts})):
            self._own.missing(left[:1])  # somebody may die before it is sent
            return
        blocks, arrays = self._own.missing(chosen)
        ready = sorted(self.asks.items())
        frame = Frame(view.number, exchange, blocks, "null", admits=True, ready=ready)
        for index in of.members:
            self._send(index, (frame, arrays))
        self._sent.add((exchange, view.number))
        self._frames.setdefault(exchange, {}).setdefault(self.index, []).append((frame, []))
        of.receive(self.index, frame)
        self._own.sent(blocks)
        self.look()

    def _give(self, view: View, exchange: int) -> None:
        """Give new members the state, as the first one."""
        if self.index == self.agreement.first and view.exchange == exchange:
            for index in {*self.agreement.members} - {*view.confirmed}:
                self._send(index, (State(view, exchange, ""), [*(self.history or [])]))

    def take(self, sender: "Island", message: Any) -> None:
        """Handle what arrives."""
        of, index = self.agreement, sender.index
        match message:
            case "up":
                self.peers[index] = sender
                if of.view is not None:
                    self._send(index, InView(of.view))
            case "ready":
                self.asks[index] = sender.start[1]
            case "down" if self.peers.get(index) is sender:
                del self.peers[index]
                self.asks.pop(index, None)
            case (State(view), history) if self.history is None and of.is_in(view):
                if of.view is None:
                    of.begin(view)
                self.history = history
                assert of.committed == len(history) - 1
            case (Frame(exchange=exchange) as frame, arrays) if exchange > of.committed:
                self._frames.setdefault(exchange, {}).setdefault(index, []).append((frame, arrays))
                of.receive(index, frame)
            case tuple() | str():
                pass
            case _:
                of.hear(sender.start, message)
        self.look()

    def look(self) -> None:
        """Suspect members that are not connected, and complete what is agreed."""
        of, before = self.agreement, None
        while of.view is not None and of.exit_reason is None and of.view is not before:
            before = of.view
            for index, start in before.members:
                peer = self.peers.get(index)
                if index != self.index and (peer is None or peer.start[1] != start):
                    of.lose(index)
        if of.view is not None and not self._announced:
            self._announced = True
            for index in self.peers:
                self._send(index, InView(of.view))
        if of.view is not None and self.history is None and of.giver not in self.peers:
            of.exit("the giver is gone")
        for index, start in [*(of.view.members if of.view else ())]:
            if self.asks.get(index) == start:
                del self.asks[index]
        if self.history is not None and of.committed >= len(self.history):
            self._complete()
        if of.exit_reason is not None and not self.dead:
            self.world.note(self, "leaves:", of.exit_reason)
            self.world.leave(self)

    def _complete(self) -> None:
        of, exchange = self.agreement, self.agreement.committed
        assert self.history is not None
        assert of.complete is not None
        assert self._own is not None
        frames = self._frames.pop(exchange)
        parts, _ = self._own.combined(of.complete, exchange, frames)
        assert [part for part, *_ in parts] == [*range(PARTS)]
        assert exchange == len(self.history)
        self.history.append((tuple(map(tuple, of.complete.members)), parts))
        self._own = None
        if of.complete.members[0] == self.start and not self.writes:
            self.writes, self.world.writer = True, self  # whoever had the lease
        if self.leaves or self.is_replaced or (self.world.ends and exchange == EXCHANGES - 1):
            self.world.leave(self)

    @property
    def is_replaced(self) -> bool:
        """Whether it wrote the run, and finds before its next commit that another one does."""
        return self.writes and self.world.writer is not self

    def _send(self, index: int, message: Any) -> None:
        if index in self.peers:
            self.world.send(self, self.peers[index], message)


Pair = tuple[Island, Island]
"""Sender and receiver."""


class World:
    """Islands, and first-in-first-out connections between each two of them.

    Args:
        count: islands that begin.
        order: choices of what happens next, over and over; 0 is the first of what can.
        proven: whether all islands are on one host, so that they know who is dead.
        ends: whether they leave when they have completed the run.
    """

    def __init__(
        self, count: int, order: bytes, *, proven: bool = True, ends: bool = False
    ) -> None:
        self._order, self._at, self._proven, self.ends = order, 0, proven, ends
        self.turn = 0
        self._noted: list[tuple[Any, ...]] = []
        self._wires: dict[Pair, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._open: set[Pair] = set()
        view = founded([(n, "a") for n in range(count)], range(count))
        self.islands = [Island(self, start, view) for start in view.members]
        self.writer = self.islands[0]
        self.writer.writes = True
        for one, other in self._pairs():
            one.peers[other.index], other.peers[one.index] = other, one
            self._open |= {(one, other), (other, one)}

    def pick(self, count: int) -> int:
        """Return the next choice from 0 to `count - 1`."""
        self._at += 1
        return self._order[self._at % len(self._order)] % count

    def note(self, *what: Any) -> None:
        self._noted.append((self.turn, *what))

    def __repr__(self) -> str:
        """Return all that happened, a line for each turn."""
        return "\n".join(" ".join(map(str, line)) for line in self._noted)

    def is_gone(self, island: Island) -> Any:
        """Return what tells `island` whether a lost member is gone for certain."""

        def is_gone(index: int) -> bool:
            view, peer = island.agreement.view, island.peers.get(index)
            assert view is not None
            other = self.islands[index]
            ended = self._proven and (other.dead or other.start not in view.members)
            return ended or (peer is not None and peer.start not in view.members)

        return is_gone

    def gets_lease(self, island: Island) -> bool:
        """Whether `island` has the lease of the run, or gets it, as who had it is dead."""
        if self.writer.dead:
            self.writer = island
        return self.writer is island

    def run(self, faults: Sequence[Fault]) -> list[Island]:
        """Let everything happen that can; return the islands that hold the state in the end."""
        coming = sorted(faults, reverse=True)
        while True:
            self.turn += 1
            assert self.turn < MOST_TURNS, "it never ends"
            wires = [pair for pair, wire in self._wires.items() if wire]
            due = [island for island in self.islands if island.is_due]
            if coming and (coming[-1].turn <= self.turn or not (wires or due)):
                self._happen(coming.pop())
            elif wires or due:
                chosen = self.pick(len(wires) + len(due))
                if chosen < len(due):
                    self.note(due[chosen], "works")
                    due[chosen].work()
                else:
                    self._deliver(*wires[chosen - len(due)])
            elif late := [i for i in self.islands if i.runs and i.is_replaced]:
                self.leave(late[0])
            else:
                return [island for island in self.islands if island.runs]

    def send(self, sender: Island, receiver: Island, message: Any) -> None:
        if (sender, receiver) in self._open:
            self._wires[sender, receiver].append(message)

    def _deliver(self, sender: Island, receiver: Island) -> None:
        message = self._wires[sender, receiver].popleft()
        self.note(sender, "to", receiver, message)
        if message is UP and (before := receiver.peers.get(sender.index)) is not None:
            self._wires.pop((before, receiver), None)  # its loss is reported before
            receiver.take(before, DOWN)
        if not receiver.dead:
            receiver.take(sender, message)

    def _pairs(self) -> Iterator[tuple[Island, Island]]:
        for number, other in enumerate(self.islands):
            for one in self.islands[:number]:
                yield one, other

    def _happen(self, fault: Fault) -> None:
        self.note(fault.kind, fault.islands)
        first = self.islands[fault.islands[0] % len(self.islands)]
        match fault.kind:
            case "kill" if not first.dead and self._is_spared(first):
                self._end(first, all_arrives=False)
            case "leave" if not first.dead and self._is_spared(first):
                first.leaves = True
            case "restart" if first.dead:
                new = Island(self, (first.index, f"{first.start[1]}a"), None)
                self.islands[first.index] = new
                self._connect([pair for pair in self._pairs() if new in pair])
            case "part":
                for one, other in self._pairs():
                    if (one.index in fault.islands) != (other.index in fault.islands):
                        self._separate(one, other, all_arrives=False)
            case "heal":
                self._connect([pair for pair in self._pairs() if pair not in self._open])

    def _is_spared(self, island: Island) -> bool:
        """Whether one that holds the state stays without `island`."""
        views = {i: i.agreement.view for i in self.islands if i.runs and not i.leaves}
        return any(
            view is not None and each.index in view.confirmed and each is not island
            for each, view in views.items()
        )

    def leave(self, island: Island) -> None:
        """Let it say that it leaves, and end its connections."""
        for index in island.peers:
            self.send(island, island.peers[index], island.agreement.done())
        island.agreement.exit("it has finished")
        self._end(island, all_arrives=True)

    def _end(self, island: Island, *, all_arrives: bool) -> None:
        island.dead = True
        for other in self.islands:
            self._separate(island, other, all_arrives=all_arrives)
            self._wires.pop((other, island), None)

    def _connect(self, pairs: Sequence[Pair]) -> None:
        for one, other in pairs:
            if not one.dead and not other.dead:
                for sender, receiver in ((one, other), (other, one)):
                    self._open.add((sender, receiver))
                    self.send(sender, receiver, UP)
                    if sender.agreement.view is None:
                        self.send(sender, receiver, READY)

    def _separate(self, one: Island, other: Island, *, all_arrives: bool) -> None:
        """End a connection once what was sent has arrived, or a part of it."""
        for pair in [each for each in ((one, other), (other, one)) if each in self._open]:
            self._open.remove(pair)
            for _ in range(0 if all_arrives else self.pick(len(self._wires[pair]) + 1)):
                self._wires[pair].pop()
            self._wires[pair].append(DOWN)
