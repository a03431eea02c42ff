"""`fit`: the whole loop around the step."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from replicax.core.average import average_of
from replicax.core.data_parallel import DataParallel
from replicax.core.feed import Feed
from replicax.core.sources import as_source, can_shuffle
from replicax.core.update import TrainState
from replicax.errors import ConfigError, MissingDependencyError
from replicax.train.audit import Audit
from replicax.train.bad_steps import BadSteps
from replicax.train.curves import COLOURS, draw_curves
from replicax.train.fingerprint import sha256
from replicax.train.goodput import Ledger
from replicax.train.guarded import guarded, with_losses
from replicax.train.interrupt import Interrupt
from replicax.train.loop import Loop
from replicax.train.meter import Meter
from replicax.train.noise_scale import NoiseMeter, noise_scale
from replicax.train.program_fingerprint import program_fingerprint
from replicax.train.progress import Progress, open_progress
from replicax.train.records import Record
from replicax.train.report import derived, describe, summary
from replicax.train.result import Fit
from replicax.train.run import Found, Run, Saving, abstract, first_batch
from replicax.train.stopping import Stopping


def fit(
    dp: DataParallel,
    state: TrainState,
    source: Any,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    eval_source: Any = None,
    eval_batch_size: int | None = None,
    eval_ema: bool = False,
    shuffle: bool | None = None,
    seed: int = 0,
    log_every: int = 50,
    audit_every: int | None = None,
    on_divergence: str = "stop",
    measure_noise_every: int | None = None,
    max_bad_steps: int = 5,
    skip_spikes: bool = False,
    run_dir: str | Path | None = None,
    save_every: int | None = None,
    save_seconds: float | None = 600.0,
    keep: int = 3,
    keep_every: int | None = None,
    accept_changes: bool = False,
    config: dict[str, Any] | None = None,
    title: str = "run",
    progress: bool = True,
    interrupt: Interrupt | None = None,
) -> Fit:
    """Train for some epochs or steps, evaluating after each epoch.

    With a `run_dir` it is saved on the way, and the same call after any stop goes on where the last
    good checkpoint is, with the same results; `state` then gives its place to what was saved.

    In a job of several processes all call it alike, and process 0 prints and records.

    Args:
        dp: what to step with.
        state: from `dp.init`; consumed where `dp` donates.
        source: as for `dp.feed`.
        batch_size: rows of a global batch.
        epochs: passes over the source. Give this or `steps`.
        steps: updates.
        eval_source: evaluated whole after every epoch, and after the last step.
        eval_batch_size: `batch_size` by default.
        eval_ema: whether with the average of the parameters; see `DataParallel.evaluate`.
        shuffle: whether each epoch has an order of its own; by default wherever the source can.
        seed: of that order.
        log_every: steps between two train records.
        audit_every: steps between two audits, which compare the bits of all that the devices hold
            copies of; None for none. See `replicax.train.audit`.
        on_divergence: what an audit does that finds a device with other bits: `stop`, or `restore`
            the state of the last clean audit and go on from there.
        measure_noise_every: steps between two samples of the gradient noise, each of which costs
            about a gradient; None for none. See `replicax.train.noise_scale`.
        max_bad_steps: steps in a row whose loss or gradient is not finite before the run stops.
            The update of each is skipped, and its examples recorded.
        skip_spikes: whether a loss far above those before is skipped too; see
            `replicax.train.guarded.with_losses`.
        run_dir: a folder for `config.json`, `records.jsonl`, `curves.png`, where it is measured
            `noise_scale.json`, and the checkpoints; None for none of these.
        save_every: steps between two checkpoints; None to go by the clock.
        save_seconds: between two checkpoints, where `save_every` is None. None too for none at all.
        keep: the newest checkpoints that stay.
        keep_every: those of a multiple of so many steps stay as well.
        accept_changes: whether to go on in a `run_dir` whose configuration was another.
        config: what `config.json` is to hold beside what is derived here.
        title: of the curves.
        progress: whether to print what is derived, a live line, and a closing summary.
        interrupt: that is told of SIGINT and SIGTERM; one of its own by default.

    Raises:
        ConfigError: arguments that cannot work.
        AgreementError: processes that were given different ones.
        LossError: see `DataParallel.step`.
        DivergedError: the loss is no longer finite.
        ReplicasDifferError: the replicas are no longer equal.
        CheckpointError: the state cannot be saved, or what was saved cannot be read.
        RunInUseError: another start holds the run.
    """
    _check_length(epochs, steps, log_every)
    _check_eval_source(source, eval_source)
    saving = Saving(save_every, save_seconds, keep, keep_every)
    if eval_ema:  # now, and not when the first epoch is over
        jax.eval_shape(average_of, state.opt_state, state.params)
    if eval_batch_size is None:
        eval_batch_size = batch_size
    if shuffle is None:
        shuffle = can_shuffle(source)
    opened = as_source(source, batch_size, dp.job, shuffle=shuffle, seed=seed)
    wanted: dict[str, Any] = {"epochs": epochs, "steps": steps, "batch_size": batch_size}
    wanted |= {"log_every": log_every, "audit_every": audit_every, "on_divergence": on_divergence}
    wanted |= {"measure_noise_every": measure_noise_every, "max_bad_steps": max_bad_steps}
    wanted |= {
        "skip_spikes": skip_spikes,
        "eval_ema": eval_ema,
        "saving": dataclasses.asdict(saving),
    }
    dp.job.agree("the run", {**wanted, "evaluation": eval_source is not None, **(config or {})})
    if skip_spikes:
        state = with_losses(state)
    dp = guarded(dp, state)
    first = dp.feed(opened)
    total = steps if steps is not None else _total_steps(first, epochs)
    eval_feed = None if eval_source is None else dp.feed(eval_source, eval_batch_size)
    bad_steps, audit, noise = BadSteps(max_bad_steps, dp.job), None, None
    if audit_every is not None:
        audit = Audit(dp, state, opened, audit_every, on_divergence)
    if measure_noise_every is not None:
        noise = NoiseMeter(dp, state, measure_noise_every, opened.batch_size)
    speaks = dp.job.process == 0
    with contextlib.ExitStack() as stack:
        display = open_progress(progress and speaks, total)
        stack.callback(display.close)
        if interrupt is None:
            terminate = run_dir is not None and saving.wanted
            interrupt = stack.enter_context(Interrupt(terminate=terminate))
        for line in describe(dp, state, first):
            display.line(line)
        run = None
        if run_dir is not None:
            facts = {**(config or {}), **derived(dp, state, first)}
            run = stack.enter_context(
                contextlib.closing(
                    Run(
                        Path(run_dir),
                        facts,
                        saving,
                        dp.job,
                        accept_changes=accept_changes,
                        state=state,
                        seed=seed,
                        say=display.line,
                    )
                )
            )
        loop = Loop(
            dp=dp,
            source=opened,
            eval_feed=eval_feed,
            eval_ema=eval_ema,
            epochs=epochs,
            total=total,
            meter=Meter(log_every),
            bad_steps=bad_steps,
            audit=audit,
            noise=noise,
            run=run,
            ledger=Ledger(None) if run is None else run.ledger,
            display=display,
            interrupt=interrupt,
            stopping=Stopping(interrupt, dp.job, None if run is None else saving.clock_seconds),
        )
        if run is not None and run.found is not None:
            state = _resume(loop, run, run.found, state)
        if audit is not None:
            audit.begin(state, loop.place)
            loop.note_good()
            for line in audit.describe():
                display.line(line)
        result = _go(loop, state, title)
        if run is not None and not (run.knows_program or result.interrupted):
            repeats = dp.job.gather("whether a source can be read again", opened.can_repeat)
            rows = next(opened.epoch(0))[0] if all(repeats) else None
            if rows is not None:  # no batch has told, as there was nothing left to train
                run.check_program(program_fingerprint(dp, result.state, rows))
        for line in summary(result, loop.total):
            display.line(line)
        if dp.mode.bitwise:
            display.line(f"bits   sha256 of the weights {sha256(result.state.params)[:16]}")
    return result


def _go(loop: Loop, state: TrainState, title: str) -> Fit:
    """Run `loop`, and draw what came of it."""
    started, before = time.perf_counter(), (loop.step, loop.rows)
    folder = None if loop.run is None else loop.run.folder
    try:
        state = loop.go(state)
    finally:
        if folder and loop.records:
            _draw(loop.records, folder.path, title, loop.display)
    loop.dp.job.rest()
    scale = None if loop.noise is None else noise_scale(loop.records)
    if folder and scale is not None:
        scale.save(folder.path)
    loop.ledger.close(kept=True)
    return Fit(
        state=state,
        records=loop.records,
        steps=loop.step - before[0],
        rows=loop.rows - before[1],
        seconds=time.perf_counter() - started,
        interrupted=loop.stopping.wanted,
        step=loop.step,
        saved=loop.run is not None and loop.run.saving.wanted,
        clean_audits=None if loop.audit is None else loop.audit.clean,
        restores=0 if loop.audit is None else loop.audit.restores,
        noise_scale=scale,
        goodput=None if folder is None else loop.ledger.summary(),
    )


def _resume(loop: Loop, run: Run, found: Found, state: TrainState) -> TrainState:
    """The state that was found, with `loop` where it was saved; `state` gives its place to it."""
    batch = first_batch(loop.source, found.position, found.extra)
    if loop.epochs is not None and loop.source.batches is not None:  # in batches as they are now
        remaining = (loop.epochs - found.position.epoch) * loop.source.batches - batch
        loop.total = found.position.step + max(remaining, 0)
    like = abstract(state)
    if loop.dp.donate:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    loop.records.extend(found.records)
    seconds = found.extra.get("seconds_unrecorded")
    loop.stand_at(found.position, batch, seconds if isinstance(seconds, float) else 0.0)
    return run.restore(like)


def _check_length(epochs: int | None, steps: int | None, log_every: int) -> None:
    if (epochs is None) == (steps is None):
        raise ConfigError(
            f"epochs={epochs} and steps={steps}; a run has one length: give one of them"
        )
    for name, value in (("epochs", epochs), ("steps", steps), ("log_every", log_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it is at least 1: raise it")


def _check_eval_source(source: Any, eval_source: Any) -> None:
    if not (isinstance(eval_source, Mapping) and isinstance(source, Mapping | tuple)):
        return
    rows: Any = jax.tree.structure(source)
    named = [name for name, each in eval_source.items() if rows == jax.tree.structure(each)]
    if named:
        raise ConfigError(
            f"eval_source has {len(named)} sources ({', '.join(map(str, named))}); fit evaluates "
            "one: give one of them, and the others to dp.evaluate"
        )


def _total_steps(feed: Feed, epochs: int | None) -> int | None:
    return None if epochs is None or feed.padding is None else epochs * len(feed)


def _draw(records: list[Record], folder: Path, title: str, display: Progress) -> None:
    try:
        drawn = [record for record in records if record.kind in COLOURS]
        draw_curves(drawn, folder / "curves.png", title)
    except MissingDependencyError as error:
        display.line(f"no curves.png: {error}")
