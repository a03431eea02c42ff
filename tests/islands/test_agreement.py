"""The agreement of islands, in simulated networks: any order of messages, deaths at any moment."""

import collections
import random

import pytest
from support.tiers import only

from replicax.islands.agreement import Agreement, founded
from replicax.islands.messages import Decided, Done, Frame, GoOn, Have, Out, Suspect, View

TARGET = 6
"""Exchanges that each simulated run completes."""


class Node:
    """An island: it sends a frame for each exchange, as the training loop does."""

    def __init__(self, world: "World", start: tuple[int, str]) -> None:
        self.world, self.start, self.dead = world, start, False
        self.index = start[0]
        self.agreement = Agreement(
            start,
            lambda to, message: world.send(self, to, message),
            lambda index: world.proven and self.lacks(index),
        )
        self.sent: set[tuple[int, int]] = set()
        self.completed: dict[int, tuple] = {}
        self.seen: dict[int, tuple] = {}
        self.expects: dict[int, set[tuple]] = collections.defaultdict(set)

    @property
    def runs(self) -> bool:
        return not self.dead and self.agreement.left is None

    def lacks(self, index: int) -> bool:
        """Whether the member of that index is gone, or replaced."""
        view, other = self.agreement.view, self.world.nodes[index]
        return other.dead or other.start not in map(tuple, view.members)

    @property
    def is_confirmed(self) -> bool:
        """Whether it holds the state, as it completed an exchange or founded the group."""
        view = self.agreement.view
        return view is not None and self.index in view.confirmed

    def work(self) -> bool:
        """Send the next frame, if it is due."""
        of = self.agreement
        if of.view is None or not of.settled or of.left or of.committed >= TARGET:
            return False
        key = of.committed + 1, of.view.number
        if key in self.sent:
            return False
        self.sent.add(key)
        of.parts = sorted({*of.parts, self.world.random.randrange(8)})
        ready = [each.start for each in self.world.waiting if not each.dead]
        frame = Frame(key[1], key[0], "step", [], "", True, ready)
        for index in of.members:
            if index != self.index:
                self.world.send(self, index, frame)
        of.receive(self.index, frame)
        return True

    def look(self) -> None:
        """Keep what the invariants compare."""
        of = self.agreement
        if of.view is not None:
            self.seen[of.view.number] = tuple(map(tuple, of.view.members))
        if of.complete is not None and of.committed >= 0:
            self.completed[of.committed] = tuple(map(tuple, of.complete.members))
        if of.view is not None:
            self.expects[of.committed].add(tuple(of.expected))


class World:
    """Islands, and first-in-first-out connections between each two of them."""

    def __init__(self, seed: int, islands: int, *, proven: bool = True) -> None:
        self.random, self.proven = random.Random(seed), proven
        self.nodes = {n: Node(self, (n, "a")) for n in range(islands)}
        self.gone: list[Node] = []
        self.waiting: list[Node] = []
        self.wires: dict[tuple[Node, Node], collections.deque] = collections.defaultdict(
            collections.deque
        )
        self.cut: set[tuple[Node, Node]] = set()

    def start(self) -> None:
        view = founded([node.start for node in self.nodes.values()], list(self.nodes))
        for node in self.nodes.values():
            node.agreement.begin(view)

    def send(self, sender: Node, to: int, message: object) -> None:
        receiver = self.nodes[to]
        if not sender.dead and not receiver.dead and (sender, receiver) not in self.cut:
            self.wires[sender, receiver].append(message)

    def separate(self, one: Node, other: Node) -> None:
        """End the connection of two islands, once what was sent arrived, or a part of it."""
        for pair in ((one, other), (other, one)):
            if pair not in self.cut:
                self.cut.add(pair)
                wire = self.wires[pair]
                for _ in range(self.random.randrange(len(wire) + 1)):
                    wire.pop()
                wire.append(None)

    def kill(self, index: int) -> None:
        node = self.nodes[index]
        node.dead = True
        self.waiting = [each for each in self.waiting if each is not node]
        for other in self.nodes.values():
            if other is not node:
                self.separate(node, other)

    def leave(self, node: Node) -> None:
        """Let an island that has completed the run say so, and end its connections."""
        for other in self.nodes.values():
            if other is not node:
                self.send(node, other.index, node.agreement.done())
                self.cut |= {(node, other), (other, node)}
                self.wires[node, other].append(None)
        node.agreement.left, node.dead = "done", True

    def replace(self, index: int) -> None:
        """IslandStart a killed island again: it asks to join."""
        old = self.nodes[index]
        assert old.dead
        self.gone.append(old)
        self.nodes[index] = Node(self, (index, old.start[1] + "a"))
        self.waiting.append(self.nodes[index])

    def deliver(self) -> bool:
        wires = [pair for pair, wire in self.wires.items() if wire and not pair[1].dead]
        if not wires:
            return False
        sender, receiver = self.random.choice(sorted(wires, key=lambda p: (p[0].start, p[1].start)))
        message = self.wires[sender, receiver].popleft()
        of = receiver.agreement
        if message is None:
            if of.is_member(sender.start):
                of.lose(sender.index)
        elif of.left is None and isinstance(message, Frame):
            of.receive(sender.index, message)  # its sender may be a member that is not known yet
        elif of.left is None:
            of.hear(sender.start, message)
        for node in [*self.nodes.values(), *self.gone]:
            node.look()
        return True

    def turn(self) -> bool:
        """Let one thing happen; return whether anything could."""
        for node in list(self.nodes.values()):
            if node.agreement.tie and node.runs and node.index == node.agreement.first:
                node.agreement.go_on(True)
            if node.agreement.left is not None and not node.dead:
                self.kill(node.index)  # it exits
        self._adopted()
        busy = [node for node in self.nodes.values() if node.runs]
        self.random.shuffle(busy)
        if self.random.random() < 0.4 and any(node.work() for node in busy):
            return True
        return self.deliver() or any(node.work() for node in busy)

    def _adopted(self) -> None:
        """A new member hears of its view with the state, from a member that holds it, later."""
        for node in list(self.waiting):
            if self.random.random() < 0.8:
                continue
            for other in self.nodes.values():
                view = other.agreement.view
                member = other.runs and view is not None and node.start in map(tuple, view.members)
                if member and other.index in view.confirmed:
                    if node.agreement.view is None:
                        node.agreement.begin(view)
                    self.waiting.remove(node)
                    break
        for node in self.nodes.values():  # it may have lost a member before that was one
            of = node.agreement
            if of.view is not None and node.runs:
                for start in of.view.members:
                    other = self.nodes[start[0]]
                    gone = other.start != tuple(start) or other.dead
                    if gone and not any(
                        self.wires[each, node]
                        for each in (other, *self.gone)
                        if each.start == tuple(start)
                    ):
                        of.lose(start[0])

    def check(self) -> None:
        """No two islands that are left disagree about an exchange or a view.

        One that left may have completed an exchange that the others then repeated without it.
        """
        completed, seen = collections.defaultdict(set), collections.defaultdict(set)
        expects = collections.defaultdict(set)
        for node in self.nodes.values():
            if node.runs and node.is_confirmed:
                for exchange, members in node.completed.items():
                    completed[exchange].add(members)
                for number, members in node.seen.items():
                    seen[number].add(members)
                for exchange, members in node.expects.items():
                    expects[exchange] |= members
        assert all(len(each) == 1 for each in completed.values()), dict(completed)
        assert all(len(each) == 1 for each in seen.values()), dict(seen)
        assert all(len(each) == 1 for each in expects.values()), dict(expects)


def simulate(seed: int, islands: int, deaths: int, joins: bool) -> World:
    world = World(seed, islands)
    world.start()
    at = sorted(world.random.sample(range(5, 240), deaths), reverse=True)
    for turn in range(6000):
        if at and turn >= at[-1]:
            at.pop()
            members = [node for node in world.nodes.values() if node.runs and node.is_confirmed]
            alive = [n for n, node in world.nodes.items() if node.runs]
            if len(members) > 1:
                world.kill(world.random.choice(alive))
        if joins and turn % 40 == 39 and turn < 400:
            dead = [n for n, node in world.nodes.items() if node.dead]
            if dead:
                world.replace(world.random.choice(dead))
        if not world.turn() and not at and (turn > 400 or not joins):
            break
    world.check()
    return world


@pytest.mark.parametrize("seed", range(200))
def test_survivors_complete_every_exchange_in_the_same_view(seed):
    world = simulate(seed, islands=2 + seed % 4, deaths=seed % 4, joins=False)
    alive = [node for node in world.nodes.values() if node.runs]
    assert alive
    assert {node.agreement.committed for node in alive} == {TARGET}


@pytest.mark.parametrize("seed", range(200))
def test_who_completes_the_run_later_than_others_has_not_lost_them(seed):
    world = World(seed, 2 + seed % 4)
    world.start()
    for _ in range(6000):
        for node in world.nodes.values():
            if node.runs and node.agreement.committed == TARGET:
                world.leave(node)
        if not world.turn():
            break
    world.check()
    ended = [node.agreement for node in world.nodes.values()]
    assert {(each.committed, each.complete.number) for each in ended} == {(TARGET, 0)}


def test_who_left_in_an_earlier_view_completes_nothing_in_this_one():
    view = founded([(n, "a") for n in range(3)], range(3))
    of = Agreement((2, "a"), lambda to, message: None, lambda n: True)
    of.begin(view)
    of.lose(0)
    of.hear((1, "a"), Suspect(view, [0], -1, []))
    of.hear((1, "a"), Have(1, 0))
    of.hear((0, "a"), Done(0, 0))
    for index in (1, 2):
        assert of.committed == -1
        of.receive(index, Frame(1, 0, "step", [], ""))
    assert of.committed == 0


@pytest.mark.parametrize("seed", range(200))
def test_islands_that_join_and_die_agree(seed):
    world = simulate(seed, islands=3 + seed % 3, deaths=2 + seed % 5, joins=True)
    members = [n for n in world.nodes.values() if n.runs and n.agreement.view is not None]
    assert {node.agreement.committed for node in members} <= {TARGET}
    assert members


@pytest.mark.parametrize("first", only((), range(1000, 11_000, 2000), sampled=[1000]))
def test_twenty_thousand_runs_agree(first):
    for seed in range(first, first + 2000):
        simulate(seed, islands=2 + seed % 5, deaths=seed % 6, joins=False)
        simulate(seed, islands=3 + seed % 3, deaths=2 + seed % 5, joins=True)


@pytest.mark.parametrize("seed", range(100))
def test_only_one_side_of_a_partition_goes_on(seed):
    world = World(seed, 3 + seed % 3, proven=seed % 2 == 0)
    world.start()
    split = world.random.sample(sorted(world.nodes), len(world.nodes) // 2)
    at = world.random.randrange(2, 80)
    for turn in range(6000):
        if turn == at:
            for one in world.nodes.values():
                for other in world.nodes.values():
                    if (one.index in split) > (other.index in split):
                        world.separate(one, other)
        if turn > at:
            for node in world.nodes.values():
                of = node.agreement
                if of.tie and node.index == of.first:  # island 0's side holds the lease
                    node.agreement.go_on((node.index in split) == (0 in split))
        if not world.turn() and turn > at:
            break
    world.check()
    runs = {node.index in split for node in world.nodes.values() if node.runs}
    assert len(runs) == 1
    equal = 2 * len(split) == len(world.nodes)
    assert runs == {(0 in split) if equal else False}
    assert sum(node.runs for node in world.nodes.values()) == len(world.nodes) - len(split)


def test_who_leaves_tells_nobody_to_leave():
    sent = []
    view = founded([(n, "a") for n in range(3)], range(3))
    of = Agreement((0, "a"), lambda to, message: sent.append((to, message)), lambda n: False)
    of.begin(view)
    of.lose(1)
    of.lose(2)
    assert of.left is not None
    assert not [message for _, message in sent if isinstance(message, Out)]


def tied() -> tuple[Agreement, list]:
    """Return island 1 of 4, which is left with the first one."""
    sent = []
    view = founded([(n, "a") for n in range(4)], range(4))
    of = Agreement((1, "a"), lambda to, message: sent.append((to, message)), lambda n: False)
    of.begin(view)
    of.lose(2)
    of.lose(3)
    of.hear((0, "a"), Suspect(view, [2, 3], -1, []))
    assert of.tie
    sent.clear()
    return of, sent


def test_a_tie_ends_when_the_first_one_goes_on():
    of, sent = tied()
    of.hear((2, "a"), GoOn(1))
    assert of.tie
    of.hear((0, "a"), GoOn(1))
    assert (of.settled, of.left) == (True, None)
    assert [(to, type(message)) for to, message in sent] == [(2, Out), (3, Out)]


def test_a_tie_ends_also_if_the_first_one_went_on_before():
    again = Agreement((1, "a"), lambda to, message: None, lambda n: False)
    again.begin(founded([(n, "a") for n in range(4)], range(4)))
    again.hear((0, "a"), GoOn(1))
    again.lose(2)
    again.lose(3)
    again.hear((0, "a"), Suspect(again.view, [2, 3], -1, []))
    assert again.settled


def test_who_loses_the_first_one_in_a_tie_leaves():
    of, _ = tied()
    of.lose(0)
    assert of.left is not None


def test_a_decision_of_another_island_is_counted_too():
    view = founded([(n, "a") for n in range(3)], range(3))
    after = View(1, [(2, "a")], [2], 0)
    of = Agreement((2, "a"), lambda to, message: None, lambda n: False)
    of.begin(view)
    of.hear((1, "a"), Decided(0, after, -1))
    assert of.left is not None


def test_nobody_asks_whether_a_survivor_is_dead():
    asked = []
    view = founded([(n, "a") for n in range(3)], range(3))
    of = Agreement((0, "a"), lambda to, message: None, lambda n: bool(asked.append(n)))
    of.begin(view)
    of.lose(2)
    of.hear((1, "a"), Suspect(view, [2], -1, []))
    assert of.members == [0, 1]
    assert asked == [2]


def test_a_suspected_island_decides_nothing() -> None:
    """The survivors may already have gone on without it."""
    members = [(n, "a") for n in range(4)]
    sent: list[int] = []
    of = Agreement(members[0], lambda to, _: sent.append(to), lambda _: True)
    of.begin(founded(members, range(4)))
    of.lose(3)
    of.lose(2)
    of.hear(members[2], Decided(0, View(1, members[:3], range(3), 0), -1))
    assert of.view is not None
    assert of.view.number == 0
    assert 1 in sent


def test_only_the_start_that_was_done_is_gone() -> None:
    of = Agreement((0, "a"), lambda index, message: None, lambda index: False)
    of.begin(founded([(0, "a"), (1, "b2"), (2, "c2")], [0, 1, 2]))
    of.hear((1, "b"), Done())  # earlier starts, which were preempted
    of.hear((2, "c"), Done())
    of.lose(1)
    of.lose(2)
    assert of.left is not None
