"""The lines that a run prints about itself."""

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Generic

import jax
import numpy as np
import optax

from replicax.cluster.alike import compared_settings
from replicax.core.data.feed import Feed
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import ModelT, TrainState
from replicax.core.placement.mesh import FSDP, MODEL, STAGE, platform_of, replica_count
from replicax.core.placement.pipeline_schedules import bubble
from replicax.known_wrong.findings import lines_once
from replicax.text.blocks import Grid, Paragraph, html_of
from replicax.text.wording import UNKNOWN, counted, duration
from replicax.train.files.records import Record
from replicax.train.folder.goodput import Goodput
from replicax.train.hooks.loss_curve import LossCurve
from replicax.train.hooks.record_lines import metrics_text, rows_per_second
from replicax.train.run.round_lines import doubtful_rounds, rounds_lines

LENGTH = ("epochs", "steps")
"""Entries of `start` in `config.json`, one of which is null: the length of the run."""


@dataclasses.dataclass(frozen=True)
class Fit(Generic[ModelT]):
    """How a run ended.

    Examples:
        >>> result = rx.fit(dp, state, source, batch_size=32, epochs=2, progress=False)
        >>> print(result.steps, result.rows)
        16 512
        >>> trained = dp.model(result.state)
    """

    state: TrainState[ModelT]
    records: list[Record]
    steps: int
    """Updates done in this call, including skipped ones."""
    rows: int
    """Real rows trained on in this call."""
    seconds: float
    """Wall time, including compilation and evaluation."""
    interrupted: bool
    """Whether Ctrl-C, SIGTERM, SIGHUP or SIGQUIT ended it early."""
    step: int = 0
    """Updates done in the whole run, over all its starts."""
    saved: bool = False
    """Whether the same call would resume from the end of this one."""
    stopped: str | None = None
    """The reason given by a hook that ended the run early; None if none did."""
    failed_hooks: tuple[str, ...] = ()
    """Names of the hooks that failed and were disabled."""
    goodput: Goodput | None = None
    """How the time was spent over all starts of the run; only with a folder, in process 0."""

    def __repr__(self) -> str:
        how = "stopped early, " if self.interrupted else ""
        ordered = sorted(self.metrics.items(), key=lambda item: item[0] != "loss")
        newest = "".join(f", {name} {value:.4g}" for name, value in ordered[:2])
        if newest and self.metrics_step != self.step:
            newest += f" of step {self.metrics_step}"
        done = f"{self.rows:,} rows in {duration(self.seconds)}"
        return f"Fit({how}step={self.step}, {done}{newest})"

    def _repr_html_(self) -> str:
        shown = {r.kind: r for r in self.records if r.kind in ("train", "eval")}  # the last of each
        metrics = dict.fromkeys(name for r in shown.values() for name in r.metrics)
        names = sorted(metrics, key=lambda name: name != "loss")
        rows = [
            (f"{kind}, step {r.step:,}", *(_metric(r.metrics.get(name)) for name in names))
            for kind, r in shown.items()
        ]
        notes = [self.stopped] if self.stopped else []
        notes += [f"failed hooks: {', '.join(self.failed_hooks)}"] if self.failed_hooks else []
        table = [Grid([("", *names), *rows])] if rows else []
        return html_of([LossCurve(self.records), *table, *map(Paragraph, notes)], repr(self))

    @property
    def exit_code(self) -> int:
        """0 if the run is done, 75 if it stopped early with everything saved, else 1."""
        if not self.interrupted:
            return 0
        return 75 if self.saved else 1

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the evaluation after the last step, or without one, of the last train record.

        An evaluation of an earlier step, as in a run that was resumed without one, is `evaluation`.
        """
        return self._newest.metrics if self._newest is not None else {}

    @property
    def metrics_step(self) -> int | None:
        """The step of `metrics`: `step`, or that of the last train record if a run was interrupted.

        None without metrics.
        """
        return self._newest.step if self._newest is not None else None

    @property
    def evaluation(self) -> Record | None:
        """The last evaluation, which may be of an earlier step or start; None if there was none."""
        return _last(self.records, "eval")

    @property
    def _newest(self) -> Record | None:
        scored = self.evaluation
        return scored if scored and scored.step == self.step else _last(self.records, "train")


def describe(dp: DataParallel, state: TrainState, feed: Feed) -> list[str]:
    """Describe the derived values of a run, one line each."""
    arrays = jax.tree.leaves(state.params)
    parameters = sum(int(np.prod(array.shape)) for array in arrays)
    devices, replicas = dp.mesh.devices.size, replica_count(dp.mesh)
    reduction = dp.configuration.names()["reduction"]
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    micro, word = dp.split.micro_batches, "micro-shard" if dp.mode.bitwise else "micro-batch"
    lines = [
        f"model  {counted(parameters, 'parameter')} in {counted(len(arrays), 'array')} · "
        f"{'' if dp.precision.name == 'float32' else 'computed in '}{dp.precision.name}",
        f"mesh   {counted(devices, dp.mesh.devices.flat[0].device_kind + ' device')}"
        f"{processes} · {counted(replicas, 'replica')} · mode {dp.mode} · "
        f"layout {dp.layout}{'' if reduction == 'float32' else f' · {reduction} on the wire'}",
    ]
    sizes = {axis: dp.mesh.shape.get(axis, 1) for axis in (MODEL, FSDP, STAGE)}
    parts = []
    if sizes[MODEL] > 1:
        parts.append(f"each layer over {sizes[MODEL]} devices")
    if sizes[FSDP] > 1:
        parts.append(f"the state over {sizes[FSDP]} of {replicas} replicas")
    if parts:
        lines.append(f"split  {' · '.join(parts)}")
    if (stages := sizes[STAGE]) > 1:
        lines.append(
            f"stages {stages} x {counted(micro, 'micro-batch')}, {dp.layout.schedule} · bubble "
            f"{bubble(stages, micro):.0%}"
        )
    lines += rounds_lines(dp, state)
    size = feed.source.batch_size
    if size:
        padded = dp.split.padded(size)
        split = f" x {counted(micro, word)}" if micro > 1 else ""
        padding = "" if size == padded else f"padded to {padded}, "
        rows = padded // replicas // micro
        lines.append(
            f"batch  {size} rows, {padding}{counted(replicas, 'replica')}{split} x {rows} rows"
        )
    last = feed.source.last_rows
    if feed.source.rows is not None and last is not None:
        text = f"epoch  {feed.source.rows:,} rows in {counted(len(feed), 'batch')}"
        if last != size:
            text += f", the last with {counted(last, 'row')} and {feed.padding} of padding"
        lines.append(text)
    elif (told := feed.source.told_batches) is not None:
        lines.append(f"epoch  {counted(told, 'batch')}, as the source's len() says")
    return lines


def doubts(dp: DataParallel, steps: int | None) -> list[str]:
    """Return lines on what will not train as meant: wrong versions, and doubtful rounds."""
    return [*lines_once(platform_of(dp.mesh)), *doubtful_rounds(dp, steps)]


def derived(dp: DataParallel, feed: Feed, length: Mapping[str, Any]) -> dict[str, Any]:
    """Return the derived values for `config.json`, with versions, settings, and this start."""
    return {
        "parallel": {
            **dp.configuration.names(),
            "mesh": dict(dp.mesh.shape),
            "device_kind": dp.mesh.devices.flat[0].device_kind,
            "processes": jax.process_count(),
        },
        "data": {
            "rows": feed.source.rows,
            **feed.source.fingerprint(),
            "padding": feed.padding,
        },
        "versions": {
            "replicax": version("replicax"),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "optax": optax.__version__,
            # Model libraries, if imported, as they may determine the operations.
            **{x: version(x) for x in ("flax", "equinox") if x in sys.modules},
        },
        "settings": compared_settings(os.environ),
        "start": {**this_start(), **{name: length[name] for name in LENGTH}},
    }


version = functools.cache(importlib.metadata.version)


def this_start() -> dict[str, Any]:
    """Return command, host and time, and the commit if the working directory is in a repository."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = {"command": list(sys.argv), "host": socket.gethostname(), "time": now}
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(ask, capture_output=True, timeout=1, check=True, env=env, text=True)
        start["commit"] = said.stdout.strip()
    return start


def run_summary(result: Fit, total: int | None) -> list[str]:
    """Return the closing lines of a run."""
    of = f" of {total:,}" if result.interrupted and total else ""
    word = "stopped after" if result.interrupted else "done:"
    first = result.step - result.steps
    timed = [r for r in result.records if r.kind == "train" and r.seconds > 0 and r.step > first]
    seconds = sum(record.seconds for record in timed)
    since = f" since step {first:,}" if first else ""
    parts = [
        f"{word} {result.steps:,}{of} steps{since}, {result.rows:,} rows in "
        f"{duration(result.seconds)}"
    ]
    if rate := rows_per_second(timed):
        waited = sum((record.input_wait_fraction or 0) * record.seconds for record in timed)
        parts.append(f"{rate:,.0f} rows/s")
        parts.append(f"input wait {waited / seconds:.0%}")
    lines = [" · ".join(parts)]
    if first and not result.steps:
        lines = [f"complete at step {first:,}: nothing was trained"]
    trained, scored = _last(result.records, "train"), result.evaluation
    if trained and not (scored and scored.step == result.step):
        lines.append(_closing_line(trained, result.step))
    if scored:
        lines.append(_closing_line(scored, result.step))
    if skipped := sum(record.kind == "skip" for record in result.records):
        lines.append(f"skip   {counted(skipped, 'step')}; see records.jsonl for their examples")
    if result.stopped is not None:
        lines.append(f"stop   {result.stopped}")
    if result.failed_hooks:
        lines.append(f"hooks  failed and disabled: {', '.join(result.failed_hooks)}")
    return lines


def _metric(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _last(records: list[Record], kind: str) -> Record | None:
    return next((record for record in reversed(records) if record.kind == kind), None)


def _closing_line(record: Record, step: int) -> str:
    """Return the metrics of a record, and of which step they are if it is not the last `step`."""
    of = "" if record.step == step else f"of step {record.step:,}: "
    return f"{record.kind:<6} {of}{metrics_text(record.metrics)}"


def plain_fields(**values: Any) -> dict[str, Any]:
    """Return the fields of `values` as numbers and names, for comparison between processes."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        fields = {} if value is None else vars(value)
        plain[name] = {
            key: each if isinstance(each, int | float | str | None) else type(each).__name__
            for key, each in fields.items()
        }
    return plain
