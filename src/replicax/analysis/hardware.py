"""What the hardware planned for can do: every number with the public document it comes from.

Documents are named by title, or as GitHub repository and path. Peaks are for dense matrices: where
a data sheet has figures "with sparsity" only, half of them. A GPU's memory is what its driver
reports, a little less than a data sheet's round number.

Links of GPUs are given as NCCL counts on them, since that is what an all-reduce can reach: NVLink
and PCIe by its table of link speeds, and the latency of one step of a ring in the protocol that it
takes for large messages (Simple).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

GIB = 2**30
PREALLOCATED = 0.75
"""What JAX takes of a GPU's memory by default; XLA_CLIENT_MEM_FRACTION changes it."""


@dataclass(frozen=True)
class Link:
    """What carries data between devices.

    Args:
        bytes_per_second: what one device can send, in one direction, to all its neighbours
            together, while it receives as much. On a torus of D dimensions that is the sum of its
            2·D links; one of them carries `bytes_per_second / (2 * torus_dims)`.
        latency_seconds: from the start of a send to the arrival of its first byte at the
            neighbour, software included: the α of an α-β model, paid once each step of a ring.
        source: the documents that both numbers come from.
    """

    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Chip:
    """One kind of device, and the hosts it is sold in.

    Args:
        name: what a target calls it, as in `h100:8`.
        title: its name in prose.
        platform: `cpu`, `cuda` or `tpu`.
        kinds: regular expression of its `jax.Device.device_kind`.
        memory_bytes: the memory of one device; None where nobody tells.
        usable_bytes: what a program can have of it by default: on a GPU the share that JAX
            preallocates, on a TPU what libtpu's compiler says is available; None as above.
        flops_per_second: dense peak of matrix products, by dtype (`float32`, `bfloat16`,
            `float16`). float32 is what JAX does with it by default: TF32 on Ampere and newer, plain
            float32 on older GPUs, bfloat16 multiplications on TPUs. The others accumulate in
            float32. A dtype without units of its own is absent.
        memory_bytes_per_second: peak of the device's memory; None where not known.
        inside: between the devices of one host; on a TPU, the torus, which crosses hosts. None
            where not known.
        between: between hosts (between slices of a TPU), per device; None where not known.
        devices_per_host: in the usual host; on a TPU, those of one process of a larger slice.
        torus_dims: dimensions of a TPU's torus (2 or 3); 0 for all others.
        ring_multiple: a dimension of a 2-D torus that is a multiple of this closes into a ring,
            any other is a line; a 3-D torus has three rings where all of its dimensions are such
            multiples, else none. 0 where there is no torus.
        largest_slice: the most devices of one torus; 0 where there is no torus.
        sources: the document of each fact, by field name. A link has its own.
    """

    name: str
    title: str
    platform: str
    kinds: str
    memory_bytes: int | None
    usable_bytes: int | None
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float | None
    inside: Link | None
    between: Link | None
    devices_per_host: int
    torus_dims: int = 0
    ring_multiple: int = 0
    largest_slice: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    def is_kind(self, device_kind: str) -> bool:
        """Whether a device with this `device_kind` is one of these."""
        return re.fullmatch(self.kinds, device_kind) is not None


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that a `jax.Device.device_kind` names; None where it is not a known one."""
    return next((chip for chip in CHIPS.values() if chip.is_kind(device_kind)), None)


def _nvlink(links: int, gigabytes: float, sheet: str) -> Link:
    return Link(
        links * gigabytes * 1e9,
        3.4e-6,
        f"{sheet}: {links} NVLinks; NVIDIA/nccl src/graph/topo.h: {gigabytes} GB/s each, and "
        "src/graph/tuning.cc: 3.4 µs a step of a ring",
    )


def _pcie(generation: int, sheet: str) -> Link:
    gigabytes = {3: 12.0, 4: 24.0, 5: 48.0}[generation]
    return Link(
        gigabytes * 1e9,
        5.7e-6,
        f"{sheet}: PCIe {generation}.0 x16; NVIDIA/nccl src/graph/topo.cc: {gigabytes:.0f} GB/s, "
        "and src/graph/tuning.cc: 5.7 µs a step of a ring",
    )


def _network(gigabits_per_host: float, devices_per_host: int, host: str) -> Link:
    return Link(
        gigabits_per_host * 1e9 / 8 / devices_per_host,
        14e-6,
        f"{host}: {gigabits_per_host:.0f} Gbit/s for {devices_per_host} devices; NVIDIA/nccl "
        "src/graph/tuning.cc: 14 µs a step of a ring over a network",
    )


Memory = tuple[int, str]


def _memory_in_xla(spec: str, size: int) -> Memory:
    return size, f"openxla/xla xla/backends/gpu/target_config/specs/{spec}.txtpb"


def _memory_in_smi(mebibytes: int) -> Memory:
    return mebibytes * 2**20, f"nvidia-smi: {mebibytes} MiB"


def _gpu(
    name: str,
    title: str,
    kinds: str,
    *,
    memory: Memory,
    gigabytes_per_second: float,
    tera: tuple[float | None, float],
    float16: float | None = None,
    sheet: str,
    inside: Link,
    host: str | None = None,
    network_gigabits: float = 0,
) -> Chip:
    """A GPU by its data sheet, in hosts of 8.

    `tera` is TFLOP/s in bfloat16 and in float32; `float16` those in it where bfloat16 has none.
    Where it has, data sheets give both the same.
    """
    size, told = memory
    bfloat16, float32 = tera
    rates = {"float32": float32 * 1e12}
    if bfloat16 is not None:
        rates["bfloat16"] = rates["float16"] = bfloat16 * 1e12
    elif float16 is not None:
        rates["float16"] = float16 * 1e12
    return Chip(
        name,
        title,
        "cuda",
        kinds,
        memory_bytes=size,
        usable_bytes=int(PREALLOCATED * size),
        flops_per_second=rates,
        memory_bytes_per_second=gigabytes_per_second * 1e9,
        inside=inside,
        between=None if host is None else _network(network_gigabits, 8, host),
        devices_per_host=8,
        sources={
            "memory_bytes": told,
            "usable_bytes": f"{told}; JAX documentation, GPU memory allocation: 75% of it",
            "flops_per_second": sheet,
            "memory_bytes_per_second": sheet,
            "devices_per_host": host or "assumed: cards have no host of their own",
        },
    )


_SCALING_BOOK = "jax-ml/scaling-book"
_DATA_CENTRE = "Kumar et al., Swift, SIGCOMM 2020: 50 µs for short calls, at the tail"


def _tpu(
    name: str,
    kinds: str,
    *,
    gib: int,
    usable_gib: float,
    tera: float,
    gigabytes_per_second: float,
    torus_gigabytes: float,
    slice_gigabits: float,
    torus: tuple[int, int, int],
    sources: Mapping[str, str] | None = None,
) -> Chip:
    """A TPU by its page; `torus` is dimensions, multiple for rings and most chips of a slice."""
    page = f"Cloud TPU documentation, TPU {name}"
    told = {"inside": page, "between": page, "memory_bytes": page, **(sources or {})}
    dims, ring_multiple, largest = torus
    return Chip(
        name,
        f"TPU {name}",
        "tpu",
        kinds,
        memory_bytes=gib * GIB,
        usable_bytes=int(usable_gib * GIB),
        flops_per_second={"bfloat16": tera * 1e12, "float32": tera * 1e12},
        memory_bytes_per_second=gigabytes_per_second * 1e9,
        inside=Link(
            torus_gigabytes * 1e9,
            1e-6,
            f"{told['inside']}; {_SCALING_BOOK} sharding.md: 1 µs a hop",
        ),
        between=Link(slice_gigabits * 1e9 / 8, 50e-6, f"{told['between']}; {_DATA_CENTRE}"),
        devices_per_host=4,
        torus_dims=dims,
        ring_multiple=ring_multiple,
        largest_slice=largest,
        sources={
            "memory_bytes": told["memory_bytes"],
            "usable_bytes": f"libtpu 0.0.42.1, of what is too large: available HBM {usable_gib}G",
            "flops_per_second": page,
            "memory_bytes_per_second": page,
            "devices_per_host": page,
            "torus_dims": page,
            "ring_multiple": f"{_SCALING_BOOK} tpus.md",
            "largest_slice": page,
        },
    )


def _all() -> Iterable[Chip]:
    yield from _volta_and_older()
    yield from _ampere()
    yield from _hopper_and_newer()
    yield from _ada()
    yield from _tpus()


def _volta_and_older() -> Iterable[Chip]:
    yield _gpu(
        "p100",
        "NVIDIA P100 (SXM2)",
        r"Tesla P100-SXM2-16GB",
        memory=_memory_in_xla("p100", 17066885120),
        gigabytes_per_second=732,
        tera=(None, 10.6),
        sheet="NVIDIA P100 data sheet (October 2016)",
        inside=_nvlink(4, 18.0, "NVIDIA P100 white paper WP-08019-001"),
        host="NVIDIA DGX-1 system architecture WP-08437-001",
        network_gigabits=400,
    )
    sheet = "NVIDIA V100 data sheet (January 2020)"
    v100 = partial(_gpu, gigabytes_per_second=900, sheet=sheet)
    sxm2 = partial(
        v100,
        tera=(None, 15.7),
        float16=125.0,
        inside=_nvlink(6, 20.0, sheet),
        host="NVIDIA DGX-1 system architecture WP-08437-002",
        network_gigabits=400,
    )
    card = partial(v100, tera=(None, 14.0), float16=112.0, inside=_pcie(3, sheet))
    small, large = _memory_in_xla("v100", 16935682048), _memory_in_smi(32510)
    yield sxm2("v100", "NVIDIA V100 32 GB (SXM2)", r"Tesla V100-SXM\d-32GB.*", memory=large)
    yield sxm2("v100-16", "NVIDIA V100 16 GB (SXM2)", r"Tesla V100-SXM\d-16GB.*", memory=small)
    yield card("v100-pcie", "NVIDIA V100 32 GB (PCIe)", r"Tesla V100-PCIE-32GB", memory=large)
    yield card("v100-pcie-16", "NVIDIA V100 16 GB (PCIe)", r"Tesla V100-PCIE-16GB", memory=small)
    sheet = "NVIDIA T4 data sheet (March 2019)"
    yield _gpu(
        "t4",
        "NVIDIA T4",
        r"(Tesla|NVIDIA) T4",
        memory=_memory_in_smi(15360),
        gigabytes_per_second=300,
        tera=(None, 8.1),
        float16=65.0,
        sheet=sheet,
        inside=_pcie(3, sheet),
        host="Amazon EC2 g4dn.metal",
        network_gigabits=100,
    )


def _ampere() -> Iterable[Chip]:
    sheet = "NVIDIA A100 data sheet (June 2021)"
    a100 = partial(_gpu, tera=(312.0, 156.0), sheet=sheet)
    sxm4 = partial(
        a100,
        inside=_nvlink(12, 20.0, sheet),
        host="NVIDIA DGX A100 user guide DU-09821-001",
        network_gigabits=1600,
    )
    card = partial(a100, inside=_pcie(4, sheet))
    small = _memory_in_xla("a100_sxm_40", 42331013120)
    large = _memory_in_xla("a100_sxm_80", 85100068864)
    yield sxm4(
        "a100-80",
        "NVIDIA A100 80 GB (SXM4)",
        r"(NVIDIA )?A100-SXM4-80GB",
        memory=large,
        gigabytes_per_second=2039,
    )
    yield sxm4(
        "a100-40",
        "NVIDIA A100 40 GB (SXM4)",
        r"(NVIDIA )?A100-SXM4-40GB",
        memory=small,
        gigabytes_per_second=1555,
    )
    yield card(
        "a100-pcie-80",
        "NVIDIA A100 80 GB (PCIe)",
        r"NVIDIA A100 80GB PCIe|(NVIDIA )?A100-PCIE-80GB",
        memory=large,
        gigabytes_per_second=1935,
    )
    yield card(
        "a100-pcie-40",
        "NVIDIA A100 40 GB (PCIe)",
        r"NVIDIA A100 40GB PCIe|(NVIDIA )?A100-PCIE-40GB",
        memory=small,
        gigabytes_per_second=1555,
    )
    sheet = "NVIDIA A10G data sheet (February 2022)"
    yield _gpu(
        "a10g",
        "NVIDIA A10G",
        r"NVIDIA A10G",
        memory=_memory_in_smi(23028),
        gigabytes_per_second=600,
        tera=(70.0, 35.0),
        sheet=sheet,
        inside=_pcie(4, sheet),
        host="Amazon EC2 g5.48xlarge",
        network_gigabits=100,
    )


def _hopper_and_newer() -> Iterable[Chip]:
    sheet = "NVIDIA H100 data sheet (2022)"
    sxm5 = partial(
        _gpu,
        tera=(989.4, 494.7),
        host="NVIDIA DGX BasePOD reference architecture, core components",
        network_gigabits=3200,
    )
    yield sxm5(
        "h100",
        "NVIDIA H100 80 GB (SXM5)",
        r"NVIDIA H100 80GB HBM3",
        memory=_memory_in_xla("h100_sxm", 84942979072),
        gigabytes_per_second=3350,
        sheet=sheet,
        inside=_nvlink(18, 20.6, sheet),
    )
    yield _gpu(
        "h100-pcie",
        "NVIDIA H100 80 GB (PCIe)",
        r"NVIDIA H100 PCIe",
        memory=_memory_in_xla("h100_pcie", 84942979072),
        gigabytes_per_second=2000,
        tera=(756.0, 378.0),
        sheet=sheet,
        inside=_pcie(5, sheet),
    )
    sheet = "NVIDIA H200 data sheet (2024)"
    yield sxm5(
        "h200",
        "NVIDIA H200 141 GB (SXM5)",
        r"NVIDIA H200",
        memory=_memory_in_xla("h200", 151397597184),
        gigabytes_per_second=4800,
        sheet=sheet,
        inside=_nvlink(18, 20.6, sheet),
    )
    sheet = "NVIDIA DGX B200 data sheet (2024)"
    yield _gpu(
        "b200",
        "NVIDIA B200 180 GB (SXM)",
        r"NVIDIA B200",
        memory=_memory_in_xla("b200", 191514411008),
        gigabytes_per_second=8000,
        tera=(2250.0, 1125.0),
        sheet=sheet,
        inside=_nvlink(18, 40.1, sheet),
        host="NVIDIA DGX BasePOD reference architecture, core components",
        network_gigabits=3200,
    )


def _ada() -> Iterable[Chip]:
    sheet = "NVIDIA L4 data sheet (March 2023)"
    yield _gpu(
        "l4",
        "NVIDIA L4",
        r"NVIDIA L4",
        memory=_memory_in_smi(23034),
        gigabytes_per_second=300,
        tera=(121.0, 60.0),
        sheet=sheet,
        inside=_pcie(4, sheet),
        host="Amazon EC2 g6.48xlarge",
        network_gigabits=100,
    )
    sheet = "NVIDIA Ada GPU architecture white paper, appendix A"
    yield _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        r"NVIDIA GeForce RTX 4090",
        memory=_memory_in_smi(24564),
        gigabytes_per_second=1008,
        tera=(165.2, 82.6),
        sheet=sheet,
        inside=_pcie(4, sheet),
    )


def _tpus() -> Iterable[Chip]:
    """A page's bidirectional bandwidth per chip is twice what a chip sends to its neighbours."""
    yield _tpu(
        "v4",
        r"TPU v4",
        gib=32,
        usable_gib=30.75,
        tera=275,
        gigabytes_per_second=1200,
        torus_gigabytes=6 * 45,
        slice_gigabits=50,
        torus=(3, 4, 4096),
        sources={
            "inside": f"{_SCALING_BOOK} tpus.md: 45 GB/s a link",
            "between": f"{_SCALING_BOOK} tpus.md: 25 GB/s a host of 4",
        },
    )
    yield _tpu(
        "v5e",
        r"TPU v5 lite|TPU v5e",
        gib=16,
        usable_gib=15.75,
        tera=197,
        gigabytes_per_second=819,
        torus_gigabytes=400 / 2,
        slice_gigabits=6400 / 256,
        torus=(2, 16, 256),
    )
    yield _tpu(
        "v5p",
        r"TPU v5|TPU v5p",
        gib=96,
        usable_gib=95.74,
        tera=459,
        gigabytes_per_second=2765,
        torus_gigabytes=1200 / 2,
        slice_gigabits=50,
        torus=(3, 4, 6144),
        sources={"memory_bytes": f"{_SCALING_BOOK} tpus.md"},
    )
    yield _tpu(
        "v6e",
        r"TPU v6 lite|TPU v6e",
        gib=32,
        usable_gib=31.25,
        tera=918,
        gigabytes_per_second=1638,
        torus_gigabytes=800 / 2,
        slice_gigabits=25600 / 256,
        torus=(2, 16, 256),
    )


CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _all()}
"""Every accelerator that is known, by name."""

CPU = Chip(
    name="cpu",
    title="CPU device of this host",
    platform="cpu",
    kinds="cpu",
    memory_bytes=None,
    usable_bytes=None,
    flops_per_second={},
    memory_bytes_per_second=None,
    inside=None,
    between=None,
    devices_per_host=1,
)
"""A device of this host, whose speed is measured rather than known, and whose memory it shares."""
