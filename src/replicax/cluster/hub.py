"""The meeting place that process 0 keeps open: it admits the processes of one job, passes on what
they tell each other, and decides when one of them is lost or stuck.

A star over TCP, beside the devices' own network, so that it works when that one hangs.
"""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from replicax.cluster.differences import differences, processes_text
from replicax.cluster.pulse import Standing
from replicax.cluster.verdict import Member, Verdict, Waiting, judge
from replicax.cluster.wire import LONGEST_LINE_BYTES, Message, decode, encode

HELLO_SECONDS = 10.0
"""How long who connects may take to say who it is."""
LOOK_SECONDS = 0.1
"""Between two looks at who is stuck."""
_COLLATERAL_SECONDS = 1.0
"""How long a failure that looks like somebody else's waits for that other one to be known."""


class Hub:
    """Serves one job on `listening` from a thread of its own until `close`.

    Args:
        listening: a bound socket that listens.
        job: the id that every process must bring.
        processes: how many are to come.
        silent_seconds: without a sign of life before a process counts as frozen.
        timeout_seconds: until all must have come.
        prepare: called once with what each process told of itself, in order; its result is sent
            to all with the start.
    """

    def __init__(
        self,
        listening: socket.socket,
        job: str,
        processes: int,
        *,
        silent_seconds: float,
        timeout_seconds: float,
        prepare: Callable[[list[Message]], Message],
    ) -> None:
        self._listening, self._job, self._processes = listening, job, processes
        self._silent_seconds, self._timeout_seconds = silent_seconds, timeout_seconds
        self._prepare = prepare
        self._members: dict[int, Member] = {}
        self._hellos: dict[int, Message] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._gathers: dict[str, _Gather] = {}
        self._started = False
        self._suspecting = False
        """Whether a process failed that may be a victim: nobody waits for it any more."""
        self._verdict: Verdict | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._meet, sock=self._listening, limit=LONGEST_LINE_BYTES
        )
        watching = asyncio.ensure_future(self._watch())
        await self._closing.wait()
        watching.cancel()
        server.close()  # each connection is closed by its own task, which the runner cancels

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its first word to its last."""
        process = None
        try:
            hello = decode(await asyncio.wait_for(reader.readline(), HELLO_SECONDS))
            refusal = self._refusal(hello)
            if refusal:
                writer.write(encode({"refused": refusal}))
                return
            process = self._admit(hello, writer)
            while line := await reader.readline():
                self._take(process, decode(line))
        except (TimeoutError, OSError, ValueError, KeyError, TypeError):
            pass  # a stranger's noise, or a connection that broke: both end below
        except asyncio.CancelledError:
            pass  # the hub closes, and Python 3.11 would log that as an error
        finally:
            if process is not None:
                self._lost(process)
            with contextlib.suppress(OSError):
                writer.close()

    def _refusal(self, hello: Message) -> str | None:
        process, processes, job = hello["process"], hello["processes"], hello["job"]
        if job != self._job:
            return f"job {self._job!r} has this port, and this process belongs to job {job!r}"
        if hello.get("asks"):
            return f"job {self._job!r} of {self._processes} processes has it already"
        if processes != self._processes:
            return f"the job has {self._processes} processes, and this one was told {processes}"
        if type(process) is not int or not 0 <= process < self._processes:
            return f"processes count from 0 to {self._processes - 1}, and this one is {process!r}"
        if process in self._members:
            return f"{self._members[process]} is already in the job"
        if self._verdict:
            return self._verdict.reason
        return None

    def _admit(self, hello: Message, writer: asyncio.StreamWriter) -> int:
        process: int = hello["process"]
        self._members[process] = Member(
            process, str(hello["host"]), int(hello["pid"]), time.monotonic()
        )
        self._hellos[process], self._writers[process] = hello, writer
        self._send(process, {"welcome": self._missing()})
        if not self._missing():
            self._start()
        return process

    def _missing(self) -> list[int]:
        return [p for p in range(self._processes) if p not in self._members]

    def _start(self) -> None:
        hellos = [self._hellos[process] for process in range(self._processes)]
        if found := differences([hello["versions"] for hello in hellos]):
            text = f"the processes differ: {'; '.join(found)}: start all in the same environment"
            self._stop(Verdict(text, []))
            return
        try:
            prepared = self._prepare(hellos)
        except Exception as error:
            self._stop(Verdict(str(error), []))
            return
        self._started = True
        now = time.monotonic()
        for member in self._members.values():
            member.heard_at = now
        names = [str(self._members[process]) for process in range(self._processes)]
        self._send_all({"go": {**prepared, "names": names}})

    def _take(self, process: int, message: Message) -> None:
        member = self._members[process]
        member.heard_at = time.monotonic()
        if "beat" in message:
            member.standing = Standing(**message["beat"])
        elif "gather" in message:
            self._gather(process, message)
        elif "withdraw" in message:
            self._withdraw(process, message["withdraw"])
        elif "accuse" in message:
            self._stop(Verdict(**message["accuse"]))
        elif "stop" in message:
            self._stop(Verdict(str(message["stop"]), [], code=int(message["code"])))
        elif "failed" in message:
            member.ended = True
            self._failed(member, message)
        elif "bye" in message:
            member.ended = True

    def _gather(self, process: int, message: Message) -> None:
        topic = message["gather"]
        gather = self._gathers.setdefault(topic, _Gather(time.monotonic()))
        gather.values[process] = message["value"]
        gather.patience_seconds[process] = float(message.get("patience_seconds") or 0.0)
        if len(gather.values) == self._processes:
            del self._gathers[topic]
            values = [gather.values[p] for p in range(self._processes)]
            self._send_all({"gathered": topic, "values": values})

    def _withdraw(self, process: int, topic: str) -> None:
        gather = self._gathers.get(topic)
        if gather is not None:
            gather.values.pop(process, None)
            gather.patience_seconds.pop(process, None)
            if not gather.values:
                del self._gathers[topic]

    def _failed(self, member: Member, message: Message) -> None:
        verdict = Verdict(f"{member} failed: {message['failed']}", [member.process])
        if message.get("collateral"):
            self._suspecting = True
            self._loop.call_later(_COLLATERAL_SECONDS, self._stop, verdict)
        else:
            self._stop(verdict)

    def _lost(self, process: int) -> None:
        member = self._members[process]
        del self._writers[process]
        if member.ended or self._verdict or self._closing.is_set():
            return
        if not self._started:
            del self._members[process]  # it may come again; until then it is missing
            return
        end = f"{member} is gone without a word, last heard of at step {member.standing.begun}"
        self._stop(Verdict(f"{end}: killed, crashed, or cut off", [process]))

    async def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        looked_at = told_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - looked_at > LOOK_SECONDS + self._silent_seconds / 4:
                # We were frozen ourselves, and cannot know who else was.
                for member in self._members.values():
                    member.heard_at += now - looked_at
                for gather in self._gathers.values():
                    gather.since += now - looked_at
            looked_at = now
            if self._verdict or self._suspecting:
                continue
            if self._started:
                self._judge(now)
            elif now > deadline:
                self._stop(Verdict(self._absent(), self._missing()))
            if now - told_at > self._silent_seconds / 8:
                told_at = now
                self._send_all({"tick": self._missing()})

    def _judge(self, now: float) -> None:
        waiting = [
            Waiting(
                topic,
                gather.since,
                [p for p in self._members if p not in gather.values],
                max(gather.patience_seconds.values()),
            )
            for topic, gather in self._gathers.items()
        ]
        verdict = judge(self._members, waiting, now, self._silent_seconds)
        if verdict:
            self._stop(verdict)

    def _absent(self) -> str:
        missing = self._missing()
        return (
            f"{processes_text(missing)} of {self._processes} did not come within "
            f"{self._timeout_seconds:.0f} s: see why in {'its' if len(missing) == 1 else 'their'} "
            "output"
        )

    def _stop(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._send_all({"stop": dataclasses.asdict(verdict)})

    def _send_all(self, message: Message) -> None:
        # This process last: it may be about to exit, and the others are to know why.
        for process in sorted(self._writers, reverse=True):
            self._send(process, message)

    def _send(self, process: int, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._writers[process].write(encode(message))


@dataclasses.dataclass
class _Gather:
    """Values on one topic that have come so far."""

    since: float
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    patience_seconds: dict[int, float] = dataclasses.field(default_factory=dict)
