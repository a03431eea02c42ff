"""This process's connection to the other processes of its job, through process 0."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.cluster import wire
from replicax.cluster.watchdog import LoopProgress, StuckVerdict, Timeouts
from replicax.errors import ConfigError
from replicax.net.message import encode
from replicax.net.stall_clock import StallClock

_ACKNOWLEDGE_SECONDS = 3.0
"""How long a failing process waits for the verdict of process 0."""

_PART_SECONDS = 0.5


class Link:
    """Sends this process's heartbeats to the others, and receives their verdict.

    `names` are those of `Go`, sent when all have joined. `on_stop` is called once, in the link's
    thread, with the reason why all stop.
    """

    def __init__(
        self,
        connection: wire.Connection,
        process: int,
        names: Sequence[str],
        timeouts: Timeouts,
        progress: LoopProgress,
        on_stop: Callable[[StuckVerdict], None],
    ) -> None:
        self.process, self.processes = process, len(names)
        self.progress = progress
        self.verdict: StuckVerdict | None = None
        self._wire, self._timeouts, self._on_stop = connection, timeouts, on_stop
        connection.expect(self.processes)
        self._hub = names[0]
        self._gathered: dict[str, Sequence[str] | None] = {}
        """The values received, by pending topic."""
        self._changed = threading.Condition()
        self._leaving = self._failing = False
        self._thread = threading.Thread(target=self._run, name="replicax-link", daemon=True)
        self._thread.start()

    def gather(
        self,
        topic: str,
        value: Any,
        cancelled: Callable[[], bool] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Return the `value` of every process, in order, once all have sent theirs for `topic`.

        A topic is used once in a job, and values must be JSON. `cancelled` is polled; once it is
        true, the result is empty. The others always have at least as long as each of them may go
        without progress, which is the default timeout.
        """
        sent = wire.Gather(topic, json.dumps(value), timeout_seconds)
        if (size := len(encode(sent))) > wire.LONGEST_VALUE_BYTES:
            raise ConfigError(
                f"the value for {topic} has {size:,} bytes in JSON, and a process sends at most "
                f"{wire.LONGEST_VALUE_BYTES:,}: send a part at a time, or share a file"
            )
        with self._changed:  # first, so that an answer that comes at once finds its topic
            self._gathered[topic] = None
        self._wire.send(sent)
        with self._changed:
            while self._gathered[topic] is None and not (cancelled and cancelled()):
                self._changed.wait(timeout=0.1)
            values = self._gathered.pop(topic)
        if values is not None:
            return [json.loads(each) for each in values]
        # Otherwise the hub would keep waiting for the other values.
        with contextlib.suppress(OSError):
            self._wire.send(wire.Withdraw(topic))
        return []

    def fail(self, error: str, *, collateral: bool) -> StuckVerdict | None:
        """Notify the others that this process fails, and whether that looks like another's fault.

        Return why all stop, if known in time.
        """
        self._failing = True  # so that the verdict does not end this process, which ends itself
        return self._acknowledged(wire.Failed(error, collateral))

    def stop_all(self, reason: str, code: int) -> StuckVerdict | None:
        """End all processes, including this one, with exit code `code`.

        Return why all stop: this or an earlier reason; None if process 0 did not answer in time.
        """
        return self._acknowledged(StuckVerdict(reason, [], code=code))

    def _acknowledged(self, message: wire.Message) -> StuckVerdict | None:
        with contextlib.suppress(OSError):  # process 0 is gone; the verdict will say so
            self._wire.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self.verdict is not None, _ACKNOWLEDGE_SECONDS)
        return self.verdict

    def part(self) -> None:
        """Leave together with all others, for a reason known to each."""
        self._failing = True
        self.leave()
        if self.process == 0:
            time.sleep(_PART_SECONDS)  # let the others read their last messages

    def leave(self) -> None:
        """Notify the others that this process is done."""
        self._leaving = True
        with contextlib.suppress(OSError):  # process 0 left before us
            self._wire.send(self.progress.heartbeat(self._timeouts))  # its last step
            self._wire.send(wire.Bye())

    def close(self) -> None:
        """Close the connection."""
        self._leaving = True
        self._wire.close()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        clock = StallClock(self._timeouts.silent_seconds / 2)
        heard_at = now = beat_at = clock.now()
        frozen_seconds = 0.0
        while self.verdict is None:
            try:
                if now >= beat_at:
                    beat_at = now + self._timeouts.beat_seconds
                    self._wire.send(self.progress.heartbeat(self._timeouts))
                for message in self._wire.receive(self._timeouts.beat_seconds / 4):
                    heard_at = clock.now()
                    self._take(message)
            except (OSError, ValueError):
                if not self._leaving:
                    self._stop(
                        StuckVerdict(
                            f"{self._hub} disconnected without notice: killed or crashed", [0]
                        )
                    )
                return
            now = clock.now()
            if clock.frozen_seconds > frozen_seconds:  # then the loop stood still, but is not stuck
                self.progress.exclude(clock.frozen_seconds - frozen_seconds)
                frozen_seconds = clock.frozen_seconds
            if now - heard_at > self._timeouts.silent_seconds:
                silent = f"{self._hub} sent no heartbeat for {now - heard_at:.0f} s"
                verdict = StuckVerdict(
                    f"{silent}: frozen, out of memory, or network failure", [0], True
                )
                with contextlib.suppress(OSError):  # it reads this if it ever wakes up
                    self._wire.send(verdict)
                self._stop(verdict)

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Gathered(topic, values):
                with self._changed:
                    if topic in self._gathered:
                        self._gathered[topic] = values
                        self._changed.notify_all()
            case StuckVerdict():
                self._stop(message)

    def _stop(self, verdict: StuckVerdict) -> None:
        with self._changed:
            self.verdict = verdict
            self._changed.notify_all()
        if not self._failing:
            self._on_stop(verdict)
