"""Checks of the way from this island to each other one: address, port, secret, time and clock."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from replicax.cluster.variables import JOB_ID
from replicax.doctor.between import MOST_SECONDS, seconds_text
from replicax.doctor.combined import finding_and_fix
from replicax.errors import ClusterError
from replicax.islands.handshake import INQUIRES, Handshakes
from replicax.islands.inquiry import Distance, answer_inquiry, bytes_per_second, inquire
from replicax.islands.island_listener import IslandListener, connect
from replicax.islands.island_place import IslandPlace, find_island
from replicax.islands.island_variables import ISLANDS
from replicax.islands.messages import Greeting
from replicax.net.address import split_address
from replicax.net.channel import Channel
from replicax.net.proof import RefusedError
from replicax.net.secret import SECRET
from replicax.text.checks import FAIL, NOTE, PASS, Check
from replicax.text.wording import listed, size_text

ISLANDS_CHECK = "islands"
_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.2
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 10.0


def check_islands(
    env: Mapping[str, str], timeout_seconds: float, say: Callable[[str], None]
) -> list[Check]:
    """Check the way to each other island: a program that trains, or another `replicax doctor`.

    Waits up to `timeout_seconds` for those that nobody has started yet. `ConfigError` if the
    variables of the islands are wrong.
    """
    place = find_island(env)
    if place is None:
        return []
    inquiries = _Inquiries(place, timeout_seconds, say)
    others = [index for index in range(len(place.addresses)) if index != place.index]
    try:
        with inquiries.listening(), ThreadPoolExecutor(max(len(others), 1)) as threads:
            reached = list(threads.map(inquiries.reach, others))
            rows = [each if isinstance(each, Check) else inquiries.judge(*each) for each in reached]
            inquiries.close()  # which tells the others that this one has asked
            inquiries.wait_for_others()
    finally:
        inquiries.close()
    return [*inquiries.own, *rows]


class _Inquiries:
    """Inquiries of this island, which also answers those of others."""

    def __init__(
        self, place: IslandPlace, timeout_seconds: float, say: Callable[[str], None]
    ) -> None:
        self.own: list[Check] = []
        """Problems of this island itself."""
        self._place, self._say = place, say
        self._deadline = time.monotonic() + timeout_seconds
        self._handshakes = Handshakes(place, secrets.token_hex(8))
        self._open: dict[int, Channel] = {}
        self._doctors: set[int] = set()
        self._asked_by: set[int] = set()
        self._changed = threading.Condition()
        self._answering: set[Channel] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Answer other islands meanwhile, if this one can listen."""
        try:
            listener = IslandListener(self._place, self._handshakes, self._answer)
        except ClusterError as error:
            self.own.append(Check(ISLANDS_CHECK, "", FAIL, *finding_and_fix(str(error))))
            yield
            return
        try:
            yield
        finally:
            threads = listener.close()
            with self._changed:
                for channel in self._answering:
                    channel.end()
            for thread in threads:
                thread.join(_CONNECT_SECONDS)

    def _answer(self, hello: Greeting, channel: Channel, accept: Callable[[], None]) -> None:
        if refusal := self._handshakes.refusal(hello):
            raise ValueError(refusal)
        if hello.purpose != INQUIRES:
            raise ValueError(f"island {self._place.index} is a replicax doctor, and ends soon")
        accept()
        with self._changed:
            self._answering.add(channel)
        with contextlib.suppress(OSError, ValueError):
            answer_inquiry(channel, trains=False)
        with self._changed:
            self._answering.remove(channel)
            self._asked_by.add(hello.island)
            self._changed.notify_all()
        channel.close()

    def reach(self, other: int) -> Check | tuple[int, Distance]:
        """Return the distance to an island, or what is wrong."""
        address = self._place.addresses[other]
        host, port = split_address(address, ISLANDS)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found = f"the name {host!r} cannot be resolved here ({error.strerror})"
            return self._wrong(other, found, f"correct it in {ISLANDS}, or use the address")
        try:
            channel = self._connected(other)
        except OSError as error:
            fix = f"let this host reach {host} on port {port}, or use another network"
            if isinstance(error, ConnectionRefusedError):
                fix = f"start island {other} there, or replicax doctor, or correct {ISLANDS}"
            return self._wrong(other, f"not reachable: {error.strerror or error}", fix)
        try:
            self._handshakes.dial(channel, other, INQUIRES)
            distance = inquire(channel)
        except (OSError, ValueError) as error:
            received = channel.received_bytes
            channel.close()
            return self._wrong(other, *_refused(error, received))
        with self._changed:
            self._open[other] = channel  # until `close`: its end says that this one has asked
            if not distance.trains:
                self._doctors.add(other)
        return other, distance

    def _connected(self, other: int) -> Channel:
        """Return a connection; `OSError` if there is none until the deadline."""
        said = time.monotonic()
        while True:
            try:
                return connect(self._place.addresses[other], _CONNECT_SECONDS)
            except OSError:
                if time.monotonic() > self._deadline:
                    raise
            if time.monotonic() > said + _SAY_SECONDS:
                said = time.monotonic()
                self._say(f"waiting for island {other} at {self._place.addresses[other]}")
            time.sleep(_AGAIN_SECONDS)

    def judge(self, other: int, distance: Distance) -> Check:
        """Return the row of an island that was reached, with the rate to it if it is a doctor."""
        trip, ahead = distance.round_trip_seconds, distance.ahead_seconds
        figures: dict[str, object] = {"island": other, "address": self._place.addresses[other]}
        figures |= {"trains": distance.trains, "round_trip_seconds": trip, "ahead_seconds": ahead}
        parts = ["trains" if distance.trains else "a doctor, too"]
        parts.append(f"{seconds_text(trip)} round trip")
        if not distance.trains:
            try:
                rate = bytes_per_second(self._open[other], trip)
            except (OSError, ValueError) as error:
                return self._wrong(other, f"lost meanwhile: {error}", "see its output")
            figures["bytes_per_second"] = rate
            parts.append(f"{size_text(rate)}/s")
        way = "ahead" if ahead > 0 else "behind"
        parts.append(f"clock {seconds_text(abs(ahead))} {way}, ± {seconds_text(trip / 2)}")
        found = f"{self._named(other)}: {' · '.join(parts)}"
        if abs(ahead) - trip / 2 <= MOST_SECONDS:
            return Check(ISLANDS_CHECK, "", PASS, found, figures=figures)
        fix = "synchronise the hosts' clocks (chrony, systemd-timesyncd)"
        return Check(ISLANDS_CHECK, "", NOTE, found, fix, figures)

    def wait_for_others(self) -> None:
        """Wait until the doctors that were reached have asked this one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._doctors <= self._asked_by, _LOOK_SECONDS)
                missing = sorted(self._doctors - self._asked_by)
            if self.own or not missing:
                return
            if time.monotonic() > self._deadline or not any(map(self._listens, missing)):
                break
        names = listed([f"island {index}" for index in missing])
        found = f"{names} did not reach this one, at {self._place.addresses[self._place.index]}"
        fix = f"see the output there: a firewall, or another {ISLANDS}"
        self.own.append(Check(ISLANDS_CHECK, "", NOTE, found, fix))

    def _listens(self, other: int) -> bool:
        try:
            connect(self._place.addresses[other], _CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        for channel in self._open.values():
            channel.close()

    def _named(self, other: int) -> str:
        return f"island {other} at {self._place.addresses[other]}"

    def _wrong(self, other: int, found: str, fix: str) -> Check:
        figures = {"island": other, "address": self._place.addresses[other]}
        return Check(ISLANDS_CHECK, "", FAIL, f"{self._named(other)}: {found}", fix, figures)


def _refused(error: OSError | ValueError, received: int) -> tuple[str, str]:
    """Return why an island that is reachable is not one of this job, and the fix."""
    if isinstance(error, RefusedError):
        return f"refuses: {error}", f"give all islands the same {ISLANDS}"
    if isinstance(error, TimeoutError):
        return "listens, but does not answer", "see whether it hangs, or is another program"
    if isinstance(error, OSError):  # islands tell strangers nothing, and close
        if received:
            return "does not accept this secret", f"give all islands the same {SECRET}"
        return "closes at once: another job, or another program", f"compare {JOB_ID} and {ISLANDS}"
    if "secret" in str(error):
        return "does not know this secret", f"give all islands the same {SECRET}"
    if "job" in str(error):
        return "belongs to another job", f"give all islands the same {JOB_ID}"
    return f"{error}", f"give all islands the same {ISLANDS}, in the order of their indices"
