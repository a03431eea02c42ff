"""`fit`: a whole run in one call."""

import inspect
from collections.abc import Callable
from typing import ParamSpec

from replicax.train.result import Fit
from replicax.train.run import Run

_Settings = ParamSpec("_Settings")


def _to_its_end(run: Callable[_Settings, Run]) -> Callable[_Settings, Fit]:
    """Return what takes the arguments of `run`, steps on all its batches, and gives its result."""

    def fit(*arguments: _Settings.args, **settings: _Settings.kwargs) -> Fit:
        with run(*arguments, **settings) as running:
            for batch in running:
                running.step(batch)
        return running.result

    signature = inspect.signature(run).replace(return_annotation=Fit)
    fit.__signature__ = signature  # type: ignore[attr-defined]
    fit.__qualname__ = "fit"
    fit.__doc__ = """Train for some epochs or steps: an `rx.Run` from its beginning to its end.

    It takes the arguments of `rx.Run`, and raises what that raises.

    Example:
        >>> result = rx.fit(dp, state, source, batch_size=256, epochs=10, eval_source=held_out)
        >>> result.metrics["loss"], dp.model(result.state)
    """
    return fit


fit = _to_its_end(Run)
