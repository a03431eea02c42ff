"""Kinds of fault: each starts the run, disturbs it, and restarts it until it is done."""

import dataclasses
import re
import signal
import time
from collections.abc import Callable, Sequence

from chaos.runs import storage
from chaos.runs.corruption import corrupt
from chaos.runs.launched import launched
from chaos.runs.sizes import SAVE_EVERY, STEPS
from chaos.runs.trial import Moment, Start, Trial
from chaos.trial import SAVED
from support.fork_server import Child

GRACE_SECONDS = 30.0
SECOND_SECONDS = 5.0
SILENT_SECONDS = 2.0
FROZEN_SECONDS = SILENT_SECONDS + 5.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        what: as the table says it.
        inject: does it to a trial, up to the end of the run.
        data: that it trains on.
        processes: those it may have, each as often as it is here.
        env: of the trial's processes.
    """

    what: str
    inject: Callable[[Trial], None]
    data: str = "plain"
    processes: Sequence[int] = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4)
    env: dict[str, str] = dataclasses.field(default_factory=dict)


def kill(trial: Trial) -> None:
    """Kill one to three starts at any time."""
    for _ in range(trial.chance.choice((1, 1, 1, 1, 1, 2, 3))):
        start = trial.start()
        struck = trial.wait_for(start, trial.any_moment())
        if not _strike(trial, start, struck):
            return
    trial.finish()


def _strike(trial: Trial, start: Start, struck: bool) -> bool:
    """Kill processes of `start` and measure it; False if it had already finished."""
    if struck:
        victims = trial.victims(start)
        trial.say(f"kill {_numbers(start, victims)} at step {trial.step(victims[0])}")
        since, trial.struck_at = trial.struck_at, None
        trial.kill(start, victims)
        if trial.has_noted(start.children[0], "stepped"):
            again, trial.struck_at = trial.struck_at, since
            trial.measure(start)
            trial.struck_at = again
        return True
    trial.settle(start)
    trial.measure(start)
    done = start.codes == [0] * trial.processes
    trial.check(done, f"an undisturbed start ended with {start.codes}")
    trial.missed = len(trial.starts) == 1
    return False


def kill_saving(trial: Trial) -> None:
    """Kill while a checkpoint is being written or renamed."""
    start = trial.start()
    saves = trial.chance.randrange(1, STEPS // SAVE_EVERY + 1)
    if trial.until(start, lambda: trial.saves_begun() >= saves):
        struck = trial.wait_for(start, _from_now(start, trial.chance.uniform(0, 0.02)))
        if _strike(trial, start, struck):
            trial.finish()
    else:
        _strike(trial, start, False)


def kill_restoring(trial: Trial) -> None:
    """Kill up to three restarts in their first moments."""
    start = trial.start()
    if not _strike(trial, start, trial.wait_for(start, trial.moment_in_training(SAVE_EVERY))):
        return
    for _ in range(trial.chance.choice((1, 1, 2, 3))):
        start = trial.start()
        moment = Moment(trial.chance.uniform(0, 1.2 * trial.reference.first_step_seconds))
        if not _strike(trial, start, trial.wait_for(start, moment)):
            return
    trial.finish()


def corrupted(trial: Trial) -> None:
    """Kill a run and corrupt its newest checkpoint."""
    start = trial.start()
    if not _strike(trial, start, trial.wait_for(start, trial.moment_in_training(SAVE_EVERY + 1))):
        return
    folders = sorted(trial.checkpoints.glob("[0-9]*"), key=lambda path: int(path.name))
    if not folders:
        trial.missed = True
        trial.finish()
        return
    newest, older = folders[-1], folders[-2] if len(folders) > 1 else None
    trial.say(f"{newest.name}: {corrupt(newest, older, trial.chance)}")
    left = [int(path.name) for path in folders[:-1]]
    trial.finish(newest=left[-1] if left else 0)
    said = trial.said(trial.starts[1])
    step = f"{int(newest.name):,}"
    trial.check(re.search(rf"refused step {step}: \w", said), f"step {step} refused without a word")


def term(trial: Trial) -> None:
    """Send SIGTERM to one process, to all, or twice."""
    start = trial.start()
    if not trial.wait_for(start, trial.any_moment()):
        _strike(trial, start, False)
        return
    how = trial.chance.choice(("one", "all", "twice"))
    victims = [trial.chance.choice(start.children)] if how == "one" else list(start.children)
    trial.say(f"SIGTERM to {how} at step {trial.step(victims[0])}")
    ready = all(trial.has_noted(child, "fitting") for child in start.children)
    trial.struck_at = time.time()
    for child in victims:
        child.signal(signal.SIGTERM)
    if how == "twice":
        trial.server.wait(start.children, trial.chance.uniform(0, 0.1))
        for child in victims:
            child.signal(signal.SIGTERM)
    _terminated(trial, start, ready, how)


def _terminated(trial: Trial, start: Start, ready: bool, how: str) -> None:
    """Check that all end within the grace period, with all saved if training had begun."""
    if not ready:
        # Nothing to save, and a process that waits for others to join is ended as by a launcher.
        trial.server.wait_any(start.children, GRACE_SECONDS)
        for child in start.children:
            if child.status == -signal.SIGTERM:
                start.killed.add(child.pid)
        trial.kill_rest(start)
        trial.finish()
        return
    in_time = trial.server.wait(start.children, GRACE_SECONDS)
    trial.check(in_time, f"not all gone {GRACE_SECONDS:g} s after SIGTERM")
    trial.kill_rest(start)
    if start.codes == [0] * trial.processes:  # the last step was done
        trial.measure(start)
        return
    if -signal.SIGTERM in start.codes and trial.disk().newest == STEPS:
        # `fit` was over, all saved, its handler gone; its peer may miss it
        start.killed.update(child.pid for child in start.children)
        trial.finish()
        return
    if how == "twice" and set(start.codes) - {SAVED}:
        start.killed.update(child.pid for child in start.children)
        trial.finish()
        return
    trial.check(set(start.codes) == {SAVED}, f"SIGTERM ended with {start.codes}, not {SAVED}")
    disk = trial.disk()
    trial.check(disk.newest >= disk.recorded, f"saved {disk.newest}, recorded {disk.recorded}")
    lost = len(trial.lost)
    trial.finish()
    trial.check(not any(trial.lost[lost:]), f"{trial.lost[lost:]} steps lost by SIGTERM")


def freeze(trial: Trial) -> None:
    """Stop one of several processes with SIGSTOP; it wakes up later, or never."""
    start = trial.start()
    victim = trial.chance.choice(start.children)
    if not trial.wait_for(start, trial.moment_in_training()):
        _strike(trial, start, False)
        return
    wakes = trial.chance.random() < 0.5
    step = trial.step(victim)
    trial.say(f"freeze {_numbers(start, [victim])} at step {step}{', wakes up' * wakes}")
    trial.struck_at = time.time()
    victim.signal(signal.SIGSTOP)
    others = [child for child in start.children if child is not victim]
    in_time = trial.server.wait(others, FROZEN_SECONDS)
    trial.check(in_time, f"others not gone {FROZEN_SECONDS:g} s after a process froze")
    said = "\n".join(map(trial.cause, others))
    trial.check("no heartbeat" in said, f"the cause is not told: {said!r}")
    if wakes:
        _wake_later(trial, start, victim)
        return
    trial.kill_rest(start)
    trial.judge(start)
    trial.finish()


def _wake_later(trial: Trial, start: Start, victim: Child) -> None:
    """Wake the frozen process beside a new start of its run, which it must not disturb."""
    again = trial.start()
    trial.wait_for(again, trial.any_moment())
    victim.signal(signal.SIGCONT)
    gone = trial.server.wait([victim], SECOND_SECONDS)
    trial.check(gone, f"the process that froze is there {SECOND_SECONDS:g} s after it woke up")
    trial.kill_rest(start)
    trial.judge(start)
    trial.server.wait(again.children, GRACE_SECONDS)
    trial.settle(again)
    if again.codes == [0] * trial.processes:
        trial.measure(again)
        return
    # A frozen process on the same host still holds its run.
    refused = "is already writing to it" in trial.said(again)
    trial.check(
        refused and victim is start.children[0], f"the start after it was harmed: {again.codes}"
    )
    trial.finish()


def second_start(trial: Trial) -> None:
    """Start the same command while the run goes on: it is refused at once, and harms nothing."""
    first = trial.start(CHAOS_STEP_SECONDS="0.25")
    if not trial.wait_for(first, Moment(trial.chance.uniform(0, 0.5), 1)):
        _strike(trial, first, False)
        return
    began = time.time()
    second = trial.start()
    gone = trial.server.wait(second.children, SECOND_SECONDS)
    trial.check(gone, f"the second start is there after {SECOND_SECONDS:g} s")
    seconds = max(child.ended_at or time.time() for child in second.children) - began
    trial.say(f"a second start beside step {trial.step(first.children[0])}: {seconds:.1f} s")
    trial.kill_rest(second)
    codes = set(second.codes)
    trial.check(all(code and code > 0 for code in codes), f"the second start ended with {codes}")
    trial.judge(second)
    trial.server.wait(first.children, GRACE_SECONDS)
    trial.settle(first)
    trial.check(first.codes == [0] * trial.processes, f"the first ended with {first.codes}")
    trial.starts.remove(second)  # the first one's processes are those that are done


def _from_now(start: Start, seconds: float) -> Moment:
    return Moment(time.time() - start.began + seconds)


def _numbers(start: Start, children: Sequence[Child]) -> str:
    return ",".join(str(start.children.index(child)) for child in children)


SEVERAL = (2, 2, 2, 3)
SMALL = (1, 1, 2)
FAULTS = {
    "kill": Fault("kill -9 at any time", kill),
    "kill-saving": Fault("kill -9 while saving", kill_saving),
    "kill-restoring": Fault("kill -9 while restoring", kill_restoring),
    "term": Fault("SIGTERM to one, all, or twice", term, processes=(1, 1, 2, 2, 3)),
    "corrupt": Fault("newest checkpoint corrupted", corrupted),
    "disk-full": Fault("disk full", storage.full, processes=SMALL),
    "read-only": Fault("folder read-only", storage.read_only, processes=SMALL),
    "io-error": Fault("I/O error", storage.io_error, processes=SMALL),
    "nan-one": Fault("NaN in one row, and kill -9", kill, "nan-one"),
    "nan-all": Fault("NaN in a whole batch, and kill -9", kill, "nan-all"),
    "freeze": Fault(
        "a process frozen",
        freeze,
        processes=SEVERAL,
        env={"REPLICAX_SILENT_SECONDS": f"{SILENT_SECONDS:g}"},
    ),
    "second-start": Fault("a second start beside it", second_start, processes=SMALL),
    "launch": Fault("kill -9 under replicax launch", launched, processes=(1, 2)),
}
