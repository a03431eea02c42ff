"""This island in its group: finds the others, exchanges sums with them, takes in new ones."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from replicax.cluster.same_system import boot, ends_at_once
from replicax.cluster.watchdog import Timeouts
from replicax.core.ground.job import Parts, Value
from replicax.errors import AgreementError, IslandLeftError
from replicax.islands.agreement import Agreement, founded
from replicax.islands.founding import AwaitedIslands, disagreement, founders, refuse
from replicax.islands.group_changes import (
    GroupChange,
    GroupChanges,
    ReceivedState,
    packed_state,
    unpacked_state,
)
from replicax.islands.island_network import Network
from replicax.islands.island_place import IslandPlace
from replicax.islands.local_parts import LocalParts, check_same
from replicax.islands.messages import Control, Frame, InView, Out, Ready, State, View
from replicax.islands.pace import Pace
from replicax.islands.parts import assigned
from replicax.islands.peer import IslandPeer
from replicax.net.stall_clock import StallClock

_LOOK_SECONDS, _AGAIN_SECONDS = 0.5, 0.2


class Group:
    """The islands that train together, as this one sees them; one thread and the network use it."""

    def __init__(self, place: IslandPlace, timeouts: Timeouts) -> None:
        self.place, self._timeouts = place, timeouts
        self.arbiter: Callable[[bool], bool] = lambda most_terminated: most_terminated
        """Decides whether to go on if half or more were lost; told whether most have terminated."""
        self.stops: Callable[[], bool] = lambda: False
        """Tells whether to give up joining the others."""
        self.is_over: Callable[[], bool] = lambda: False
        """Tells whether the run is over, so that no others need be waited for."""
        self._changes = GroupChanges()
        self.admits = True
        """Whether islands that start anew may join now."""
        self.most_bytes = 1 << 30
        """The limit for the arrays of a frame that arrives."""
        self.pace = Pace(timeouts)
        self.bytes = [0, 0]
        """Bytes sent and received for exchanges, of peers that are gone."""
        self._changed = threading.Condition()
        self._state: ReceivedState | None = None
        with self._changed:  # what the network brings waits
            self._connect()

    def _connect(self) -> None:
        self._candidates: dict[int, tuple[str, Ready]] = {}
        self._disagrees = ""  # why, of an island that may be gone since
        self._refused_by: set[int] = set()  # islands that will not train with this one
        self._frames: dict[int, dict[int, list[tuple[Frame, list[np.ndarray]]]]] = {}
        self._asks: Ready | None = None
        self._grouped: set[int] = set()  # peers that are members of some view
        self._announced = False
        self._changes.members = []
        self._past: dict[int, tuple[str, int]] = {}
        self.network = Network(
            self.place,
            patience_seconds=self._timeouts.silent_seconds,
            joined=self._joined,
            heard=self._heard,
            arrived=self._arrived,
            lost=self._lost,
        )
        self.network.most_bytes = self.most_bytes
        me = self.place.index, self.network.start
        self.agreement = Agreement(me, self._send, self._has_terminated)

    # What the network brings.

    def _joined(self, peer: IslandPeer) -> None:
        with self._changed:
            self._past[peer.index] = (peer.boot, peer.pid)
            if self.agreement.view is not None:
                peer.send(InView(self.agreement.view))
            elif self._asks is not None:
                self._ask()
            self._look()

    def _heard(self, peer: IslandPeer, message: Control) -> None:
        with self._changed:
            match message:
                case Ready(fields):
                    self._candidates[peer.index] = peer.start, message
                    mine = fields if self._asks is None else self._asks.fields
                    if why := disagreement({self.place.index: mine, peer.index: fields}):
                        self._disagrees = why
                        peer.send(Out(why, is_final=True))
                case InView():
                    self._grouped.add(peer.index)
                case Out(_, True) if self._grouped and peer.index not in self._grouped:
                    return  # only the group knows
                case Out(_, True):
                    self._refused_by.add(peer.index)
            self.agreement.hear((peer.index, peer.start), message)
            self._look()

    def _arrived(self, peer: IslandPeer, header: Frame | State, arrays: list[np.ndarray]) -> None:
        with self._changed:
            if isinstance(header, State):
                self._take(peer, header, arrays)
            elif header.exchange > self.agreement.committed:
                self._keep(peer.index, header, arrays)
            self._look()

    def _keep(self, index: int, frame: Frame, arrays: list[np.ndarray]) -> None:
        self._frames.setdefault(frame.exchange, {}).setdefault(index, []).append((frame, arrays))
        self.agreement.receive(index, frame)

    def _lost(self, peer: IslandPeer, reason: str) -> None:
        with self._changed:
            self.bytes[0] += peer.sent_bytes
            self.bytes[1] += peer.received_bytes
            self._changes.why[peer.index] = reason
            self._grouped.discard(peer.index)
            # A later start of it may have asked already.
            if self._candidates.get(peer.index, ("", None))[0] == peer.start:
                del self._candidates[peer.index]
            self._look()

    def _look(self) -> None:
        """Suspect the members that are not connected, and wake the thread that waits."""
        of = self.agreement
        before = None  # a loss may bring the next view at once, which has to be looked at, too
        while of.view is not None and of.exit_reason is None and of.view is not before:
            before = of.view
            for index, start in before.members:
                peer = self.network.peers.get(index)
                if index != self.place.index and (peer is None or peer.start != start):
                    of.lose(index)
        if of.view is not None and not self._announced:
            self._announced = True
            for peer in self.network.peers.values():
                peer.send(InView(of.view))
        if of.view is not None and self._changes.note(of.view, of.committed + 1):
            for index, start in of.view.members:
                if self._candidates.get(index, ("", None))[0] == start:
                    del self._candidates[index]
        self._changed.notify_all()

    def _send(self, index: int, message: Control) -> None:
        peer = self.network.peers.get(index)
        if peer is not None:
            peer.send(message)

    def _has_terminated(self, index: int) -> bool:
        """Whether the process of a lost member ended, or a new start took its place."""
        view, peer = self.agreement.view, self.network.peers.get(index)
        starts = {} if view is None else dict(view.members)
        if peer is not None and peer.start != starts.get(index):
            return True
        system, pid = self._past.get(index, ("", 0))
        return bool(system) and system == boot() and ends_at_once(pid)

    def _ask(self) -> None:
        """Ask all islands to join, and tell them which ones this island sees."""
        assert self._asks is not None
        self._asks = Ready(self._asks.fields, sorted(self.network.peers))
        for peer in self.network.peers.values():
            peer.send(self._asks)

    # Membership.

    def enter(self, fields: Mapping[str, Any], *, has_state: bool = False) -> ReceivedState | None:
        """Become a member, once the step is compiled; return the state that another one gives.

        None if this island founded the group, with the state that it has; and, with `has_state`, if
        all do.

        Raises:
            AgreementError: an island has other `fields`, which are JSON values by name.
            IslandLeftError: it `stops` before that.
        """
        self.network.most_bytes = self.most_bytes
        text = json.dumps({**fields, "state": has_state})
        while True:
            with self._changed:
                self._asks = Ready(text)
                self._ask()
                self._wait_to_enter(has_state)
                if self.agreement.exit_reason is None:
                    return self._state
                if self.agreement.is_final:
                    self._refuse(self.agreement.exit_reason)
            # Who was to give the state is gone; nothing is lost by asking again, as a new start.
            self.network.close()
            time.sleep(_AGAIN_SECONDS)
            with self._changed:
                self._connect()

    def _wait_to_enter(self, has_state: bool) -> None:
        of, began = self.agreement, time.monotonic()
        waiting = AwaitedIslands(self.place, self.network)
        while of.exit_reason is None and self._state is None:
            waiting.tell(self._candidates, of.giver)
            if self.stops():
                raise IslandLeftError(f"island {self.place.index} was stopped before it joined")
            if of.view is None:
                self._found(time.monotonic() - began, has_state)
            if of.view is not None:
                if has_state or self.place.index in of.view.confirmed:
                    return
                if of.giver not in of.members or of.giver not in self.network.peers:
                    of.exit(f"island {of.giver}, which was to give the state, is gone")
            self._changed.wait(_LOOK_SECONDS)

    def _found(self, waited_seconds: float, has_state: bool) -> None:
        """Found a group if this is the first of enough islands, of which none has one."""
        assert self._asks is not None
        if self._grouped:  # which knows whether this island fits
            return
        asked = {index: asks.fields for index, (_, asks) in self._candidates.items()}
        asked[self.place.index] = self._asks.fields
        if why := self._disagrees or disagreement(asked):
            self._refuse(why)
        me, everyone = (self.place.index, self.network.start), len(self.place.addresses)
        here = self._candidates, self.network.peers, waited_seconds, self.is_over
        if first := founders(me, everyone, *here):
            confirmed = [index for index, _ in first] if has_state else [self.place.index]
            self.agreement.begin(founded(first, confirmed))
            self._look()

    def _refuse(self, why: str) -> NoReturn:
        if self._grouped:  # which does not wait for this island
            raise AgreementError(why)
        refuse(self.network, self.place.others, why, self._changed, self._refused_by)

    @property
    def newcomers(self) -> list[int]:
        """Members to which this island has to give the state, before its next exchange."""
        with self._changed:
            view = self.agreement.view
            if view is None or self.place.index != self.agreement.first:
                return []
            new = [index for index, _ in view.members if index not in view.confirmed]
            return new if view.exchange == self.agreement.committed + 1 else []

    def give(self, run: Any, arrays: Sequence[np.ndarray]) -> None:
        """Give the state to `newcomers`: `run` is JSON, `arrays` those of the state.

        The arrays are sent later, so nobody may change them.
        """
        new = self.newcomers
        with self._changed:
            view, exchange = self.agreement.view, self.agreement.committed + 1
        assert view is not None
        header, sent = packed_state(view, exchange, run, arrays)
        for index in new:
            if (peer := self.network.peers.get(index)) is not None:
                peer.send_arrays(header, sent)

    def _take(self, peer: IslandPeer, header: State, arrays: list[np.ndarray]) -> None:
        """Take the state from a member, unless it is damaged or not for this start."""
        if self._state is not None or not self.agreement.is_in(header.view):
            return
        if (received := unpacked_state(header, arrays)) is None:
            self.agreement.exit(f"the state that island {peer.index} sent is damaged")
            return
        if self.agreement.view is None:
            self.agreement.begin(header.view)
        self._state = received
        self._changes.begin(header.view)

    def taken_changes(self) -> list[GroupChange]:
        """Return the changes of the group since the last call."""
        with self._changed:
            return self._changes.taken()

    def finish(self) -> None:
        """Leave, as the run is complete or failed."""
        with self._changed:  # a thread may still wait for an exchange
            for peer in self.network.peers.values():
                peer.send(self.agreement.done())
            self.agreement.exit("it has finished")
            self._changed.notify_all()
        self.network.close()

    # Exchanges.

    def move(self) -> None:
        """Report progress: heartbeats say so."""
        self.pace.move()
        self.network.moves, self.network.rests = self.network.moves + 1, False

    def rest(self) -> None:
        """Report that no progress is expected until the next `move`."""
        self.pace.rest()
        self.network.rests = True

    def exchange(
        self,
        parts: Parts[Value],
        note: Any = None,
        *,
        same: Mapping[str, Any] | None = None,
        topic: str = "parts",
        admits: bool = False,
        slow: bool = False,
        own_parts: Callable[..., LocalParts[Value]] = LocalParts,
    ) -> tuple[list[Value], list[Any]]:
        """Return the values of all parts, or their sum; and the `note`, in JSON, of each member.

        All members call it in the same order; if `slow`, others may come late. Afterwards, if it
        `admits` them, islands that asked all members to join are members, too.

        Raises:
            AgreementError: members differ in `same`, which are JSON values by name.
            IslandLeftError: this island is no longer a member.
        """
        alike = json.dumps({"exchange": topic, "parts": parts.count, **(same or {})})
        began, exchange = time.monotonic(), self.agreement.committed + 1
        before, local = self.agreement.view, own_parts(parts, self._note_part)
        while True:  # once for each view, as the parts of those that are lost are dealt again
            view = self._settled(exchange)
            if view is None:
                break
            chosen = assigned(view, exchange, parts.count)[self.place.index]
            blocks, arrays = local.missing(chosen)
            with self._changed:  # parts are computed without it, which takes long
                if view is not self.agreement.view or not self.agreement.settled:
                    continue
                ready = [(i, start) for i, (start, _) in self._candidates.items()]
            admits = admits and self.admits
            head = view.number, exchange, blocks, json.dumps(note)
            frame = Frame(*head, same=alike, admits=admits, ready=ready)
            for index, _ in view.members:
                if (peer := self.network.peers.get(index)) is not None:
                    peer.send_arrays(frame, arrays)
            with self._changed:
                self._keep(self.place.index, frame, [])
                local.sent(blocks)
                self._look()
                self._wait_for(exchange, view, slow=slow)
        with self._changed:
            view = self.agreement.view
            changed = view is not before or (view is not None and view.exchange == exchange)
            self.pace.exchanged(time.monotonic() - began, changed=changed)
            complete, frames = self.agreement.complete, self._frames.pop(exchange)
            self._frames = {n: each for n, each in self._frames.items() if n > exchange}
        assert complete is not None
        check_same(complete, frames)
        return local.combined(complete, exchange, frames)

    def _note_part(self, part: int) -> None:
        with self._changed:
            self.agreement.parts.append(part)

    def _settled(self, exchange: int) -> View | None:
        """Return the view, once no member is suspected; None if the exchange is complete."""
        while True:
            with self._changed:
                of = self.agreement
                if of.exit_reason is not None:
                    raise IslandLeftError(f"island {of.me[0]} left the others: {of.exit_reason}")
                if of.committed >= exchange:
                    return None
                if of.settled:
                    return of.view
                asks = of.tie and self.place.index == of.first
                if not asks:
                    self._changed.wait(_LOOK_SECONDS)
            if asks:  # without the lock: the arbiter may read a disk that others write
                allowed = self.arbiter(of.most_terminated)
                with self._changed:
                    of.go_on(allowed)
                    self._look()

    def _wait_for(self, exchange: int, view: View, *, slow: bool) -> None:
        """Wait until the exchange is complete or the view changes."""
        of = self.agreement
        receiving = exchange == view.exchange and len(view.confirmed) < len(view.members)
        allowed = self.pace.allowed(slow=slow or receiving)
        clock = StallClock(2 * _LOOK_SECONDS)  # if this process was frozen, nobody else was late
        deadline = clock.now() + allowed
        progress: dict[int, Any] = {}
        while of.committed < exchange and of.view is view and of.settled and of.exit_reason is None:
            self._changed.wait(_LOOK_SECONDS)
            missing, peers = of.missing(exchange), self.network.peers
            before, progress = progress, {i: peers[i].progress for i in missing if i in peers}
            # Between two exchanges an island may take many steps, and its arrays some time.
            if any(peers[i].rests or progress[i] != before.get(i) for i in progress):
                deadline = clock.now() + allowed
            if clock.now() > deadline:
                for index in missing:
                    self._changes.why[index] = "no progress, but heartbeats"
                    of.lose(index)
                self._look()
