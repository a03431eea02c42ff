"""Every layout, in every mode that supports it, trains as one device does.

Each case takes five AdamW steps on 51 real rows padded to 64, against mode `single` in float32. The
first gradient is compared as well: Adam would not notice one that is N times too large.
"""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from support.agreement import largest_difference
from support.layout_cases import MODELS, SINGLE, Setup, on, train
from support.tiers import only

BOUND = 1e-6
"""Relative to a leaf's largest value for metrics and gradients, absolute for parameters."""
FLOAT64_BOUND = 1e-9
ROUNDING_DECIDES = ("lenet", "cnn", "gpt2")
"""Models with gradients near zero by cancellation, for which Adam takes full steps: see
test_parity. They are compared in float64, and to FLOAT64_BOUND."""


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


@functools.cache
def reference(model: str, accumulate: int, float64: bool) -> dict[str, Any]:
    assert bool(jax.config.jax_enable_x64) == float64
    return train(model, SINGLE, accumulate)


def is_held(model: str, setup: Setup, accumulate: int) -> bool:
    """Return whether a model can be trained so, and be compared with one device."""
    if setup.mode == "exact":
        return accumulate == 1 and model not in BY_MICRO_SHARD
    return setup.stages == 1 or LAYERS.get(model, 1) % setup.stages == 0


MATRIX = [case for case in itertools.product(MODELS, SETUPS, (1, 4)) if is_held(*case)]
ON_EIGHT = [
    *(on(mode, layout, data=8) for mode in ("jit", "shard_map") for layout in ("zero1", "fsdp")),
    on("jit", "fsdp", data=4, model=2),
    on("exact", "zero1", data=8),
]
"""Setups for every model: one of each kind, on most devices."""


def is_sampled(model: str, setup: Setup, accumulate: int) -> bool:
    """Return whether `make test-all` has a case; `make test-everything` has all.

    A model has two of the first four of ON_EIGHT: each of the modes, and each of the layouts.
    """
    first = list(MODELS).index(model) % 2
    chosen = [ON_EIGHT[first], ON_EIGHT[3 - first], *ON_EIGHT[4:]]
    return accumulate == (1 if setup.mode == "exact" else 4) and (
        model == "tower" or setup in chosen
    )


IN_EVERY_TEST_RUN = [
    ("tower", on("jit", "fsdp", data=2, fsdp=2, model=2), 4),
    ("nnx", on("jit", "zero1", data=2, fsdp=4), 1),
    ("tower", on("shard_map", "fsdp", data=4), 4),
    ("tower", on("jit", "replicated", data=2, model=2, stage=2), 4),
    ("linen", on("shard_map", "zero1", data=2, fsdp=2), 4),
    ("weighted", on("exact", "zero1", data=8), 1),
]


SAMPLE = [case for case in MATRIX if is_sampled(*case)]


@pytest.mark.parametrize(
    ("model", "setup", "accumulate"), only(IN_EVERY_TEST_RUN, MATRIX, SAMPLE), ids=str
)
def test_every_layout_trains_as_one_device_does(model: str, setup: Setup, accumulate: int) -> None:
    float64 = model in ROUNDING_DECIDES
    with jax.enable_x64(float64):
        found, wanted = train(model, setup, accumulate), reference(model, accumulate, float64)
    bound = FLOAT64_BOUND if float64 else BOUND
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found["params"], wanted["params"])
    assert max(jax.tree.leaves(moved)) <= bound, moved
    for part in wanted.keys() - {"params"}:
        difference, path = largest_difference(found[part], wanted[part])
        assert difference <= bound, f"{part}{path} differs by {difference:.1e}"
