"""The state of a loader or an iterator, from which it goes on at its next batch.

It is stored as JSON, and reading it runs no code. JSON's values stand for themselves; others are
an object with one name that begins with `$`: bytes, NumPy arrays, torch tensors, tuples, and dicts
with other keys than plain names.
"""

import base64
import collections
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from replicax.errors import ConfigError

_MOST_INT = 2**63


@dataclasses.dataclass(frozen=True)
class LoaderState:
    """Where a source is, between two batches of an epoch, on one process; JSON values."""

    epoch: int
    rows: int
    """Rows of this process that were read in the epoch."""
    state: Any
    """State of the loader; see `encoded`."""
    again: int = 0
    """Batches to read again and skip: the last one, to compare it; others may need its shapes."""


class Loader:
    """An iterable of batches, which may have a state.

    That of a torchdata `StatefulDataLoader` is the loader's, from one pass to the next; that of
    Grain's `DataLoader` and `IterDataset` is the iterator's.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches: Any = batches
        self._iterator: Any = None
        self._of_loader = _has(batches, "state_dict", "load_state_dict")

    @property
    def has_state(self) -> bool:
        """Whether it has one, as far as that is known before it is read."""
        return self._of_loader or _has(self._iterator, "get_state", "set_state")

    @property
    def is_generator(self) -> bool:
        """Whether it is an iterator, or has been opened as a generator.

        Loaders and datasets of libraries, which have rows of their own, are none.
        """
        if any(hasattr(self._batches, name) for name in ("__getitem__", "dataset")):
            return False
        return isinstance(self._batches, Iterator) or isinstance(self._iterator, Generator)

    def read(self, saved: LoaderState | None, epoch: int) -> Iterator[Any]:
        """Begin the epoch, or go on in it from what was `saved`."""
        if saved is None or (saved.epoch != epoch and not self._of_loader):
            self._iterator = iter(self._batches)
        elif self._of_loader:
            state, generator = decoded(saved.state)
            self._take(self._batches.load_state_dict, state)
            self._iterator = iter(self._batches)
            if generator is not None:  # from which each pass draws more than the state tells
                self._batches.generator.set_state(generator)
            if saved.epoch != epoch:  # at its end
                collections.deque(self._iterator, maxlen=0)
                self._iterator = iter(self._batches)
        else:
            self._iterator = iter(self._batches)
            state, _ = decoded(saved.state)
            self._take(getattr(self._iterator, "set_state", None), state)
        iterator: Iterator[Any] = self._iterator
        return iterator

    def state(self) -> Any:
        """Return the state before the next batch as JSON values, or None if there is none."""
        if self._of_loader:
            generator: Any = getattr(self._batches, "generator", None)
            drawn = generator.get_state() if _has(generator, "get_state", "set_state") else None
            return encoded([self._batches.state_dict(), drawn])
        if not _has(self._iterator, "get_state", "set_state"):
            return None
        return encoded([self._iterator.get_state(), None])

    def _take(self, take: Callable[[Any], Any] | None, state: Any) -> None:
        name = type(self._batches).__name__
        if take is None:
            raise ConfigError(
                f"the checkpoint has the state of the loader that it was fed by, and the source "
                f"is now a {name}, which has none: pass that loader, or start a new run"
            )
        try:
            take(state)
        except Exception as error:  # of any type
            lines = str(error).strip().splitlines() or [""]
            raise ConfigError(
                f"the {name} does not take the state that was saved ({type(error).__name__}: "
                f"{lines[0]}): make it as it was, or start a new run"
            ) from error


def encoded(value: Any, path: str = "state") -> Any:
    """Return the state of a loader as JSON values.

    Raises:
        ConfigError: it has an object of another kind, which is named.
    """
    torch: Any = sys.modules.get("torch")
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value if abs(value) < _MOST_INT else {"$int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        data = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if torch is not None and isinstance(value, torch.Tensor):
        return {"$tensor": encoded(value.detach().cpu().numpy(), path)}
    if isinstance(value, list | tuple):
        items = [encoded(each, f"{path}[{place}]") for place, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encoded(each, f"{path}[{key!r}]") for key, each in value.items()}
        items = [[key, each] for key, each in value.items()]
        return {"$dict": encoded(items, path)}
    raise ConfigError(
        f"the loader's {path} is a {type(value).__name__}, and a checkpoint keeps numbers, text, "
        "bytes, arrays, tensors, lists, tuples and dicts of a state only: let it return these"
    )


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind: str = next(iter(value), "")
    inner: Any = value.get(kind)
    if not kind.startswith("$"):
        return {key: decoded(each) for key, each in value.items()}
    if kind == "$array":
        dtype, shape, data = inner
        array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
        return array if shape else array[()]
    return _DECODERS[kind](inner)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$float": float,
    "$bytes": base64.b64decode,
    "$tensor": lambda array: importlib.import_module("torch").as_tensor(decoded(array)),
    "$tuple": lambda items: tuple(decoded(items)),
    "$dict": lambda items: dict(decoded(items)),
}


def _has(part: Any, *names: str) -> bool:
    return all(callable(getattr(part, name, None)) for name in names)
