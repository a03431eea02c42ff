"""Undisturbed runs, each made once; their compiled programs serve all trials."""

import json
import shutil
import threading
from pathlib import Path

from chaos.checks import check_undisturbed, comparable
from chaos.trial import Trial, Undisturbed
from support.fork_server import ForkServer


class References:
    """The undisturbed run of each number of processes and data, in `folder`."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._known: dict[tuple[int, str], Undisturbed] = {}
        self._making = threading.Lock()
        self.cache = folder / "compiled"

    def find(self, processes: int, data: str) -> Undisturbed:
        """Return the run, and make it at the first call."""
        with self._making:
            key = processes, data
            if key not in self._known:
                self._known[key] = self._make(processes, data)
            return self._known[key]

    def _make(self, processes: int, data: str) -> Undisturbed:
        compiling = {"CHAOS_CACHE": str(self.cache), "CHAOS_COMPILES": "1"}
        first = self._run(f"first-{processes}-{data}", processes, data, compiling)
        self._continue(f"first-{processes}-{data}", processes, data, compiling)
        second = self._run(f"second-{processes}-{data}", processes, data, self.env)
        if first.result != second.result or comparable(first.records) != comparable(second.records):
            raise RuntimeError(
                f"two undisturbed runs on {processes} processes differ: {first.result} and "
                f"{second.result}"
            )
        return second

    @property
    def env(self) -> dict[str, str]:
        """Environment of a trial: it reads the compilation cache and never writes to it."""
        return {"CHAOS_CACHE": str(self.cache)}

    def _run(self, name: str, processes: int, data: str, env: dict[str, str]) -> Undisturbed:
        trial = Trial(self._server, self._folder / name, "none", 0, processes, data, env)
        try:
            start = trial.start()
            self._server.wait(start.children, 300.0)
            if start.codes != [0] * processes:
                raise RuntimeError(f"an undisturbed run ended {start.codes}:\n{trial.said(start)}")
        finally:
            trial.clear()
        result = json.loads((trial.folder / "result.json").read_text())
        stepped = trial.note(start.children[0], "stepped")
        assert stepped is not None
        found = Undisturbed(
            result=result,
            records=trial.records(),
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
        ended.clear()
