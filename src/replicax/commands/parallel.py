"""The `DataParallel` that a command's flags ask for."""

from typing import Any, Protocol

import jax

import replicax as rx


class ParallelOptions(Protocol):
    """The flags that decide how a recipe's step runs."""

    @property
    def mode(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def micro_shards(self) -> int: ...
    @property
    def precision(self) -> str: ...


def parallel_of(recipe: Any, options: ParallelOptions, mesh: jax.sharding.Mesh) -> rx.DataParallel:
    """The recipe's step on `mesh`, as the flags say."""
    return rx.DataParallel(
        recipe.loss,
        recipe.optimizer(),
        mesh=mesh,
        mode=options.mode,
        layout=options.layout,
        accumulate=options.accumulate,
        micro_shards=options.micro_shards,
        precision=options.precision,
    )
