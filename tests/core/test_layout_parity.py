"""Every layout, in every mode that supports it, trains as one device does.

Each case takes five AdamW steps on 51 real rows padded to 64, against mode `single` in float32. The
first gradient is compared as well: Adam would not notice one that is N times too large.
"""

import dataclasses
import itertools

import jax
import pytest
from support.agreement import How, agrees, on
from support.cases import CASES, TOWER
from support.tiers import only

PARTS = ("first", "last", "gradient", "params", "extras", "evaluated")
BOUND = 2e-6
"""Relative to a leaf's largest value for metrics and gradients, absolute for parameters."""
FLOAT64_BOUND = 1e-9
ROUNDING_DECIDES = ("lenet", "cnn", "gpt2")
"""Models with gradients near zero by cancellation, for which Adam takes full steps: see
test_parity. They are compared in float64, and to FLOAT64_BOUND."""

MODELS = {
    **{name: CASES[name] for name in ("pytree", "weighted", "linen", "nnx", "mlp")},
    **{name: CASES[name] for name in ROUNDING_DECIDES},
    "tower": TOWER,
}

SETUPS = [
    *(on("jit", layout, data=n) for layout in ("zero1", "fsdp") for n in (2, 4, 8)),
    *(on("jit", layout, data=2, fsdp=n) for layout in ("zero1", "fsdp") for n in (2, 4)),
    *(on("jit", "replicated", data=n, model=2) for n in (1, 2, 4)),
    on("jit", "zero1", data=4, model=2),
    on("jit", "fsdp", data=4, model=2),
    on("jit", "fsdp", data=2, fsdp=2, model=2),
    *(on("shard_map", layout, data=n) for layout in ("zero1", "fsdp") for n in (2, 4, 8)),
    *(on("shard_map", layout, data=2, fsdp=n) for layout in ("zero1", "fsdp") for n in (2, 4)),
    *(on("exact", "zero1", data=n) for n in (2, 4, 8)),
    *(on("exact", "zero1", data=2, fsdp=n) for n in (2, 4)),
    *(on("jit", "replicated", "gpipe", data=n, stage=2) for n in (1, 4)),
    *(on("jit", "replicated", data=n, stage=2) for n in (1, 2, 4)),
    on("jit", "replicated", data=2, stage=4),
    on("jit", "replicated", data=2, model=2, stage=2),
    on("jit", "zero1", data=4, stage=2),
    on("jit", "fsdp", data=2, fsdp=2, stage=2),
]
BY_MICRO_SHARD = ("linen", "nnx", "cnn")
"""Models whose BatchNorm has the statistics of a micro-shard in mode `exact`."""
LAYERS = {"tower": 8}
"""Layers of the models that can be cut into stages; for gpt2, see test_staged_objective."""


def is_held(model: str, how: How) -> bool:
    """Return whether a model can be trained so, and be compared with one device."""
    if how.mode == "exact":
        return how.accumulate == 1 and model not in BY_MICRO_SHARD
    return how.stages == 1 or LAYERS.get(model, 1) % how.stages == 0


MATRIX = [
    (model, dataclasses.replace(how, accumulate=accumulate))
    for model, how, accumulate in itertools.product(MODELS, SETUPS, (1, 4))
]
MATRIX = [case for case in MATRIX if is_held(*case)]
ON_EIGHT = [
    *(on(mode, layout, data=8) for mode in ("jit", "shard_map") for layout in ("zero1", "fsdp")),
    on("jit", "fsdp", data=4, model=2),
    on("exact", "zero1", data=8),
]
"""Setups for every model: one of each kind, on most devices."""


def is_sampled(model: str, how: How) -> bool:
    """Return whether `make test-all` has a case; `make test-everything` has all.

    A model has two of the first four of ON_EIGHT: each of the modes, and each of the layouts.
    """
    first = list(MODELS).index(model) % 2
    chosen = [ON_EIGHT[first], ON_EIGHT[3 - first], *ON_EIGHT[4:]]
    return how.accumulate == (1 if how.mode == "exact" else 4) and (
        model == "tower" or dataclasses.replace(how, accumulate=1) in chosen
    )


IN_EVERY_TEST_RUN = [
    ("tower", on("jit", "zero1", data=2, fsdp=2, accumulate=4)),
    ("tower", on("shard_map", "fsdp", data=2, accumulate=4)),
    ("tower", on("jit", "replicated", data=2, model=2, stage=2, accumulate=4)),
    ("tower", on("jit", "fsdp", data=2, fsdp=2, model=2, accumulate=4)),
    ("linen", on("shard_map", "zero1", data=2, fsdp=2, accumulate=4)),
    ("weighted", on("exact", "zero1", data=8)),
]
SAMPLE = [case for case in MATRIX if is_sampled(*case)]


@pytest.mark.parametrize(("model", "how"), only(IN_EVERY_TEST_RUN, MATRIX, SAMPLE), ids=str)
def test_every_layout_trains_as_one_device_does(model: str, how: How) -> None:
    float64 = model in ROUNDING_DECIDES
    bounds = dict.fromkeys(PARTS, FLOAT64_BOUND if float64 else BOUND)
    with jax.enable_x64(float64):
        agrees(MODELS[model], how, bounds, absolute=("params",))
