"""Calling conventions of a step: stacked arguments, device placement, and return values."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree, is_random_key
from replicax.errors import ConfigError
from replicax.text.wording import shortened

StepFile = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """The calling convention of a step."""

    step: StepFile
    stacked: bool = False
    """Whether batches are passed as [replicas, rows / replicas, ...], as for `pmap`."""
    state_stacked: bool = False
    """Whether the state is passed as [replicas, ...]."""
    key_stacked: bool = False
    replicas: int = 1
    state_like: PyTree = None
    """The user's state: states are placed like its arrays that span several devices."""
    batch_like: PyTree = None
    """The user's batch: batches are placed like its arrays that span several devices."""

    def arguments(self, state: PyTree, batch: PyTree, key: Any) -> tuple[Any, ...]:
        """Return the step's arguments as fresh arrays, since the step may donate them.

        Raises:
            ConfigError: the rows do not divide over the replicas, but the step takes them stacked.
        """
        if self.state_stacked:
            state = jax.tree.map(self._spread, state)
        else:
            state = jax.tree.map(_placed, state, self.state_like)
        if self.stacked:
            batch = jax.tree.map(self._cut, batch)
        else:
            batch = jax.tree.map(_placed, batch, self.batch_like)
        rows = batch if isinstance(batch, tuple) else (batch,)
        if key is None:
            return (state, *rows)
        # A loop that passes one key per replica splits it.
        keys = jax.random.split(key, self.replicas) if self.key_stacked else _copied(key)
        return (state, *rows, keys)

    def again(self, returned: PyTree) -> PyTree:
        """Return a state that the step returned in the form that it takes."""

        def fed(single: Any, after: Any) -> Any:
            if self.state_stacked and np.ndim(after) == np.ndim(single):
                return self._spread(after)  # for example out_axes=None
            if self.stacked and not self.state_stacked and np.ndim(after) > np.ndim(single):
                return after[0]  # in_axes=None and out_axes=0
            return after

        return jax.tree.map(fed, self.state_like, returned)

    def _spread(self, leaf: Any) -> Any:
        """Broadcast [...] to [replicas, ...]."""
        if is_random_key(leaf):
            return jax.numpy.broadcast_to(leaf, (self.replicas, *leaf.shape))
        values = np.asarray(leaf)
        return np.broadcast_to(values, (self.replicas, *values.shape)).copy()

    def _cut(self, leaf: Any) -> Any:
        """Reshape [rows, ...] to [replicas, rows / replicas, ...]."""
        if np.ndim(leaf) == 0:
            return self._spread(leaf)
        rows = leaf.shape[0]
        if rows % self.replicas:
            raise ConfigError(
                f"{rows} rows do not divide over {self.replicas} replicas, but the step takes them "
                "stacked: pad the batch and give padded rows weight 0"
            )
        return leaf.reshape(self.replicas, rows // self.replicas, *leaf.shape[1:]).copy()


def candidates(
    step: StepFile, state: PyTree, batch: PyTree, replicas: int, stacked: bool | None
) -> Iterator[Form]:
    """Yield the calling conventions that a step may have, the likeliest first."""
    plain = Form(step, replicas=replicas, state_like=state, batch_like=batch)
    by_replica = [
        dataclasses.replace(plain, stacked=True, state_stacked=of_state, key_stacked=of_key)
        for of_state in (True, False)
        for of_key in (True, False)
    ]
    if stacked is None:
        stacked_first = is_pmap(step)
        yield from [*by_replica, plain] if stacked_first else [plain, *by_replica]
    else:
        yield from by_replica if stacked else [plain]


def is_pmap(step: Any, depth: int = 3) -> bool:
    """Whether a function is a `pmap`, or a Python function that refers to one."""
    code = getattr(step, "__code__", None)
    if code is not None and code.co_filename.replace("\\", "/").endswith("jax/_src/pmap.py"):
        return True
    if not inspect.isfunction(step) or depth == 0:
        return False
    used = inspect.getclosurevars(step)
    named = [*used.nonlocals.values(), *used.globals.values()]
    return any(is_pmap(each, depth - 1) for each in named if callable(each))


def parts_returned(returned: Any, state: PyTree) -> dict[str, PyTree]:
    """Split a step's return value into the state and the rest.

    A step returns `state`, `(state, metrics)`, `(state, a, b, ...)`, or, if the state is a tuple,
    its elements followed by the rest.

    Returns:
        `{"state": ...}`, with "loss" if the rest is a single array, else "metrics".

    Raises:
        ConfigError: no part of it has the structure of the state.
    """
    form: Any = jax.tree.structure(state)
    if form == jax.tree.structure(returned):
        return {"state": returned}
    if isinstance(returned, (tuple, list)) and returned:
        if form == jax.tree.structure(returned[0]):
            return {"state": returned[0], **_named(returned[1:])}
        parts = len(state) if isinstance(state, tuple) else 0
        if parts and form == jax.tree.structure(tuple(returned[:parts])):
            return {"state": tuple(returned[:parts]), **_named(returned[parts:])}
    raise ConfigError(
        f"the step returns {_outline(returned)}, but its state is {_outline(state)}; a step "
        "returns its new state, or (state, metrics): wrap it in a lambda that does so"
    )


def host(tree: PyTree) -> PyTree:
    """Return the tree with its arrays copied to the host; random keys stay keys."""
    return jax.tree.map(lambda leaf: _copied(leaf) if _is_array(leaf) else leaf, tree)


def _named(rest: Any) -> dict[str, PyTree]:
    """Name the rest of a return value: a single array is the loss, anything else is metrics."""
    if not rest:
        return {}
    if len(rest) == 1:
        leaf = rest[0]
        return {"loss": leaf} if _is_array(leaf) else {"metrics": leaf}
    return {"metrics": tuple(rest)}


def _outline(tree: Any) -> str:
    text = str(jax.tree.structure(tree)).removeprefix("PyTreeDef(").removesuffix(")")
    return shortened(text, 80)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _copied(leaf: Any) -> Any:
    if is_random_key(leaf):
        data = jax.numpy.array(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return np.array(leaf)


def _placed(leaf: Any, like: Any) -> Any:
    """Return a fresh array, placed like `like` if that spans several devices."""
    if not _is_array(leaf):
        return leaf
    fresh = _copied(leaf)
    if isinstance(like, jax.Array) and len(like.sharding.device_set) > 1:
        return jax.device_put(fresh, like.sharding)
    return fresh
