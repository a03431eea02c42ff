"""Faults that end islands, by SIGKILL or SIGTERM."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

from chaos.islands.sizes import STEPS
from chaos.islands.trial import Start, Trial


def kill(trial: Trial) -> None:
    if trial.any_moment():
        kill_now(trial, trial.pick(1))


def kill_now(trial: Trial, victims: Sequence[int], why: str = "kill") -> None:
    starts = [trial.of(island) for island in victims if trial.of(island).lives]
    trial.strike(f"{why} {named(victims)}")
    for start in starts:
        start.kill()


def named(islands: Sequence[int]) -> str:
    return ",".join(map(str, islands))


def kill_two(trial: Trial) -> None:
    if trial.any_moment():
        kill_now(trial, trial.pick(2))


def kill_others(trial: Trial) -> None:
    """Kill all but one; it may have to finish alone."""
    if not trial.any_moment():
        return
    one = trial.chance.randrange(trial.islands)
    others = [island for island in range(trial.islands) if island != one]
    if trial.chance.random() < 0.3:
        trial.hold(others)
        trial.say("held")
    kill_now(trial, others)
    trial.pause(trial.chance.uniform(0.5, 4.0))


def kill_all(trial: Trial) -> None:
    if trial.any_moment():
        kill_now(trial, range(trial.islands))


def kill_many(trial: Trial) -> None:
    """Kill one or two, again and again."""
    for _ in range(trial.chance.randrange(2, 7)):
        if not trial.pause(trial.chance.uniform(0.0, 1.5)):
            return
        living = trial.living()
        if living:
            kill_now(trial, trial.pick(trial.chance.choice((1, 1, 2)), living))


def kill_unproven(trial: Trial) -> None:
    """Kill islands of which the others cannot tell that they are dead, and not only unreachable."""
    if trial.any_moment():
        kill_now(trial, trial.pick(trial.chance.randrange(1, trial.islands)))


def kill_saving(trial: Trial) -> None:
    """Kill the writing island while a checkpoint is written or renamed."""
    saves = trial.chance.randrange(1, STEPS // 3)
    begun = trial.until(lambda: trial.saves_begun() >= saves)
    if begun and trial.pause(trial.chance.uniform(0.0, 0.02)):
        writer = trial.writer()
        victims = trial.pick(1) if writer < 0 else [writer]
        if trial.chance.random() < 0.3:
            victims = sorted({*victims, *trial.pick(1)})
        kill_now(trial, victims, "kill saving")


def kill_joining(trial: Trial) -> None:
    """Kill one, and once it is back the joiner, another one, the writing one or two of them."""
    if not trial.a_step(last=STEPS - 25):
        return
    victim = trial.pick(1)[0]
    before = trial.of(victim)
    kill_now(trial, [victim])
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
        kill_now(trial, chosen, f"kill {whom}")


def _is_back(trial: Trial, island: int, before: Start) -> Callable[[], bool]:
    return lambda: trial.of(island) is not before


def _has_stepped(trial: Trial, start: Start) -> Callable[[], bool]:
    return lambda: trial.has_stepped(start) or not start.lives


def fresh_left(trial: Trial) -> None:
    """Kill all others at the moment at which a new island joins."""
    if not trial.a_step(last=STEPS // 3):  # it takes a while to come back
        return
    victim = trial.pick(1)[0]
    before = trial.of(victim)
    kill_now(trial, [victim])
    if trial.until(_is_back(trial, victim, before)):
        if trial.chance.random() < 0.5:
            trial.pause(trial.chance.uniform(0.5, 1.8))
        else:
            trial.until(_has_stepped(trial, trial.of(victim)))
    trial.missed = trial.done_at is not None
    if not trial.missed:
        kill_now(trial, [island for island in range(trial.islands) if island != victim])


def launched(trial: Trial) -> None:
    """Kill islands of `replicax launch`, which starts them again."""
    for _ in range(trial.chance.choice((1, 1, 2, 3))):
        if not trial.a_step():
            return
        pids = trial.pids()
        count = trial.chance.choice((1, 1, 2, len(pids)))
        victims = trial.chance.sample(sorted(pids), min(count, len(pids)))
        trial.strike(f"kill {named(sorted(victims))} under the launcher")
        for island in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[island], signal.SIGKILL)
        trial.pause(trial.chance.uniform(0.0, 2.0))


def term(trial: Trial) -> None:
    """SIGTERM to one or all."""
    if trial.any_moment():
        everyone = trial.chance.random() < 0.4
        victims = range(trial.islands) if everyone else trial.pick(1)
        trial.strike(f"SIGTERM {named(victims)}")
        for island in victims:
            start = trial.of(island)
            start.terminated = True
            start.child.signal(signal.SIGTERM)
