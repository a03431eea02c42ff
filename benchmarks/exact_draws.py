"""Cases of a search for other bits in mode `exact`: drawn by Hypothesis, or by a seed."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from exact_models import LAYERS
from exact_optimizers import BY_VALUE, NAMES, WRAPPERS
from hypothesis import strategies as st

Choose = Callable[[Sequence[Any]], Any]
"""Returns one of some values; the first is the plainest."""

HEADS = ("square", "cross entropy", "twins", "huber", "mean", "logsumexp", "unit")
PENALTIES = ("", "", "", "l2", "norm")
STEPS = ("", "", "", "", "once", "twice", "scan", "while", "cond", "gather", "two losses")
NETWORKS = ("", "", "", "", "", "batch norm", "batch norm, dropout", "conv", "dropout")
WIDTHS = (4, 1, 2, 3, 5, 7, 8, 8, 13, 16, 16, 17, 24, 32, 32, 33, 48, 64, 64)


@dataclasses.dataclass(frozen=True)
class Draw:
    """What is trained, and how; the numbers follow from `seed`."""

    layers: tuple[tuple[str, int], ...]
    """Their names and widths, of a pytree model."""
    network: str
    """That of Flax NNX in place of the layers, if any."""
    head: str
    penalty: str
    custom_step: str
    """Kind of a custom step; None for a loss."""
    optimizer: tuple[str, ...]
    features: int
    rows: int
    batch_size: int
    weighted: bool
    metrics: bool
    scale: float
    """By which rows are multiplied."""
    precision: str
    reduction: str
    layout: str
    accumulate: int
    trainable: str | None
    ema: float | None
    guarded: bool
    """Whether bad steps are skipped, as `rx.fit` does."""
    donate: bool
    micro_shards: int
    seed: int
    gathers: bool
    """Whether a row's loss sees other rows, by `rx.gather`."""

    def __str__(self) -> str:
        layers = " ".join(f"{name}:{width}" for name, width in self.layers)
        fields = ("penalty", "weighted", "metrics", "scale", "precision", "reduction", "layout")
        fields = (*fields, "accumulate", "trainable", "ema", "guarded", "donate", "gathers")
        usual = {"scale": 1.0, "precision": "float32", "reduction": "float32", "donate": True}
        usual |= {"layout": "replicated", "accumulate": 1}
        told = {name: getattr(self, name) for name in fields}
        more = [
            f"{n}={value}" for n, value in told.items() if value != usual.get(n, value or value)
        ]
        return " · ".join(
            [
                self.network or layers,
                self.head,
                *([f"step {self.custom_step}"] if self.custom_step else []),
                "/".join(self.optimizer),
                f"{self.rows} rows by {self.batch_size}",
                f"{self.features} features, {self.micro_shards} micro-shards, seed {self.seed}",
                *more,
            ]
        )


def drawn(choose: Choose, micro_shards: int) -> Draw:
    """A case of what is chosen; what cannot be together is not."""
    custom_step, network = choose(STEPS), choose(NETWORKS)
    network = "" if custom_step else network
    names = tuple(LAYERS)
    width = choose(WIDTHS)
    layers = [
        (choose(names), width if choose((True, False)) else choose(WIDTHS))
        for _ in range(choose((1, 2, 2, 3, 4)))
    ]
    base = choose(NAMES)
    around = {choose(WRAPPERS) for _ in range(choose((0, 0, 1, 1, 2)))}
    if base in BY_VALUE:
        around = {name for name in around if "multi_steps" not in name}
    batch_size = micro_shards * choose((1, 2, 3, 4, 8, 16, 33))
    plain = not custom_step
    return Draw(
        layers=() if network else tuple(layers),
        network=network,
        head=choose(HEADS),
        penalty=choose(PENALTIES),
        custom_step=custom_step,
        optimizer=(base, *sorted(around)),
        features=choose((4, 1, 3, 8, 9, 16, 31)),
        rows=batch_size * 3 - choose((0, 1, 5)),
        batch_size=batch_size,
        weighted=choose((False, False, True)),
        metrics=choose((False, True)),
        scale=choose((1.0, 1.0, 1.0, 1e-3, 30.0)),
        precision=choose(
            ("float32", "float32", "float32", "bfloat16", "float16" if plain else "bfloat16")
        ),
        reduction=choose(("float32", "float32", "float32", "bfloat16")),
        layout=choose(("replicated", "zero1")) if plain else "replicated",
        accumulate=choose((1, 1, 2, 4)),
        trainable=choose((None, None, None, "head|out")) if plain else None,
        ema=choose((None, None, 0.9)) if plain else None,
        guarded=choose((False, False, True)),
        donate=choose((True, True, True, False)),
        micro_shards=micro_shards,
        seed=choose(range(1000)),
        gathers=choose((False,) * 7 + (True,)),
    )


@st.composite
def draws(draw: Any, micro_shards: int = 8) -> Draw:
    """Cases that Hypothesis draws."""
    return drawn(lambda values: draw(st.sampled_from(values)), micro_shards)


def micro_shards_of(seed: int) -> int:
    """8, for every tenth seed 4, and for another tenth 16: those of a process are alike."""
    return {3: 4, 7: 16}.get(seed % 10, 8)


def seeded(seed: int) -> Draw:
    """The case of a seed, the same for ever."""
    return drawn(random.Random(seed).choice, micro_shards_of(seed))
