"""Several launchers at once: which one numbers this process."""

from collections.abc import Mapping
from dataclasses import replace

from replicax.cluster.engines import kubernetes, openmpi, slurm, torch_variables, tpu
from replicax.cluster.engines.detected import Detected
from replicax.cluster.variables import COORDINATOR, PROCESS_ID, PROCESSES
from replicax.errors import ConfigError

# From the innermost launcher outwards, where two agree.
_DETECTORS = (
    torch_variables.detect,
    tpu.detect,
    openmpi.detect,
    slurm.detect,
    kubernetes.detect,
)
# Inner and outer: two that may differ, since the outer only starts the inner's own helpers
# (mpirun's daemons are a Slurm step), or numbers a part (one slice of TPUs is one indexed Job).
_MAY_DIFFER = {
    (openmpi.ENGINE, slurm.ENGINE),
    (tpu.ENGINE, kubernetes.ENGINE),
}


def find_innermost(env: Mapping[str, str]) -> Detected | None:
    """The engine that started this very process, or `None` where there is no engine.

    torchrun is always the innermost. An engine with one process only holds another's launcher.
    Engines that agree are one, and fill each other's gaps.

    Raises:
        ConfigError: two engines number this process differently, or one's variables are wrong.
    """
    if torch_variables.is_torchrun(env):
        return torch_variables.detect(env)
    found = [place for detect in _DETECTORS if (place := detect(env)) is not None]
    several = [place for place in found if place.is_one_of_several]
    if not several:
        on_tpu = tpu.detect_from_metadata(env)
        if on_tpu is not None:
            found.insert(0, on_tpu)
        complete = [place for place in found if place.is_complete]
        # WORLD_SIZE=1 beside a Slurm step of one says nothing that is missing.
        candidates = complete or found
        return candidates[0] if candidates else None
    inner = several[0]
    for outer in several[1:]:
        if _started_inside_mpirun(env, inner, outer):
            inner = outer
        elif (inner.process, inner.processes) == (outer.process, outer.processes):
            inner = _filled(inner, outer)
        elif (inner.engine, outer.engine) not in _MAY_DIFFER:
            raise ConfigError(
                f"{inner.numbering} ({inner.engine}) and {outer.numbering} ({outer.engine}) "
                f"disagree; one launcher numbers the processes: unset one pair, or set "
                f"{PROCESS_ID}, {PROCESSES} and {COORDINATOR}"
            )
    return inner


def _started_inside_mpirun(env: Mapping[str, str], inner: Detected, outer: Detected) -> bool:
    """Whether srun ran inside mpirun, not around it: then its PMIx has named the job anew."""
    return (inner.engine, outer.engine) == (
        openmpi.ENGINE,
        slurm.ENGINE,
    ) and env.get("PMIX_NAMESPACE", "").startswith("slurm.")


def _filled(inner: Detected, outer: Detected) -> Detected:
    """`inner` with what only `outer` knows."""
    fields = ("coordinator", "job", "local_process", "local_processes")
    gaps = [
        name
        for name in fields
        if getattr(inner, name) in (None, "") and getattr(outer, name) not in (None, "")
    ]
    return replace(
        inner,
        **{name: getattr(outer, name) for name in gaps},
        reasons={**inner.reasons, **{name: outer.reasons[name] for name in gaps}},
    )
