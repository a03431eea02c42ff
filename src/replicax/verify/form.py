"""How a step is called: what it takes stacked, where its arguments live, what it returns."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.core.leaves import is_random_key
from replicax.errors import ConfigError
from replicax.wording import shortened

PyTree = Any
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """How one step is called."""

    step: Step
    stacked: bool = False
    """Batches go in as [replicas, rows / replicas, ...], as `pmap` takes them."""
    state_stacked: bool = False
    """The state goes in as [replicas, ...]."""
    key_stacked: bool = False
    replicas: int = 1
    state_like: PyTree = None
    """The state that the user gave: its arrays on several devices say where states go."""
    batch_like: PyTree = None
    """The same of the batch."""

    def arguments(self, state: PyTree, batch: PyTree, key: Any) -> tuple[Any, ...]:
        """The step's arguments, fresh arrays all of them: the step may donate them.

        Raises:
            ConfigError: the rows do not divide over the replicas, and the step takes them stacked.
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
        # A loop that hands out keys by replica splits them.
        keys = jax.random.split(key, self.replicas) if self.key_stacked else _copied(key)
        return (state, *rows, keys)

    def again(self, returned: PyTree) -> PyTree:
        """A state that the step returned, as it takes it."""

        def fed(single: Any, after: Any) -> Any:
            if self.state_stacked and np.ndim(after) == np.ndim(single):
                return self._spread(after)  # out_axes=None, say
            if self.stacked and not self.state_stacked and np.ndim(after) > np.ndim(single):
                return after[0]  # in_axes=None, and out_axes=0
            return after

        return jax.tree.map(fed, self.state_like, returned)

    def _spread(self, leaf: Any) -> Any:
        """[...] -> [replicas, ...]."""
        if is_random_key(leaf):
            return jax.numpy.broadcast_to(leaf, (self.replicas, *leaf.shape))
        values = np.asarray(leaf)
        return np.broadcast_to(values, (self.replicas, *values.shape)).copy()

    def _cut(self, leaf: Any) -> Any:
        """[rows, ...] -> [replicas, rows / replicas, ...]."""
        if np.ndim(leaf) == 0:
            return self._spread(leaf)
        rows = leaf.shape[0]
        if rows % self.replicas:
            raise ConfigError(
                f"{rows} rows do not divide over {self.replicas} replicas, and the step takes them "
                "stacked: pad the batch and give the padding weight 0"
            )
        return leaf.reshape(self.replicas, rows // self.replicas, *leaf.shape[1:]).copy()


def candidates(
    step: Step, state: PyTree, batch: PyTree, replicas: int, stacked: bool | None
) -> Iterator[Form]:
    """The forms that a step may have, the likelier first."""
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
    """Whether a function is a `pmap`, or a Python function that uses one by name."""
    code = getattr(step, "__code__", None)
    if code is not None and code.co_filename.replace("\\", "/").endswith("jax/_src/pmap.py"):
        return True
    if not inspect.isfunction(step) or depth == 0:
        return False
    used = inspect.getclosurevars(step)
    named = [*used.nonlocals.values(), *used.globals.values()]
    return any(is_pmap(each, depth - 1) for each in named if callable(each))


def parted(returned: Any, state: PyTree) -> dict[str, PyTree]:
    """Return what a step returned: the state, and what stands beside it.

    A step returns `state`, `(state, metrics)`, `(state, a, b, ...)`, or, where the state is a tuple
    itself, its parts and then the rest.

    Returns:
        `{"state": ...}`, with "loss" where one array stands beside it, else "metrics".

    Raises:
        ConfigError: no part of it is built like the state.
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
        f"the step returns {_outline(returned)}, and its state is {_outline(state)}; a step "
        "returns its new state, or (state, metrics): wrap it in a lambda that does"
    )


def host(tree: PyTree) -> PyTree:
    """The tree with its arrays copied to the host; keys stay keys."""
    return jax.tree.map(lambda leaf: _copied(leaf) if _is_array(leaf) else leaf, tree)


def _named(rest: Any) -> dict[str, PyTree]:
    """A lone scalar is the loss; anything else is metrics."""
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
    """A fresh array, on the devices of `like` where those are several."""
    if not _is_array(leaf):
        return leaf
    fresh = _copied(leaf)
    if isinstance(like, jax.Array) and len(like.sharding.device_set) > 1:
        return jax.device_put(fresh, like.sharding)
    return fresh
