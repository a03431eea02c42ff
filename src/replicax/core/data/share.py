"""The rows of batches `[held, ...]` on this process's devices, and their transfer to them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.data.batch import Batch, mask_and_count
from replicax.core.data.loader_state import LoaderState
from replicax.core.data.rows import opened
from replicax.core.ground.leaves import PyTree, is_here, whole_on_host
from replicax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of several steps: arrays with a leading dim of steps, `[steps, rows, ...]`.

    Examples:
        >>> batches = next(iter(dp.feed(source, batch_size=32, stack=4)))
        >>> len(batches), batches.stack.data["x"].shape
        (4, (4, 32, 3))
    """

    stack: Batch
    """All of them as one tree, whose slices are batches."""
    rows: tuple[int, ...]
    """Number of real rows of each."""
    feed_padding: int | None = None
    hosts: tuple[PyTree, PyTree] = (None, None)
    """`Batch.host` of the first and of the last."""
    source_state: LoaderState | None = None
    """`Batch.source_state` of the last."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def host(self) -> PyTree:
        """`Batch.host` of the first."""
        return self.hosts[0]

    @property
    def first(self) -> Batch:
        """The first batch by itself."""
        batch: Batch = jax.tree.map(lambda leaf: leaf[0], self.stack)
        return dataclasses.replace(batch, rows=self.rows[0], feed_padding=self.feed_padding)


FeedItem = Batch | Batches
"""An item of a feed."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows on this process's devices, for global batches of one size."""

    sharding: NamedSharding
    """Shards rows over the devices of all processes."""
    size: int
    """Rows in a global batch, including padding."""

    @cached_property
    def held(self) -> np.ndarray:
        """Int `[held rows]`: indices of the rows held, ascending."""
        parts = self.sharding.addressable_devices_indices_map((self.size,)).values()
        return np.unique(np.concatenate([np.arange(self.size)[part] for part in parts if part]))

    def place(self, batch: Batch) -> Batch:
        """Put a host batch (all of it, or the held rows) on the devices, without waiting."""
        return self._placed(batch.apart(), 0)

    def place_all(self, batches: Sequence[Batch]) -> Batches:
        """Put host batches of the same shapes on the devices, in one transfer.

        Raises:
            ConfigError: an `rx.ExtraRows` in a batch.
            DataError: batches of different shapes.
        """
        apart = [batch.apart() for batch in batches]
        refuse_sets(apart)
        shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(each)) for each in apart}
        if len(shapes) > 1:
            raise DataError(
                f"{len(apart)} batches of {len(shapes)} different shapes in a call of several "
                "steps, which is one program for one shape: pad them to the same, or call dp.step "
                "on each"
            )
        placed = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(apart))
        stacked = jnp.stack if placed else np.stack
        stack = jax.tree.map(lambda *leaves: stacked(leaves), *apart)
        hosts = apart[0].host, apart[-1].host
        rows = tuple(
            int(np.count_nonzero(whole_on_host(each.mask))) if each.rows is None else each.rows
            for each in apart
        )
        return Batches(
            self._placed(stack, 1), rows, apart[0].feed_padding, hosts, apart[-1].source_state
        )

    def place_rows(
        self,
        data: PyTree,
        index: np.ndarray,
        rows: np.ndarray,
        feed_padding: int | None = None,
        held: np.ndarray | None = None,
    ) -> Batches:
        """Put the rows of several steps, `[steps, rows, ...]`, on the devices, in one transfer.

        Args:
            data: all rows with their padding, or those at the positions `held` of each batch.
            index: int `[steps, rows]`: their indices in the source.
            rows: int `[steps]`: real rows of each step, the first ones.
            feed_padding: as that of a `Batch`.
            held: int `[held rows]`; default: all positions.
        """
        held = np.arange(self.size) if held is None else held
        mask, count = mask_and_count(held, rows[:, None])
        batch = Batch(data, mask, index.astype(np.int32), count=count).apart()
        refuse_sets([batch])
        shared = jax.tree.map(
            lambda leaf: np.broadcast_to(leaf, (len(rows), *np.shape(leaf))), batch.shared
        )
        stack = self._placed(dataclasses.replace(batch, shared=shared), 1)
        return Batches(stack, tuple(rows.tolist()), feed_padding)

    def _placed(self, batch: Batch, dim: int) -> Batch:
        """Return a host batch on the devices; its rows are dim `dim`."""
        arrays = (batch.data, batch.mask, batch.index, batch.count)
        shared = opened(batch.shared).on_host(copy=True).data
        mesh = self.sharding.mesh
        where = NamedSharding(mesh, PartitionSpec(*[None] * dim, *self.sharding.spec))
        everywhere = NamedSharding(mesh, PartitionSpec())
        if self.sharding.is_fully_addressable:
            data, mask, index, count = (
                _at_once(arrays, where) if dim else jax.device_put(arrays, where)
            )
            shared = jax.device_put(shared, everywhere) if shared else shared
        else:
            to_global = partial(self._global, where=where, dim=dim)
            data, mask, index, count = jax.tree.map(to_global, arrays)
            shared = jax.tree.map(
                lambda leaf: jax.make_array_from_callback(
                    leaf.shape, everywhere, lambda part: leaf[part]
                ),
                shared,
            )
        sets = tuple(dataclasses.replace(self, size=each.size).place(each) for each in batch.sets)
        placed = dataclasses.replace(batch, data=data, mask=mask, index=index, count=count)
        return dataclasses.replace(placed, shared=shared, sets=sets)

    def _global(self, leaf: np.ndarray | jax.Array, where: NamedSharding, dim: int) -> jax.Array:
        if not is_here(leaf):
            whole: jax.Array = jax.device_put(leaf, where)
            return whole
        count, steps = leaf.shape[dim], (slice(None),) * dim

        def part(index: Any) -> Any:
            start, stop, _ = index[dim].indices(self.size)
            first = start if count == self.size else int(np.searchsorted(self.held, start))
            return leaf[(*steps, slice(first, first + stop - start))]

        shape = (*leaf.shape[:dim], self.size, *leaf.shape[dim + 1 :])
        return jax.make_array_from_callback(shape, where, part)


def _at_once(arrays: PyTree, where: NamedSharding) -> PyTree:
    """Return host arrays on the devices, by one program: small ones in a sixth of the time of
    `device_put`. No setting of the user's may look into it, refuse its inputs or skip it.
    """
    with (
        jax.transfer_guard_host_to_device("allow"),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        return _identity(where)(arrays)


@lru_cache(maxsize=8)
def _identity(where: NamedSharding) -> Callable[[PyTree], PyTree]:
    return jax.jit(lambda arrays: arrays, in_shardings=where, out_shardings=where)


def refuse_sets(batches: Sequence[Batch]) -> None:
    """Raise `ConfigError` if one of `batches`, which are apart, has an `rx.ExtraRows`."""
    if any(batch.sets for batch in batches):
        raise ConfigError(
            "a batch with an rx.ExtraRows in a call of several steps, or inside a transformation; "
            "each set is padded by itself on the host: call dp.step outside of jax.jit"
        )
