"""The slowest kernels of a step: times measured by JAX's profiler, and planned times."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

LONGEST = 40
STEPS = 3


def longest_kernels(steps: Callable[[int], Any], planned: Mapping[str, float]) -> dict[str, Any]:
    """Return `kernels`: name, measured and planned milliseconds per step; or a reason in `profile`.

    The profiler's names are not stable, so a failure here does not affect the other figures.
    """
    try:
        took = profiled(steps)
    except Exception as error:
        return {"profile": f"not read: {type(error).__name__}: {error}"}
    if not took:
        return {"profile": "no kernels found"}
    rows = [
        [name, round(ms, 4), round(planned[name], 4) if name in planned else None]
        for name, ms in took.most_common(LONGEST)
    ]
    known = sum(ms for name, ms in took.items() if name in planned)
    return {
        "profile": f"{len(took)} kernels",
        "profiled_ms": round(took.total(), 3),
        "profiled_and_planned_ms": round(known, 3),
        "kernels": rows,
    }


def profiled(steps: Callable[[int], Any]) -> Counter[str]:
    """Return milliseconds per step of each kernel, by instruction name if the profiler has it."""
    took: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps(STEPS)
        for path in Path(folder).rglob("*.xplane.pb"):
            data = jax.profiler.ProfileData.from_file(str(path))
            for name, nanoseconds in kernel_events(data):
                took[name] += nanoseconds / 1e6 / STEPS
    return took


def kernel_events(data: Any) -> Iterator[tuple[str, float]]:
    """Yield name and nanoseconds of each kernel: events on a GPU's streams, or marked by XLA."""
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                instruction = dict(event.stats).get("hlo_op")
                if instruction or gpus:
                    yield str(instruction or event.name), event.duration_ns
