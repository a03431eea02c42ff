"""Run a step and its single-device form side by side on the same state and rows."""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree, is_random_key
from replicax.errors import ConfigError
from replicax.known_wrong.avoidance import avoiding
from replicax.text.wording import first_line
from replicax.verify.batch_rows import last_name, rows_of_batch, take
from replicax.verify.copies import Copies, read_copies
from replicax.verify.difference import (
    Leaves,
    bounds,
    is_float,
    leaves,
    rounding_noise,
    step_changes,
    stored_rounding,
)
from replicax.verify.evidence import Evidence
from replicax.verify.form import Form, StepFile, host, is_pmap, parts_returned

_FIRST_NAME = re.compile(r"^\['(\w+)'\]")
_KEY_NAMES = ("rng", "key")
"""Parts of the names of leaves that are raw keys, arrays of two uint32."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A step and its reference, and how to run both."""

    form: Form
    reference: StepFile
    state: PyTree
    """The user's state, on the host."""
    key: Any
    eps: float
    """The eps of the coarsest dtype that the reference computes in."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the reference's results, by path."""
    _: dataclasses.KW_ONLY
    against: str = "one device"
    """Description of the reference."""
    draws: bool = False
    """Whether it is known to draw random numbers, and so is not run on fewer rows."""
    micro_batches: int = 1
    """Micro-batches per replica."""
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Cached results of the reference, by batches."""

    @property
    def replicas(self) -> int:
        """Return the number of devices that the step runs on."""
        return self.form.replicas

    def expected(self, batches: Sequence[PyTree], *, state: PyTree = None) -> Leaves:
        """Return the reference's change of each leaf over all batches, and the last metrics."""
        if state is None:
            return self.once("expected", batches, lambda: self._expected(batches, self.state))
        return self._expected(batches, state)

    def _expected(self, batches: Sequence[PyTree], before: PyTree) -> Leaves:
        after, results = before, {}
        for batch in batches:
            results = run_reference(self.reference, after, batch, self.key)
            after = results["state"]
        return self.named(step_changes({"state": before}, results))

    def once(self, what: str, batches: Sequence[PyTree], make: Callable[[], Leaves]) -> Leaves:
        """Return the result of `make`, called once for the same batches."""
        key = (what, self.reference, *map(id, batches))
        if key not in self.known:
            self.known[key] = (batches, make())  # kept alive, so that ids stay unique
        result: Leaves = self.known[key][1]
        return result

    def reseeded(self) -> "Trial | None":
        """Return the trial with all random keys replaced, or None if there are none."""
        key = None if self.key is None else jax.random.fold_in(self.key, 1)
        state = jax.tree_util.tree_map_with_path(_with_other_key, self.state)
        same = all(map(operator.is_, *map(jax.tree.leaves, (state, self.state))))
        if same and key is None:
            return None
        return dataclasses.replace(self, key=key, state=state, known={})

    def given(self, found: Leaves, expected: Leaves) -> Leaves:
        """Return the results expected of a step that returned `found`."""
        del found
        return expected

    def bounds(self, expected: Leaves, batches: Sequence[PyTree], rows: int) -> Leaves:
        """Return the difference that rounding explains in each element of `expected`."""
        noise = self.noise(expected, batches)
        return bounds(expected, noise, terms=rows, eps=self.eps, stored=self.stored())

    def stored(self) -> Leaves:
        """Return the rounding of each value of the state."""
        return self.named(stored_rounding({"state": self.state}))

    def noise(self, expected: Leaves, batches: Sequence[PyTree]) -> Leaves:
        """Return how much rounding changes each element of `expected`."""
        return rounding_noise(
            lambda state, moved: self.expected(moved, state=state),
            self.state,
            list(batches),
            eps=self.eps,
            expected=expected,
        )

    def run(self, batches: Sequence[PyTree]) -> Copies:
        """Return every replica's copy after all batches, and the last metrics."""
        *_, (_, results) = self.steps(batches)
        return self.read(results)

    def steps(self, batches: Sequence[PyTree]) -> Iterator[tuple[PyTree, dict[str, PyTree]]]:
        """Yield of each step the state that it is given, which it may donate, and the results."""
        results: dict[str, PyTree] = {}
        for batch in batches:
            fed, *rest = self.form.arguments(self.state, batch, self.key)
            fed = self.form.again(results["state"]) if results else fed
            results = parts_returned(self.form.step(fed, *rest), fed)
            yield fed, results

    def trace(self, batch: PyTree) -> Any:
        """Return the step's jaxpr."""
        arguments = self.form.arguments(self.state, batch, self.key)
        return jax.make_jaxpr(self.form.step)(*arguments)

    def read(self, results: Mapping[str, PyTree]) -> Copies:
        """Copy the results of the step to the host from every device."""
        stacked = self.replicas if self.form.stacked else None
        copies = read_copies(dict(results), self.shapes, stacked_over=stacked)
        return dataclasses.replace(
            copies,
            held=self.named(copies.held),
            stacked=frozenset(self.named(dict.fromkeys(copies.stacked))),
        )

    def evidence(
        self,
        found: Leaves,
        expected: Leaves,
        limits: Leaves,
        batches: Sequence[PyTree],
        **more: Any,
    ) -> Evidence:
        """Return the evidence for finding the cause of a difference."""
        return Evidence(
            found,
            expected,
            limits,
            rows=rows_of_batch(batches[0]),
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            on_rows=None if self.draws else lambda indices: self.on_rows(batches, indices),
            **more,
        )

    def on_rows(self, batches: Sequence[PyTree], indices: np.ndarray) -> Leaves:
        """Return the reference's results on only some rows of each batch; NaN if it fails."""
        try:
            return self.expected([take(batch, indices) for batch in batches])
        except Exception:  # rows that are all padding, or too few for the user's code
            whole = self.expected(batches)
            return {path: np.full(np.shape(each), np.nan) for path, each in whole.items()}

    def named(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Return results by their names in the table."""
        return renamed(by_path)

    def changes(self, held: Leaves) -> Leaves:
        """Return the changes in a replica's results, in the form of `expected`."""
        before = self.named(leaves({"state": self.state}))
        return {
            path: value - before[path]
            if path in before
            and np.issubdtype(value.dtype, np.inexact)
            and before[path].shape == value.shape
            else value
            for path, value in held.items()
        }


def _with_other_key(path: Any, leaf: Any) -> Any:
    """Return a leaf of the state, replaced if it holds random keys."""
    raw = getattr(leaf, "dtype", None) == np.uint32 and np.shape(leaf)[-1:] == (2,)
    named = any(name in last_name(path).lower() for name in _KEY_NAMES)
    if raw and (named or np.ndim(leaf) == 1):
        return np.asarray(leaf) ^ np.uint32(1)
    if not is_random_key(leaf):
        return leaf
    data = jax.random.key_data(leaf) ^ 1
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def run_reference(reference: StepFile, state: PyTree, batch: PyTree, key: Any) -> dict[str, PyTree]:
    """Run one step on one device from fresh arrays, since the reference may donate its state."""
    return parts_returned(reference(*arguments_of(host(state), batch, key)), state)


def arguments_of(state: PyTree, batch: PyTree, key: Any) -> tuple[Any, ...]:
    """Return the arguments of a reference."""
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return (state, *arguments, *(() if key is None else (key,)))


def _jitted(reference: StepFile) -> StepFile:
    found: StepFile = jax.jit(reference, compiler_options=avoiding(jax.default_backend()))
    return found


def compiled_reference(reference: StepFile, state: PyTree, batch: PyTree, key: Any) -> StepFile:
    """Return the reference under `jit` if possible, since it runs often.

    Raises:
        ConfigError: it fails on the batch.
    """
    compiled = reference if hasattr(reference, "lower") else _jitted(reference)
    try:
        run_reference(compiled, state, batch, key)
    except jax.errors.ConcretizationTypeError:  # it depends on values: run it eagerly
        return reference
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the reference fails on the batch ({first_line(error)}); it is called with the state, "
            "the global batch and, if given, the key: make it run alone first"
        ) from error
    return compiled


def find_form(
    forms: Iterable[Form], state: PyTree, batch: PyTree, key: Any, expected: PyTree
) -> Form:
    """Return the first of `forms` in which the step runs on state and batch.

    If several stacked forms work (a `pmap` that takes its state whole may also accept a stacked
    one), the one whose result is closest to `expected`, the reference's new state, is used.

    Raises:
        ConfigError: no form works.
    """
    errors: list[tuple[Form, Exception]] = []
    working: list[tuple[float, Form]] = []
    for form in forms:
        if working and not form.stacked:
            break
        try:
            fed, *rest = form.arguments(state, batch, key)
            results = parts_returned(form.step(fed, *rest), fed)
            jax.block_until_ready(results)
        except Exception as error:
            errors.append((form, error))
            continue
        if not form.stacked:
            devices = [
                len(leaf.sharding.device_set)
                for leaf in jax.tree.leaves(results)
                if isinstance(leaf, jax.Array)
            ]
            return dataclasses.replace(form, replicas=max(devices, default=1))
        distance = _distance(form, state, results["state"], expected)
        if distance is not None:
            working.append((distance, form))
    if working:
        return min(working, key=lambda each: each[0])[1]
    first = next((error for form, error in errors if form.stacked == is_pmap(form.step)), None)
    message = first_line(first or errors[0][1]) if errors else "its new state has different shapes"
    raise ConfigError(
        f"the step fails on the batch ({message}); it is called with the state, the batch and, "
        "if given, the key, either whole or stacked by replica as for pmap: wrap it in a lambda "
        "that takes these, or pass its number of replicas"
    )


def _distance(form: Form, state: PyTree, returned: PyTree, expected: PyTree) -> float | None:
    """Return the distance of a new state from the reference's, summed over leaves.

    None unless its shapes are those of the given state, perhaps with a leading replica dimension.
    """
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(returned), strict=True):
        if np.shape(after) not in (np.shape(before), (form.replicas, *np.shape(before))):
            return None
    ours = leaves(returned)
    gaps = [
        float(np.linalg.norm(ours[path] - value) / (1 + np.linalg.norm(value)))
        for path, value in leaves(expected).items()
        if is_float(value)
    ]
    return sum(gap if np.isfinite(gap) else 1e9 for gap in gaps)


def renamed(by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten paths: `['state']['w']` to `state['w']`."""
    return {_FIRST_NAME.sub(r"\1", path): value for path, value in by_path.items()}
