"""The agreement of islands, in simulated networks: any order of messages, deaths at any moment."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from support.agreement_worlds import EXCHANGES, Fault, Island, World
from support.tiers import only

from replicax.islands.agreement import Agreement, founded
from replicax.islands.messages import Decided, Done, Frame, GoOn, Have, Out, Suspect, View

COUNTS = st.integers(2, 5)
ORDERS = st.binary(min_size=500, max_size=500)
EXAMPLES = only([200], [200, 4_000, 40_000], sampled=[])
"""Worlds of each property in `make test`, `make test-all` and `make test-everything`."""


def faults(*kinds: str, most: int = 5) -> st.SearchStrategy[list[Fault]]:
    islands = st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)
    return st.lists(
        st.builds(Fault, st.integers(1, 150), st.sampled_from(kinds), islands), max_size=most
    )


def hold(examples: int, check: Callable[..., None], *drawn: st.SearchStrategy[Any]) -> None:
    """Check in worlds that are drawn; what happened in the smallest that fails is printed."""
    settings = hypothesis.settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    settings(hypothesis.given(*drawn)(check))()


def run(world: World, faults: Sequence[Fault]) -> list[Island]:
    """Return the islands that are left: they have the same sums and the same view.

    No two of them disagree about the members of an exchange or about who computed which part. One
    that left may have completed an exchange that the others then repeated without it.
    """
    try:
        left = world.run(faults)
    finally:
        hypothesis.note(world)
    assert {len(island.history or ()) for island in left} <= {EXCHANGES}  # nobody waits for ever
    assert all(island.history == left[0].history for island in left)
    for island in left:
        for exchange in island.expected.keys() & left[0].expected.keys():
            assert island.expected[exchange] == left[0].expected[exchange]
    assert all(island.agreement.view == left[0].agreement.view for island in left)
    return left


@pytest.mark.parametrize("examples", EXAMPLES)
def test_most_islands_complete_every_exchange_whoever_dies_or_leaves(examples: int) -> None:
    def check(count: int, order: bytes, deaths: list[Fault], proven: bool) -> None:
        deaths = deaths[: (count - 1) // 2]
        world = World(count, order, proven=proven)
        left = run(world, deaths)
        assert {island.index for island in left} >= {*range(count)} - {
            fault.islands[0] % count for fault in deaths
        }

    hold(examples, check, COUNTS, ORDERS, faults("kill", "leave"), st.booleans())


@pytest.mark.parametrize("examples", EXAMPLES)
def test_islands_that_die_join_and_leave_agree(examples: int) -> None:
    def check(count: int, order: bytes, given: list[Fault]) -> None:
        world = World(count, order)
        # Who loses the first one in a tie leaves, as that one may have gone on.
        assert run(world, given) or any(each.agreement.tie for each in world.islands)

    hold(examples, check, COUNTS, ORDERS, faults("kill", "leave", "restart", "restart", most=8))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_whatever_ends_or_heals_connections_those_that_are_left_agree(examples: int) -> None:
    def check(count: int, order: bytes, given: list[Fault]) -> None:
        run(World(count, order, proven=False), given)

    hold(
        *(examples, check, COUNTS, ORDERS),
        faults("kill", "leave", "restart", "part", "heal", most=8),
    )


@pytest.mark.promise("islands.one-side-goes-on")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_only_one_side_of_a_partition_goes_on(examples: int) -> None:
    def check(count: int, order: bytes, at: int, side: set[int]) -> None:
        sides = {*range(count)} & side, {*range(count)} - side
        left = run(World(count, order, proven=False), [Fault(at, "part", [*side, 9])])
        goes_on = max(sides, key=lambda each: (len(each), 0 in each))  # island 0 has the lease
        assert {island.index for island in left} == goes_on

    hold(examples, check, COUNTS, ORDERS, st.integers(1, 150), st.sets(st.integers(0, 4)))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_who_completes_the_run_later_than_others_has_not_lost_them(examples: int) -> None:
    def check(count: int, order: bytes) -> None:
        world = World(count, order, ends=True)
        assert run(world, []) == []
        ended = {(len(each.history), each.agreement.view.number) for each in world.islands}
        assert ended == {(EXCHANGES, 0)}

    hold(examples, check, COUNTS, ORDERS)


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
        of.receive(index, Frame(1, 0, [], ""))
    assert of.committed == 0


def test_who_leaves_tells_nobody_to_leave():
    sent = []
    view = founded([(n, "a") for n in range(3)], range(3))
    of = Agreement((0, "a"), lambda to, message: sent.append((to, message)), lambda n: False)
    of.begin(view)
    of.lose(1)
    of.lose(2)
    assert of.exit_reason is not None
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
    assert (of.settled, of.exit_reason) == (True, None)
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
    assert of.exit_reason is not None


def test_a_decision_of_another_island_is_counted_too():
    view = founded([(n, "a") for n in range(3)], range(3))
    after = View(1, [(2, "a")], [2], 0)
    of = Agreement((2, "a"), lambda to, message: None, lambda n: False)
    of.begin(view)
    of.hear((1, "a"), Decided(0, after, -1))
    assert of.exit_reason is not None


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
    assert of.exit_reason is not None
