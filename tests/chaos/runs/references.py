"""Undisturbed runs, each made once; their compiled programs serve all trials."""

import shutil
from pathlib import Path

from chaos.checks import check_alike
from chaos.harness import Once
from chaos.runs.checks import check_undisturbed, in_order
from chaos.runs.trial import Reference, Trial
from support.fork_server import ForkServer


class References:
    """The undisturbed run of each number of processes and data, in `folder`."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._known = Once()
        self.env = {"CHAOS_CACHE": str(folder / "compiled")}
        """Environment of a trial: it reads the compilation cache and never writes to it."""

    def find(self, processes: int, data: str) -> Reference:
        """Return the run, and make it at the first call."""
        found: Reference = self._known.of((processes, data), lambda: self._make(processes, data))
        return found

    def _make(self, processes: int, data: str) -> Reference:
        name, compiling = f"{processes}-{data}", {**self.env, "CHAOS_COMPILES": "1"}
        first = self._run(f"first-{name}", processes, data, compiling)
        self._continue(f"first-{name}", processes, data, compiling)
        second = self._run(f"second-{name}", processes, data, self.env)
        check_alike(first, second)
        return second

    def _run(self, name: str, processes: int, data: str, env: dict[str, str]) -> Reference:
        trial = Trial(self._server, self._folder / name, "none", 0, processes, data, env)
        try:
            start = trial.start()
            self._server.wait(start.children, 300.0)
            if start.codes != [0] * processes:
                raise RuntimeError(f"an undisturbed run ended {start.codes}:\n{trial.said(start)}")
        finally:
            trial.close()
        stepped = trial.note(start.children[0], "stepped")
        assert stepped is not None
        (result,) = trial.results().values()
        found = Reference(
            result=result,
            records=in_order(trial.records()),
            seconds=max(child.ended_at for child in start.children) - start.began,
            first_step_seconds=stepped["time"] - start.began,
        )
        check_undisturbed(found, data)
        return found

    def _continue(self, name: str, processes: int, data: str, env: dict[str, str]) -> None:
        """Restore an older checkpoint once, to compile what that needs."""
        ended = Trial(self._server, self._folder / name, "none", 0, processes, data, env)
        newest = ended.disk().newest
        shutil.rmtree(ended.checkpoints / str(newest))
        start = ended.start()
        self._server.wait(start.children, 300.0)
        ended.close()
