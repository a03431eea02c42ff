"""Published scaling figures, and their forecasts from public parameters alone.

The rows are shared by `tests/plan/test_published.py` and `benchmarks/published.py`. Nothing here is
fitted: every row goes through the same code with the same constants, and what differs between rows
is what their sources say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from support.published_models import Decoder, even, resnet, vgg16
from support.published_schedules import Layer, Timeline, bucketed, fused, sharded

from replicax.analysis.hardware import CHIPS, Interconnect
from replicax.plan.forecast import StepTime, Transfer, step_time
from replicax.plan.network import RING, DeviceNetwork, HostNetwork, network
from replicax.plan.target import parse_target

MIB, GIB = 2**20, 2**30
FLOAT32, BFLOAT16 = 4, 2
Schedule = Callable[[Timeline, DeviceNetwork], Sequence[Transfer]]


@dataclass(frozen=True)
class Row:
    """A published efficiency: speed of a device among `devices`, over that among `smallest`.

    Args:
        name: system, model, devices.
        published: the figure, as a fraction.
        source: where the figure is.
        smallest: devices of the smallest scale published.
        devices: of the scale that is forecast.
        compute_seconds: of a step at the smallest scale, as published.
        layers: of the model.
        networks: of the devices that reduce gradients together, by the number of all devices.
        schedule: when they are sent.
        recomputed: whether the backward pass runs the forward pass again.
        parameters: what the forecast uses, and where each is from.
        chosen: whether the row was chosen before anything was forecast.
        complete: whether all that the forecast needs of that run is public.
    """

    name: str
    published: float
    source: str
    smallest: int
    devices: int
    compute_seconds: float
    layers: Sequence[Layer]
    networks: Callable[[int], DeviceNetwork]
    schedule: Schedule
    parameters: str
    recomputed: bool = False
    chosen: bool = True
    complete: bool = True

    def step(self, devices: int) -> StepTime:
        """The forecast of a step."""
        timeline = Timeline(self.layers, self.compute_seconds, self.recomputed)
        joined = self.networks(devices)
        return step_time(self.compute_seconds, self.schedule(timeline, joined), lambda _: joined)

    @property
    def forecast(self) -> float:
        """The efficiency, as a fraction."""
        return self.step(self.smallest).seconds / self.step(self.devices).seconds

    @property
    def error(self) -> float:
        """Forecast over published, in points."""
        return 100 * (self.forecast - self.published)


def mean_error(rows: Sequence[Row]) -> float:
    """Points, the sign left out."""
    return sum(abs(row.error) for row in rows) / len(rows)


# Horovod

_TF_RATES = "tensorflow/docs site/en/r1/guide/performance/benchmarks.md"
_HOROVOD = "horovod/horovod docs/benchmarks.rst"


def _pascal(devices: int) -> DeviceNetwork:
    """Hosts of 4 GPUs that share a card. NCCL before 2.4 (January 2019) had no tree."""
    if devices == 1:
        return HostNetwork(None, None, 1)
    like_it = CHIPS["p100"].between
    assert like_it is not None
    card = Interconnect(25e9 / 8 / 4, like_it.latency_seconds, _HOROVOD)
    return HostNetwork(CHIPS["v100-pcie"].inside, card, 4, devices // 4, (RING,))


def _horovod(
    model: str,
    layers: Sequence[Layer],
    rate: float,
    rate_source: str,
    published: float,
    devices: int = 512,
    source: str = _HOROVOD,
) -> Row:
    return Row(
        name=f"Horovod, {model}, {devices} P100",
        published=published,
        source=source,
        smallest=1,
        devices=devices,
        compute_seconds=64 / rate,
        layers=layers,
        networks=_pascal,
        schedule=lambda timeline, joined: fused(timeline, 64 * MIB, FLOAT32, joined),
        parameters=f"64 rows at {rate:.4g} a second ({rate_source}); {_millions(layers)} in "
        f"float32; hosts of 4 with 25 Gbit/s ({_HOROVOD}), on PCIe; fusion buffer of 64 MB, the "
        "default then (horovod CHANGELOG.md, #2468); rings only (NVIDIA/nccl before 2.4.2)",
        chosen=devices == 512,
    )


def _millions(layers: Sequence[Layer]) -> str:
    return f"{sum(layer.parameters for layer in layers) / 1e6:,.1f} M gradients"


# PyTorch DDP

_DDP = "pytorch/pytorch benchmarks/distributed/ddp/README.md"


def _ddp(model: str, layers: Sequence[Layer], alone: float, among: float) -> Row:
    """Against one GPU with DDP, so that what DDP itself costs is in both."""
    return Row(
        name=f"PyTorch DDP, {model}, 16 V100",
        published=alone / among,
        source=_DDP,
        smallest=1,
        devices=16,
        compute_seconds=alone,
        layers=layers,
        networks=lambda devices: network(parse_target(f"v100:{devices}")),
        schedule=lambda timeline, _: bucketed(timeline, 25 * MIB, FLOAT32),
        parameters=f"32 rows in {alone:.3f} s; {_millions(layers)} in float32; buckets of 25 MB; "
        f"DGX-1 with 4 x 100 Gbit/s (all {_DDP})",
        chosen=False,
    )


def _ddp_256(row: Row) -> Row:
    return replace(
        row,
        name="PyTorch DDP, ResNet-50, 256 V100",
        published=0.5,
        source="arXiv:2006.15704, 5.3: an iteration on 256 GPUs takes twice as long as on one",
        devices=256,
        parameters="those of the row for 16: this run's rows and network are not published. It was "
        "on a shared cluster; the paper's abstract calls its scaling near-linear",
        chosen=True,
        complete=False,
    )


# torchtitan

_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
LLAMA3_8B = Decoder(4096, 14336, 32, 128_256, queries=4096, key_values=1024, matrices=3)


def _titan(model: str, small: float, large: float, chosen: bool) -> Row:
    layers = LLAMA3_8B.layers
    return Row(
        name=f"torchtitan, {model}, 8 to 128 H100",
        published=large / small,
        source=_TITAN,
        smallest=8,
        devices=128,
        compute_seconds=2 * 8192 / small,
        layers=layers,
        networks=lambda devices: network(parse_target(f"h100:{devices}")),
        schedule=lambda timeline, joined: sharded(timeline, joined.devices, BFLOAT16, FLOAT32),
        parameters=f"2 rows of 8,192 tokens at {small:,.0f} tokens a second on each of 8; "
        f"{_millions(layers)}; 400 Gbit/s a GPU (same page); gathered in bfloat16, reduced in "
        "float32 (torchtitan/config_manager.py), a layer ahead (arXiv:2304.11277)",
        chosen=chosen,
    )


# MaxText

_MAXTEXT = "AI-Hypercomputer/maxtext"
_REDUCED = "in bfloat16, the dtype of the products where XLA's partitioner reduces them"
MAXTEXT_32B = Decoder(
    10240, 32768, 32, 32_768, queries=8192, key_values=8192, matrices=2, tied=True
)
MAXTEXT_22B = Decoder(6144, 24576, 48, 32_768, queries=6144, key_values=6144, matrices=2, tied=True)
LLAMA2_7B = Decoder(4096, 11008, 32, 32_000, queries=4096, key_values=4096, matrices=3)


def _maxtext(
    name: str,
    model: Decoder,
    between: Interconnect | None,
    *,
    folder: str,
    inside: int,
    slices: int,
    rows: int,
    tokens: int,
    teraflops: tuple[float, float],
    bucket_bytes: float = 0,
    recomputed: bool = True,
) -> Row:
    """Fully sharded inside a slice, data-parallel between slices.

    Each device reduces its shard with those that hold the same one in the other slices. What a
    slice sends inside is in both rates.
    """
    small, large = teraflops
    assert between is not None
    layers = model.layers
    return Row(
        name=name,
        published=large / small,
        source=f"{_MAXTEXT} {folder}/README.md",
        smallest=inside,
        devices=inside * slices,
        compute_seconds=model.step_flops(rows, tokens) / (small * 1e12),
        layers=layers,
        networks=lambda devices: HostNetwork(None, between, 1, devices // inside),
        schedule=lambda timeline, _: bucketed(timeline, bucket_bytes, BFLOAT16 / inside),
        recomputed=recomputed,
        parameters=f"{rows} rows of {tokens:,} tokens a device at {small} TFLOP/s on one slice; "
        f"{_millions(layers)} over {inside} devices of a slice ({folder}), {_REDUCED}, "
        + (f"in buckets of {bucket_bytes / GIB:.0f} GB" if bucket_bytes else "layer by layer")
        + f"; {between.bytes_per_second * 8 / 1e9:.0f} Gbit/s a device between slices "
        f"({between.source})",
    )


_A3 = Interconnect(
    800e9 / 8 / 8,
    14e-6,
    "Google Cloud, GPU network bandwidth: A3 High has 1,000 Gbit/s in 5 cards, 4 of them for GPUs",
)
_RESNET_50, _RESNET_101 = resnet((3, 4, 6, 3)), resnet((3, 4, 23, 3))
_DDP_50 = _ddp("ResNet-50", _RESNET_50, 0.100, 0.104)

ROWS: tuple[Row, ...] = (
    _horovod("ResNet-101", _RESNET_101, 1656.82 / 16, f"{_HOROVOD}, 16 GPUs", 0.90),
    _horovod("Inception V3", even(23.9e6, 94), 142, _TF_RATES, 0.90),
    _horovod("VGG-16", vgg16(), 154, _TF_RATES, 0.68),
    _ddp_256(_DDP_50),
    _titan("Llama 3.1 8B", 5762, 5605, chosen=True),
    _maxtext(
        "MaxText, 32B, 1 to 32 v5e-256",
        MAXTEXT_32B,
        CHIPS["v5e"].between,
        folder="MaxText/configs/v5e",
        inside=256,
        slices=32,
        rows=4,
        tokens=2048,
        teraflops=(132, 119),
    ),
    _maxtext(
        "MaxText, Llama 2 7B, 8 to 128 H100",
        LLAMA2_7B,
        _A3,
        folder="MaxText/configs/a3/llama_2_7b",
        inside=8,
        slices=16,
        rows=4,
        tokens=4096,
        teraflops=(492, 375),
        bucket_bytes=GIB,
        recomputed=False,
    ),
    _maxtext(
        "MaxText, 22B, 1 to 8 v4-128",
        MAXTEXT_22B,
        CHIPS["v4"].between,
        folder="MaxText/configs/v4",
        inside=64,
        slices=8,
        rows=16,
        tokens=2048,
        teraflops=(156, 146),
    ),
    _horovod(
        "VGG-16", vgg16(), 154, _TF_RATES, 0.79, 128, "horovod/horovod README.md until May 2018"
    ),
    _DDP_50,
    _ddp("ResNet-101", _RESNET_101, 0.171, 0.179),
    _titan("compiled", 6667, 6514, chosen=False),
)
"""First those that were chosen beforehand, then further ones of the same tables."""
