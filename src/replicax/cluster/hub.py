"""The coordinator in process 0: it admits the processes of one job, relays their messages, and
detects a process that is lost or stuck.

The topology is a star over TCP, separate from the devices' network, so it works when that hangs.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from replicax.cluster import wire
from replicax.cluster.differences import field_differences, first_of, processes_text
from replicax.cluster.job_listener import JobListener, Peer
from replicax.cluster.place import Place
from replicax.cluster.rendezvous import bound_socket
from replicax.cluster.variables import COORDINATOR
from replicax.cluster.watchdog import Heartbeat, Member, StuckVerdict, Timeouts, Waiting, find_stuck
from replicax.net.proof import DIALS, LISTENS, Proof, Refusal, check_proof, nonce, proof
from replicax.net.secret import SECRET
from replicax.net.stall_clock import StallClock

LOOK_SECONDS = 0.1
"""Interval between checks for stuck processes."""
_COLLATERAL_SECONDS = 1.0
"""How long to wait for the root cause of a failure that looks like a consequence."""
_MOST_TOPICS = 100
"""Topics that may wait for values at once: each has a thread that waits for it."""
OTHER_JOB = "another job uses this port"
Prepare = Callable[[list[wire.Hello]], Sequence[Any]]
"""Called once with the first message of each process, in order; returns the fields of `Go` after
the names. An error ends all processes."""


class Hub:
    """Serves the job of process 0's `place` in a separate thread until `close`.

    All others must join within `timeout_seconds`.
    """

    def __init__(
        self, place: Place, timeouts: Timeouts, timeout_seconds: float, prepare: Prepare
    ) -> None:
        self._listening = bound_socket(place, listens=True)
        self._job, self._processes, self._secret = place.job, place.processes, place.secret
        self._door = JobListener(place.processes, self._hear, self._lost)
        self._silent_seconds = timeouts.silent_seconds
        self._clock = StallClock(LOOK_SECONDS + self._silent_seconds / 4)
        self._timeout_seconds, self._prepare = timeout_seconds, prepare
        self._members: dict[int, Member] = {}
        self._hellos: dict[int, wire.Hello] = {}
        self._peers: dict[int, Peer] = {}
        self._gathers: dict[str, Waiting] = {}
        self._started = False
        self._suspecting = False
        """Whether a process failed that may be a victim; stuck processes are then ignored."""
        self._verdict: StuckVerdict | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._door.serve(self._listening))
        watching = asyncio.ensure_future(self._watch())
        await self._closing.wait()
        for task in (serving, watching):
            task.cancel()
        self._listening.close()
        self._door.close()
        await asyncio.sleep(0)  # the loop runs once more, in which the connections close

    def _hear(self, peer: Peer, message: wire.Message) -> None:
        if peer.process is not None:
            self._take(self._members[peer.process], message)
            return
        match message, peer.said:
            case wire.Hello(), None:
                peer.said = message, wire.Prove(nonce())
                peer.send(peer.said[1])
                return
            case Proof(), (hello, prove):
                refusal = self._refusal(hello, prove, message)
                if refusal is None:
                    self._admit(hello, prove, peer)
                    return
                peer.send(Refusal(refusal))
        peer.close()

    def _refusal(self, hello: wire.Hello, prove: wire.Prove, given: Proof) -> str | None:
        """Return why `hello` is not admitted; strangers learn nothing of the job."""
        process, processes = hello.process, hello.processes
        try:
            check_proof(given, proof(self._secret, DIALS, hello, prove))
        except ValueError:
            return f"{OTHER_JOB}, or the secret of this process differs: give all the same {SECRET}"
        if hello.job != self._job:
            return f"{OTHER_JOB}: set {COORDINATOR} to a free one"
        if hello.asks:
            return f"process 0 of this job, of {self._processes} processes, already uses it"
        if processes != self._processes:
            return f"the job has {self._processes} processes, but this one was given {processes}"
        if not 0 <= process < self._processes:
            return f"ranks range from 0 to {self._processes - 1}, but this process has {process}"
        if process in self._members:
            return f"{self._members[process]} is already in the job"
        return self._verdict.reason if self._verdict else None

    def _admit(self, hello: wire.Hello, prove: wire.Prove, peer: Peer) -> None:
        process = hello.process
        peer.admit(process)
        self._members[process] = Member(process, hello.host, hello.pid, self._clock.now())
        self._hellos[process], self._peers[process] = hello, peer
        peer.send(proof(self._secret, LISTENS, hello, prove))
        peer.send(wire.Tick(self._missing()))
        if not self._missing():
            self._start()

    def _missing(self) -> list[int]:
        return [p for p in range(self._processes) if p not in self._members]

    def _start(self) -> None:
        hellos = [self._hellos[process] for process in range(self._processes)]
        if found := field_differences([hello.environment for hello in hellos]):
            text = f"the processes differ: {first_of(found)}: start all in the same environment"
            self._stop(StuckVerdict(text, []))
            return
        names = [str(self._members[process]) for process in range(self._processes)]
        try:
            go = wire.Go(names, *self._prepare(hellos))
        except Exception as error:
            self._stop(StuckVerdict(str(error), []))
            return
        self._started = True
        now = self._clock.now()
        for member in self._members.values():  # who waits for `Go` sends no heartbeats
            member.heard_at = now
        self._send_all(go)

    def _take(self, member: Member, message: wire.Message) -> None:
        member.heard_at = self._clock.now()
        match message:
            case Heartbeat():
                member.heartbeat = message
            case wire.Gather():
                self._gather(member.process, message)
            case wire.Withdraw(topic) if topic in self._gathers:
                gather = self._gathers[topic]
                gather.values.pop(member.process, None)
                gather.timeout_seconds.pop(member.process, None)
                if not gather.values:
                    del self._gathers[topic]
            case StuckVerdict():
                self._stop(message)
            case wire.Failed(error, collateral):
                member.ended = True
                verdict = StuckVerdict(f"{member} failed: {error}", [member.process])
                if collateral:  # the process at fault may report meanwhile, and counts then
                    self._suspecting = True
                    self._loop.call_later(_COLLATERAL_SECONDS, self._stop, verdict)
                else:
                    self._stop(verdict)
            case wire.Bye():
                member.ended = True

    def _gather(self, process: int, message: wire.Gather) -> None:
        topic = message.topic
        gather = self._gathers.setdefault(topic, Waiting(self._clock.now()))
        gather.values[process] = message.value
        gather.timeout_seconds[process] = message.timeout_seconds or 0.0
        held_bytes = sum(len(each.values.get(process, "")) for each in self._gathers.values())
        if len(self._gathers) > _MOST_TOPICS or held_bytes > wire.LONGEST_VALUE_BYTES:
            raise ValueError("more values than the threads of a process send")
        if len(gather.values) == self._processes:
            del self._gathers[topic]
            values = [gather.values[p] for p in range(self._processes)]
            self._send_all(wire.Gathered(topic, values))

    def _lost(self, peer: Peer) -> None:
        process = peer.process
        if process is None:
            return
        member = self._members[process]
        del self._peers[process]
        if not self._started:
            del self._members[process]  # missing until it reconnects
            return
        if member.ended or self._verdict or self._closing.is_set():
            return
        end = f"{member} disconnected without notice, last seen at step {member.heartbeat.begun}"
        self._stop(StuckVerdict(f"{end}: killed, crashed, or network failure", [process]))

    async def _watch(self) -> None:
        deadline = self._clock.now() + self._timeout_seconds
        ticked_at = self._clock.now()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock.now()
            if self._verdict or self._suspecting:  # those that stop now make no progress
                continue
            if self._started:
                verdict = find_stuck(self._members, self._gathers, now, self._silent_seconds)
            else:
                verdict = self._absent() if now > deadline else None
            if verdict:
                self._stop(verdict)
            if now - ticked_at > self._silent_seconds / 8:
                ticked_at = now
                self._send_all(wire.Tick(self._missing()))

    def _absent(self) -> StuckVerdict:
        missing = self._missing()
        return StuckVerdict(
            f"{processes_text(missing)} of {self._processes} did not join within "
            f"{self._timeout_seconds:.0f} s: see {'its' if len(missing) == 1 else 'their'} "
            "output",
            missing,
        )

    def _stop(self, verdict: StuckVerdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._send_all(verdict)

    def _send_all(self, message: wire.Message) -> None:
        # Process 0 last: it may be about to exit, and the others need the message first.
        for process in sorted(self._peers, reverse=True):
            self._peers[process].send(message)
