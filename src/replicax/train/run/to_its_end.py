"""A whole run in one call."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from replicax.text.arguments import bind
from replicax.train.run.summary import Fit

_Settings = ParamSpec("_Settings")


def to_its_end(run: Callable[_Settings, Any], **defaults: Any) -> Callable[_Settings, Fit]:
    """Return a function with the arguments of `run` that steps on all batches of the run.

    `defaults` are those that differ from `run`'s.
    """
    signature = inspect.signature(run).replace(return_annotation=Fit)
    parameters = [
        each.replace(default=defaults.get(each.name, each.default))
        for each in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters)

    def fit(*arguments: _Settings.args, **settings: _Settings.kwargs) -> Fit:
        bind("fit", signature, arguments, settings)
        settings.update({name: settings.get(name, value) for name, value in defaults.items()})
        with run(*arguments, **settings) as running:
            for batch in running:
                running.step(batch)
        result: Fit = running.result
        return result

    fit.__signature__ = signature  # type: ignore[attr-defined]
    fit.__qualname__ = "fit"
    fit.__doc__ = """Train for a number of epochs or steps: an `rx.Run` from start to end.

    Takes the arguments of `rx.Run`, and raises the same errors.

    Examples:
        >>> result = rx.fit(dp, state, source, batch_size=256, epochs=10, eval_source=held_out)
        >>> result.metrics["loss"], dp.model(result.state)
    """
    return fit
