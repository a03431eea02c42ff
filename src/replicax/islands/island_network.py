"""The network of the islands of a job: two connections between each pair, as long as both live.

Each island dials all others, so that a start at another address reaches those that know only the
old one. Of each pair, the island with the lower index decides which connections count: it accepts
those that the other has dialled, or says on its own that they count (with a `Beat`). So both ends
always use the same ones, whatever crosses.

A connection has one owner at a time, who frees it: the listener, until the other end has proven
that it knows the secret; then `_opening`, while its second one or an answer is awaited by a thread,
or `_waiting`, if no thread awaits it; then an `IslandPeer`, whose last thread frees both. `_held`
has the peer of each index from its connections to the report of its loss; a new start takes the
place of an old one, whose loss is reported first.

Threads: one watches; one dials each other island, and serves the peer that it reached; the
listener's accepts, and each visitor has one, which serves the peer that it became; a peer has three
more. All block on a socket, a queue or `_closing`, and end once it ends: `close` ends everything
that is owned, and waits for them.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from replicax.islands.handshake import HANDSHAKE_SECONDS, INQUIRES, PURPOSES, Handshakes
from replicax.islands.inquiry import answer_inquiry
from replicax.islands.island_listener import IslandListener, connect
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import CONTROL_DECODER, Beat, Control, Frame, Greeting, State
from replicax.islands.peer import CLOSED_HERE, IslandPeer
from replicax.net.channel import Channel
from replicax.net.message import read_message
from replicax.net.stall_clock import StallClock

_AGAIN_SECONDS = 0.2
_CONNECT_SECONDS = 1.5
_BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
REPLACED = "replaced by a new start"


class Network:
    """Connects the island at `place` to all others, again and again, until `close`.

    `joined`, `heard` and `lost` of one peer are called in this order and one at a time; `lost` is
    always the last, once for each peer that joined, unless `close` ended it. `arrived` may run at
    the same time. None is called under a lock, and different peers do not wait for each other.

    Args:
        place: addresses, and the secret.
        patience_seconds: how long a peer may be silent before it is lost.
        joined: called once both connections to a peer are up.
        heard: called with each control message but `Beat`.
        arrived: called with each frame and its arrays, which nobody else uses.
        lost: called with the reason.
    """

    def __init__(
        self,
        place: IslandPlace,
        *,
        patience_seconds: float = 10.0,
        joined: Callable[[IslandPeer], None],
        heard: Callable[[IslandPeer, Control], None],
        arrived: Callable[[IslandPeer, Frame | State, list[np.ndarray]], None],
        lost: Callable[[IslandPeer, str], None],
    ) -> None:
        self.start = secrets.token_hex(8)
        """Random text that tells this start of the island from others."""
        self.peers: dict[int, IslandPeer] = {}
        """Peers that have joined and are not lost. Each change makes a new dictionary."""
        self.most_bytes = 1 << 20
        """The limit for the arrays of a frame that arrives."""
        self.rests = False
        """Whether this island is not expected to make progress; heartbeats say so."""
        self.moves = 0
        """Number of times that this island made progress, which they say, too."""
        self.troubles: dict[int, str] = {}
        """Why this island could not reach another one that has not joined yet, by index."""
        self._place, self._patience_seconds = place, patience_seconds
        self._clock = StallClock(patience_seconds / 2)
        self._joined, self._heard, self._arrived, self._lost = joined, heard, arrived, lost
        self._handshakes = Handshakes(place, self.start)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._held: dict[int, IslandPeer] = {}  # from its connections to the report of its loss
        self._waiting: dict[int, tuple[str, Channel, float]] = {}  # for the second connection
        self._replaced: set[tuple[int, str]] = set()
        self._opening: set[Channel] = set()  # that no peer owns yet
        self._threads: list[threading.Thread] = []
        self._entrance = IslandListener(place, self._handshakes, self._enter)
        self._begin("watches", self._watch)
        for other in place.others:
            self._begin(f"dials-{other}", self._dial, other)

    def close(self) -> None:
        """End all connections, once everything is sent or a second has passed, and all threads."""
        with self._lock:
            self._closing.set()
            peers = list({*self.peers.values(), *self._held.values()})
            waiting, self._waiting = self._waiting, {}
            opening = list(self._opening)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for peer in peers:
            peer.close()
        for channel in opening:
            channel.end()
        for _, channel, _ in waiting.values():
            channel.close()
        threads = [*self._threads, *self._entrance.close()]
        for peer in peers:
            peer.over.wait(deadline - _CLOSE_SECONDS / 2 - time.monotonic())
            peer.fail(CLOSED_HERE)
        for thread in [*threads, *(thread for peer in peers for thread in peer.threads)]:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _begin(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        name = f"replicax-island-{name}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _peer(self, introduced: Greeting, control: Channel, data: Channel) -> IslandPeer:
        beat_seconds = min(self._patience_seconds / 20, _BEAT_SECONDS)
        return IslandPeer(
            *(introduced, control, data),
            beat_seconds=beat_seconds,
            most_bytes=lambda: self.most_bytes,
            beat=lambda: Beat(self.rests, self.moves),
            clock=self._clock,
        )

    def _hold(self, peer: IslandPeer) -> IslandPeer | None:
        """Hold `peer` in place of the one with its index; end that one, and return it."""
        before = self._held.get(peer.index)
        if before is not None:
            before.fail(REPLACED)
        self._held[peer.index] = peer
        self.troubles.pop(peer.index, None)
        return before

    # Connections that this island dials.

    def _dial(self, other: int) -> None:
        while not self._closing.is_set():
            if other not in self._held:
                self._reach(other)
            self._closing.wait(_AGAIN_SECONDS)

    def _reach(self, other: int) -> None:
        """Dial the island `other`, and serve it until it is lost, if the connections count."""
        channels: list[Channel] = []
        try:
            peer, before = self._dialled(other, channels)
        except (OSError, ValueError) as error:
            for channel in channels:
                channel.close()
            with self._lock:
                if other not in self._held:
                    self.troubles[other] = str(error)
            return
        finally:
            with self._lock:
                self._opening.difference_update(channels)
        self._live(peer, before)

    def _dialled(self, other: int, channels: list[Channel]) -> tuple[IslandPeer, IslandPeer | None]:
        """Return the island `other` and the peer that it replaces; open `channels` to it."""
        starts = []
        for purpose in PURPOSES:
            channel = connect(self._place.addresses[other], _CONNECT_SECONDS)
            channels.append(channel)
            with self._lock:
                self._opening.add(channel)
            if self._closing.is_set():  # or `close` finds the channel, and ends it
                raise ConnectionAbortedError(CLOSED_HERE)
            challenge = self._handshakes.dial(channel, other, purpose)
            starts.append(challenge.start)
        with self._lock:
            if self._closing.is_set():
                raise ConnectionAbortedError(CLOSED_HERE)
            if starts[0] != starts[1] or (other, starts[0]) in self._replaced:
                raise ValueError(REPLACED)
            held, decides = self._held.get(other), self._decides(other)
            # An address may be an old one: who has dialled this island since is not replaced.
            if held is not None and (decides or held.start != starts[0]):
                raise ValueError(f"island {other} has connected meanwhile")
            if decides:
                channels[0].send(Beat())  # a few bytes, which the system takes at once
            peer = self._peer(challenge, *channels)
            return peer, self._hold(peer)

    def _decides(self, other: int) -> bool:
        return self._place.index < other

    # Connections that others dial.

    def _enter(self, hello: Greeting, channel: Channel, accept: Callable[[], None]) -> None:
        """Take the connection of an island that knows the secret, and serve it until it is lost.

        `ValueError` if it is refused, `OSError` if it has ended.
        """
        if hello.purpose == INQUIRES:
            self._answer(hello, channel, accept)
            return
        index, start = hello.island, hello.start
        with self._lock:
            if refusal := self._refusal(hello):
                raise ValueError(refusal)
            accept()  # a few bytes, which the system takes at once
            held, waiting = self._held.get(index), self._waiting.pop(index, None)
            # The first connection of a start waits for the second, and ends what came before it.
            if waiting is None or hello.purpose == "control":
                if waiting is not None:
                    waiting[1].close()
                if held is not None:
                    self._replaced.add((index, held.start))
                    held.fail(REPLACED)
                self._waiting[index] = start, channel, time.monotonic() + HANDSHAKE_SECONDS
                return
            peer = self._peer(hello, waiting[1], channel)
            if decides := self._decides(index):
                before = self._hold(peer)
            else:
                self._opening |= {waiting[1], channel}
        if not decides:
            try:
                before = self._decided(peer, waiting[1])
            except (OSError, ValueError):
                waiting[1].close()
                channel.close()
                return
            finally:
                with self._lock:
                    self._opening -= {waiting[1], channel}
        self._live(peer, before)

    def _decided(self, peer: IslandPeer, control: Channel) -> IslandPeer | None:
        """Wait until the other end says that these connections count; return the peer before."""
        control.limit(HANDSHAKE_SECONDS)
        if not isinstance(read_message(control.receive(), CONTROL_DECODER), Beat):
            raise ValueError("another message first")
        control.limit(None)
        with self._lock:
            if self._closing.is_set() or (peer.index, peer.start) in self._replaced:
                raise ConnectionAbortedError(CLOSED_HERE)
            return self._hold(peer)

    def _answer(self, hello: Greeting, channel: Channel, accept: Callable[[], None]) -> None:
        """Answer the questions of a `replicax doctor`."""
        with self._lock:
            if refusal := self._handshakes.refusal(hello):
                raise ValueError(refusal)
            if self._closing.is_set():
                raise ValueError(CLOSED_HERE)
            self._opening.add(channel)
            accept()
        try:
            with contextlib.suppress(OSError, ValueError):
                answer_inquiry(channel, trains=True)
        finally:
            with self._lock:
                self._opening.remove(channel)
            channel.close()

    def _refusal(self, hello: Greeting) -> str | None:
        index, start = hello.island, hello.start
        if self._closing.is_set():
            return CLOSED_HERE
        if wrong := self._handshakes.refusal(hello):
            return wrong
        if (index, start) in self._replaced:
            return REPLACED
        held, waiting = self._held.get(index), self._waiting.get(index)
        if held is not None and held.start == start:
            return f"this start of island {index} is connected already"
        same = waiting is not None and waiting[0] == start
        if hello.purpose == "data":
            return None if same else "the control connection comes first"
        if waiting is not None and same and not waiting[1].has_ended():
            return f"this start of island {index} is about to connect already"
        return None

    # Every island.

    def _live(self, peer: IslandPeer, before: IslandPeer | None) -> None:
        """Serve `peer` until it is lost, and report that, once the loss of `before` is reported."""
        if before is not None:
            before.over.wait()
        with self._lock:
            serves = not self._closing.is_set()
            if serves:
                self.peers = {**self.peers, peer.index: peer}
        if serves:
            with _reported():
                peer.run(self._joined, self._heard, self._arrived)
        with self._lock:
            self.peers = {i: other for i, other in self.peers.items() if other is not peer}
            reports = serves and not self._closing.is_set()
        if reports:
            with _reported():
                self._lost(peer, peer.reason)
        with self._lock:
            if self._held.get(peer.index) is peer:
                del self._held[peer.index]
        peer.over.set()
        peer.fail(CLOSED_HERE)
        peer.leave()
        for thread in peer.threads:  # they end at once, unless `arrived` is busy
            thread.join(_CLOSE_SECONDS / 2)

    def _watch(self) -> None:
        look_seconds = min(self._patience_seconds / 20, _LOOK_SECONDS)
        while not self._closing.wait(look_seconds):
            now = time.monotonic()
            with self._lock:
                peers = {*self.peers.values(), *self._held.values()}
                late = [i for i, (_, _, by) in self._waiting.items() if now > by]
                for index in late:
                    self._waiting.pop(index)[1].close()
            for peer in peers:
                peer.look(self._patience_seconds)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Report the error of a callback as that of a thread, which goes on."""
    try:
        yield
    except Exception as error:
        thread = threading.current_thread()
        arguments = (type(error), error, error.__traceback__, thread)
        threading.excepthook(threading.ExceptHookArgs(arguments))
