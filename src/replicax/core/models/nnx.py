"""Flax NNX models: BatchNorm statistics and Dropout streams are extras."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.models.definition import CallContext, SplitModel, changed_alone, is_trainable
from replicax.core.models.training_mode import for_inference
from replicax.core.placement.mesh import Axis


def _is_param(_path: Any, node: Any) -> bool:
    return isinstance(node, nnx.Param) and is_trainable(node.get_value())


def split_nnx(model: nnx.Module) -> SplitModel:
    """Split an NNX module: `nnx.Param` trains, all other state is extras."""
    graphdef, params, extras = nnx.split(model, _is_param, ...)  # type: ignore[misc]
    definition = NNXDefinition(graphdef, jax.tree.structure(params), jax.tree.structure(extras))
    return definition, nnx.to_pure_dict(params), nnx.to_pure_dict(extras)


@dataclasses.dataclass(frozen=True)
class NNXDefinition:
    """An NNX graph and the structures of its two states."""

    graphdef: Any
    params: Any
    extras: Any

    def paths_of(self, wanted: Any, params: PyTree) -> list[str]:
        """Return the paths of the `params` selected by an NNX filter."""
        return list(by_path(nnx.to_pure_dict(nnx.filter_state(self.as_model(params), wanted))))

    def merge(self, params: PyTree, extras: PyTree) -> Any:
        return nnx.merge(
            self.graphdef,
            self.as_model(params),
            jax.tree.unflatten(self.extras, jax.tree.leaves(extras)),
        )

    def in_inference(self, model: nnx.Module) -> Any:
        return for_inference(model)

    def as_model(self, params: PyTree) -> Any:
        """Return `params` as `nnx.state(model, nnx.Param)` has them."""
        return jax.tree.unflatten(self.params, jax.tree.leaves(params))

    def written(self, model: nnx.Module, extras: PyTree) -> tuple[Any, ...]:
        nnx.update(model, jax.tree.unflatten(self.extras, jax.tree.leaves(extras)))
        return ()

    def apply(
        self, function: Callable[[Any], Any], params: PyTree, extras: PyTree, context: CallContext
    ) -> tuple[Any, PyTree]:
        model = self.merge(params, extras)
        if context.key is None:
            self.in_inference(model)
        else:
            _reseed(model, context.key)
        synchronised = _average_statistics_over(model, context.axis)
        random = _random(model)
        before = _extras_by_path(model)
        returned = function(model)
        after = _extras_by_path(model)

        def updated(path: Any, old: Any) -> Any:
            name = _names(path)
            new = after[name]
            if new is before[name] or name in random:
                return old
            if not context.may_write and name not in synchronised:
                raise changed_alone(".".join(map(str, name)))
            return new.astype(old.dtype)

        return returned, jax.tree_util.tree_map_with_path(updated, extras)


def _reseed(model: nnx.Module, key: jax.Array) -> None:
    """Reseed every random stream of the model from `key`, so it depends only on the step."""
    streams = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngStream)]
    for number, stream in enumerate(streams):
        stream.key.set_value(jax.random.fold_in(key, number))
        stream.count.set_value(jax.numpy.zeros_like(stream.count.get_value()))


def _random(model: nnx.Module) -> set[tuple[Any, ...]]:
    """Return the paths of the random streams' states, which the next step reseeds."""
    return {path for path, node in nnx.iter_graph(model) if isinstance(node, nnx.RngState)}


def _average_statistics_over(model: nnx.Module, axis: Axis | None) -> set[tuple[Any, ...]]:
    """Make every BatchNorm average over `axis`; return the paths of its statistics."""
    paths: set[tuple[Any, ...]] = set()
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            module.axis_name = axis  # type: ignore[assignment]
            paths |= {(*path, "mean"), (*path, "var")}
    return paths


def _extras_by_path(model: nnx.Module) -> dict[tuple[Any, ...], Any]:
    extras = nnx.to_pure_dict(nnx.state(model, nnx.Not(_is_param)))
    return {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(extras)}


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(entry.key for entry in path)
