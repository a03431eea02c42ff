"""Made-up plans for tables and files."""

from dataclasses import replace
from typing import Any

from replicax.plan.forecast import StepTime, Transfer, scaling_curve
from replicax.plan.memory_formula import MemoryFormula, OnPaper
from replicax.plan.planned import (
    Alternative,
    BatchAdvice,
    KernelShare,
    MicroBatches,
    Need,
    Plan,
    Scaling,
    Speed,
)
from replicax.plan.step_traffic import Movement, Traffic
from replicax.plan.target import Target, parse_target

GB = 10**9
ABOUT = {
    "name": "gpt2 --preset 124m",
    "mode": "jit",
    "layout": "replicated",
    "accumulate": 1,
    "precision": "float32",
    "parameters": 124_439_808,
    "batch_size": 2048,
    "tokens_per_row": 1024,
    "compiler": "libtpu 0.0.42",
}
FORMULA = MemoryFormula(
    rows=8,
    parameters=500_000_000,
    optimizer=GB,
    extras=8,
    new_state=0,
    batch=66_000,
    compute_copy=0,
    gradient=500_000_000,
    activations=6 * GB,
    workspace=3 * GB,
    never_together=400_000_000,
)
SPEED = Speed(
    rows=8,
    # In all, that of the computation, of the transfers, and of those that it waits for.
    step=StepTime(0.050, 0.040, 0.030, 0.010),
    flops=5e12,
    peak_share=0.51,
    model_share=0.45,
    compute_share=0.75,
    kernels=(
        KernelShare("jit(step)/transpose(jvp(loss))/logits/dot_general", 0.21, "compute"),
        KernelShare("jit(step)/transpose(jvp(loss))/attention/softmax", 0.14, "memory"),
    ),
    rows_per_second=40_960.0,
    tokens_per_second=41_943_040.0,
)
TRAFFIC = Traffic(
    movements=(
        Movement("all-reduce", 12, 500_000_000, 996_000_000.0, True, 0.0123),
        Movement("all-gather", 150, 2_000, 1_900.0, False, 0.0),
    ),
    least_bytes=498_000_000.0,
    warning="each device sends 996 MB, 2.00 times the 498 MB it has to",
)


def need(rows: int, gigabytes: float, **changes: Any) -> Need:
    """A need that fits into 16.9 GB or does not, from a compiler."""
    size = int(gigabytes * GB)
    fits = gigabytes < 16.9
    return replace(Need(rows, size, fits, True, int(size * 0.8) if fits else None), **changes)


def scaled(target: Target, rows: int = 8) -> Scaling:
    """Return the curves of a step that reduces 500 MB at its end and computes for 40 ms."""
    moved = [Transfer("all-reduce", 5e8, 0.03, 0.04)] if target.devices > 1 else []
    weak = scaling_curve(target, 0.04, moved, rows)
    strong = scaling_curve(target, 0.04, moved, rows, fixed_batch=True)
    return Scaling(weak, strong, weak[-1].devices, 64)


def make_plan(target: str | Target = "v5e:16x16", **changes: Any) -> Plan:
    """Return a plan that fits, with every field set."""
    aim = parse_target(target) if isinstance(target, str) else target
    known = aim.chip.inside is not None
    fields: dict[str, Any] = {
        "about": ABOUT,
        "target": aim,
        "mesh": {"data": aim.devices, "model": 1, "stage": 1},
        "asked": need(8, 11.0),
        "formula": FORMULA,
        "largest": need(12, 16.0),
        "too_large": need(13, 17.2),
        "micro_batches": None,
        "alternatives": (
            Alternative("precision=bfloat16", need(8, 7.5), 3_500_000_000),
            Alternative("layout=fsdp", need(8, 11.2), -200_000_000, "moves more"),
        ),
        "traffic": TRAFFIC if aim.devices > 1 else None,
        "speeds": (SPEED, replace(SPEED, rows=12)),
        "scaling": scaled(aim) if known and aim.devices > 1 else None,
        "device_hours": None,
        "batches": (
            BatchAdvice(2048, 1.0, 1.0, None, None),
            BatchAdvice(3072, 1.5, 1.22, None, None),
        ),
        "first": "precision=bfloat16: products up to 2.0 times as fast",
        "notes": (),
        **changes,
    }
    tried = {each for each in map(fields.get, ("asked", "largest", "too_large")) if each}
    return Plan(**{"sizes": tuple(sorted(tried, key=lambda each: each.rows)), **fields})


PLAIN: dict[str, Any] = {"compiled": False, "temporaries": None}
"""A need by formula."""
UNKNOWN = parse_target("cpu:8")
UNKNOWN = replace(UNKNOWN, chip=replace(UNKNOWN.chip, memory_bytes=None, usable_bytes=None))
LONG, HUGE = "a_very_long_name_of_a_function", 987_654_321_000_000
MUCH = need(16_777_216, HUGE / GB, fits=True, temporaries=HUGE // 2)
NO_TOKENS = replace(SPEED, tokens_per_second=None)
WAITING = replace(
    SPEED,
    step=StepTime(0.1, 0.01, 0.09, 0.09),
    kernels=(
        KernelShare("jit(a)/loss/dot", 0.3, "compute"),
        KernelShare("update/add", 0.25, "memory"),
        KernelShare("update/add", 0.2, "memory"),
    ),
)
NOT_EVEN_ONE: dict[str, Any] = {
    "asked": need(8, 300.0),
    "formula": replace(FORMULA, optimizer=200 * GB),
    "largest": None,
    "too_large": need(1, 250.0),
    "alternatives": (Alternative("layout=fsdp", need(8, 90.0), 210 * GB),),
    "traffic": None,
    "speeds": (),
    "scaling": None,
    "batches": (),
    "first": "more memory per device or a smaller model: none of the changes below helps",
}

KINDS: dict[str, dict[str, Any]] = {
    "fits": {},
    "more may fit": {"too_large": None},
    "too large by a line": {"too_large": need(13, 22.0, **PLAIN)},
    # The batch fits only in micro-batches.
    "too large": {
        "asked": need(64, 81.0),
        "formula": replace(FORMULA, rows=64, activations=48 * GB),
        "micro_batches": MicroBatches(8, need(64, 11.4)),
        "alternatives": (Alternative("remat", need(64, 20.5), 60_500_000_000),),
        "speeds": (replace(SPEED, rows=12),),
        "first": "accumulate=8: the same batch in micro-batches of 8 rows per device fits",
    },
    "not even one": NOT_EVEN_ONE,
    "not even four": {**NOT_EVEN_ONE, "too_large": need(4, 250.0)},
    "by formula": {
        "target": "v100:16",
        "about": {key: value for key, value in ABOUT.items() if key != "compiler"},
        "asked": need(8, 11.0, **PLAIN),
        "largest": need(20, 25.0, **PLAIN, fits=True),
        "too_large": need(21, 26.0, **PLAIN),
        "alternatives": (Alternative("layout=fsdp", need(8, 10.0, **PLAIN), GB),),
        "traffic": None,
        "speeds": (replace(SPEED, compute_share=None, kernels=()),),
        "notes": ("by formula: libtpu is not installed; pip install 'replicax[plan-tpu]'",),
    },
    "one device": {
        "target": "h100:1",
        "speeds": (replace(SPEED, step=StepTime(0.04, 0.04, 0.0, 0.0)),),
    },
    "unknown chip": {
        "target": UNKNOWN,
        "largest": None,
        "too_large": None,
        "speeds": (),
        "scaling": None,
        "notes": ("how much memory this target has is not known: nor what fits",),
    },
    "no rates": {"speeds": (), "scaling": None, "notes": ("no speed: not known",)},
    "no tokens": {"speeds": (NO_TOKENS,)},
    "MFU is HFU": {"speeds": (replace(NO_TOKENS, model_share=0.51),)},
    "at measured rates": {
        "speeds": (replace(SPEED, at_rates=replace(SPEED, rows_per_second=30_000.0)),)
    },
    "no MFU": {"speeds": (replace(NO_TOKENS, model_share=None),)},
    "waits": {"speeds": (WAITING,)},
    "too small": {"asked": need(8, 0.011), "speeds": (WAITING,)},
    "waits, no kernels": {"speeds": (replace(WAITING, kernels=()),)},
    "frees and sends": {
        "alternatives": (
            Alternative("layout=zero1", need(8, 9.0), 2 * GB),
            Alternative("precision", need(8, 8.0, compiled=False), 3 * GB),
            Alternative("remat", need(8, 11.0), -560),
        ),
        "traffic": Traffic((Movement("all-reduce", 1, 10, 20.0, True, None),), 20.0),
    },
    "desired rows, measured noise": {
        "about": {**ABOUT, "accumulate": 4, "wished_rows": 1e9, "noise_scale": 512.0},
        "device_hours": 1234.6,
        "batches": (BatchAdvice(2048, 1.0, 1.0, 1.25, 5.0),),
        "on_paper": OnPaper(9.6e9, 3),
    },
    "several devices a replica": {
        "mesh": {"data": 32, "model": 4, "stage": 2},
        "traffic": Traffic(
            (
                Movement("all-reduce", 96, 10**9, 1.5e9, False, 0.0, ("model",)),
                Movement("collective-permute", 18, 10**8, 1e8, False, 0.0, ("stage",)),
            ),
            0.0,
        ),
        "speeds": (replace(SPEED, bubble=0.25),),
        "alternatives": (Alternative("model=8", need(16, 7.0), 4 * GB, "", 0.0712, 3e9),),
        "scaling": None,
    },
    # Long names, and big numbers in every column.
    "huge": {
        "target": "v4:16x16x16",
        "about": {**ABOUT, "name": "a name " * 30, "parameters": 10**13, "noise_scale": 1e7},
        "asked": MUCH,
        "formula": replace(
            FORMULA, rows=MUCH.rows, new_state=HUGE, extras=HUGE, compute_copy=HUGE, batch=HUGE
        ),
        "largest": MUCH,
        "alternatives": (
            Alternative("a change of many things at once, " * 4, MUCH, -HUGE, "why it is so, " * 9),
            Alternative("one", MUCH, HUGE),
        ),
        "traffic": Traffic(
            (
                Movement("collective-broadcast", 123_456_789, 10**18, 1e18, False, None),
                Movement("ragged-all-to-all", 123_456_789, 10**18, 1e18, True, None),
            ),
            1e17,
            "a warning that goes on " * 9,
        ),
        "speeds": (
            replace(
                SPEED,
                rows=2**24,
                step=StepTime(1e8, 9e7, 8e7, 1e7),
                kernels=(KernelShare("/".join([LONG] * 20), 0.999, "compute"),) * 5,
                tokens_per_second=1.2e16,
            ),
        ),
        "scaling": scaled(parse_target("v4:16x16x16"), 2**24),
        "device_hours": 1e13,
        "batches": (BatchAdvice(68_719_476_736, 33_554_432.0, 5792.6, 1.0001, 6872.9),),
        "first": "the first thing to change is " * 8,
        "notes": ("a note that goes on " * 12, "x" * 200),
    },
    "100,000 devices": {"target": "h100:131072"},
}
"""Changes of a plan that fits and has every field."""


def plan_of(kind: str) -> Plan:
    return make_plan(**KINDS[kind])
