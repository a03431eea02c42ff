"""Choose what is between steps from the arguments of a `DataParallel`."""

import dataclasses

from replicax.core.between.rounds import Rounds
from replicax.core.between.seam import Between
from replicax.core.ground.job import Job
from replicax.core.modes.mapping import Mode
from replicax.core.placement.layout import Layout
from replicax.errors import ConfigError


def as_between(
    rounds: Rounds | None,
    *,
    job: Job,
    mode: Mode,
    layout: Layout,
    replicas: int,
    micro_shards: int,
    ema: float | None,
) -> Between:
    """Return what is between the steps of a job; `ConfigError` if `islands` does not fit the rest.

    `rounds` are those that were given; without them, jobs exchange sums in every step.
    """
    peers = job.peers
    if peers is None and rounds is None:
        return Between()
    from replicax.core.between.every_round import EveryRound
    from replicax.core.between.every_step import EveryStep

    count, exchange = (1, None) if peers is None else (peers.count, peers.exchange)
    each_step: Between = Between()
    if peers is not None and exchange is not None:
        parts = 1 if mode.bitwise else micro_shards
        each_step = EveryStep(peers=peers, exchange=exchange, parts=parts, by_mode=mode.bitwise)
    if rounds is None:
        return each_step
    if ema is not None:
        raise ConfigError(
            f"ema={ema} with rounds of islands, whose averages differ: leave ema out; the "
            "outer parameters are an average"
        )
    if rounds.delay and job.processes > 1 and count > 1:
        raise ConfigError(
            f"delay={rounds.delay} with islands of {job.processes} processes; fragments are "
            "sent in the background by islands of one process: use delay=0"
        )
    if rounds.sends_gradients:
        if rounds.codec.error >= 1 or rounds.axis is not None or mode.bitwise:
            raise ConfigError(
                f"rounds with every=1, send={rounds.codec.name!r}, axis={rounds.axis!r} in mode="
                f"{mode.name!r}; gradients are sent between jobs, with small errors: use every=30, "
                f"reduction={rounds.codec.name!r} within one job, or another mode"
            )
        if isinstance(each_step, EveryStep) and rounds.codec.error:
            return dataclasses.replace(each_step, settings=rounds)
        return each_step
    if rounds.axis is not None and (
        not mode.per_replica or not layout.is_whole or exchange is not None
    ):
        raise ConfigError(
            f"rounds along axis={rounds.axis!r} with mode={mode.name!r}, layout="
            f"{layout.name!r} and {count} islands of the job; each replica of one job is "
            "an island: use mode='shard_map', layout='replicated' and a job without islands"
        )
    return EveryRound(
        settings=rounds.resolved(count if rounds.axis is None else replicas),
        peers=peers,
        each_step=each_step,
        exchange=exchange,
        parts=each_step.parts,
        boundary_interval=1 if count == 1 and rounds.delay == 0 else rounds.interval,
    )
