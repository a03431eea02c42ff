"""The manifest against JobSet's own schema, and what a pod makes of it."""

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicax.cluster.place import find_place
from replicax.errors import ConfigError
from replicax.launch.job_spec import JobSpec
from replicax.launch.scripts import KubernetesOptions, jobset_manifest

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest back")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks the manifest")

DEFINITION = Path(__file__).parent / "data" / "jobset-v0.12.0-crd.yaml.gz"
ODD = (
    "python",
    "a b",
    "it's",
    'say "x"',
    "$HOME $(HOME) $$",
    "line\nbreak",
    "back\\slash",
    "\t: #",
)
ODDER = ("- x", "", "{}", "yes", "é😀", "\x7f\u2028\x85", "%s", "'", "--flag=[1, 2]")


def _job(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"command": ("replicax", "train", "mlp"), "processes": 4}
    return JobSpec(**{**fields, "name": "run-7", **changes})


@pytest.fixture(scope="module")
def schema() -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    definition = yaml.load(gzip.decompress(DEFINITION.read_bytes()), loader)
    (version,) = definition["spec"]["versions"]
    assert version["name"] == "v1alpha2"
    return dict(_strict(version["schema"]["openAPIV3Schema"]))


def _strict(node: Any) -> Any:
    """The schema with unknown fields refused, as `kubectl --validate=strict` does."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        strict["additionalProperties"] = False
    return strict


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' own replacement of $(NAME) and $$ in commands and values."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text
    )


def _container(manifest: str) -> Any:
    (workers,) = yaml.safe_load(manifest)["spec"]["replicatedJobs"]
    (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    return container


def _environment(container: Any, number: int, secret: dict[str, Any]) -> dict[str, str]:
    """The environment of pod `number` in the second island, of the third start of a job."""
    labels = {"jobset-uid": "u-1", "restart-attempt": "2", "job-index": "1"}
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(number)}
    for variable in container["env"]:
        if "value" in variable:
            env[variable["name"]] = _expand(variable["value"], env)
        elif key := variable["valueFrom"].get("secretKeyRef"):
            assert key == {"name": "run-7", "key": "secret", **secret}
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            name = re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]", path)
            env[variable["name"]] = labels[name[1]]  # type: ignore[index]
    return env


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, KubernetesOptions(image="registry/app:1")),
        (
            {"restarts": 3, "devices_per_process": 2, "processes": 16},
            KubernetesOptions(
                image="registry/app@sha256:00",
                namespace="research",
                gpus_per_process=8,
                cpu="96",
                memory="1.5Ti",
                shared_memory="64Gi",
            ),
        ),
        ({"command": ODD + ODDER, "name": "a"}, KubernetesOptions(image="x")),
        ({"islands": 3, "restarts": 20}, KubernetesOptions(image="x", gpus_per_process=8)),
    ],
    ids=["least", "most", "odd", "islands"],
)
def test_fits_the_schema_of_jobset(
    changes: dict[str, Any], options: KubernetesOptions, schema: Mapping[str, Any]
) -> None:
    manifest = yaml.safe_load(jobset_manifest(_job(**changes), options))
    metadata = manifest["metadata"]
    manifest["metadata"] = {}  # Kubernetes checks it apart from the schema
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert metadata["name"] == changes.get("name", "run-7")
    assert metadata.get("namespace") == options.namespace


def test_odd_words_of_the_command_arrive_as_they_were() -> None:
    command = ODD + ODDER
    container = _container(jobset_manifest(_job(command=command), KubernetesOptions(image="x")))
    assert tuple(_expand(word, {"HOME": "wrong"}) for word in container["command"]) == command


def test_a_pod_finds_its_place() -> None:
    container = _container(jobset_manifest(_job(), KubernetesOptions(image="x")))
    env = _environment(container, 3, {"optional": True})
    place = find_place(env)
    assert "resources" not in container  # nothing is asked for that was not given
    assert "JAX_NUM_CPU_DEVICES" not in env
    assert (place.process, place.processes, place.engine) == (3, 4, "Kubernetes")
    assert place.coordinator == "run-7-workers-0-0.run-7:29400"
    assert place.job == "u-1.2"


@pytest.mark.parametrize("processes", [1, 4])
def test_a_pod_finds_its_island(processes: int) -> None:
    job = _job(islands=3, processes=processes, restarts=20)
    manifest = yaml.safe_load(jobset_manifest(job, KubernetesOptions(image="x")))
    (group,) = manifest["spec"]["replicatedJobs"]
    assert (group["name"], group["replicas"]) == ("islands", 3)
    assert group["template"]["spec"]["completions"] == processes
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet", "RestartJob"]
    name = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"  # as JobSet's webhook checks it
    assert all(re.fullmatch(name, rule["name"]) for rule in policy["rules"])
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    env = _environment(container, processes - 1, {})
    assert env["REPLICAX_ISLAND"] == "1"
    assert env["REPLICAX_ISLANDS"].split(",") == [
        f"run-7-islands-{island}-0.run-7:29401" for island in range(3)
    ]
    assert [port["containerPort"] for port in container["ports"]] == [29400, 29401]
    place = find_place(env)
    assert (place.process, place.processes) == (processes - 1, processes)
    assert place.job == "u-1"  # the same in each start of each island
    if processes > 1:
        assert place.coordinator == "run-7-islands-1-0.run-7:29400"


def test_what_the_job_asks_for() -> None:
    options = KubernetesOptions(
        image="app", gpus_per_process=8, cpu="4", memory="8Gi", shared_memory="2Gi"
    )
    manifest = yaml.safe_load(jobset_manifest(_job(restarts=5, devices_per_process=2), options))
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 5
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    limits = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"limits": limits}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert {"name": "JAX_NUM_CPU_DEVICES", "value": "2"} in container["env"]


@pytest.mark.parametrize("name", ["", "Run", "7run", "run_7", "run.7", "run-", "é", "a\n"])
def test_a_name_that_is_no_label(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not\b.*DNS label"):
        jobset_manifest(_job(name=name), KubernetesOptions(image="x"))


def test_a_name_that_is_too_long() -> None:
    jobset_manifest(_job(name="a" * 45, processes=10), KubernetesOptions(image="x"))
    with pytest.raises(ConfigError, match=r"shorten it\b.* 44$"):
        jobset_manifest(_job(name="a" * 45, processes=11), KubernetesOptions(image="x"))
    with pytest.raises(ConfigError, match=r"shorten it\b.* 45$"):
        jobset_manifest(_job(name="a" * 46), KubernetesOptions(image="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": " "}, "the pods need a container image"),
        ({"namespace": "A"}, "namespace='A' is not a DNS label"),
        ({"memory": "64 GB"}, "memory='64 GB' is not a"),
        ({"cpu": "4\nx: 1"}, "cpu=.* is not a"),
        ({"shared_memory": "8gi"}, "shared_memory='8gi' is not a"),
        ({"gpus_per_process": -1}, "gpus_per_process=-1; .* at least 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jobset_manifest(_job(), KubernetesOptions(**{"image": "x", **options}))
