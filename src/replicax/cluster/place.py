"""The place of this process in its job, and which variable decided each part of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicax.cluster.address import split_address
from replicax.cluster.detected import Detected
from replicax.cluster.engines import find_innermost
from replicax.cluster.variables import COORDINATOR, JOB_ID, LOCAL_DEVICES, PROCESS_ID, PROCESSES
from replicax.errors import ConfigError

_VARIABLES = {"process": PROCESS_ID, "processes": PROCESSES, "coordinator": COORDINATOR}
_ARGUMENTS = "arguments"
_OWN_VARIABLES = "REPLICAX_*"


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job."""

    process: int
    """This process, from 0."""
    processes: int
    coordinator: str | None
    """`host:port` where process 0 listens; `None` for one process alone."""
    job: str
    """The job's id; `""` where nothing tells."""
    local_process: int | None
    """This process among those of its host, from 0, where known."""
    local_processes: int | None
    """Processes on this host, where known."""
    local_devices: tuple[int, ...] | None
    """Which of the visible devices this process takes, where told; `None`: not told."""
    engine: str
    """The engine that started it: `Slurm`, `Open MPI`, `Kubernetes`, `TPU`, `RANK/WORLD_SIZE`,
    `REPLICAX_*`, `arguments` or `nothing`."""
    reasons: Mapping[str, str]
    """Field -> what decided it: `{"process": "SLURM_PROCID=3"}`."""

    def line(self) -> str:
        """Return what was found and which variables decided it, in one line."""
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
        """The reasons of `fields` in brackets, without the values, which stand beside them."""
        bare = [
            re.sub(r"(?<=\w)=\S*?(?=,? |$)", "", self.reasons[field])
            for field in fields
            if field in self.reasons
        ]
        return f" ({', '.join(dict.fromkeys(bare))})" if bare else ""


@dataclass(frozen=True)
class _Told:
    """One field that an argument or a REPLICAX_* variable gives."""

    value: str
    reason: str
    by: str


def find_place(
    env: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    job: str | None = None,
    local_devices: Sequence[int] | None = None,
) -> Place:
    """This process's place in its job.

    Each field comes from its argument, else from its REPLICAX_* variable, else from the innermost
    engine that started the process: torchrun and the like (RANK, WORLD_SIZE), a TPU pod, Open MPI,
    a Slurm step, an indexed Job of Kubernetes. Where none did, the process is alone. Only a
    TPU VM without TPU variables is asked over the network, through its own metadata server.

    Args:
        env: the environment, `os.environ`.
        coordinator: `host:port` where process 0 listens.
        processes: how many there are.
        process: this one, from 0.
        job: the job's id.
        local_devices: which of the visible devices this process takes, from 0.

    Raises:
        ConfigError: a value that is missing, malformed, out of range, or contradicts another.
    """
    arguments = {"process": process, "processes": processes, "coordinator": coordinator}
    told = {
        field: value
        for field in _VARIABLES
        if (value := _told(env, field, arguments[field])) is not None
    }
    counted = _number(told["processes"], least=1) if "processes" in told else None
    if counted == 1 or len(told) == len(_VARIABLES):
        detected = None
    else:
        detected = find_innermost(env)
    if detected is not None and detected.processes == 1 and told.keys() - {"coordinator"}:
        # One process that is told it is one of several: the engine did not number it.
        detected = None
    reasons = dict(detected.reasons) if detected else {}
    reasons |= {field: value.reason for field, value in told.items()}
    if counted is None and detected is not None:
        counted = detected.processes
    if counted is None:
        counted = _count_without_engine(told, detected, reasons)
    number = _process(told, detected, counted, reasons)
    address = None if counted == 1 else _coordinator(told, detected)
    if job is None:
        job = env.get(JOB_ID, detected.job if detected else "")
        if JOB_ID in env:
            reasons["job"] = JOB_ID
    else:
        reasons["job"] = "argument job"
    return Place(
        process=number,
        processes=counted,
        coordinator=address,
        job=job,
        local_process=detected.local_process if detected else None,
        local_processes=detected.local_processes if detected else None,
        local_devices=_local_devices(env, local_devices, reasons),
        engine=_engine(told, detected),
        reasons=_known(reasons, counted, job, detected),
    )


def _told(env: Mapping[str, str], field: str, argument: object) -> _Told | None:
    if argument is not None:
        return _Told(str(argument), f"argument {field}={argument}", _ARGUMENTS)
    name = _VARIABLES[field]
    if name not in env:
        return None
    return _Told(env[name], f"{name}={env[name]}", _OWN_VARIABLES)


def _number(told: _Told, least: int = 0) -> int:
    text = told.value.strip()
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{told.reason} is not a whole number from {least}: correct it")
    return int(text)


def _count_without_engine(
    told: Mapping[str, _Told], detected: Detected | None, reasons: dict[str, str]
) -> int:
    """1 where nothing tells of more."""
    if detected is not None:
        raise ConfigError(detected.lacks["processes"])
    if told:
        raise _incomplete(told, "processes")
    reasons["process"] = "no launcher detected"
    return 1


def _process(
    told: Mapping[str, _Told], detected: Detected | None, counted: int, reasons: dict[str, str]
) -> int:
    if "process" in told:
        number = _number(told["process"])
    elif counted == 1 and (detected is None or detected.process is None):
        if "processes" in told:
            reasons["process"] = told["processes"].reason
        return 0
    elif detected is None:
        raise _incomplete(told, "process")
    elif detected.process is None:
        raise ConfigError(detected.lacks["process"])
    else:
        number = detected.process
    if number >= counted:
        raise ConfigError(
            f"{reasons['process']} with {reasons['processes']}; "
            f"processes count from 0 to {counted - 1}: lower it"
        )
    return number


def _coordinator(told: Mapping[str, _Told], detected: Detected | None) -> str:
    if "coordinator" in told:
        name = told["coordinator"].reason.partition("=")[0]
        address = told["coordinator"].value.strip()
    elif detected is None:
        raise _incomplete(told, "coordinator")
    elif detected.coordinator is None:
        raise ConfigError(detected.lacks["coordinator"])
    else:
        name, address = f"coordinator ({detected.reasons['coordinator']})", detected.coordinator
    split_address(address, name)
    return address


def _incomplete(told: Mapping[str, _Told], missing: str) -> ConfigError:
    there = ", ".join(value.reason for value in told.values())
    name = _VARIABLES[missing]
    return ConfigError(
        f"{there} without {name}; {', '.join(_VARIABLES.values())} go together where no launcher "
        f"gives them: set {name}, or pass {missing}="
    )


def _local_devices(
    env: Mapping[str, str], argument: Sequence[int] | None, reasons: dict[str, str]
) -> tuple[int, ...] | None:
    if argument is not None:
        text, name = ",".join(map(str, argument)), "argument local_devices"
    elif LOCAL_DEVICES in env:
        text, name = env[LOCAL_DEVICES], LOCAL_DEVICES
    else:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries) or len(
        set(map(int, entries))
    ) < len(entries):
        raise ConfigError(
            f"{name}={text!r} is not a list of different devices from 0, such as 0,1: correct it"
        )
    reasons["local_devices"] = f"{name}={text}"
    return tuple(map(int, entries))


def _engine(told: Mapping[str, _Told], detected: Detected | None) -> str:
    if detected is not None:
        return detected.engine
    by = {value.by for value in told.values()}
    return _ARGUMENTS if _ARGUMENTS in by else _OWN_VARIABLES if by else "nothing"


def _known(
    reasons: Mapping[str, str], counted: int, job: str, detected: Detected | None
) -> dict[str, str]:
    """The reasons of the fields that have a value."""
    absent = {
        "coordinator": counted == 1,
        "job": not job,
        "local_process": detected is None or detected.local_process is None,
        "local_processes": detected is None or detected.local_processes is None,
    }
    return {field: reason for field, reason in reasons.items() if not absent.get(field)}
