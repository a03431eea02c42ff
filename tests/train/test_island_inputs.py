"""Islands that wait for their input when they are asked to stop."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.island_networks import places
from support.island_runs import BATCH, ROWS, SOURCE, STEPS, At, Island
from support.tiers import only

import replicax as rx


class Loader:
    """Batches; once asked, the next one comes only after a signal, and a moment."""

    def __init__(self) -> None:
        self.asked, self.signalled = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            if self.asked.is_set():
                self.asked.clear()
                assert self.signalled.wait(20.0)
                threading.Event().wait(1.0)
            yield {name: rows[number * BATCH :][:BATCH] for name, rows in SOURCE.items()}


@pytest.mark.promise("islands.sigterm-leaves-alone")
@pytest.mark.parametrize(
    ("rounds", "alone"),
    only([(0, True), (4, False)], [(0, True), (0, False), (4, True), (4, False)]),
)
def test_a_signal_while_an_island_waits_for_input_ends_no_other(
    rounds: int, alone: bool, tmp_path: Path
) -> None:
    islands, every = [], rx.Rounds(every=rounds) if rounds else None
    for place in places(2):
        interrupt, loader = rx.types.Interrupt(), Loader()

        def send(interrupt: rx.types.Interrupt = interrupt, loader: Loader = loader) -> None:
            interrupt.signal = signal.SIGTERM
            loader.signalled.set()

        def act(send: Any = send, loader: Loader = loader, waits: bool = not islands) -> None:
            threading.Timer(0.5, send).start()
            if waits:
                loader.asked.set()

        hooks = [] if islands and alone else [At(5, act)]
        settings: dict[str, Any] = {"hooks": hooks, "source": loader, "interrupt": interrupt}
        islands.append(
            Island(place, mode="jit", rounds=every, run_dir=tmp_path / "run", **settings)
        )
    first, second = [island.join() for island in islands]
    assert second.error is None
    assert second.result is not None
    if alone:
        assert isinstance(first.error, rx.errors.IslandLeftError)
        assert second.result.step == STEPS
    else:
        assert first.error is None
        assert second.result.interrupted
        assert first.result is not None
        assert first.result.step == second.result.step < STEPS
