"""`GradientNorm`: the norm of the gradient among the metrics of each step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicax.core.accumulate import Apply
from replicax.core.models.definition import PyTree
from replicax.core.objective import StepSums
from replicax.core.update import Metrics, TrainState
from replicax.errors import ConfigError
from replicax.train.hook import Hook, Running

GRADIENT_NORM = "gradient_norm"


class GradientNorm(Hook):
    """Adds the metric `gradient_norm`: the L2 norm of the gradient of the global mean loss.

    It is that of the gradient the optimizer is given, of all parameters that train, before it is
    clipped. It is computed in the step, which is then another program than one without.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10, hooks=[rx.GradientNorm()])

    Raises:
        ConfigError: in a run, a step of one's own, or a metric of that name.
    """

    @property
    def wrap(self) -> Callable[[Apply], Apply]:
        return with_gradient_norm

    def start(self, run: Running) -> None:
        if run.dp.configuration.step is not None:
            raise ConfigError(
                "GradientNorm and a step of one's own, which may have several gradients: leave the "
                "hook out, and return optax.tree.norm(gradient) among the step's metrics"
            )


def with_gradient_norm(apply: Apply) -> Apply:
    """Return `apply` with the metric `gradient_norm`."""

    def told_apply(state: TrainState, total: StepSums, *rest: PyTree) -> tuple[TrainState, Metrics]:
        if GRADIENT_NORM in total.weighted:
            raise ConfigError(
                f"GradientNorm and a metric {GRADIENT_NORM} of the loss; a name has one meaning: "
                "leave the hook out, or rename the metric"
            )
        after, told = apply(state, total, *rest)
        return after, {**told, GRADIENT_NORM: _norm(total)}

    return told_apply


def _norm(total: StepSums) -> jax.Array:
    """That of the mean gradient; 0 where nothing has any weight."""
    divisor = jnp.where(total.weight > 0, total.weight, 1)
    means = [leaf / divisor for leaf in jax.tree.leaves(total.gradient)]
    squares = [jnp.sum(jnp.square(jnp.abs(mean))) for mean in means]
    return jnp.sqrt(jnp.sum(jnp.stack([jnp.float32(0), *squares])))
