"""Checks of a hand-written step besides its numbers: copies, bits, compilations."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.text.checks import FAIL, NOTE, PASS, Check
from replicax.text.wording import named
from replicax.verify.batch_rows import rows_of_batch
from replicax.verify.causes import likely_cause
from replicax.verify.copies import Copies
from replicax.verify.difference import Leaves, equations, is_float, leaf_differences
from replicax.verify.trial import Trial

_STEPS = 3
"""The first rate of a warm-up is 0, and layers behind a layer of zeros move one step later."""
# Lowering rather than compiling: a program found in the persistent cache was still rebuilt.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def one_device() -> Check:
    """Return the row on a step that leaves all devices but one idle."""
    devices = jax.device_count()
    return Check(
        "redundant work",
        "full batch",
        FAIL,
        f"the step ran on 1 of {devices} devices",
        "nothing places its arrays on the others: set in_shardings, or pass a state and a batch "
        "that live on a mesh, as from jax.device_put(batch, NamedSharding(mesh, P('data')))",
        {"devices": devices},
    )


def same_on_all_replicas(
    trial: Trial, batches: Sequence[PyTree], copies: Copies, case: str
) -> Check:
    """Compare every device's copy of replicated results after all batches."""
    unequal = copies.unequal
    figures: dict[str, Any] = {"leaves": len(copies.held), "unequal": unequal}
    if not unequal:
        found = f"{len(copies.held)} leaves have the same bits on every device"
        return Check("replicas", case, PASS, found, "", figures)
    expected = trial.expected(batches)
    held = [trial.changes(copies.of(replica)) for replica in range(trial.replicas)]
    bounds = trial.bounds(expected, batches, rows_of_batch(batches[0]))
    if note := _averaged_on_the_host(unequal, copies, held, expected, bounds):
        return note
    cause = likely_cause(
        trial.evidence(
            {path: held[0][path] for path in unequal},
            {path: expected[path] for path in unequal if path in expected},
            bounds,
            batches,
            of_replica=lambda replica: {path: held[replica][path] for path in unequal},
        )
    )
    text = f"{unequal[0]} is not the same on all replicas"
    if len(unequal) > 1:
        text += f", nor are {len(unequal) - 1} more of {len(copies.held)} leaves"
    return Check("replicas", case, FAIL, text, cause, figures)


def _averaged_on_the_host(
    unequal: Sequence[str],
    copies: Copies,
    held: Sequence[Leaves],
    expected: Leaves,
    bounds: Leaves,
) -> Check | None:
    """Return a note on metrics returned stacked, which are right if their mean is logged."""
    if any(path.startswith("state") or path not in copies.stacked for path in unequal):
        return None
    means = {path: np.mean([each[path] for each in held], axis=0) for path in unequal}
    wanted = {path: expected[path] for path in unequal if path in expected}
    if leaf_differences(means, wanted, bounds):
        return None
    case, path = f"{len(held)} replicas", unequal[0]
    found = f"{path} differs between replicas; the mean of the {len(held)} is correct"
    cause = f"{path}[0] covers only the rows of replica 0: log the mean, or apply lax.pmean to it"
    return Check("replicas", case, NOTE, found, cause, {"unequal": list(unequal)})


def parameters(
    trial: Trial,
    batch: PyTree,
    case: str = f"{_STEPS} steps",
    *,
    of: str = "state",
    without: Sequence[str] = (),
) -> Check:
    """Return the row on leaves, with paths starting with `of`, that several steps do not change.

    Leaves `without` a gradient are left out.
    """
    for steps in (1, _STEPS):
        floats = {
            path: value
            for path, value in trial.expected([batch] * steps).items()
            if path.startswith(of) and is_float(value) and value.size and path not in without
        }
        still = [path for path, value in floats.items() if not np.any(value)]
        if not still:
            break
    figures = {"leaves": len(floats), "unchanged": still}
    if not still:
        found = f"all {len(floats)} float leaves change"
        return Check("parameters", case, PASS, found, "", figures)
    found = f"{named(still)} of {len(floats)} leaves do not change, nor do they on one device"
    return Check("parameters", case, NOTE, found, STILL, figures)


STILL = (
    "frozen on purpose, by the optimizer or a learning rate of 0; or without a gradient: "
    "stop_gradient, an unused layer, a gradient of exactly 0"
)


def determinism(trial: Trial, batch: PyTree, first: Copies, second: Copies) -> Check:
    """Compare the bits of two runs on the same inputs."""
    once, again = first.bits(), second.bits()
    other = [path for path in once if once[path] != again.get(path)]
    figures = {"leaves": len(once), "differing": other}
    if not other:
        found = f"{len(once)} leaves have the same bits"
        return Check("determinism", "two runs", PASS, found, "", figures)
    found = f"{other[0]} has different bits on the same inputs ({len(other)} of {len(once)} leaves)"
    called: list[str] = []
    with contextlib.suppress(Exception):  # the step may not be traceable as a whole
        called = [each.primitive.name for each in equations(trial.trace(batch).jaxpr)]
    callbacks = sorted({name for name in called if "callback" in name})
    cause = FROM_HOST.format(", ".join(callbacks)) if callbacks else FROM_OUTSIDE
    return Check("determinism", "two runs", FAIL, found, cause, figures)


FROM_HOST = (
    "it calls back into Python ({}), and the host's results change between runs: most often host "
    "random numbers; draw them with jax.random from the key"
)
FROM_OUTSIDE = (
    "it depends on something outside the arguments: a key made from the time, NumPy's global "
    "generator, or atomic additions on a GPU (XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """One of consecutive steps."""

    batch: PyTree
    copies: Copies
    form: dict[str, str]
    """Shape and dtype of each leaf of the state that it was given, by path."""
    compiled: int
    """The programs that were compiled."""


def consecutive(trial: Trial, batches: Sequence[PyTree]) -> list[Stepped]:
    """Run a step on each batch; count what is compiled."""
    found, steps = [], trial.steps(batches)
    for batch in batches:
        with counted_compilations() as compilations:
            fed, results = next(steps)
            jax.block_until_ready(results)
        found.append(Stepped(batch, trial.read(results), _aval_of(fed), len(compilations)))
    return found


def recompilation(steps: Sequence[Stepped], case: str = "same shapes") -> Check:
    """Return the row on compilations in consecutive steps on batches of one shape."""
    forms, compiled = [each.form for each in steps], [each.compiled for each in steps]
    figures = {"compiled": compiled}
    if any(compiled[2:]):
        found = f"the third step on the same shapes recompiles {sum(compiled[2:])} programs"
        return Check("recompilation", case, FAIL, found, ANEW, figures)
    changed = [path for path, form in forms[1].items() if forms[0].get(path, form) != form]
    if compiled[1] and changed:
        path, found = changed[0], "the second step recompiles, the third does not"
        was, now = forms[0][path], forms[1][path]
        cause = f"{path} goes in as {was} and comes back as {now}: start with the latter"
        return Check("recompilation", case, NOTE, found, cause, figures)
    found = "another batch of the same shape compiles nothing"
    return Check("recompilation", case, PASS, found, "", figures)


ANEW = (
    "jit or pmap is applied anew in each call, or an argument hashed by identity (a lambda, a new "
    "mesh) changes: create the compiled function once, outside the loop"
)


def _aval_of(tree: PyTree) -> dict[str, str]:
    """Return the shape, dtype and weak type of each leaf, which determine the compiled program."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        weak = " (weak)" if getattr(leaf, "weak_type", False) else ""
        dims = ", ".join(str(dim) for dim in np.shape(leaf))
        found[f"state{jax.tree_util.keystr(path)}"] = f"{getattr(leaf, 'dtype', '?')}[{dims}]{weak}"
    return found


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Record the name of each function that this process compiles in this context."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        del duration_secs
        if event == _LOWERED:
            seen.append(str(facts.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
