"""`Rounds`: how often islands exchange what they learned, in which form, and the outer step."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.ground.codecs import Codec, CodecName, as_codec
from replicax.core.ground.vectors import size_in_blocks
from replicax.errors import ConfigError
from replicax.text.arguments import Count, NotNegative, typed

_RATES = {1: 0.5, 4: 0.6}
"""Outer learning rates up to a number of islands (2503.09799, figure 8); 0.8 for more."""
MOMENTUM = 0.9
"""Default outer momentum, which does harm in runs of few rounds."""
_SPARSE_DECAY = 0.95


class OuterSGD(optax.GradientTransformation):  # type: ignore[misc]
    """SGD with Nesterov momentum, which knows its `rate` and its `momentum`.

    The defaults are those of a number of islands; without momentum for `sparse`.
    """

    rate: float
    momentum: float

    def __new__(
        cls, islands: int, codec: Codec, rate: float | None = None, momentum: float | None = None
    ) -> "OuterSGD":
        sparse = codec.error >= 1
        usual = next((rate for most, rate in _RATES.items() if islands <= most), 0.8)
        rate = (1.0 if sparse else usual) if rate is None else rate
        momentum = (0.0 if sparse else MOMENTUM) if momentum is None else momentum
        plain = optax.sgd(rate, momentum or None, nesterov=momentum > 0)
        made: OuterSGD = super().__new__(cls, *plain)
        made.rate, made.momentum = rate, momentum
        return made

    def __str__(self) -> str:
        with_momentum = f", Nesterov momentum {self.momentum:g}" if self.momentum else ""
        return f"SGD {self.rate:g}{with_momentum}"


@typed
@dataclasses.dataclass(frozen=True)
class Rounds:
    """Low-communication training (DiLoCo, arXiv 2311.08105): rounds of steps, and an outer step.

    Each island, a job of its own or a replica of one job, takes `every` steps on its own rows with
    the optimizer of the `DataParallel`, whose state it keeps. Then all islands send how their
    parameters changed, and an outer optimizer takes the mean, weighted by the rows of each, as the
    gradient of the parameters that evaluation, `dp.model` and checkpoints have.

    With `every=1` and no `outer` optimizer there are no rounds: islands send the sums of their
    gradients in every step, encoded, for one update by the optimizer.

    Examples:
        >>> job = rx.initialize()
        >>> rounds = rx.Rounds(every=30, send="int4")
        >>> dp = rx.DataParallel(loss, optax.adamw(3e-4), rounds=rounds)

    Args:
        every: steps of a round. More send less, and cost more in loss: see docs/slow-links.md.
        send: codec of the differences: `float32`, `bfloat16`, `int8`, `int4` or `sparse`, with
            error feedback. Weights, the loss and model state are sent in float32.
        outer: outer optimizer. Default: SGD with Nesterov momentum 0.9 and a learning rate for the
            number of islands, 0.5 for 1, 0.6 for up to 4, 0.8 for more; for `sparse` plain SGD with
            learning rate 1, as the error feedback is the momentum (SparseLoCo, arXiv 2508.15706).
        decay: factor of what earlier rounds did not send. Default: 1, or 0.95 for `sparse`.
        fragments: parts of the parameters, whole arrays of about equal size in total, that are sent
            in turn, at equal intervals of a round (Streaming DiLoCo, arXiv 2501.18512). Must divide
            `every`.
        delay: steps after which the outer step of a fragment takes effect, while it is sent in the
            background. Less than `every / fragments`.
        mix: share of an island's own parameters when the outer ones take effect, from 0 to 1.
        axis: `data` if each replica of one job is an island, as to simulate islands, in mode
            `shard_map`. Default: the islands of the job.

    Raises:
        ConfigError: incompatible arguments.
    """

    every: Count = 30
    send: CodecName | Codec = "float32"
    outer: optax.GradientTransformation | None = None
    decay: NotNegative | None = None
    fragments: Count = 1
    delay: int = 0
    mix: NotNegative = 0.0
    axis: str | None = None

    def __post_init__(self) -> None:
        as_codec(self.send)
        if self.every % self.fragments:
            raise ConfigError(
                f"every={self.every} with fragments={self.fragments}; fragments are sent at equal "
                "intervals of a round: use a number that divides it"
            )
        if not 0 <= self.delay < max(self.interval, 1):
            raise ConfigError(
                f"delay={self.delay} with a fragment every {self.interval} steps; each takes "
                f"effect before the next is sent: use at most {self.interval - 1}"
            )
        if self.mix > 1:
            raise ConfigError(f"mix={self.mix}; it is a share: use at most 1")
        if self.sends_gradients and (self.mix or self.decay is not None):
            raise ConfigError(
                f"every=1 with decay={self.decay}, mix={self.mix} and no outer=; gradients have "
                "neither: leave them out, or give an outer optimizer"
            )
        if self.axis not in (None, "data"):
            raise ConfigError(f"axis={self.axis!r}; islands of one job are along 'data': use that")

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients are sent in every step, instead of differences after a round."""
        return self.every == 1 and self.outer is None

    @property
    def codec(self) -> Codec:
        """The codec that `send` names."""
        return as_codec(self.send)

    @property
    def interval(self) -> int:
        """Steps between two fragments."""
        return self.every // self.fragments

    def dealt(self, sizes: Sequence[int]) -> list[int]:
        """Return the fragment of each array, by its size: the largest first, to the smallest."""
        of, filled = [0] * len(sizes), [0] * self.fragments
        for place in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            of[place] = filled.index(min(filled))
            filled[of[place]] += sizes[place]
        return of

    def payload_bytes(self, arrays: Sequence[Any]) -> list[int]:
        """Return the bytes of each fragment that an island sends; `arrays` may be shapes."""
        of = self.dealt([array.size for array in arrays])
        parts: list[list[Any]] = [[] for _ in range(self.fragments)]
        for array, number in zip(arrays, of, strict=True):
            parts[number].append(array)
        return [self.codec.payload_bytes(size_in_blocks(part)) for part in parts]

    def due(self, step: int) -> int | None:
        """Return the fragment that is sent after `step` steps, if any."""
        return step // self.interval % self.fragments if step % self.interval == 0 else None

    def is_boundary(self, step: int) -> bool:
        """Whether a fragment has just taken effect after `step` steps, and none is under way.

        A run may then stop, save, and take islands in.
        """
        return step >= self.delay and (step - self.delay) % self.interval == 0

    def resolved(self, islands: int) -> "Rounds":
        """Return these settings with the defaults for a number of islands."""
        if self.sends_gradients:
            return self
        decay = _SPARSE_DECAY if self.codec.error >= 1 else 1.0
        return dataclasses.replace(
            self,
            outer=self.outer or OuterSGD(islands, self.codec),
            decay=decay if self.decay is None else self.decay,
        )

    def names(self) -> dict[str, Any]:
        """Return the settings as JSON values; the outer optimizer as a digest of its update."""
        chosen = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("outer", "send")
        }
        if self.outer is None:
            return {**chosen, "send": self.codec.name}
        leaf = jnp.zeros(2)
        traced = jax.make_jaxpr(self.outer.update)(leaf, self.outer.init(leaf), leaf)
        digest = hashlib.sha256(str(traced).encode()).hexdigest()[:12]
        return {**chosen, "send": self.codec.name, "outer": digest}
