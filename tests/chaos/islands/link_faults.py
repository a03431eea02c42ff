"""Faults of the links between islands, which reach each other through a proxy."""

import json
import time
from collections.abc import Sequence

from chaos.islands.deaths import named
from chaos.islands.links import Wire
from chaos.islands.sizes import PATIENCE_SECONDS, STEPS
from chaos.islands.trial import Trial


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
    trial.strike(f"divide {named(side)} from {named(other)} for {seconds:.1f} s")
    began = time.time()
    for wire in wires:
        wire.stall()
    trial.pause(seconds)
    _check_sides(trial, [side, other], began + 0.1, time.time())
    for wire in wires:
        wire.heal()


def _check_sides(trial: Trial, sides: Sequence[Sequence[int]], since: float, to: float) -> None:
    """Check that not both sides of a partition did steps; the one then may end on the way.

    With rounds it may do so at the end of one.
    """
    every = json.loads(trial.env.get("CHAOS_ROUNDS", "{}")).get("every", 1)
    done = []
    for side in sides:
        steps = {s for at, s, name in trial.steps() if since < at < to and _of(name) in side}
        done.append(steps)
    both = min(len(steps) for steps in done) > every
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
