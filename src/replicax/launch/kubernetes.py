"""A job for Kubernetes: the JobSet manifest that a person reads and applies."""

import json
import re
from dataclasses import dataclass

from replicax.cluster.engines.kubernetes import DEFAULT_PORT
from replicax.cluster.variables import COORDINATOR, JOB_ID, PROCESSES
from replicax.errors import ConfigError
from replicax.launch.job import Job

GRACE_SECONDS = 120
"""How long a pod that is told to stop may take to save."""
_REPLICATED_JOB = "workers"
_LONGEST_LABEL = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
# As the Kubernetes API checks them: 8, 500m, 64Gi.
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)


@dataclass(frozen=True)
class KubernetesOptions:
    """What to ask Kubernetes for. Each process is one pod; for the rest, edit the manifest."""

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


def jobset_manifest(job: Job, options: KubernetesOptions) -> str:
    """The YAML of a JobSet whose pods are the processes of `job`.

    Args:
        job: the command, how many processes run it, its name and how often it may start again.
        options: the image, and what each pod takes.

    Raises:
        ConfigError: a name that is no DNS label or is too long, an empty image, or a quantity that
            Kubernetes does not read.
    """
    _check_name(job.name, job.processes)
    _check_options(options)
    namespace = f"  namespace: {_quoted(options.namespace)}\n" if options.namespace else ""
    return f"""\
# {job.processes} pods, one process each; submit with kubectl create --filename FILE.
# Needs the JobSet controller: https://jobset.sigs.k8s.io
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {_quoted(job.name)}
{namespace}spec:
  # Gives every pod a name that the others can find.
  network:
    enableDNSHostnames: true
  failurePolicy:
    # A pod that fails starts all of them again, from their last checkpoint.
    maxRestarts: {job.restarts}
    rules:
    # A wrong flag (exit code 2, below) would fail every time.
    - name: wrong-flag
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: {_REPLICATED_JOB}
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {job.processes}
        parallelism: {job.processes}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values: [2]
        template:
          spec:
            restartPolicy: Never
            # Time to save after SIGTERM.
            terminationGracePeriodSeconds: {GRACE_SECONDS}
            containers:
            - name: train
              image: {_quoted(options.image)}
              command:
{_command(job)}              env:
{_environment(job)}{_resources(options)}              ports:
              - containerPort: {DEFAULT_PORT}
              volumeMounts:
              - name: shared-memory
                mountPath: /dev/shm
            volumes:
            # A container's own /dev/shm has 64 MB, too little for NCCL.
            - name: shared-memory
              emptyDir:
                medium: Memory
{_size_limit(options)}"""


def _command(job: Job) -> str:
    """The command's words; Kubernetes replaces $(NAME) in them and reads $$ as $."""
    words = (_quoted(word.replace("$", "$$")) for word in job.command)
    return "".join(f"              - {word}\n" for word in words)


def _environment(job: Job) -> str:
    name = job.name
    lines = [
        "# The number of the process comes from Kubernetes: JOB_COMPLETION_INDEX.",
        f"- name: {PROCESSES}",
        f"  value: {_quoted(str(job.processes))}",
        f"- name: {COORDINATOR}",
        f"  value: {_quoted(f'{name}-{_REPLICATED_JOB}-0-0.{name}:{DEFAULT_PORT}')}",
        "# A pod left over from an earlier attempt has another id, and is refused.",
        "- name: JOBSET_UID",
        "  valueFrom:",
        "    fieldRef:",
        "      fieldPath: metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
        "- name: JOBSET_ATTEMPT",
        "  valueFrom:",
        "    fieldRef:",
        "      fieldPath: metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        f"- name: {JOB_ID}",
        '  value: "$(JOBSET_UID).$(JOBSET_ATTEMPT)"',
        "- name: PYTHONUNBUFFERED",
        '  value: "1"',
    ]
    if job.devices_per_process is not None:
        lines += [
            "# Simulated devices of each process, where it runs on CPUs.",
            "- name: JAX_NUM_CPU_DEVICES",
            f"  value: {_quoted(str(job.devices_per_process))}",
        ]
    return "".join(f"              {line}\n" for line in lines)


def _resources(options: KubernetesOptions) -> str:
    asked = {"cpu": options.cpu, "memory": options.memory}
    if options.gpus_per_process:
        asked["nvidia.com/gpu"] = str(options.gpus_per_process)
    limits = [f"{name}: {_quoted(value)}" for name, value in asked.items() if value is not None]
    if not limits:
        return ""
    lines = ["resources:", "  limits:", *(f"    {limit}" for limit in limits)]
    return "".join(f"              {line}\n" for line in lines)


def _size_limit(options: KubernetesOptions) -> str:
    if options.shared_memory is None:
        return ""
    return f"                sizeLimit: {_quoted(options.shared_memory)}\n"


def _check_name(name: str, processes: int) -> None:
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"name={name!r} is no DNS label; lower-case letters, digits and inner hyphens, after "
            "a letter, are: change it"
        )
    # Kubernetes adds five characters to the name of each pod.
    pod = f"{name}-{_REPLICATED_JOB}-0-{processes - 1}-abcde"
    if len(pod) > _LONGEST_LABEL:
        most = _LONGEST_LABEL - (len(pod) - len(name))
        raise ConfigError(
            f"name={name!r} has {len(name)} characters; its pods' names have {len(pod) - len(name)}"
            f" more, {_LONGEST_LABEL} at most: shorten it to {most}"
        )


def _check_options(options: KubernetesOptions) -> None:
    if not options.image.strip():
        raise ConfigError("image=''; the pods need a container image: name one")
    if options.gpus_per_process < 0:
        raise ConfigError(
            f"gpus_per_process={options.gpus_per_process}; it is at least 0: raise it"
        )
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        raise ConfigError(f"namespace={options.namespace!r} is no DNS label: change it")
    for name in ("cpu", "memory", "shared_memory"):
        value = getattr(options, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(
                f"{name}={value!r} is no quantity of Kubernetes, such as 8, 500m or 64Gi: change it"
            )


def _quoted(text: str) -> str:
    """`text` as a quoted string of YAML."""
    # JSON's strings are YAML's, but YAML bars more characters from standing as they are.
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False)
    )
