"""Write a job as a file to review and submit: a Slurm script, or a JobSet for Kubernetes."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from replicax.cluster.engines import POD_PORT
from replicax.errors import ConfigError
from replicax.launch.job_spec import JobSpec
from replicax.text.wording import counted

TEMPLATES = Path(__file__).with_name("templates")
# Lines between `#if NAME` and `#else` or `#end` are included if NAME is given.
_BLOCK = re.compile(r"^#if ([\w-]+)\n(.*?)(?:^#else\n(.*?))?^#end\n", re.DOTALL | re.MULTILINE)
_PLACE = re.compile(r"\{\{([\w-]+)\}\}")
_LONGEST_LABEL = 63
_ISLAND_PORT = POD_PORT + 1
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
# As sbatch parses a time limit: 90, 90:30, 1:30:00, 2-0, 2-00:30, 2-00:30:00.
_TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.ASCII | re.IGNORECASE)
# As the Kubernetes API checks them: 8, 500m, 64Gi.
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """Resources to request from Slurm. For memory etc., edit the script or pass flags to sbatch."""

    nodes: int | None = None
    """Number of nodes; by default 1, or derived from --processes-per-node."""
    processes_per_node: int | None = None
    """Processes per node; by default, processes divided by nodes."""
    gpus_per_process: int | None = None
    """GPUs per process; by default none, which a line says."""
    cpus_per_process: int | None = None
    """CPU cores per process; by default, the cluster's default."""
    time: str | None = None
    """Time limit in Slurm's format: minutes, hours:minutes:seconds or days-hours."""
    partition: str | None = None
    """Partition to run in; by default, the cluster's default."""
    account: str | None = None
    """Account to charge; by default, the user's default."""
    output: str | None = None
    """File for the output of all processes; by default slurm-%j.out, of the job's ID, or
    slurm-%A_%a.out, of the array's ID and the island."""


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """Resources to request from Kubernetes; one pod per process. For more, edit the manifest."""

    image: str
    """Container image with the program and Replicax."""
    namespace: str | None = None
    """Namespace to run in; by default, the current one."""
    gpus_per_process: int | None = None
    """GPUs (nvidia.com/gpu) per pod; by default none, which a line says."""
    cpu: str | None = None
    """CPU cores per pod: 8, or 500m."""
    memory: str | None = None
    """Memory per pod: 64Gi."""
    shared_memory: str | None = None
    """Size limit of /dev/shm per pod: 8Gi; its contents count as the pod's memory."""


def slurm_script(job: JobSpec, options: SlurmOptions) -> str:
    """Return an sbatch script that runs `job`, or each of its islands, with one srun.

    Raises:
        ConfigError: processes that do not divide evenly over the nodes, or a value that is invalid
            in an #SBATCH line.
    """
    if job.islands is not None:
        _at_least("islands", job.islands, 1)
    nodes, per_node = _spread(job.processes, options)
    gpus = _at_least("gpus_per_process", options.gpus_per_process or 0, 0)
    if options.time is not None and not _TIME_LIMIT.fullmatch(options.time):
        raise ConfigError(
            f"time={options.time!r} is not a time limit of Slurm such as 90, 1:30:00 or 2-00: "
            "change it"
        )
    cpus = options.cpus_per_process
    asked: dict[str, object] = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        # Per node, not per task: NCCL cannot copy directly between GPUs bound to single tasks, and
        # the processes of a node divide its GPUs among themselves.
        "gpus-per-node": per_node * gpus or None,
        "cpus-per-task": None if cpus is None else _at_least("cpus_per_process", cpus, 1),
        "time": options.time,
        "output": options.output or ("slurm-%A_%a.out" if job.islands else "slurm-%j.out"),
    }
    values = {name: _directive(name, value) for name, value in asked.items() if value is not None}
    islands = job.islands and {
        "islands": counted(job.islands, "island"),
        "island-count": job.islands,
        "last-island": job.islands - 1,
    }
    return _filled(
        "slurm_islands.sh" if islands else "slurm.sh",
        {
            **values,
            **(islands or {}),
            "processes": counted(job.processes, "process"),
            "hosts": counted(nodes, "node"),
            "devices": job.devices_per_process,
            "restarts": job.restarts if islands else job.restarts or None,
            # srun reads the cores per task only from its own command line.
            "srun-cpus": f" --cpus-per-task={cpus}" if cpus else "",
            "command": shlex.join(job.command),
        },
    )


def jobset_manifest(job: JobSpec, options: KubernetesOptions) -> str:
    """Return the YAML of a JobSet whose pods are the processes of `job`, or of its islands.

    Raises:
        ConfigError: a name that is not a DNS label or is too long, an empty image, or an invalid
            Kubernetes quantity.
    """
    if job.islands is not None:
        _at_least("islands", job.islands, 1)
    group = "islands" if job.islands else "workers"
    _check_name(job, f"-{group}-{(job.islands or 1) - 1}-{job.processes - 1}-abcde")
    if not options.image.strip():
        raise ConfigError("image=''; the pods need a container image: give one")
    gpus = _at_least("gpus_per_process", options.gpus_per_process or 0, 0)
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        raise ConfigError(f"namespace={options.namespace!r} is not a DNS label: change it")
    for name in ("cpu", "memory", "shared_memory"):
        value = getattr(options, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(
                f"{name}={value!r} is not a Kubernetes quantity such as 8, 500m or 64Gi: change it"
            )
    limits = {"cpu": options.cpu, "memory": options.memory}
    limits |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    asked = [f"{name}: {_quoted(value)}" for name, value in limits.items() if value is not None]
    islands = job.islands or 0
    # The first pod of each island; Kubernetes expands $(NAME) of a variable that comes before.
    hosts = [f"{job.name}-{group}-{island}-0.{job.name}" for island in range(islands)]
    first_host = f"{job.name}-{group}-{'$(REPLICAX_ISLAND)' if islands else 0}-0.{job.name}"
    # Kubernetes expands $(NAME) in the words of a command, and reads $$ as $.
    words = [_quoted(word.replace("$", "$$")) for word in job.command]
    return _filled(
        "jobset.yaml",
        {
            "name": _quoted(job.name),
            "bare-name": job.name,
            "namespace": options.namespace and _quoted(options.namespace),
            "processes": job.processes,
            "restarts": job.restarts,
            "devices": job.devices_per_process,
            "image": _quoted(options.image),
            "command": "\n              - ".join(words),
            "islands": job.islands and counted(job.islands, "island"),
            "pods": counted(job.processes, "pod"),
            "group": group,
            "replicas": job.islands or 1,
            "addresses": _quoted(",".join(f"{host}:{_ISLAND_PORT}" for host in hosts)),
            "coordinator": _quoted(f"{first_host}:{POD_PORT}"),
            "port": POD_PORT,
            "island-port": _ISLAND_PORT,
            "limits": "\n                  ".join(asked) or None,
            "shared-memory": options.shared_memory and _quoted(options.shared_memory),
        },
    )


def _filled(template: str, values: Mapping[str, object]) -> str:
    """Return a template without the blocks of missing values, and with each {{NAME}} replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    text = _BLOCK.sub(lambda m: m[2] if values.get(m[1]) is not None else m[3] or "", text)
    return _PLACE.sub(lambda m: str(values[m[1]]), text)


def _spread(processes: int, options: SlurmOptions) -> tuple[int, int]:
    """Return the number of nodes, and of processes per node."""
    nodes, per_node = options.nodes, options.processes_per_node
    for name, given in (("nodes", nodes), ("processes_per_node", per_node)):
        if given is not None:
            _at_least(name, given, 1)
    nodes = nodes or max(1, processes // (per_node or processes))
    per_node = per_node or max(1, processes // nodes)
    if nodes * per_node != processes:
        raise ConfigError(
            f"{counted(processes, 'process')} on {counted(nodes, 'node')} with {per_node} on each; "
            f"the product must match: use {nodes * per_node} processes, or change the nodes"
        )
    return nodes, per_node


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name}={value}; it must be at least {least}: raise it")
    return value


def _directive(name: str, value: object) -> str:
    """Return `value` for an #SBATCH line, which ends at a space and drops quotes."""
    text = str(value)
    if not re.fullmatch(r"[\w%@:+,./=\[\]-]+", text, re.ASCII):
        raise ConfigError(
            f"{name}={text!r} is not allowed in an #SBATCH line; only letters, digits and "
            "%@:+,./=[]-_ are: change it"
        )
    return text


def _check_name(job: JobSpec, suffix: str) -> None:
    name = job.name
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"name={name!r} is not a DNS label; use a lower-case letter, then lower-case letters, "
            "digits and inner hyphens: change it"
        )
    added = len(suffix)  # Kubernetes adds five characters to the name of each pod
    if len(name) + added > _LONGEST_LABEL:
        raise ConfigError(
            f"name={name!r} has {len(name)} characters; pod names add {added}, and the limit is "
            f"{_LONGEST_LABEL}: shorten it to {_LONGEST_LABEL - added}"
        )


def _quoted(text: str) -> str:
    # JSON strings are valid YAML, but YAML requires more characters to be escaped.
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False)
    )
