"""`DumpHLO`: write the programs of the step as text."""

import re
from pathlib import Path

from replicax.core.data.share import FeedItem
from replicax.text.arguments import typed
from replicax.train.files.places import check_own, on_disk, write_whole, writing
from replicax.train.hooks.hook import Hook, Running

_NAME = re.compile(r"step\.(mlir|(\d+\.)?hlo)")
_MARK = "// written by replicax\n"


class DumpHLO(Hook):
    """Writes the step's program as text, before and after XLA's optimizations.

    `step.mlir` is StableHLO, as JAX lowers the step; `step.hlo` is what XLA makes of it for these
    devices. Where a step takes several programs, as in mode `exact`, there are `step.0.hlo`,
    `step.1.hlo` and so on. They are those of the step on the first batch of the start.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, hooks=[rx.hooks.DumpHLO("hlo")])
        >>> "dot_general" in pathlib.Path("hlo/step.mlir").read_text()
        True

    Args:
        folder: created if it does not exist; files that an earlier start wrote are replaced.
            Default: `hlo` in the run's folder.

    Raises:
        ConfigError: in a run, no folder, or one with files of these names from elsewhere.
    """

    interval = None  # it looks at the first call, of however many steps

    @typed
    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._into: Path | None = None
        self._done = False

    def start(self, run: Running) -> None:
        self._done = False
        if run.is_main:
            self._into = on_disk(run.folder, self._folder, "hlo", "DumpHLO()")
            with writing(self._into):
                self._into.mkdir(parents=True, exist_ok=True)
            for path in self._into.glob("step.*"):
                if _NAME.fullmatch(path.name):
                    check_own(path, _MARK)

    def before_step(self, run: Running, batch: FeedItem) -> None:
        if self._done:
            return
        self._done, first = True, batch.first
        step = run.dp.program(run.state).step
        programs = [each.as_text() for each in step.compiled(run.state, first)]  # by every process
        if self._into is None:
            return
        files = {"step.mlir": step.text(run.state, first)}
        if len(programs) == 1:
            files["step.hlo"] = programs[0]
        else:
            files |= {f"step.{number}.hlo": text for number, text in enumerate(programs)}
        for name, text in files.items():
            write_whole(self._into / name, f"{_MARK}{text}".encode())
        names = ", ".join(files) if len(files) < 4 else f"step.mlir, step.0.hlo to {[*files][-1]}"
        run.say(f"hlo    {self._into}: {names}, of the step on {first.size:,} rows")
