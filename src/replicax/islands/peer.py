"""Another island, as long as both connections to it are up."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from replicax.islands.frames import checksum, frame_parts, message_bytes, receive_frame
from replicax.islands.messages import CONTROL_DECODER, Beat, Control, Frame, Greeting, State
from replicax.net.channel import Channel
from replicax.net.message import encode, read_message
from replicax.net.stall_clock import StallClock

_DRAIN_SECONDS, _DRAINED_WITHIN_SECONDS = 0.01, 0.5
"""How long a loss waits for the end of the other connection, and so for what was sent before it:
if nothing has come, and at most."""
_FLUSH_SECONDS = 1.0
"""How long a close waits until what was said before is sent."""
CLOSED_HERE = "closed by this island"
_ERROR_HERE = "an error in this process"


class IslandPeer:
    """Another island. Any thread may send to it; after its loss, what is sent is dropped.

    Four threads serve it: two receive, and two send what is queued, so that nobody waits for it.
    One of those that receive is the caller of `run`. If the connection of one ends, `fail` ends
    both, and so the other threads; the last thread frees the sockets, with `leave`.
    """

    def __init__(
        self,
        introduced: Greeting,
        control: Channel,
        data: Channel,
        *,
        beat_seconds: float,
        most_bytes: Callable[[], int],
        beat: Callable[[], Beat],
        clock: StallClock,
    ) -> None:
        self.index, self.start = introduced.island, introduced.start
        self.host, self.boot, self.pid = introduced.host, introduced.boot, introduced.pid
        self.over = threading.Event()
        """Whether its loss has been reported."""
        self.rests = False
        """Whether the other island says that no progress is to be expected of it."""
        self._moves = 0
        self._own_beat, self._control, self._data = beat, control, data
        self._sent_before, self._received_before = data.sent_bytes, data.received_bytes
        self._beat_seconds, self._most_bytes = beat_seconds, most_bytes
        self._controls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._frames: queue.SimpleQueue[tuple[Frame | State, list[memoryview]] | None]
        self._frames = queue.SimpleQueue()
        self._lock, self._clock = threading.Lock(), clock
        self._heard_at = math.inf  # also while this process is busy with a message
        self._ended = False
        self._no_messages, self._no_frames = threading.Event(), threading.Event()
        self._reason: str | None = None
        self._close_by = math.inf
        self._senders = 2
        self._users = 1  # threads that may use the sockets, the caller of `run` first
        self.threads: list[threading.Thread] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes of the frames sent so far, headers included."""
        return self._data.sent_bytes - self._sent_before

    @property
    def received_bytes(self) -> int:
        """Bytes of the frames received so far, headers included."""
        return self._data.received_bytes - self._received_before

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers that grow while it makes progress: as it says, and bytes that have come."""
        return self._moves, self._data.received_bytes

    @property
    def reason(self) -> str:
        """Why its connections have ended; empty if they have not."""
        return self._reason or ""

    def send(self, message: Control) -> None:
        """Queue `message` for the control connection."""
        text = message_bytes(message)  # here, where an error reaches the caller
        if self._reason is None:
            self._controls.put(text)

    def send_arrays(self, header: Frame | State, arrays: Sequence[np.ndarray]) -> None:
        """Queue a frame. Nobody may change the arrays from now on: they are not copied.

        The dtypes, shapes and checksum of the header are filled in.
        """
        packed = frame_parts(header, arrays)
        if self._reason is None:
            self._frames.put(packed)

    def close(self) -> None:
        """End both connections, once everything is sent or a second has passed."""
        with self._lock:
            self._close_by = min(self._close_by, time.monotonic() + _FLUSH_SECONDS)
        self._wake_senders()

    def look(self, patience_seconds: float) -> None:
        """End the connections if it has been silent."""
        silent_seconds = self._clock.now() - self._heard_at
        if time.monotonic() > self._close_by:
            self.fail(CLOSED_HERE)
        elif silent_seconds > patience_seconds:
            self.fail(f"silent for {silent_seconds:.1f} s")

    def fail(self, reason: str, rest: threading.Event | None = None) -> None:
        """End both connections, unless that has begun; the first reason is the one that counts.

        `rest` is set when all that the other end had sent is received, which is worth a moment.
        """
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._wake_senders()
        if rest is not None:
            self._drain(rest)
        with self._lock:
            if self._users:
                self._control.end()
                self._data.end()

    def run(
        self,
        joined: Callable[["IslandPeer"], None],
        heard: Callable[["IslandPeer", Control], None],
        arrived: Callable[["IslandPeer", Frame | State, list[np.ndarray]], None],
    ) -> None:
        """Serve both connections until one of them ends.

        `joined` and `heard` are called here, one after the other, `arrived` in another thread.
        """
        try:
            self._begin("sends", self._send_controls)
            self._begin("sends-arrays", self._send_frames)
            joined(self)
            self._begin("arrays", self._receive_frames, arrived)  # none arrives before `joined`
            self._heard_at = self._clock.now()
            for message in self._messages():
                if isinstance(message, Beat):
                    self.rests, self._moves = message.rests, message.moves
                else:
                    self._heard_at = math.inf
                    heard(self, message)
                self._heard_at = self._clock.now()
            self._drain(self._no_frames)
        finally:
            self._ended = True
            self.fail(_ERROR_HERE)  # unless there is a reason already

    def _drain(self, ended: threading.Event) -> None:
        """Wait until all that came on one connection before its end is handled."""
        channel = self._control if ended is self._no_messages else self._data
        until = time.monotonic() + _DRAINED_WITHIN_SECONDS
        while not ended.wait(_DRAIN_SECONDS) and time.monotonic() < until:
            if not channel.has_ended():
                return

    def leave(self) -> None:
        """Free the sockets, if no other thread of this peer uses them still."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._control.close()
                self._data.close()

    def _begin(
        self, name: str, target: Callable[..., None], *arguments: object
    ) -> threading.Thread:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException:
                self.fail(_ERROR_HERE)
                raise
            finally:
                self.leave()

        name = f"replicax-island-{self.index}-{name}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # who closes may join whatever it finds; `leave` counts down
            thread.start()
            self._users += 1
            self.threads.append(thread)
        return thread

    def _messages(self) -> Iterator[Control]:
        while True:
            try:
                message = read_message(self._control.receive(), CONTROL_DECODER)
            except (OSError, ValueError) as error:
                self._no_messages.set()
                self.fail(_why(error), self._no_frames if isinstance(error, OSError) else None)
                return
            yield message

    def _receive_frames(
        self, arrived: Callable[["IslandPeer", Frame | State, list[np.ndarray]], None]
    ) -> None:
        while not self._ended:
            try:
                header, arrays = receive_frame(self._data, self._most_bytes())
            except (OSError, ValueError, MemoryError) as error:
                self._no_frames.set()
                self.fail(_why(error), self._no_messages if isinstance(error, OSError) else None)
                return
            if not self._ended:
                arrived(self, header, arrays)

    def _send_controls(self) -> None:
        while self._reason is None:
            try:
                text = self._controls.get(timeout=self._beat_seconds)
            except queue.Empty:
                text = message_bytes(self._own_beat())
            if text is None:
                break
            try:
                self._control.send_bytes([text])
            except OSError as error:
                self.fail(_why(error))
        self._sender_ends()

    def _send_frames(self) -> None:
        while self._reason is None and (packed := self._frames.get()) is not None:
            header, views = packed
            try:
                # A checksum of much data takes a while, for which only this thread waits.
                self._data.send_bytes([encode(checksum(header, views)), *views])
            except OSError as error:
                self.fail(_why(error))
        self._sender_ends()
        while not self._frames.empty():  # somebody may keep this peer, but not its arrays
            self._frames.get()

    def _sender_ends(self) -> None:
        """End the connections once nothing is left to send on either."""
        with self._lock:
            self._senders -= 1
            if self._senders:
                return
        self.fail(CLOSED_HERE)

    def _wake_senders(self) -> None:
        self._controls.put(None)
        self._frames.put(None)


def _why(error: BaseException) -> str:
    if isinstance(error, ValueError):
        return f"it does not follow the protocol: {error}"
    if isinstance(error, MemoryError):
        return "no memory for its arrays"
    return f"disconnected: {getattr(error, 'strerror', None) or error}"
