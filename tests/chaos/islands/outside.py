"""Faults from outside: strangers at the ports, and a full disk."""

import contextlib

from chaos.islands.deaths import kill_now
from chaos.islands.sizes import STEPS
from chaos.islands.trial import Trial
from support.island_networks import RawIsland
from support.island_strangers import IslandStrangers

from replicax.islands.island_place import IslandPlace
from replicax.net.secret import Secret


def strangers(trial: Trial) -> None:
    """Let strangers come to all ports, and one who knows all but the secret."""
    place = IslandPlace(
        trial.islands - 1,
        tuple(f"127.0.0.1:{port}" for port in trial.ports),
        trial.folder.name,
        Secret(b"a guess"),
    )
    visitors = [IslandStrangers(place, port, trial.seed + port) for port in trial.ports]
    if not trial.pause(trial.chance.uniform(0.0, 2.0)):
        return
    trial.strike("strangers")
    try:
        for _ in range(trial.chance.randrange(20, 100)):
            with contextlib.suppress(OSError):
                trial.chance.choice(visitors).come()
            if trial.chance.random() < 0.1:
                guest = RawIsland(place, trial.chance.randrange(trial.islands - 1))
                with contextlib.suppress(OSError, ValueError):
                    guest.join()
                    trial.wrong.append("an island without the secret has joined")
                guest.close()
            if not trial.pause(trial.chance.uniform(0.0, 0.05)):
                break
    finally:
        for visitor in visitors:
            visitor.leave()


def disk_full(trial: Trial) -> None:
    """Fill the disk of the run for some time, perhaps when the writing island dies."""
    if trial.disk is None:
        trial.missed = True  # nothing can be mounted here
        return
    if not trial.a_step(last=STEPS - 25):
        return
    trial.strike("fill the disk")
    trial.disk.fill(trial.chance.choice((0, 0, 5000, 20_000)))
    trial.pause(trial.chance.uniform(0.1, 0.5))
    if trial.chance.random() < 0.5:
        writer = trial.writer()
        kill_now(trial, trial.pick(1) if writer < 0 else [writer])
    trial.pause(trial.chance.uniform(0.1, 0.8))
    trial.disk.empty()
