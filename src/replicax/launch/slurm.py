"""A job for Slurm: the batch script that a person reads and submits."""

import re
import shlex
from dataclasses import dataclass

from replicax.errors import ConfigError
from replicax.launch.job import Job

SECONDS_TO_SAVE = 120
"""How long before its time limit a job is told to save and stop."""

SECONDS_TO_END = 60
"""How long after the first process has ended the others may go on."""


@dataclass(frozen=True)
class SlurmOptions:
    """What to ask Slurm for. Memory and the like: edit the script, or give them to sbatch."""

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


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """The text of a script for sbatch that runs `job` with one srun.

    Args:
        job: the command and how many processes run it.
        options: what to ask Slurm for.

    Raises:
        ConfigError: processes that do not divide over the nodes, or a value that no #SBATCH line
            can hold.
    """
    return "\n".join([*_header(job, options), "", *_body(job, options), ""])


def _header(job: Job, options: SlurmOptions) -> list[str]:
    nodes, per_node = _spread(job.processes, options)
    gpus = _at_least("gpus_per_process", options.gpus_per_process, 0)
    asked: dict[str, object] = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        # For the node and not for each task: GPUs bound to one task are out of reach of NCCL's
        # direct copies, and the processes of a node share its GPUs out among themselves.
        "gpus-per-node": per_node * gpus or None,
        "cpus-per-task": _cpus(options),
        "time": options.time,
        "output": options.output,
    }
    lines = [
        "#!/bin/bash",
        f"# {_count(job.processes, 'process')} on {_count(nodes, 'node')}; submit with sbatch.",
    ]
    lines += [f"#SBATCH --{name}={_value(name, v)}" for name, v in asked.items() if v is not None]
    if options.time is not None:
        lines += [
            f"# SIGTERM {SECONDS_TO_SAVE} seconds before the time is up: save and stop.",
            f"#SBATCH --signal=TERM@{SECONDS_TO_SAVE}",
        ]
    if job.restarts:
        lines += [
            "# After the loss of a node, start again on others.",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
        ]
    return lines


def _body(job: Job, options: SlurmOptions) -> list[str]:
    cpus = _cpus(options)
    # srun takes the cores per task from its own command line only.
    srun = f"srun --kill-on-bad-exit=0 --wait={SECONDS_TO_END} --label"
    srun += f" --cpus-per-task={cpus}" if cpus else ""
    devices = []
    if job.devices_per_process is not None:
        devices = [
            "# Simulated devices of each process, where it runs on CPUs.",
            f"export JAX_NUM_CPU_DEVICES={job.devices_per_process}",
            "",
        ]
    about = [
        "# Each process finds its place, and process 0, in what srun sets.",
        "# One that fails tells the others; --kill-on-bad-exit=1 would take 75 for a",
        "# failure too, and cut off those that still save.",
    ]
    command = f"{srun} \\\n    {shlex.join(job.command)}"
    if not job.restarts:
        return [*devices, *about, command]
    return [
        *devices,
        f"restarts={job.restarts}",
        "for ((attempt = 0; attempt <= restarts; attempt++)); do",
        "    code=0",
        *(f"    {line}" for line in about),
        f"    {command} || code=$?",
        "    case $code in",
        "        # Done, or a wrong flag, which starting again does not mend.",
        "        0 | 2) break ;;",
        "        # Stopped early with everything saved: go on in a new allocation.",
        "        75)",
        "            if ((${SLURM_RESTART_COUNT:-0} < restarts)); then",
        '                scontrol requeue "$SLURM_JOB_ID"',
        "            fi",
        "            break ;;",
        "    esac",
        '    echo "attempt $((attempt + 1)) of $((restarts + 1)): exit code $code" >&2',
        "done",
        'exit "$code"',
    ]


def _spread(processes: int, options: SlurmOptions) -> tuple[int, int]:
    """Nodes, and processes on each."""
    nodes, per_node = options.nodes, options.processes_per_node
    for name, given in (("nodes", nodes), ("processes_per_node", per_node)):
        if given is not None:
            _at_least(name, given, 1)
    if nodes is None:
        nodes = 1 if per_node is None else max(1, processes // per_node)
    if per_node is None:
        per_node = max(1, processes // nodes)
    if nodes * per_node != processes:
        raise ConfigError(
            f"{_count(processes, 'process')} on {_count(nodes, 'node')} with {per_node} on each; "
            f"every node takes as many: give {nodes * per_node} processes, or other nodes"
        )
    return nodes, per_node


def _cpus(options: SlurmOptions) -> int | None:
    cpus = options.cpus_per_process
    return None if cpus is None else _at_least("cpus_per_process", cpus, 1)


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name}={value}; it is at least {least}: raise it")
    return value


def _value(name: str, value: object) -> str:
    """`value` as it may stand in an #SBATCH line, which ends at a space and drops quotes."""
    text = str(value)
    if not re.fullmatch(r"[\w%@:+,./=\[\]-]+", text, re.ASCII):
        raise ConfigError(
            f"{name}={text!r} cannot stand in an #SBATCH line; letters, digits and "
            "%@:+,./=[]-_ can: change it"
        )
    return text


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
