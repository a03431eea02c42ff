"""Made-up benches for tables, files and pictures."""

import dataclasses
from typing import Any

from replicax.analysis.compiled import Collectives
from replicax.bench.bench_result import Bench, CaseResult, LayoutFigures, with_efficiency
from replicax.bench.cases import STRONG, WEAK

CASE = CaseResult(
    mode="jit",
    devices=1,
    global_batch=256,
    rows_per_device=256,
    padded_rows=0,
    scalings=(STRONG,),
    steps_per_round=10,
    seconds_per_step=(0.01, 0.02, 0.03),
    rows_per_second=(25600.0, 12800.0, 8533.0),
    tokens_per_row=None,
    input_wait_fraction=(0.1, 0.0, 0.02),
    trace_seconds=0.25,
    compile_seconds=1.0,
    peak_bytes_per_device=3 << 20,
    measured_peak_bytes_per_device=None,
    flops_per_step=2_000_000_000,
    peak_flops_per_second=None,
    product_flops_per_second=400e9,
    collectives=(),
    least_sent_bytes=0,
    efficiency={STRONG: (1.0, 1.0, 1.0)},
)
ENVIRONMENT = {
    "date": "2026-01-02",
    "processor": "A Processor",
    "cores": 8,
    "python": "3.11.0",
    "replicax": "0.1.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "numpy": "2.0",
    "optax": "0.2",
}


def make_bench(*cases: CaseResult, **changes: Any) -> Bench:
    """A bench of `cases`."""
    fields: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "platform": "cpu",
        "device_kind": "cpu",
        "parameters": 1000,
        "parameter_bytes": 4000,
        "batch_size": 256,
        "layout": "replicated",
        "accumulate": 1,
        "precision": "float32",
        "rounds": 3,
        "pinned": False,
        "seed": 0,
        "seconds": 12.0,
        "notes": (),
    }
    return Bench(cases=cases, **{**fields, **changes})


def scaled(*devices: int, modes: tuple[str, ...] = ("jit", "shard_map", "pmap")) -> Bench:
    """Every mode on `devices`, the time of a step falling as devices are added."""
    cases = []
    for mode in modes:
        for count in devices:
            seconds = tuple(each / count**0.9 for each in CASE.seconds_per_step)
            case = dataclasses.replace(
                CASE,
                mode=mode,
                devices=count,
                rows_per_device=256 // count,
                scalings=(STRONG, WEAK) if len(devices) > 1 else (STRONG,),
                seconds_per_step=seconds,
                rows_per_second=tuple(256 / each for each in seconds),
                collectives=(Collectives("all-reduce", 1, 4008),) if count > 1 else (),
                least_sent_bytes=4000 if count > 1 else 0,
            )
            cases.append(case)
    return make_bench(*with_efficiency(cases))


def layouts(mode: str = "jit", size: float = 1.0) -> Bench:
    """Every layout on four devices beside one, `size` times as slow and large."""
    cases = []
    names = {"data": 1, "zero1": 1, "fsdp": 1, "data=2 model=2": 1, "stages=4": 4}
    for place, (name, stages) in enumerate([("data", 1), *names.items()]):
        seconds = tuple(size * each * (1 + place / 4) for each in CASE.seconds_per_step)
        case = dataclasses.replace(
            CASE,
            mode=mode,
            devices=4 if place else 1,
            seconds_per_step=seconds,
            rows_per_second=tuple(256 / each for each in seconds),
            peak_bytes_per_device=int(size * 3e6) << 2,
            efficiency={STRONG: (1.0 / (1 + place),) * 3},
            layout=LayoutFigures(
                name=name,
                state_bytes_per_device=int(size * 1e6),
                sent_bytes=4008.0 * size * place,
                bubble=(stages - 1) / (8 + stages - 1) if stages > 1 else None,
            ),
        )
        cases.append(case)
    return make_bench(*cases, accumulate=8, layout=", ".join(names))


def extreme() -> Bench:
    """Long names and big numbers in every column."""
    case = dataclasses.replace(
        CASE,
        mode="shard_map",
        devices=4096,
        global_batch=123_456_789,
        scalings=(STRONG, WEAK),
        seconds_per_step=(98_765.4, 99_999.1, 123_456.7),
        rows_per_second=(1.234567e15,) * 3,
        tokens_per_row=8192,
        input_wait_fraction=(1.0, 1.0, 1.0),
        compile_seconds=12_345.6,
        peak_bytes_per_device=987_654_321_000,
        measured_peak_bytes_per_device=987_654_321_000,
        flops_per_step=10**24,
        peak_flops_per_second=1e18,
        product_flops_per_second=None,
        collectives=(Collectives("all-reduce", 123_456, 999_900_000_000),),
        least_sent_bytes=999_900_000_000,
        efficiency={STRONG: (0.001, 1.2, 12.3), WEAK: (0.5, 1.2, 12.3)},
    )
    one = dataclasses.replace(case, devices=1, efficiency={STRONG: (1.0,) * 3, WEAK: (1.0,) * 3})
    return make_bench(
        case,
        one,
        environment={**ENVIRONMENT, "processor": "A Processor With Very Many Words " * 4},
        device_kind="A Device of a Kind With a Name That Nobody Would Say Twice in One Day",
        parameters=10**12,
        parameter_bytes=4 * 10**12,
        batch_size=123_456_789,
        accumulate=1024,
        notes=("a note that goes on " * 12,),
    )
