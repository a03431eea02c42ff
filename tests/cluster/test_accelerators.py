"""GPUs from nvidia-smi, CUDA_VISIBLE_DEVICES as CUDA reads it, and their distribution."""

import os
import sys
from pathlib import Path

import pytest

from replicax.cluster import accelerators
from replicax.cluster.accelerators import deal, list_gpus, visible_gpus
from replicax.errors import ConfigError

FOUR = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}aaa-{i}bbb)\n" for i in range(4))
G = [f"GPU-{i}aaa-{i}bbb" for i in range(4)]
MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0aaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-c0ffee00)
  MIG 3g.20gb     Device  1: (UUID: MIG-deadbeef)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1aaa)
"""


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, G),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [G[2], G[0]]),
        (" 1 , 3 ", [G[1], G[3]]),
        ("1,-1,2", [G[1]]),
        ("0,7,1", [G[0]]),
        ("1gpu,2", [G[1], G[2]]),
        ("1,1", []),
        (f"{G[3]},GPU-0", [G[3], G[0]]),
        ("GPU-,1", []),  # fits all four
        ("GPU-9,0", []),
        ("GPU-1aaa,GPU-1aaa-1", []),
    ],
)
def test_visible_gpus(variable: str | None, seen: list[str]) -> None:
    env = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(env, lambda: FOUR) == tuple(seen)


@pytest.mark.parametrize(
    ("platforms", "seen"),
    [(None, G), ("", G), ("cuda,cpu", G), ("gpu", G), ("cpu", []), ("cpu,tpu", [])],
)
def test_jax_may_not_use_the_gpus(platforms: str | None, seen: list[str]) -> None:
    assert visible_gpus({}, lambda: FOUR, platforms) == tuple(seen)


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, ["MIG-c0ffee00"]),
        ("MIG-deadbeef", ["MIG-deadbeef"]),
        ("MIG-dead", ["MIG-deadbeef"]),
        ("MIG-deadbeef,MIG-c0ffee00", ["MIG-deadbeef"]),
        ("0", ["MIG-c0ffee00"]),
        ("GPU-0aaa", ["MIG-c0ffee00"]),
        ("1", ["GPU-1aaa"]),
        ("MIG-none", []),
    ],
)
def test_visible_mig_devices(variable: str | None, seen: list[str]) -> None:
    env = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(env, lambda: MIG) == tuple(seen)


def test_mig_devices_of_older_drivers() -> None:
    name = "MIG-GPU-0aaa/7/0"
    listing = f"GPU 0: A100 (UUID: GPU-0aaa)\n  MIG 1g.5gb Device 0: (UUID: {name})\n"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": name}, lambda: listing) == (name,)


def _nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, monkeypatch, f"assert sys.argv[1:] == ['-L']\nprint({FOUR!r}, end='')")
    assert list_gpus() == FOUR
    assert visible_gpus({}) == tuple(G)


def test_nvidia_smi_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, monkeypatch, "print('NVIDIA-SMI has failed'); sys.exit(9)")
    assert list_gpus() == ""


def test_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "LIST_SECONDS", 0.2)
    _nvidia_smi(tmp_path, monkeypatch, "time.sleep(30)")
    with pytest.raises(ConfigError, match=r"nvidia-smi -L did not\b.* 0 s;"):
        list_gpus()


def test_the_same_gpus_are_dealt_in_blocks() -> None:
    assert deal([("a", G)] * 2) == [(0, 1), (2, 3)]
    assert deal([("a", G)] * 4) == [(0,), (1,), (2,), (3,)]
    assert deal([("a", G), ("a", G[::-1])]) == [(0, 1), (1, 0)]
    assert deal([("a", [f"GPU-{i}" for i in range(6)])] * 3) == [(0, 1), (2, 3), (4, 5)]
    # By host, in the order of the processes.
    assert deal([("a", G), ("b", G), ("a", G), ("b", G)]) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_different_gpus_are_kept() -> None:
    assert deal([("a", G[:1]), ("a", G[1:])]) == [None, None]
    assert deal([("a", G), ("b", G)]) == [None, None]
    with pytest.raises(ConfigError, match=r"processes 1 and 2 on a\b.*\bsee"):
        deal([("a", G[:1]), ("a", G[1:]), ("a", G[1:])])


@pytest.mark.parametrize(
    ("gpus_of", "message"),
    [
        (
            [("a", G), ("a", G), ("a", G)],
            "processes 0 to 2 on a see the same 4 GPUs, which 3 processes cannot share evenly; "
            "start 1 or 2 or 4 there, or set CUDA_VISIBLE_DEVICES per process",
        ),
        (
            [("b", G), ("a", G[:1]), ("a", G[:1])],
            "processes 1 and 2 on a see the same 1 GPU, fewer than the 2 processes; each "
            "process needs its own GPU: start at most 1 there, or correct CUDA_VISIBLE_DEVICES",
        ),
        (
            [("a", G[:2]), ("a", G[1:])],
            f"processes 0 and 1 on a see 2 and 3 GPUs, both including {G[1]}; processes on one "
            "host must see either identical or disjoint sets of GPUs: correct CUDA_VISIBLE_DEVICES",
        ),
        (
            [("a", G), ("a", [])],
            "process 1 on a sees no GPU and process 0 sees 4 GPUs; either all processes use GPUs "
            "or none: correct CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_what_cannot_be_dealt(gpus_of: list[tuple[str, list[str]]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deal(gpus_of)
    assert str(caught.value) == message
