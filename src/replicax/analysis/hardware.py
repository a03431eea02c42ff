"""Hardware facts and their sources, read from `hardware.toml`.

GPU links use the figures that NCCL plans with, since those are what an all-reduce can reach: NVLink
and PCIe bandwidth from its table of link speeds, and the latency per ring step of the protocol that
it uses for large messages (Simple).
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

GIB = 2**30
PREALLOCATED = 0.75
"""Share of a GPU's memory that JAX preallocates; XLA_CLIENT_MEM_FRACTION changes it."""


@dataclass(frozen=True)
class Interconnect:
    """A kind of link between devices.

    Args:
        bytes_per_second: rate at which one device can send to all its neighbours combined, in one
            direction, while receiving at the same rate. On a torus of D dimensions this is the sum
            of its 2·D links; each carries `bytes_per_second / (2 * torus_dims)`.
        latency_seconds: time from the start of a send to the arrival of its first byte, including
            software: the α of an α-β model, paid once per ring step.
        source: the documents with both numbers.
    """

    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Chip:
    """One kind of device and its usual host.

    Args:
        name: its name in a target, as in `h100:8`.
        title: its display name.
        platform: `cpu`, `cuda` or `tpu`.
        kinds: regular expression for its `jax.Device.device_kind`.
        flops_per_second: dense peak of matrix products, by dtype (`float32`, `bfloat16`,
            `float16`). float32 means JAX's default precision: TF32 on Ampere and newer, plain
            float32 on older GPUs, bfloat16 multiplications on TPUs. The others accumulate in
            float32. A dtype without hardware support is absent.
        devices_per_host: devices of the usual host; on a TPU, of one process of a larger slice.
        memory_bytes: the memory of one device; None if unknown.
        usable_bytes: the memory available to a program by default: on a GPU the share that JAX
            preallocates, on a TPU what libtpu's compiler reports as available; None if unknown.
        memory_bytes_per_second: peak bandwidth of the device's memory; None if unknown.
        inside: link between the devices of one host; on a TPU, the torus, which spans hosts. None
            if unknown.
        between: link between hosts (between slices of a TPU), per device; None if unknown.
        torus_dims: dimensions of a TPU's torus (2 or 3); 0 for other chips.
        ring_multiple: a dimension of a 2-D torus that is a multiple of this closes into a ring,
            any other is a line; a 3-D torus has three rings if all its dimensions are such
            multiples, otherwise none. 0 without a torus.
        largest_slice: the most devices of one torus; 0 without a torus.
        sources: the source of each fact, by field name. Links have their own.
    """

    name: str
    title: str
    platform: str
    kinds: str
    flops_per_second: Mapping[str, float]
    devices_per_host: int
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    inside: Interconnect | None = None
    between: Interconnect | None = None
    torus_dims: int = 0
    ring_multiple: int = 0
    largest_slice: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)


def chip_of_kind(device_kind: str) -> Chip | None:
    """Return the chip with a `jax.Device.device_kind`; None if it is unknown."""
    return next((chip for chip in CHIPS.values() if re.fullmatch(chip.kinds, device_kind)), None)


def _gpu(name: str, facts: Mapping[str, Any]) -> Chip:
    """Return a GPU by its data sheet, in hosts of 8."""
    size, memory_source, sheet = facts["memory_bytes"], facts["memory_source"], facts["sheet"]
    host, between = facts.get("host"), None
    if host is not None:
        gigabits = facts["network_gigabits"]
        between = Interconnect(
            gigabits * 1e9 / 8 / 8,
            14e-6,
            f"{host}: {gigabits:.0f} Gbit/s for 8 devices; NVIDIA/nccl src/graph/tuning.cc: 14 µs "
            "per ring step over a network",
        )
    return Chip(
        name,
        facts["title"],
        "cuda",
        facts["kinds"],
        memory_bytes=size,
        usable_bytes=int(PREALLOCATED * size),
        flops_per_second={dtype: rate * 1e12 for dtype, rate in facts["teraflops"].items()},
        memory_bytes_per_second=facts["gigabytes_per_second"] * 1e9,
        inside=_in_host(facts["inside"], sheet),
        between=between,
        devices_per_host=8,
        sources={
            "memory_bytes": memory_source,
            "usable_bytes": f"{memory_source}; JAX documentation, GPU memory allocation: 75% of it",
            "flops_per_second": sheet,
            "memory_bytes_per_second": sheet,
            "devices_per_host": host or "assumed: cards have no standard host",
        },
    )


def _in_host(facts: Mapping[str, Any], sheet: str) -> Interconnect:
    if "pcie" in facts:
        gigabytes = {3: 12.0, 4: 24.0, 5: 48.0}[facts["pcie"]]
        return Interconnect(
            gigabytes * 1e9,
            5.7e-6,
            f"{sheet}: PCIe {facts['pcie']}.0 x16; NVIDIA/nccl src/graph/topo.cc: "
            f"{gigabytes:.0f} GB/s, and src/graph/tuning.cc: 5.7 µs per ring step",
        )
    links, gigabytes = facts["nvlinks"], facts["gigabytes"]
    return Interconnect(
        links * gigabytes * 1e9,
        3.4e-6,
        f"{facts.get('sheet', sheet)}: {links} NVLinks; NVIDIA/nccl src/graph/topo.h: {gigabytes} "
        "GB/s each, and src/graph/tuning.cc: 3.4 µs per ring step",
    )


def _tpu(name: str, facts: Mapping[str, Any]) -> Chip:
    page = f"Cloud TPU documentation, TPU {name}"
    pages = {"inside": page, "between": page, "memory_bytes": page, **facts.get("sources", {})}
    usable = facts["usable_gib"]
    return Chip(
        name,
        f"TPU {name}",
        "tpu",
        facts["kinds"],
        memory_bytes=facts["memory_gib"] * GIB,
        usable_bytes=int(usable * GIB),
        flops_per_second={dtype: rate * 1e12 for dtype, rate in facts["teraflops"].items()},
        memory_bytes_per_second=facts["gigabytes_per_second"] * 1e9,
        inside=Interconnect(
            facts["torus_gigabytes"] * 1e9,
            1e-6,
            f"{pages['inside']}; jax-ml/scaling-book sharding.md: 1 µs per hop",
        ),
        between=Interconnect(
            facts["slice_gigabits"] * 1e9 / 8,
            50e-6,
            f"{pages['between']}; Kumar et al., Swift, SIGCOMM 2020: 50 µs tail latency of short "
            "calls",
        ),
        devices_per_host=4,
        **{fact: facts[fact] for fact in ("torus_dims", "ring_multiple", "largest_slice")},
        sources={
            "memory_bytes": pages["memory_bytes"],
            "usable_bytes": f"libtpu 0.0.42.1, out-of-memory message: available HBM {usable}G",
            "flops_per_second": page,
            "memory_bytes_per_second": page,
            "devices_per_host": page,
            "torus_dims": page,
            "ring_multiple": "jax-ml/scaling-book tpus.md",
            "largest_slice": page,
        },
    )


FACTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    files("replicax.analysis").joinpath("hardware.toml").read_text(encoding="utf-8")
)
"""The raw table, by chip."""
CHIPS: Mapping[str, Chip] = {
    name: (_tpu if "torus_dims" in facts else _gpu)(name, facts) for name, facts in FACTS.items()
}
"""All known accelerators, by name."""

CPU = Chip(
    name="cpu",
    title="CPU device of this host",
    platform="cpu",
    kinds="cpu",
    flops_per_second={},
    devices_per_host=1,
)
"""A CPU device of this host, whose speed is measured and whose memory is shared."""
