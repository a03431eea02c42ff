"""Bound Flax Linen modules: `module.bind(variables)` is the model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from replicax.core.ground.leaves import PyTree
from replicax.core.models.definition import CallContext, SplitModel, changed_alone
from replicax.errors import ConfigError

PARAMS = "params"


def split_linen(model: nn.Module) -> SplitModel:
    """Split a Linen module bound to its variables: the collection `params` trains."""
    if model.scope is None:
        raise ConfigError(
            f"the Linen module {type(model).__name__} is not bound to its variables: use "
            "model.bind(model.init(key, example))"
        )
    module, variables = model.unbind()
    extras = {name: tree for name, tree in variables.items() if name != PARAMS}
    return LinenDefinition(module), variables.get(PARAMS, {}), extras


@dataclasses.dataclass(frozen=True)
class LinenDefinition:
    """An unbound Linen module."""

    module: nn.Module

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        return self.module.bind({PARAMS: params, **extras})

    def in_inference(self, model: nn.Module) -> Any:
        return model  # a call's arguments say it

    def as_model(self, params: PyTree) -> Any:
        return params

    def written(self, _model: nn.Module, extras: PyTree) -> tuple[Any, ...]:
        """Return the variables of all other collections, if there are any."""
        return (extras,) if extras else ()

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, context: CallContext
    ) -> tuple[Any, PyTree]:
        # Linen derives every RNG stream not named here from "params".
        rngs = {} if context.key is None else {PARAMS: context.key}
        mutable = [] if context.key is None else list(extras)
        model = self.module.bind({PARAMS: params, **extras}, rngs=rngs, mutable=mutable)
        synchronised: set[tuple[str, ...]] = set()

        def average_statistics(
            call: Any, args: Any, kwargs: Any, of_call: nn.module.InterceptorContext
        ) -> Any:
            if isinstance(of_call.module, nn.BatchNorm):
                object.__setattr__(of_call.module, "axis_name", context.axis)  # modules are frozen
                synchronised.add(tuple(of_call.module.path))
            return call(*args, **kwargs)

        with nn.intercept_methods(average_statistics):
            returned = function(model)
        if not mutable:
            return returned, extras

        def updated(path: Any, old: Any, new: Any) -> Any:
            if new is old:
                return old
            owner = tuple(entry.key for entry in path[1:-1])
            if not context.may_write and owner not in synchronised:
                raise changed_alone(jax.tree_util.keystr(path))
            return new.astype(old.dtype)

        after = {name: model.variables[name] for name in extras}
        return returned, jax.tree_util.tree_map_with_path(updated, extras, after)
