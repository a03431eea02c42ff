"""Faults that stop islands for a while, by SIGSTOP."""

import time

from chaos.islands.deaths import named
from chaos.islands.sizes import PATIENCE_SECONDS, STEPS
from chaos.islands.trial import Trial


def freeze(trial: Trial) -> None:
    """Stop one or two for longer than the patience of the others."""
    if not trial.a_step(last=STEPS - 20):
        return
    victims = trial.pick(trial.chance.choice((1, 1, 1, trial.islands - 1)))
    starts = [trial.of(island) for island in victims]
    trial.strike(f"freeze {named(victims)}")
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
        trial.strike(f"freeze {named(victims)} briefly")
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
