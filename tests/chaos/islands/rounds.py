"""Trials with rounds of steps between exchanges: a lost island costs its round, and no more.

    python tests/chaos/chaos.py --rounds --faults kill,resize --trials 40

Their bits are those of an undisturbed run only if no island was lost in a round; otherwise all
islands end with equal outer parameters, and with about the loss of other seeds.
"""

import json
import random
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chaos.islands.checks import check_ends, read_checkpoint
from chaos.islands.deaths import kill_now, named
from chaos.islands.faults import FAULTS, Fault
from chaos.islands.sizes import STEPS
from chaos.islands.trial import MOST_SECONDS, Trial

JOB = Path(__file__).resolve().parent / "round_job.py"
ROUNDS: tuple[dict[str, Any], ...] = (
    {"every": 5},
    {"every": 10, "send": "int4"},
    {"every": 12, "send": "int4", "fragments": 3},
    {"every": 12, "fragments": 2, "delay": 2},
)
MOST_LOSS = 0.11
"""At the end; 32 undisturbed runs of 3 islands, of 8 seeds, had 0.064 to 0.089."""


def kill_round(trial: Trial) -> None:
    """Kill one or two about when islands exchange what they learned, and vote."""
    every = rounds_of(trial.env)["every"]
    step = every * trial.chance.randrange(1, (STEPS - 8) // every)
    if trial.reach(step - 1, trial.chance.uniform(0.0, 0.12)):
        kill_now(trial, trial.pick(trial.chance.choice((1, 1, 2))), "kill at a round's end")


def end_all(trial: Trial) -> bool:
    """End all islands by SIGTERM, and wait; False if the run was over before."""
    if not trial.a_step(last=STEPS - 30):
        return False
    trial.hold(range(trial.islands))
    starts = [trial.of(island) for island in range(trial.islands)]
    trial.strike(f"SIGTERM {named(range(trial.islands))}")
    for start in starts:
        start.child.signal(signal.SIGTERM)
    return trial.until(lambda: not any(start.lives for start in starts), MOST_SECONDS)


def term_all(trial: Trial) -> None:
    """Restart the run with the same islands."""
    if end_all(trial):
        trial.free()


def resize(trial: Trial) -> None:
    """Restart it with another number of islands."""
    if end_all(trial):
        count = trial.chance.choice([n for n in (1, 2, 3, 4, 5) if n != trial.islands])
        trial.say(f"then {count} islands")
        trial.resize(count)


ROUND_FAULTS = {
    **FAULTS,
    "kill-round": Fault("kill -9 at the end of a round", kill_round),
    "term-all": Fault("SIGTERM to all, then the same islands", term_all, (2, 3, 4), resumes=True),
    "resize": Fault("SIGTERM to all, then more or fewer", resize, (2, 3, 4)),
}
"""Faults of all islands, and of rounds."""


def rounds_of(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(env["CHAOS_ROUNDS"])
    return found


def chosen_rounds(fault: str, seed: int) -> str:
    """Return the rounds of a trial, as its environment has them."""
    several = FAULTS["several"] is ROUND_FAULTS[fault]  # processes, which send nothing later
    possible = [each for each in ROUNDS if not (several and "delay" in each)]
    return json.dumps(random.Random(f"rounds of {fault} {seed}").choice(possible))


def check_rounds(
    trial: Trial, undisturbed: Mapping[str, Any] | None, codes: Collection[int]
) -> None:
    """Check all that must hold at the end; with `undisturbed` also that the bits are the same."""
    check_ends(trial, codes)
    results = trial.results()
    trial.check(results, "no island has completed the run")
    first = next(iter(results.values()), {})
    for name, result in results.items():
        trial.check(result["step"] == STEPS, f"{name} ended at step {result['step']}")
        trial.check(result["loss"] < MOST_LOSS, f"the loss of {name} is {result['loss']:.4f}")
        for other in filter(None, (first, undisturbed)):
            whose = "of another island" if other is first else "undisturbed"
            mine, its = result["agreed"][:16], other["agreed"][:16]
            trial.check(mine == its, f"{name} has {mine}, {whose} {its}")
            pairs = zip(result["records"], other["records"], strict=False)
            differ = [f"{a} and not {b}" for a, b in pairs if a != b]
            trial.check(not differ, f"records of {name} differ, {whose}: {differ[:1]}")
    read_checkpoint(trial.run)  # checks the sums in its manifest
