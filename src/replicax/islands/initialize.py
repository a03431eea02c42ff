"""`initialize`: join the processes of this job, and know the other islands, if there are any."""

import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

import jax

from replicax.cluster import join
from replicax.cluster.accelerators import visible_gpus
from replicax.cluster.cluster_job import ClusterJob, current_job
from replicax.cluster.failure import print_uncaught
from replicax.cluster.watchdog import Timeouts, read_timeouts
from replicax.core.ground.job import PROCESS_JOB
from replicax.errors import ReplicaxError
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.islands.island_place import find_island
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.text.arguments import bind, with_signature

_Settings = ParamSpec("_Settings")


def _with_islands(
    join_processes: Callable[_Settings, ClusterJob],
) -> Callable[_Settings, ClusterJob | IslandJob]:
    """Return a function that also connects to the islands that the environment names."""
    signature = inspect.signature(join_processes)

    @functools.wraps(join_processes)
    def with_islands(*args: _Settings.args, **settings: _Settings.kwargs) -> ClusterJob | IslandJob:
        bind("initialize", signature, args, settings)
        if isinstance(PROCESS_JOB.job, IslandJob):
            return PROCESS_JOB.job
        begins = current_job() is None
        place, job = find_island(os.environ), join_processes(*args, **settings)
        if begins:
            job.agree("the island", {name: os.environ.get(name) for name in (ISLAND, ISLANDS)})
        if place is None:
            PROCESS_JOB.job = job if job.processes > 1 else None
            return job
        patience = settings.get("patience")
        timeouts = patience if isinstance(patience, Timeouts) else read_timeouts(os.environ)
        group = Group(place, timeouts) if job.process == 0 else None
        PROCESS_JOB.job = island = IslandJob(job, place, group)
        atexit.register(island.finish)
        _watch_exceptions()
        if not visible_gpus(os.environ, platforms=jax.config.jax_platforms):
            join.do_not_preempt()  # the network's threads, started before, do
        return island

    with_islands.__name__ = with_islands.__qualname__ = "initialize"
    return with_signature(with_islands, signature)  # type: ignore[no-any-return]


def _watch_exceptions() -> None:
    """Let an island end with the exit code of its error, which tells whether to start it again."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_uncaught(before, kind, error, trace)
        if isinstance(error, ReplicaxError):
            raise SystemExit(error.exit_code)

    sys.excepthook = hook


initialize = _with_islands(join.join_job)
