"""The hardware to plan for, parsed from the user's target or taken from the attached devices."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import jax

from replicax.analysis.hardware import CHIPS, CPU, Chip, chip_of_kind
from replicax.errors import ConfigError, did_you_mean

ATTACHED = "attached"
_OTHER_NAMES = {"h100-80": "h100", "v100-32": "v100", "h200-141": "h200", "b200-180": "b200"}
Topology = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """Hardware to plan for."""

    text: str
    """The target as the user wrote it, such as `h100:64`."""
    chip: Chip
    devices: int
    hosts: int
    """Processes that the devices belong to."""
    topology: Topology | None = None
    """Chips in each dimension of a TPU slice's torus; None for other hardware."""
    slices: int = 1
    """Number of slices, connected by the data-center network."""

    @property
    def devices_per_host(self) -> int:
        """Devices per host, the same for all hosts."""
        return self.devices // self.hosts

    @property
    def rings(self) -> tuple[bool, ...]:
        """Whether each dimension of the torus closes into a ring; `()` without a torus.

        A 2-D torus wraps each dimension that spans the pod. A 3-D torus consists of 4x4x4 cubes
        connected by optical switches, and wraps all dimensions or, below one cube, none
        (jax-ml/scaling-book tpus.md).
        """
        if self.topology is None:
            return ()
        full = [size % self.chip.ring_multiple == 0 for size in self.topology]
        return tuple(full) if len(full) == 2 else (all(full),) * len(full)

    @property
    def topology_arguments(self) -> Mapping[str, Any]:
        """Arguments of `jax.experimental.topologies.get_topology_desc` to describe these devices.

        A GPU also needs its `target_config`; `cpu` devices are simulated, not described.

        Raises:
            ConfigError: CPU devices.
        """
        if self.chip.platform == "cuda":
            # Slices x hosts per slice x devices per host: no NVLink between these hosts.
            shape = f"{self.hosts}x1x{self.devices_per_host}"
            return {"platform": "cuda", "topology": shape}
        if self.topology is None:
            raise ConfigError(f"{self.text}: no compiler supports describing this kind of device")
        described: dict[str, Any] = {
            "platform": "tpu",
            "topology_name": f"{self.chip.name}:{_written(self.topology)}",
            "chips_per_host_bounds": host_bounds(self.topology),
            "wrap": (*self.rings, False)[:3],
            "num_slices": self.slices,
        }
        if self.chip.torus_dims == 3:
            # Both cores of a chip as one device, as on Cloud TPU.
            described["chip_config_name"] = "megacore"
        return described

    def with_devices(self, devices: int) -> "Target":
        """Return the same hardware with another number of devices.

        GPUs fill each host as this target does, or completely if it has one host. TPUs use the
        most cubic slice of that many chips, or the fewest equal slices if no single one is enough.

        Raises:
            ConfigError: the hardware does not come in this number.
        """
        if devices < 1:
            raise ConfigError(f"{self.text} with {devices} devices; 1 is the minimum")
        if self.chip.torus_dims:
            return self._with_chips(devices)
        if self.chip.platform == "cpu":
            return _simulated(f"{CPU.name}:{devices}", (devices,))
        usual = self.chip.devices_per_host
        fill = usual if self.hosts == 1 else self.devices_per_host
        each = min(fill, devices)
        if devices % each:
            raise ConfigError(
                f"{self.text} with {devices} devices; hosts have {each} devices each: "
                f"use {devices // each * each} or {-(-devices // each) * each}"
            )
        hosts = devices // each
        size = str(devices) if hosts == 1 or each == usual else f"{hosts}x{each}"
        return replace(self, text=f"{self.chip.name}:{size}", devices=devices, hosts=hosts)

    def _with_chips(self, devices: int) -> "Target":
        sold, largest = _sold(self.chip), self.chip.largest_slice
        most = devices if devices > largest else 1
        for slices in range(-(-devices // largest), most + 1):
            if devices % slices == 0 and devices // slices in sold:
                shape = min(sold[devices // slices], key=max)
                times = f"{slices} x " if slices > 1 else ""
                text = f"{times}{self.chip.name}:{_written(shape)}"
                return Target(text, self.chip, devices, slices * _hosts(shape), shape, slices)
        raise ConfigError(
            f"{self.chip.title} with {devices} chips; no slices have that size: use "
            f"{' or '.join(map(str, _nearest_counts(self.chip, devices)))}"
        )

    def device_counts(self, most: int) -> Iterator[int]:
        """Yield the powers of two up to `most` that are valid device counts of this hardware."""
        count = 1
        while count <= most:
            try:
                self.with_devices(count)
            except ConfigError:
                pass
            else:
                yield count
            count *= 2


def parse_target(text: str) -> Target:
    """Parse a target as a user writes it.

    `attached` · `cpu:8` · `h100:8` · `h100:64` (hosts of 8) · `h100:4x2` (4 hosts of 2) ·
    `v5e:16x16` · `v4:2x2x2`; case-insensitive.

    Raises:
        ConfigError: an unknown chip, or a size that it does not come in.
    """
    name, _, size = text.strip().lower().partition(":")
    name = _OTHER_NAMES.get(name, name)
    if name == ATTACHED:
        if size:
            raise ConfigError(f"{text!r}: attached devices take no size: write {ATTACHED}")
        return attached_target()
    chip = _chip_called(name, text)
    if not size:
        raise ConfigError(f"{text!r} has no size: write {_example(chip)}")
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", size):
        raise ConfigError(f"{text!r}: {size!r} is not a size: write {_example(chip)}")
    numbers = tuple(int(number) for number in size.split("x"))
    if 0 in numbers:
        raise ConfigError(f"{text!r} has no devices; 1 is the minimum: write {_example(chip)}")
    if chip.torus_dims:
        return _slice(text, chip, numbers)
    if chip is CPU:
        return _simulated(text, numbers)
    return _hosts_of_gpus(text, chip, numbers)


def attached_target(devices: Sequence[jax.Device] | None = None) -> Target:
    """Return the target of this job's devices, with the memory that they report.

    Uses all of `jax.devices()` by default.
    """
    devices = jax.devices() if devices is None else devices
    kind, platform = devices[0].device_kind, devices[0].platform
    hosts = len({device.process_index for device in devices})
    each = len(devices) // hosts
    if platform == "cpu":
        return Target(ATTACHED, _host_shared_by(each), len(devices), hosts)
    unknown = replace(
        CPU,
        name=kind,
        title=kind,
        platform="tpu" if platform == "tpu" else "cuda",
        kinds=re.escape(kind),
        devices_per_host=each,
    )
    chip = chip_of_kind(kind) or unknown
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats = (own[0].memory_stats() if own else None) or {}
    if "bytes_limit" in stats:
        told = {**chip.sources, "usable_bytes": "memory_stats of the attached device"}
        chip = replace(chip, usable_bytes=stats["bytes_limit"], sources=told)
    return Target(ATTACHED, chip, len(devices), hosts, _attached_topology(chip, devices))


def _attached_topology(chip: Chip, devices: Sequence[jax.Device]) -> Topology | None:
    """Return the chips in each dimension if the devices report coordinates and fill a box."""
    if not chip.torus_dims:
        return None
    places = {tuple(getattr(device, "coords", ())) for device in devices}
    if () in places:
        return None
    ends = list(zip(*places, strict=True))
    sizes = tuple(max(axis) - min(axis) + 1 for axis in ends)[: chip.torus_dims]
    return sizes if prod(sizes) == len(devices) else None


_COUNTED = re.compile(
    r"(?P<chip>[a-z]\w*?)[\s x*-]+(?P<count>\d+)|(?P<first>\d+)[\s x*-]+(?P<last>[a-z]\S*)"
)
"""A chip with a number of devices, as it is written elsewhere: h100x8, 8xh100."""


def _chip_called(name: str, text: str) -> Chip:
    if name == CPU.name:
        return CPU
    if name in CHIPS:
        return CHIPS[name]
    longer = [known for known in CHIPS if known.startswith(f"{name}-")]
    if longer:
        raise ConfigError(f"{text!r}: which {name}? Write {' or '.join(longer)}")
    known = (ATTACHED, CPU.name, *CHIPS)
    if counted := _COUNTED.fullmatch(name):
        chip, count = counted["chip"] or counted["last"], counted["count"] or counted["first"]
        nearest = next((f"{each}:{count}" for each in known if each == chip), None)
        if nearest is not None:
            raise ConfigError(f"{text!r}: the number of devices follows a colon: write {nearest}")
    nearest = did_you_mean(name, known)
    choices = "" if nearest else f"; choose one of {', '.join(known)}"
    raise ConfigError(f"{text!r}: unknown hardware {name!r}{nearest}{choices}")


def _example(chip: Chip) -> str:
    if chip is CPU:
        return "cpu:8 for 8 devices of this host"
    if chip.torus_dims:
        shapes = [shape for count in (4, 16) for shape in _sold(chip)[count]]
        return f"its topology, as in {' or '.join(f'{chip.name}:{_written(s)}' for s in shapes)}"
    name, each = chip.name, chip.devices_per_host
    return f"{name}:{each} for one host, {name}:{8 * each} for 8, or {name}:4x2 for 4 of 2 each"


def _hosts_of_gpus(text: str, chip: Chip, numbers: Topology) -> Target:
    most = chip.devices_per_host
    if len(numbers) > 2:
        raise ConfigError(f"{text!r} has {len(numbers)} numbers; write {_example(chip)}")
    if len(numbers) == 2:
        hosts, each = numbers
        if each > most:
            raise ConfigError(
                f"{text!r}: {each} devices per host; hosts of {chip.title} have {most}: "
                f"use {chip.name}:{hosts * each} for hosts of {most}, or {chip.name}:{hosts}x{most}"
            )
        return Target(text, chip, hosts * each, hosts)
    (devices,) = numbers
    if devices > most and devices % most:
        lower, upper = devices // most * most, (devices // most + 1) * most
        raise ConfigError(
            f"{text!r}: hosts have {most} devices each, and {most} must divide the devices of "
            f"several hosts: use {chip.name}:{lower} or {chip.name}:{upper}, or write HOSTSxDEVICES"
        )
    return Target(text, chip, devices, max(1, devices // most))


def _simulated(text: str, numbers: Topology) -> Target:
    if len(numbers) > 1:
        raise ConfigError(f"{text!r}: CPU devices are all on this host: write cpu:{prod(numbers)}")
    return Target(text, _host_shared_by(numbers[0]), numbers[0], 1)


def _host_shared_by(devices: int) -> Chip:
    """Return a CPU device with its share of this host's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
    except (AttributeError, ValueError, OSError):
        return replace(CPU, devices_per_host=devices)
    told = "sysconf of this host: its memory, shared by its devices"
    return replace(
        CPU,
        memory_bytes=memory,
        usable_bytes=memory,
        devices_per_host=devices,
        sources={"memory_bytes": told, "usable_bytes": told},
    )


def _slice(text: str, chip: Chip, shape: Topology) -> Target:
    sold, chips = _sold(chip), prod(shape)
    if shape in sold.get(chips, ()):
        return Target(text, chip, chips, _hosts(shape), shape)
    nearest = [min(sold[count], key=max) for count in _nearest_counts(chip, chips)]
    if tuple(sorted(shape)) in sold.get(chips, ()):
        nearest = [tuple(sorted(shape))]
    names = " or ".join(f"{chip.name}:{_written(each)}" for each in nearest)
    if len(shape) == 1:
        raise ConfigError(f"{text!r} has no topology; {chip.title} is a torus: write {names}")
    if len(shape) != chip.torus_dims:
        raise ConfigError(
            f"{text!r} has {len(shape)} dimensions; {chip.title} has {chip.torus_dims}: use {names}"
        )
    most = f", at most {chip.largest_slice} chips" if chips > chip.largest_slice else ""
    raise ConfigError(f"{text!r}: {chip.title} has no such slice{most}: use {names}")


# All topologies on offer for chips with a 2-D torus.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Those below a 4x4x4 cube for chips with a 3-D torus; larger ones are multiples of 4.
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def _sold(chip: Chip) -> Mapping[int, Sequence[Topology]]:
    """Return the topologies that a TPU comes in, by number of chips."""
    return _topologies(chip.torus_dims, chip.largest_slice)


@cache
def _topologies(dims: int, most: int) -> Mapping[int, Sequence[Topology]]:
    cubes = (
        (a, b, c)
        for a in range(4, most + 1, 4)
        for b in range(a, most // a + 1, 4)
        for c in range(b, most // (a * b) + 1, 4)
    )
    found: dict[int, list[Topology]] = {}
    for shape in _FLAT if dims == 2 else (*_BELOW_A_CUBE, *cubes):
        found.setdefault(prod(shape), []).append(shape)
    return found


def _nearest_counts(chip: Chip, devices: int) -> list[int]:
    """Return valid slice sizes: this one, or else the nearest below and above."""
    counts = sorted(_sold(chip))
    if devices in counts:
        return [devices]
    below = [count for count in counts if count < devices][-1:]
    return below + [count for count in counts if count > devices][:1]


def _hosts(shape: Topology) -> int:
    return max(1, prod(shape) // prod(host_bounds(shape)))


def host_bounds(shape: Topology) -> tuple[int, int, int]:
    """Return the chips of one process: 2x2, or a whole 2-D slice if it fits on one host."""
    if shape in ((1, 1), (2, 4)):
        return (*shape, 1)
    return (2, 2, 1)


def _written(shape: Topology) -> str:
    return "x".join(str(size) for size in shape)
