"""Compilers for TPUs and NVIDIA GPUs, on a machine without them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from plan.compilers import FOLDER, needs
from support.small_steps import SmallStep, mlp, wide
from support.tiers import EXHAUSTIVE

from replicax.errors import MissingDependencyError
from replicax.plan.compilation import Compilation, Description, TooLarge
from replicax.plan.compiler import CompilerProcess, compiler_for, gpu_description
from replicax.plan.exported import ExportedStep, export_step
from replicax.plan.target import Target, parse_target

HERE = Path(__file__).resolve().parent
TPUS = ["v5e:1x1", "v5e:2x2", "v6e:2x2", "v4:2x2x1", "v5p:2x2x1", "v5e:4x8"]
GPUS = ["h100:8", "h100:16", "h100:1", "a100-40:1", "a100-80:8", "h200:8", "b200:4x2"]

pytestmark = EXHAUSTIVE


@pytest.fixture(autouse=True)
def _compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


def program(step: SmallStep, target: Target) -> ExportedStep:
    dp = step.on(target.devices).dp
    return export_step(dp, step.model, step.batch, target.chip.platform, None)


def compiled(step: SmallStep, target: Target) -> Compilation | TooLarge:
    with compiler_for(target) as (compiler, notes):
        assert compiler is not None, notes
        return compiler.compile(program(step, target))


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, marks=needs("tpu")) for text in TPUS),
        *(pytest.param(text, marks=needs("cuda")) for text in GPUS),
    ],
)
def test_one_device_a_chip_and_one_reduction(text: str) -> None:
    target = parse_target(text)
    done = compiled(mlp(8 * target.devices, mode="shard_map"), target)
    assert isinstance(done, Compilation)
    assert f"num_partitions={target.devices}" in done.text or target.devices == 1
    assert ("all-reduce" in done.text) == (target.devices > 1)
    # 32x64 + 2 of 64x64 + 64x10, with biases: each a float32, and twice more for Adam.
    parameters = 33 * 64 + 2 * 65 * 64 + 65 * 10
    assert 3 * 4 * parameters <= done.memory.aliased <= done.memory.arguments


@needs("tpu")
@pytest.mark.parametrize("text", ["v5e:2x2", "v6e:2x2", "v4:2x2x1", "v5p:2x2x1"])
def test_a_tpu_refuses_what_is_too_large_and_tells_its_memory(text: str) -> None:
    target = parse_target(text)
    usable = target.chip.usable_bytes
    assert usable is not None
    rows = usable // 2**16  # of 64 KiB each; the rest gets nothing
    refused = compiled(wide((rows + 8) * target.devices, mode="shard_map"), target)
    assert isinstance(refused, TooLarge)
    assert refused.available_bytes == pytest.approx(usable, abs=1)  # in GiB, with decimals
    assert refused.needed_bytes is not None
    assert refused.needed_bytes > usable
    half = compiled(wide(rows // 2 * target.devices, mode="shard_map"), target)
    assert isinstance(half, Compilation)


AS_SHARD_MAP = "mode jit is planned as shard_map, since the step has cuDNN kernels"
WITHOUT = "planned without cuDNN kernels: the step may need less memory"


def kernels(mode: str, layout: str, attention: str, devices: int, *folders: Path) -> Any:
    """Return the kernels and notes of `cudnn_step.py`, exported with so many host devices."""
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(map(str, [FOLDER, HERE.parent, *folders])),
    }
    ended = subprocess.run(
        [sys.executable, str(HERE / "cudnn_step.py"), mode, layout, attention],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@needs("cuda")
@pytest.mark.parametrize(
    ("mode", "layout", "host_devices", "attends", "notes"),
    [
        ("shard_map", "replicated", 8, True, []),
        ("jit", "replicated", 8, True, []),
        ("jit", "fsdp", 8, True, [AS_SHARD_MAP]),
        ("shard_map", "replicated", 7, False, [WITHOUT]),
    ],
)
def test_cudnn_attends_where_there_are_host_devices_to_export_on(
    mode: str, layout: str, host_devices: int, attends: bool, notes: list[str]
) -> None:
    told = kernels(mode, layout, "cudnn", host_devices)
    assert "BIAS" in told.pop("epilogues")
    [[[missing, total]], [[chosen, of]]] = told.pop("unrecorded")
    assert missing == total == chosen == of
    both = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert told == {"calls": both if attends else [], "notes": notes}


FLASH3 = find_spec("dew_flash_attn")


@needs("cuda")
@pytest.mark.skipif(FLASH3 is None, reason="dew-flash-attn-cu13 not installed (extra flash3)")
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_flash_attention_3_compiles_without_a_gpu(mode: str) -> None:
    assert FLASH3 is not None
    assert FLASH3.origin is not None
    told = kernels(mode, "replicated", "fa3", 1, Path(FLASH3.origin).parents[1])
    assert told.pop("epilogues")
    assert told == {"calls": ["dew_flash3_mha_bwd", "dew_flash3_mha_fwd"], "notes": []}


@pytest.fixture
def without_cudnn(tmp_path: Path) -> Iterator[Path]:
    """Return a folder of the compilers without cuDNN."""
    path = tmp_path / "compilers"

    def link(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:  # another file system
            shutil.copy2(source, destination)

    leave_out = shutil.ignore_patterns("cudnn", "libtpu*", "nvidia_*")
    shutil.copytree(FOLDER, path, ignore=leave_out, copy_function=link)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no compilers installed (make compilers)")
@pytest.mark.skipif(
    any((Path(folder) / "nvidia" / "cudnn").is_dir() for folder in sys.path),
    reason="there is a cuDNN in this environment (torch's, say), which the compiler finds",
)
@needs("cuda")
def test_without_cudnn_no_gpu_is_planned_for(
    without_cudnn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(without_cudnn))
    arguments = dict(parse_target("h100:1").topology_arguments)
    arguments["target_config"] = gpu_description("h100", 84942979072)
    description = Description(arguments.pop("platform"), 1, arguments)
    with pytest.raises(MissingDependencyError, match=r"no cuDNN; .*\[plan-gpu\]'$"):
        CompilerProcess(description)
