"""A job as a file that a person reads and submits: a script for Slurm, a JobSet for Kubernetes."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from replicax.cluster.engines import POD_PORT
from replicax.errors import ConfigError
from replicax.launch.job_spec import JobSpec
from replicax.wording import counted

TEMPLATES = Path(__file__).with_name("templates")
# Lines between `#if NAME` and `#else` or `#end` are there where NAME is given.
_BLOCK = re.compile(r"^#if ([\w-]+)\n(.*?)(?:^#else\n(.*?))?^#end\n", re.DOTALL | re.MULTILINE)
_PLACE = re.compile(r"\{\{([\w-]+)\}\}")
_LONGEST_LABEL = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
# As the Kubernetes API checks them: 8, 500m, 64Gi.
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """Resources to ask Slurm for. Memory and the like: edit the script, or give them to sbatch."""

    nodes: int | None = None
    """Nodes to spread the processes over; 1 unless --processes-per-node says otherwise."""
    processes_per_node: int | None = None
    """Processes on each node; all of them divided by the nodes where it is not given."""
    gpus_per_process: int = 0
    """GPUs that each process takes."""
    cpus_per_process: int | None = None
    """CPU cores that each process takes; what the cluster gives where it is not given."""
    time: str | None = None
    """Time limit as Slurm takes it: minutes, hours:minutes:seconds or days-hours."""
    partition: str | None = None
    """Partition to run in; the cluster's default where it is not given."""
    account: str | None = None
    """Account to charge; the user's default where it is not given."""
    output: str = "slurm-%j.out"
    """File for the output of all processes; %j is the job's id."""


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """Resources to ask Kubernetes for. Each process is one pod; for the rest, edit the manifest."""

    image: str
    """Container image that holds the program and Replicax."""
    namespace: str | None = None
    """Namespace to run in; the current one where it is not given."""
    gpus_per_process: int = 0
    """GPUs (nvidia.com/gpu) that each pod takes."""
    cpu: str | None = None
    """CPU cores of each pod: 8, or 500m."""
    memory: str | None = None
    """Memory of each pod: 64Gi."""
    shared_memory: str | None = None
    """Most that a pod may put in /dev/shm: 8Gi; it counts as the pod's memory."""


def slurm_script(job: JobSpec, options: SlurmOptions) -> str:
    """Return the text of a script for sbatch that runs `job` with one srun.

    Raises:
        ConfigError: processes that do not divide over the nodes, or a value that no #SBATCH line
            can hold.
    """
    nodes, per_node = _spread(job.processes, options)
    _at_least("gpus_per_process", options.gpus_per_process, 0)
    cpus = options.cpus_per_process
    asked: dict[str, object] = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        # For the node and not for each task: GPUs bound to one task are out of reach of NCCL's
        # direct copies, and the processes of a node share its GPUs out among themselves.
        "gpus-per-node": per_node * options.gpus_per_process or None,
        "cpus-per-task": None if cpus is None else _at_least("cpus_per_process", cpus, 1),
        "time": options.time,
        "output": options.output,
    }
    values = {name: _directive(name, value) for name, value in asked.items() if value is not None}
    return _filled(
        "slurm.sh",
        {
            **values,
            "processes": counted(job.processes, "process"),
            "hosts": counted(nodes, "node"),
            "devices": job.devices_per_process,
            "restarts": job.restarts or None,
            # srun takes the cores per task from its own command line only.
            "srun-cpus": f" --cpus-per-task={cpus}" if cpus else "",
            "command": shlex.join(job.command),
        },
    )


def jobset_manifest(job: JobSpec, options: KubernetesOptions) -> str:
    """Return the YAML of a JobSet whose pods are the processes of `job`.

    Raises:
        ConfigError: a name that is no DNS label or is too long, an empty image, or a quantity that
            Kubernetes does not read.
    """
    _check_name(job.name, job.processes)
    if not options.image.strip():
        raise ConfigError("image=''; the pods need a container image: name one")
    _at_least("gpus_per_process", options.gpus_per_process, 0)
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        raise ConfigError(f"namespace={options.namespace!r} is no DNS label: change it")
    for name in ("cpu", "memory", "shared_memory"):
        value = getattr(options, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(
                f"{name}={value!r} is no quantity of Kubernetes, such as 8, 500m or 64Gi: change it"
            )
    gpus = str(options.gpus_per_process) if options.gpus_per_process else None
    limits = {"cpu": options.cpu, "memory": options.memory, "nvidia.com/gpu": gpus}
    asked = [f"{name}: {_quoted(value)}" for name, value in limits.items() if value is not None]
    # Kubernetes replaces $(NAME) in the words of a command, and reads $$ as $.
    words = [_quoted(word.replace("$", "$$")) for word in job.command]
    return _filled(
        "jobset.yaml",
        {
            "name": _quoted(job.name),
            "namespace": options.namespace and _quoted(options.namespace),
            "processes": job.processes,
            "restarts": job.restarts,
            "devices": job.devices_per_process,
            "image": _quoted(options.image),
            "command": "\n              - ".join(words),
            "coordinator": _quoted(f"{job.name}-workers-0-0.{job.name}:{POD_PORT}"),
            "port": POD_PORT,
            "limits": "\n                  ".join(asked) or None,
            "shared-memory": options.shared_memory and _quoted(options.shared_memory),
        },
    )


def _filled(template: str, values: Mapping[str, object]) -> str:
    """The text of a template: blocks of what is not given left out, then each {{NAME}} replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    text = _BLOCK.sub(lambda m: m[2] if values.get(m[1]) is not None else m[3] or "", text)
    return _PLACE.sub(lambda m: str(values[m[1]]), text)


def _spread(processes: int, options: SlurmOptions) -> tuple[int, int]:
    """Nodes, and processes on each."""
    nodes, per_node = options.nodes, options.processes_per_node
    for name, given in (("nodes", nodes), ("processes_per_node", per_node)):
        if given is not None:
            _at_least(name, given, 1)
    nodes = nodes or max(1, processes // (per_node or processes))
    per_node = per_node or max(1, processes // nodes)
    if nodes * per_node != processes:
        raise ConfigError(
            f"{counted(processes, 'process')} on {counted(nodes, 'node')} with {per_node} on each; "
            f"every node takes as many: give {nodes * per_node} processes, or other nodes"
        )
    return nodes, per_node


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name}={value}; it is at least {least}: raise it")
    return value


def _directive(name: str, value: object) -> str:
    """`value` as it may stand in an #SBATCH line, which ends at a space and drops quotes."""
    text = str(value)
    if not re.fullmatch(r"[\w%@:+,./=\[\]-]+", text, re.ASCII):
        raise ConfigError(
            f"{name}={text!r} cannot stand in an #SBATCH line; letters, digits and "
            "%@:+,./=[]-_ can: change it"
        )
    return text


def _check_name(name: str, processes: int) -> None:
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"name={name!r} is no DNS label; lower-case letters, digits and inner hyphens, after "
            "a letter, are: change it"
        )
    # Kubernetes adds five characters to the name of each pod.
    added = len(f"-workers-0-{processes - 1}-abcde")
    if len(name) + added > _LONGEST_LABEL:
        raise ConfigError(
            f"name={name!r} has {len(name)} characters; its pods' names have {added} more, "
            f"{_LONGEST_LABEL} at most: shorten it to {_LONGEST_LABEL - added}"
        )


def _quoted(text: str) -> str:
    """`text` as a quoted string of YAML."""
    # JSON's strings are YAML's, but YAML bars more characters from standing as they are.
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False)
    )
