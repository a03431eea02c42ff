"""The place of this process in its job: rank, coordinator, ..., each with its source."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicax.cluster.engines import find_innermost
from replicax.cluster.variables import (
    COORDINATOR,
    JOB_ID,
    LOCAL_DEVICES,
    PROCESS_ID,
    PROCESSES,
    Fact,
    whole_number,
)
from replicax.errors import ConfigError
from replicax.net.address import split_address
from replicax.net.secret import Secret, find_secret

_VARIABLES = {"process": PROCESS_ID, "processes": PROCESSES, "coordinator": COORDINATOR}


@dataclass(frozen=True)
class Place:
    """This process's place in its job."""

    process: int
    """Rank of this process, from 0."""
    processes: int
    coordinator: str | None = None
    """`host:port` where process 0 listens; `None` for a single process."""
    job: str = ""
    """The job ID; `""` if unknown."""
    local_process: int | None = None
    """Rank of this process on its host, from 0, if known."""
    local_processes: int | None = None
    """Number of processes on this host, if known."""
    local_devices: tuple[int, ...] | None = None
    """Indices of the visible devices that this process uses; `None` if not set."""
    engine: str = "nothing"
    """The engine that started it: `Slurm`, `Open MPI`, `Kubernetes`, `TPU`, `RANK/WORLD_SIZE`,
    `REPLICAX_*`, `arguments`, `nothing`, or the name of a class of JAX."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The source of each field: `{"process": "SLURM_PROCID=3"}`."""
    secret: Secret = field(default_factory=Secret, repr=False, compare=False)
    """Proof that this process belongs to the job."""

    def line(self) -> str:
        """Return the detected values and their sources, in one line."""
        numbered_by = self._because("process", "processes")
        parts = [f"process {self.process} of {self.processes}{numbered_by}"]
        if self.coordinator is not None:
            parts.append(f"coordinator {self.coordinator}{self._because('coordinator')}")
            if self.job:
                parts.append(f"job {self.job}{self._because('job')}")
        if self.local_devices is not None:
            devices = ",".join(map(str, self.local_devices))
            parts.append(f"local devices {devices}{self._because('local_devices')}")
        return "; ".join(parts)

    def _because(self, *fields: str) -> str:
        """Return the sources of `fields` in parentheses, without the values, shown already."""
        bare = [
            re.sub(r"(?<=\w)=\S*?(?=,? |$)", "", self.reasons[field])
            for field in fields
            if field in self.reasons
        ]
        return f" ({', '.join(dict.fromkeys(bare))})" if bare else ""


def find_place(
    env: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    job: str | None = None,
    local_devices: Sequence[int] | None = None,
) -> Place:
    """Find this process's place in its job, or raise `ConfigError`.

    Each part comes from its argument, else from its REPLICAX_* variable, else from the innermost
    engine that started the process: torchrun and similar launchers (RANK, WORLD_SIZE), a TPU pod,
    Open MPI, a Slurm step, an indexed Kubernetes Job, one that only JAX knows. Without any, the
    process is alone. Only a
    TPU VM without TPU variables sends a network request, to its own metadata server.
    """
    arguments = {"process": process, "processes": processes, "coordinator": coordinator}
    told = _told(env, {part: value for part, value in arguments.items() if value is not None})
    engine = "REPLICAX_*" if told else "nothing"
    if any(value is not None for value in arguments.values()):
        engine = "arguments"
    facts, lacks = dict(told), dict[str, str]()
    if ("processes" not in told or told["processes"].value > 1) and len(told) < len(_VARIABLES):
        detected = find_innermost(env)
        # An engine with one process did not assign the rank if variables name several.
        if detected and (detected.numbers[1] != 1 or told.keys() <= {"coordinator"}):
            engine, facts, lacks = detected.engine, {**detected.facts, **told}, {**detected.lacks}
    if not facts:
        alone = "no launcher detected"
        facts = {"process": Fact(0, alone), "processes": Fact(1, alone)}

    def needed(part: str) -> Fact:
        if part in facts:
            return facts[part]
        there, name = ", ".join(fact.reason for fact in told.values()), _VARIABLES[part]
        raise ConfigError(
            lacks.get(part)
            or f"{there} without {name}; {', '.join(_VARIABLES.values())} must all be set if no "
            f"launcher sets them: set {name}, or pass {part}="
        )

    count = needed("processes").value
    if count == 1:
        facts = {"process": Fact(0, facts["processes"].reason), **facts}
        facts.pop("coordinator", None)
    number = needed("process").value
    if number >= count:
        raise ConfigError(
            f"{facts['process'].reason} with {facts['processes'].reason}; "
            f"ranks range from 0 to {count - 1}: lower it"
        )
    if count > 1:
        address, reason = needed("coordinator")
        named = "coordinator" in told
        split_address(address, reason.partition("=")[0] if named else f"coordinator ({reason})")
    if job is not None:
        facts["job"] = Fact(job, "argument job")
    elif JOB_ID in env:
        # Bytes that are no UTF-8 cannot be sent as text.
        facts["job"] = Fact(env[JOB_ID].encode(errors="backslashreplace").decode(), JOB_ID)
    if local_devices is not None:
        given = ",".join(map(str, local_devices))
        facts["local_devices"] = _devices(given, "argument local_devices")
    elif LOCAL_DEVICES in env:
        facts["local_devices"] = _devices(env[LOCAL_DEVICES], LOCAL_DEVICES)
    secret = find_secret(env) if count > 1 else Secret()
    values = {part: fact.value for part, fact in facts.items()}
    reasons = {part: fact.reason for part, fact in facts.items()}
    return Place(**values, engine=engine, reasons=reasons, secret=secret)


def _told(env: Mapping[str, str], arguments: Mapping[str, object]) -> dict[str, Fact]:
    """Read the arguments and REPLICAX_* variables."""
    facts = {}
    for part, name in _VARIABLES.items():
        if part not in arguments and name not in env:
            continue
        source = f"argument {part}" if part in arguments else name
        text = str(arguments.get(part, env.get(name)))
        value: int | str = text.strip()
        if part != "coordinator":
            value = whole_number(text, source, least=1 if part == "processes" else 0)
        facts[part] = Fact(value, f"{source}={text}")
    return facts


def _devices(text: str, name: str) -> Fact:
    entries = [entry.strip() for entry in text.split(",")]
    numbers = tuple(int(each) for each in entries if each.isascii() and each.isdigit())
    if len(set(numbers)) < len(entries):
        raise ConfigError(
            f"{name}={text!r} is not a list of distinct device indices, such as 0,1: correct it"
        )
    return Fact(numbers, f"{name}={text}")
