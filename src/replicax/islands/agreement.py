"""Agreement of the islands on who lives, and on which exchanges are complete.

This is view-synchronous group membership (virtual synchrony: Birman and Joseph, SOSP 1987; its
guarantees are defined by Chockler, Keidar and Vitenberg, ACM Computing Surveys 33(4), 2001) of one
primary component: of two sides that lose sight of one another, at most one goes on. An exchange is
a message of every member, complete once it is stable. Whoever is suspected is excluded, even if it
lives; it may join again.

There are no threads and no connections here: events come in as calls, messages go out through
`send`. docs/islands.md has the protocol and why it holds; in short:

- A member completes an exchange once it has the frames of all members (and says so: `Have`) and
  knows that all of them have, or that one has completed it (`Done`). So if one has completed it,
  all others have what they need.
- Who loses a member tells the survivors (`Suspect`), who repeat what they hear until all name the
  same dead, and with which state they found each other. Those messages decide the next view: the
  same for all who decide. A survivor that comes late is told (`Decided`).
- Nobody completes an exchange between its first `Suspect` and the decision.
- New members are those that all members named in one exchange; they count for nothing until they
  have completed one.
"""

from collections.abc import Callable, Sequence

from replicax.islands.messages import (
    Control,
    Decided,
    Done,
    Frame,
    GoOn,
    Have,
    InView,
    Out,
    Suspect,
    View,
)

IslandStart = tuple[int, str]
"""Index and start of an island."""
_MOST_DECISIONS = 256
"""Decisions that are kept, for survivors that come late."""


class Agreement:
    """The state of one island in the protocol.

    Args:
        me: this island.
        send: sends a message to the member with an index, if it is connected.
        has_terminated: whether the process of a lost member is known to have ended, and is not only
            unreachable.
    """

    def __init__(
        self,
        me: IslandStart,
        send: Callable[[int, Control], None],
        has_terminated: Callable[[int], bool],
    ) -> None:
        self.me, self._send, self._has_terminated = me, send, has_terminated
        self.view: View | None = None
        self.committed = -1
        """The last complete exchange."""
        self.complete: View | None = None
        """The view in which it was completed."""
        self.expected: list[int] = []
        """Members of the next exchange as of the last one, when all knew the same."""
        self.parts: list[int] = []
        """Parts of the next exchange that this island has computed."""
        self.giver = -1
        """Index of the member that gives this island the state, when it joins."""
        self.exit_reason: str | None = None
        """Why this island is no longer a member."""
        self.is_final = False
        """Whether it cannot become one again."""
        self.tie = False
        """Whether at least as many members were lost as are left; `go_on` of the first decides."""
        self.most_terminated = False
        """Whether fewer of those lost than are left may still live."""
        self._excluded: list[int] = []  # they are told once this island goes on without them
        self._going: dict[int, int] = {}
        """The newest view with which an island goes on, as its first member."""
        self._suspected: set[int] = set()
        self._done: set[IslandStart] = set()
        self._suspects: dict[int, Suspect] = {}
        self._later: dict[int, tuple[IslandStart, Suspect]] = {}
        self._decided: dict[int, Decided] = {}
        self._frames: dict[int, dict[int, dict[int, Frame]]] = {}
        self._have: dict[int, dict[int, int]] = {}

    @property
    def members(self) -> list[int]:
        """Indices of the members of the view, those that joined first before others."""
        return [] if self.view is None else [index for index, _ in self.view.members]

    @property
    def span(self) -> tuple[int, int]:
        """Rank and number of those that are expected in the next exchange."""
        me = self.me[0]
        return self.expected.index(me) if me in self.expected else -1, len(self.expected)

    @property
    def rank(self) -> int:
        """The place of this island among those that completed the last exchange, from 0.

        So nobody takes the place of another one before it is agreed that this one goes on.
        """
        view = self.complete or self.view
        members = [] if view is None else [index for index, _ in view.members]
        return members.index(self.me[0]) if self.me[0] in members else -1

    @property
    def first(self) -> int:
        """Index of the first member that holds the state, or -1."""
        confirmed = () if self.view is None else self.view.confirmed
        return next((index for index in self.members if index in confirmed), -1)

    @property
    def settled(self) -> bool:
        """Whether no member of the view is suspected."""
        return self.view is not None and not self._suspected and not self.tie

    def is_member(self, island: IslandStart) -> bool:
        """Whether an island is a member of the view."""
        return self.view is not None and island in map(tuple, self.view.members)

    def begin(self, view: View) -> None:
        """Take part from the first exchange of `view` on."""
        self.view, self.committed = view, view.exchange - 1
        self.expected = self.members
        self.giver = self.first
        self._changed_view()

    def lose(self, index: int) -> None:
        """Note that a member can no longer be reached."""
        if self.view is not None and index in self.members and index != self.me[0]:
            self._suspect({index})

    def receive(self, index: int, frame: Frame) -> None:
        """Note that the arrays of a member, or this island's own, are there."""
        if frame.exchange > self.committed:
            of = self._frames.setdefault(frame.exchange, {}).setdefault(index, {})
            of[frame.view] = frame
            self._advance()

    def missing(self, exchange: int) -> list[int]:
        """Return the members whose part of the exchange has not come."""
        frames = self._frames.get(exchange, {})
        number = -1 if self.view is None else self.view.number
        return [index for index in self.members if number not in frames.get(index, {})]

    def hear(self, island: IslandStart, message: Control) -> None:
        """Handle a message of the protocol."""
        index = island[0]
        if index in self._suspected and self.is_member(island):
            return  # the survivors may already have gone on without it
        match message:
            case Suspect():
                self._heard_suspect(island, message)
            case Decided() if self.view is not None and message.before == self.view.number:
                self._adopt(message)
            case Have(view, exchange) if exchange > self.committed:
                self._have.setdefault(exchange, {})[index] = view
                self._advance()
            case Done(view, exchange):
                self._done.add(island)
                if self.view is not None and view == self.view.number and exchange > self.committed:
                    # It has completed that exchange, and so knew that all have the frames.
                    self._have[exchange] = dict.fromkeys(self.members, view)
                    self._advance()
            case GoOn(view):
                self._going[index] = view
                self._advance()
            case Out(reason, is_final) if self.view is None or self.is_member(island):
                self.exit(reason)
                self.is_final = is_final
            case InView(view) if self.view is None and self.is_in(view):
                self.begin(view)

    def exit(self, reason: str) -> None:
        """Be no longer a member; the first reason counts."""
        self.exit_reason = self.exit_reason or reason

    def done(self) -> Done:
        """Return what this island says when it leaves, as the run is complete or failed."""
        return Done() if self.complete is None else Done(self.complete.number, self.committed)

    def go_on(self, allowed: bool) -> None:
        """Decide a tie, as the first member; the others follow."""
        if allowed:
            self._go_on()
        else:
            self.exit(_too_few(1, 1))
        self._advance()

    def _go_on(self) -> None:
        """Go on in this view, and tell those that were lost, if they can be reached."""
        assert self.view is not None
        self.tie = False
        if self.first == self.me[0]:
            for index in self.members:
                if index != self.me[0]:
                    self._send(index, GoOn(self.view.number))
        for index in self._excluded:
            self._send(index, Out("the others no longer heard this island"))

    # Deaths.

    def _suspect(self, indices: set[int]) -> None:
        assert self.view is not None
        new = (indices & set(self.members)) - self._suspected - {self.me[0]}
        if not new:
            return
        self._suspected |= new
        message = Suspect(self.view, sorted(self._suspected), self.committed, list(self.parts))
        self._suspects[self.me[0]] = message
        if self.tie and self.first in self._suspected:  # before it could say who goes on
            self.exit(_too_few(1, 1))
        for index in self._survivors():
            if index != self.me[0]:
                self._send(index, message)
        self._advance()

    def _survivors(self) -> list[int]:
        return [index for index in self.members if index not in self._suspected]

    def _heard_suspect(self, island: IslandStart, message: Suspect) -> None:
        view, index = message.view, island[0]
        if self.view is None and self.is_in(view):
            self.begin(view)
        if self.view is None:
            return
        if view.number < self.view.number:
            if view.number in self._decided:
                self._send(index, self._decided[view.number])
        elif view.number > self.view.number:
            self._later[index] = island, message
        elif not self.is_member(island):
            # It joined by members that are gone, and of which this island lost sight before.
            self._send(index, Out("the others did not agree on this island"))
        else:
            if self.me[0] in message.suspected:
                self.exit(f"island {index} no longer heard this one")
                return
            self._suspects[index] = message
            self._suspect(set(message.suspected))
            self._advance()

    def _decide(self) -> bool:
        """Decide the next view if all survivors name the same dead."""
        assert self.view is not None
        survivors = self._survivors()
        messages = [self._suspects.get(index) for index in survivors]
        suspected = sorted(self._suspected)
        equal = [each for each in messages if each and list(each.suspected) == suspected]
        if len(equal) < len(survivors):
            return False
        view, committed = self.view, max(each.committed for each in equal)
        confirmed = self.members if committed >= view.exchange else list(view.confirmed)
        after = View(
            view.number + 1,
            [each for each in view.members if each[0] in survivors],
            [index for index in confirmed if index in survivors],
            committed + 1,
            [list(each.parts) if each.committed == committed else [] for each in equal],
        )
        self._adopt(Decided(view.number, after, committed))
        return True

    def _adopt(self, decided: Decided) -> None:
        """Take part in the view after this one, unless most others may go on without it."""
        assert self.view is not None
        before, after = self.view, decided.after
        self._remember(decided)
        if decided.committed > self.committed:
            self._commit(decided.committed)
        if not self.is_in(after):
            self.exit("the others went on without this island")
            return
        confirmed = self.members if decided.committed >= before.exchange else before.confirmed
        self._count_votes(confirmed, after.confirmed)
        staying = set(map(tuple, after.members))
        self._excluded = [index for index, start in before.members if (index, start) not in staying]
        self.view = after
        if staying >= set(map(tuple, before.members)):  # others joined, and nobody left
            self.expected = self.members
        if self.exit_reason is None and not self.tie:
            self._go_on()
        self._changed_view()

    def _count_votes(self, before: Sequence[int], staying: Sequence[int]) -> None:
        """Leave if most of those that hold the state may go on without this island."""
        assert self.view is not None
        starts = dict(self.view.members)
        missing = [n for n in before if n not in staying and (n, starts[n]) not in self._done]
        unreachable = [n for n in missing if not self._has_terminated(n)]  # slow if it lives
        if len(unreachable) > len(staying) or not staying:
            self.exit(_too_few(len(staying), len(unreachable)))
        elif len(missing) >= len(staying):
            # Those that terminated may have gone on before they did, without this island.
            self.tie, self.most_terminated = True, len(unreachable) < len(staying)

    def _remember(self, decided: Decided) -> None:
        self._decided[decided.before] = decided
        self._decided.pop(decided.before - _MOST_DECISIONS, None)

    def _changed_view(self) -> None:
        self._suspected, self._suspects = set(), {}
        later, self._later = self._later, {}
        for island, message in later.values():
            self._heard_suspect(island, message)
        self._advance()

    # Exchanges.

    def _advance(self) -> None:
        """Decide or complete whatever can be."""
        while self.view is not None and self.exit_reason is None:
            if self.tie and self._going.get(self.first) != self.view.number:
                return
            if self.tie:
                self._go_on()
            elif self._suspected:
                if not self._decide():
                    return
            elif not self._completed():
                return

    def _completed(self) -> bool:
        assert self.view is not None
        exchange, number = self.committed + 1, self.view.number
        frames, have = self._frames.get(exchange, {}), self._have.setdefault(exchange, {})
        if not all(number in frames.get(index, {}) for index in self.members):
            return False
        if have.get(self.me[0]) != number:
            have[self.me[0]] = number
            for index in self.members:
                if index != self.me[0]:
                    self._send(index, Have(number, exchange))
        if not all(have.get(index) == number for index in self.members):
            return False
        self._commit(exchange)
        self._admit([frames[index][number] for index in self.members])
        return True

    def _commit(self, exchange: int) -> None:
        self.committed, self.complete, self.parts = exchange, self.view, []
        self.expected = self.members
        for known in (self._frames, self._have):
            for old in [each for each in known if each <= exchange]:
                del known[old]

    def _admit(self, frames: Sequence[Frame]) -> None:
        """Begin a view with the islands that all members named, if any."""
        assert self.view is not None
        if not all(frame.admits for frame in frames):
            return
        each = [{(index, start) for index, start in frame.ready} for frame in frames]
        new = {one for one in set.intersection(*each) if one[0] not in self.members}
        if not new:
            return
        view = self.view
        members = [*view.members, *sorted(new)]  # the first is the one that writes
        after = View(view.number + 1, members, self.members, self.committed + 1)
        self._remember(Decided(view.number, after, self.committed))
        self.view, self.expected = after, [index for index, _ in members]
        self._changed_view()

    def is_in(self, view: View) -> bool:
        """Whether this island is a member of `view`."""
        return self.me in map(tuple, view.members)


def _too_few(staying: int, lost: int) -> str:
    return (
        f"{staying} of {staying + lost} islands are left, and the others may go on without them; "
        "start this one again"
    )


def founded(members: Sequence[IslandStart], confirmed: Sequence[int]) -> View:
    """Return the first view, of `members`, some of which are known to hold the state."""
    return View(0, sorted(members), sorted(confirmed), 0)
