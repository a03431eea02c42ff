"""Kinds of fault: each disturbs a trial while it runs; `Trial.finish` then waits for its end."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence

from chaos_islands.links import Wire
from chaos_islands.sizes import STEPS
from chaos_islands.trial import Start, Trial
from support.island_networks import RawIsland
from support.island_strangers import IslandStrangers

from replicax.cluster.secret import Secret
from replicax.islands.island_place import IslandPlace

PATIENCE_SECONDS = 1.5
_PATIENT = {"REPLICAX_SILENT_SECONDS": f"{PATIENCE_SECONDS:g}"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        what: as the table says it.
        inject: disturbs a trial that has begun.
        islands: numbers of islands that it may have, each as often as it is here.
        env: of the islands.
        linked: whether the islands reach each other through a proxy.
        quiet: whether no island may end early.
        disk: whether the run has a small disk of its own.
        launched: whether `replicax launch` starts the islands.
        codes: exit codes that an island may have, besides 0 and 75.
    """

    what: str
    inject: Callable[[Trial], None]
    islands: Sequence[int] = (3, 3, 4)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    linked: bool = False
    quiet: bool = False
    disk: bool = False
    launched: bool = False
    codes: Sequence[int] = ()


# Deaths.


def kill(trial: Trial) -> None:
    if trial.any_moment():
        _kill(trial, trial.pick(1))


def _kill(trial: Trial, victims: Sequence[int], why: str = "kill") -> None:
    starts = [trial.of(island) for island in victims if trial.of(island).lives]
    trial.strike(f"{why} {_named(victims)}")
    for start in starts:
        start.kill()


def _named(islands: Sequence[int]) -> str:
    return ",".join(map(str, islands))


def kill_two(trial: Trial) -> None:
    if trial.any_moment():
        _kill(trial, trial.pick(2))


def kill_others(trial: Trial) -> None:
    """Kill all but one; it may have to finish alone."""
    if not trial.any_moment():
        return
    one = trial.chance.randrange(trial.islands)
    others = [island for island in range(trial.islands) if island != one]
    if trial.chance.random() < 0.3:
        trial.hold(others)
        trial.told.append("held")
    _kill(trial, others)
    trial.pause(trial.chance.uniform(0.5, 4.0))


def kill_all(trial: Trial) -> None:
    if trial.any_moment():
        _kill(trial, range(trial.islands))


def kill_many(trial: Trial) -> None:
    """Kill one or two, again and again."""
    for _ in range(trial.chance.randrange(2, 7)):
        if not trial.pause(trial.chance.uniform(0.0, 1.5)):
            return
        living = trial.living()
        if living:
            _kill(trial, trial.pick(trial.chance.choice((1, 1, 2)), living))


def kill_unproven(trial: Trial) -> None:
    """Kill islands of which the others cannot tell that they are dead, and not only unreachable."""
    if trial.any_moment():
        _kill(trial, trial.pick(trial.chance.randrange(1, trial.islands)))


def kill_saving(trial: Trial) -> None:
    """Kill the writing island while a checkpoint is written or renamed."""
    saves = trial.chance.randrange(1, STEPS // 3)
    seen: set[str] = set()
    checkpoints = trial.folder / "run" / "checkpoints"

    def saving() -> bool:
        seen.update(path.name for path in checkpoints.glob(".saving-*"))
        return len(seen) >= saves

    if trial.until(saving) and trial.pause(trial.chance.uniform(0.0, 0.02)):
        writer = trial.writer()
        victims = trial.pick(1) if writer < 0 else [writer]
        if trial.chance.random() < 0.3:
            victims = sorted({*victims, *trial.pick(1)})
        _kill(trial, victims, "kill saving")


def kill_sending(trial: Trial) -> None:
    """Kill an island between two bytes that it sends; the rest never arrives."""
    victim, other = trial.chance.sample(range(trial.islands), 2)
    wires = [_wire(trial, victim, each) for each in range(trial.islands) if each != victim]
    if not trial.a_step():
        return

    def spring(_rest: bytes) -> None:
        trial.strike(f"kill {victim} sending to {other}")
        trial.of(victim).kill()

    _wire(trial, victim, other).trap(victim, trial.chance.randrange(1, 4000), spring)
    if trial.until(lambda: trial.struck, 3.0):
        for wire in wires:
            if trial.chance.random() < 0.5:
                wire.cut()


def _wire(trial: Trial, one: int, other: int) -> Wire:
    assert trial.links is not None
    return trial.links.wires[max(one, other), min(one, other)]


def kill_joining(trial: Trial) -> None:
    """Kill one, and once it is back the joiner, another one, the writing one or two of them."""
    if not trial.a_step(last=STEPS - 25):
        return
    victim = trial.pick(1)[0]
    before = trial.of(victim)
    _kill(trial, [victim])
    for _ in range(trial.chance.choice((1, 1, 2))):
        if not trial.until(_is_back(trial, victim, before)):
            return
        joiner = before = trial.of(victim)
        # Compiling takes a moment; the state is given just before the first step.
        if trial.chance.random() < 0.5:
            trial.pause(trial.chance.uniform(0.2, 1.8))
        else:
            trial.until(_has_stepped(trial, joiner))
            trial.pause(trial.chance.uniform(0.0, 0.05))
        if trial.done_at is not None:
            return
        others = [island for island in trial.living() if island != victim]
        if not others:
            return
        whom = trial.chance.choice(("joiner", "other", "giver", "both"))
        chosen = {"joiner": [victim], "other": [trial.chance.choice(others)]}.get(whom)
        if chosen is None:
            giver = trial.writer()
            giver = giver if giver in others else others[0]
            chosen = [giver] if whom == "giver" else sorted({giver, victim})
        _kill(trial, chosen, f"kill {whom}")


def _is_back(trial: Trial, island: int, before: Start) -> Callable[[], bool]:
    return lambda: trial.of(island) is not before


def _has_stepped(trial: Trial, start: Start) -> Callable[[], bool]:
    return lambda: trial.has_stepped(start) or not start.lives


def fresh_left(trial: Trial) -> None:
    """Kill all others at the moment at which a new island joins."""
    if not trial.a_step(last=STEPS - 25):
        return
    victim = trial.pick(1)[0]
    before = trial.of(victim)
    _kill(trial, [victim])
    if not trial.until(_is_back(trial, victim, before)):
        return
    if trial.chance.random() < 0.5:
        trial.pause(trial.chance.uniform(0.5, 1.8))
    else:
        trial.until(_has_stepped(trial, trial.of(victim)))
    if trial.done_at is None:
        _kill(trial, [island for island in range(trial.islands) if island != victim])


def launched(trial: Trial) -> None:
    """Kill islands of `replicax launch`, which starts them again."""
    for _ in range(trial.chance.choice((1, 1, 2, 3))):
        if not trial.a_step():
            return
        pids = trial.pids()
        count = trial.chance.choice((1, 1, 2, len(pids)))
        victims = trial.chance.sample(sorted(pids), min(count, len(pids)))
        trial.strike(f"kill {_named(sorted(victims))} under the launcher")
        for island in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[island], signal.SIGKILL)
        trial.pause(trial.chance.uniform(0.0, 2.0))


def term(trial: Trial) -> None:
    """SIGTERM to one or all."""
    if trial.any_moment():
        everyone = trial.chance.random() < 0.4
        victims = range(trial.islands) if everyone else trial.pick(1)
        trial.strike(f"SIGTERM {_named(victims)}")
        for island in victims:
            start = trial.of(island)
            start.terminated = True
            start.child.signal(signal.SIGTERM)


# Frozen and slow islands.


def freeze(trial: Trial) -> None:
    """Stop one or two for longer than the patience of the others."""
    if not trial.a_step(last=STEPS - 20):
        return
    victims = trial.pick(trial.chance.choice((1, 1, 1, trial.islands - 1)))
    starts = [trial.of(island) for island in victims]
    trial.strike(f"freeze {_named(victims)}")
    for start in starts:
        start.stop()
    trial.pause(PATIENCE_SECONDS * trial.chance.uniform(1.2, 2.5))
    for start in starts:
        start.go_on()


def freeze_short(trial: Trial) -> None:
    """Stop one for less than the patience."""
    for _ in range(trial.chance.randrange(1, 4)):
        if not trial.a_step():
            return
        victims = trial.pick(trial.chance.choice((1, 1, 2, trial.islands)))
        trial.strike(f"freeze {_named(victims)} briefly")
        for island in victims:
            trial.of(island).stop()
        time.sleep(PATIENCE_SECONDS * trial.chance.uniform(0.05, 0.4))
        for island in victims:
            trial.of(island).go_on()


def slow(trial: Trial) -> None:
    """Let one run only in short pulses for some time."""
    if not trial.a_step():
        return
    start = trial.of(trial.pick(1)[0])
    trial.strike(f"slow {start.island}")
    for _ in range(trial.chance.randrange(10, 40)):
        start.stop()
        time.sleep(trial.chance.uniform(0.02, 0.15))
        start.go_on()
        if not trial.pause(trial.chance.uniform(0.01, 0.05)):
            break


# Links.


def partition(trial: Trial) -> None:
    """Let nothing through between two sides, for longer than the patience or not."""
    if not trial.a_step(last=STEPS - 20):
        return
    islands = list(range(trial.islands))
    trial.chance.shuffle(islands)
    side = sorted(islands[: trial.chance.randrange(1, trial.islands // 2 + 1)])
    _divide(trial, side, PATIENCE_SECONDS * trial.chance.uniform(0.3, 3.5))


def _divide(trial: Trial, side: Sequence[int], seconds: float) -> None:
    assert trial.links is not None
    other = [island for island in range(trial.islands) if island not in side]
    wires = trial.links.between(side, other)
    trial.strike(f"divide {_named(side)} from {_named(other)} for {seconds:.1f} s")
    began = time.time()
    for wire in wires:
        wire.stall()
    trial.pause(seconds)
    _check_sides(trial, [side, other], began + 0.1, time.time())
    for wire in wires:
        wire.heal()


def _check_sides(trial: Trial, sides: Sequence[Sequence[int]], since: float, to: float) -> None:
    """Check that not both sides of a partition did steps; the one then may end on the way."""
    done = []
    for side in sides:
        steps = {s for at, s, name in trial.steps() if since < at < to and _of(name) in side}
        done.append(steps)
    both = min(len(steps) for steps in done) > 1
    trial.check(not both, f"both sides of a partition went on: steps {done}")


def _of(name: str) -> int:
    return int(name.split("-")[0])


def halves(trial: Trial) -> None:
    """Divide them 2|2 or 1|2 until long after the patience of all, perhaps to the end."""
    if not trial.a_step(last=STEPS - 20):
        return
    islands = list(range(trial.islands))
    trial.chance.shuffle(islands)
    long = trial.chance.random() < 0.3
    seconds = 12.0 if long else PATIENCE_SECONDS * trial.chance.uniform(1.5, 4.0)
    _divide(trial, sorted(islands[: trial.islands // 2]), seconds)


def cut(trial: Trial) -> None:
    """Cut connections after any byte, once or often."""
    assert trial.links is not None
    wires = list(trial.links.wires.values())
    for _ in range(trial.chance.choice((1, 1, 2, 4))):
        if not trial.pause(trial.chance.uniform(0.0, 1.0)) or not trial.a_step():
            return
        wire = trial.chance.choice(wires)

        def spring(_rest: bytes, wire: Wire = wire) -> None:
            trial.strike(f"cut {wire.pair}")

        wire.trap(trial.chance.choice(wire.pair), trial.chance.randrange(3000), spring)
        trial.pause(0.3)


def corrupt(trial: Trial) -> None:
    """Flip one bit on its way."""
    assert trial.links is not None
    wires = list(trial.links.wires.values())
    for _ in range(trial.chance.choice((1, 2, 4))):
        if not trial.any_moment():
            return
        wire, bit = trial.chance.choice(wires), trial.chance.randrange(8)

        def spring(rest: bytes, wire: Wire = wire, bit: int = bit) -> bytes:
            trial.strike(f"flip bit {bit} of {rest[:1]!r} on {wire.pair}")
            return bytes([rest[0] ^ 1 << bit]) + rest[1:]

        wire.trap(trial.chance.choice(wire.pair), trial.chance.randrange(6000), spring)
        trial.pause(trial.chance.uniform(0.1, 0.6))


def slow_link(trial: Trial) -> None:
    """Delay all that one or all pairs of islands send, to the end or for a moment."""
    assert trial.links is not None
    if not trial.any_moment():
        return
    wires = list(trial.links.wires.values())
    chosen = wires if trial.chance.random() < 0.3 else [trial.chance.choice(wires)]
    delay, rate = trial.chance.uniform(0.001, 0.03), 10 ** trial.chance.uniform(4.5, 6)
    trial.strike(f"slow {[wire.pair for wire in chosen]}: {delay:.3f} s, {rate / 1000:.0f} kB/s")
    for wire in chosen:
        wire.slow(delay, rate)
    if trial.chance.random() < 0.5:
        trial.pause(trial.chance.uniform(0.5, 3.0))
        for wire in chosen:
            wire.heal()


# The world outside.


def strangers(trial: Trial) -> None:
    """Let strangers come to all ports, and one who knows all but the secret."""
    place = IslandPlace(
        trial.islands - 1,
        tuple(f"127.0.0.1:{port}" for port in trial.ports),
        trial.folder.name,
        Secret(b"a guess"),
    )
    visitors = [IslandStrangers(place, port, trial.seed + port) for port in trial.ports]
    if not trial.pause(trial.chance.uniform(0.0, 2.0)):
        return
    trial.strike("strangers")
    try:
        for _ in range(trial.chance.randrange(20, 100)):
            with contextlib.suppress(OSError):
                trial.chance.choice(visitors).come()
            if trial.chance.random() < 0.1:
                guest = RawIsland(place, trial.chance.randrange(trial.islands - 1))
                with contextlib.suppress(OSError, ValueError):
                    guest.join()
                    trial.wrong.append("an island without the secret has joined")
                guest.close()
            if not trial.pause(trial.chance.uniform(0.0, 0.05)):
                break
    finally:
        for visitor in visitors:
            visitor.leave()


def disk_full(trial: Trial) -> None:
    """Fill the disk of the run for some time, perhaps when the writing island dies."""
    if trial.disk is None:
        trial.missed = True  # nothing can be mounted here
        return
    if not trial.a_step(last=STEPS - 25):
        return
    trial.strike("fill the disk")
    trial.disk.fill(trial.chance.choice((0, 0, 5000, 20_000)))
    trial.pause(trial.chance.uniform(0.1, 0.5))
    if trial.chance.random() < 0.5:
        writer = trial.writer()
        _kill(trial, trial.pick(1) if writer < 0 else [writer])
    trial.pause(trial.chance.uniform(0.1, 0.8))
    trial.disk.empty()


THREE = (3,)
FAULTS = {
    "kill": Fault("kill -9 of one at any time", kill),
    "kill-two": Fault("kill -9 of two at once", kill_two),
    "kill-others": Fault("kill -9 of all but one", kill_others),
    "kill-all": Fault("kill -9 of all", kill_all),
    "kill-many": Fault("kill -9 again and again", kill_many),
    "kill-unproven": Fault(
        "kill -9 of 1 to n-1 on other hosts", kill_unproven, env={"CHAOS_HOSTS": "1"}
    ),
    "kill-saving": Fault("kill -9 while saving", kill_saving, env={"CHAOS_SAVE_EVERY": "3"}),
    "kill-sending": Fault("kill -9 between two bytes", kill_sending, linked=True),
    "kill-joining": Fault("kill -9 while one joins", kill_joining),
    "fresh-left": Fault("kill -9 of all but a joiner", fresh_left),
    "term": Fault("SIGTERM to one or all", term),
    "freeze": Fault("SIGSTOP beyond the patience", freeze, env=_PATIENT),
    "freeze-short": Fault("SIGSTOP within the patience", freeze_short, env=_PATIENT, quiet=True),
    "slow": Fault("SIGSTOP in short pulses", slow, env=_PATIENT, quiet=True),
    "partition": Fault("nothing gets through", partition, env=_PATIENT, linked=True),
    "halves": Fault("2|2 or 1|2 divided for long", halves, (4, 4, 3), _PATIENT, linked=True),
    "cut": Fault("connections cut at any byte", cut, linked=True),
    "corrupt": Fault("a bit flipped on its way", corrupt, env=_PATIENT, linked=True),
    "slow-link": Fault("slow connections", slow_link, linked=True, quiet=True),
    "strangers": Fault("strangers at the ports", strangers, quiet=True),
    "disk-full": Fault(
        "disk full, perhaps a death",
        disk_full,
        env={"CHAOS_SAVE_EVERY": "3"},
        disk=True,
        codes=(1,),  # after three saves that failed a run stops, as without islands
    ),
    "launch": Fault(
        "kill -9 under replicax launch",
        launched,
        THREE,
        {"CHAOS_STEP_SECONDS": "0.1"},  # its starts import everything anew
        launched=True,
    ),
}
