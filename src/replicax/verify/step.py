"""Compare a hand-written step with its single-device form."""

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError
from replicax.known_wrong.findings import lines_once
from replicax.text.arguments import Count, typed
from replicax.text.checks import FAIL, PASS, SKIP, Check
from replicax.text.streams import alarm
from replicax.text.wording import first_line
from replicax.verify.batch_rows import find_weights, rows_of_batch, shuffled, with_weights
from replicax.verify.difference import coarsest_eps, is_float, step_changes
from replicax.verify.form import Form, StepFile, candidates, host
from replicax.verify.stages import OnCheck, Show
from replicax.verify.step_checks import (
    consecutive,
    determinism,
    one_device,
    parameters,
    recompilation,
    same_on_all_replicas,
)
from replicax.verify.step_parity import indivisible, parity, weighted
from replicax.verify.step_program import gradient_bytes, program_checks
from replicax.verify.trial import Trial, arguments_of, compiled_reference, find_form, run_reference
from replicax.verify.verification import Verification

MOST_WARM_STEPS = 2
"""Most steps of the reference before the comparison starts; see `_moving`."""


@typed
def verify_step(
    step: StepFile,
    reference: StepFile,
    state: PyTree,
    batch: PyTree,
    *,
    key: jax.Array | None = None,
    replicas: Count | None = None,
    stacked: bool | None = None,
    micro_batches: Count = 1,
    weights: str | None = None,
    steps: Count = 2,
    show: Show | None = None,
    found: OnCheck | None = None,
) -> Verification:
    """Compare a `pmap`, `jit` or `shard_map` step with its single-device form.

    Both are called as `step(state, batch)`, or `step(state, *batch)` if the batch is a tuple and
    the reference takes that many arguments, followed by the key if one is given. Both return the
    new state or `(state, metrics)`. Wrap steps with other signatures in a lambda. Each call gets
    fresh arrays, which it may donate; matrix products use the full precision of their dtype.

    Examples:
        >>> @partial(jax.pmap, axis_name="i", in_axes=(None, 0), out_axes=None)
        ... def step(w, batch):
        ...     return w - 0.1 * jax.lax.pmean(gradient(w, batch), "i")
        >>> def reference(w, batch):
        ...     return w - 0.1 * gradient(w, batch)
        >>> def gradient(w, batch):
        ...     return jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
        >>> result = rx.verify_step(step, reference, jnp.zeros(3), source)
        >>> print(result.ok)
        True

    Args:
        step: the step as the training loop calls it.
        reference: the same step for one device: the whole batch and no collectives.
        state: everything that a step changes (parameters, optimizer state, statistics), as any
            pytree, for one device. It is stacked to [replicas, ...] if the step takes it that way.
            A fresh optimizer state allows the most specific causes.
        batch: the global batch, a pytree of arrays [rows, ...] with rows a multiple of replicas.
            Arrays of batch and state that span several devices keep their placement.
        key: a random key for both, the same on all replicas.
        replicas: devices that the step splits a batch over; detected by default.
        stacked: whether the step takes its batch as [replicas, rows / replicas, ...], as `pmap`
            does; detected by default.
        micro_batches: micro-batches per replica, which helps to identify causes.
        weights: the name of the array of the batch with each row's weight; "mask", "weights" and
            similar names are detected.
        steps: consecutive steps whose state is compared.
        show: called with a line of text on each stage.
        found: called with each row as soon as it is known.

    Returns:
        the checks, each with a verdict.

    Raises:
        ConfigError: the step or the reference cannot be called this way, the rows do not divide,
            a count is invalid, or there is only one device.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"verify_step in a job of {jax.process_count()} processes; it compares with one device "
            "and must run in a single process: start it separately"
        )
    _check_counts(replicas=replicas, micro_batches=micro_batches, steps=steps)
    takes = partial(_takes, reference, state, key=key)
    if isinstance(batch, tuple) and takes(batch) and not takes(*batch):
        batch = (batch,)  # one argument
    begun = time.monotonic()
    for line in lines_once(jax.default_backend()):
        alarm(line)
    show = show or (lambda _text: None)
    rows, path = rows_of_batch(batch), find_weights(batch, weights)
    forms = candidates(step, state, batch, replicas or jax.device_count(), stacked)
    ones = host(batch) if path is None else with_weights(host(batch), path, np.ones(rows))
    # TF32 or bfloat16 products would hide errors of a few percent.
    with jax.default_matmul_precision("highest"):
        show("the step on the full batch")
        trial = _trial(forms, reference, host(state), ones, key, replicas)
        trial = dataclasses.replace(trial, micro_batches=micro_batches)
        checks = []
        for check in _checks(trial, ones, path, steps, show):
            checks.append(check)
            if found is not None:
                found(check)
    about = {
        "step": _name(step),
        "reference": _name(reference),
        "devices": trial.replicas,
        "mode": "stacked by replica" if trial.form.stacked else "global arrays",
        "rows": rows_of_batch(ones),
        "weights": path,
        "micro_batches": micro_batches,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "seconds": round(time.monotonic() - begun, 1),
    }
    return Verification(checks, about)


def _takes(function: StepFile, *arguments: Any, key: Any) -> bool:
    """Whether a function's signature, if known, accepts these arguments."""
    try:
        inspect.signature(function).bind(*arguments, *(() if key is None else (key,)))
    except TypeError:
        return False
    except ValueError:  # written in C, or by a library that hides it
        pass
    return True


def _check_counts(**given: int | None) -> None:
    devices, replicas = jax.device_count(), given["replicas"]
    if replicas is not None and replicas > devices:
        raise ConfigError(
            f"replicas={replicas} with {devices} devices; each replica needs its own: lower it"
        )
    if (replicas or devices) < 2:
        raise ConfigError(
            "there is 1 device, but N are compared with 1; on a CPU set JAX_NUM_CPU_DEVICES=8, or "
            "jax.config.update('jax_num_cpu_devices', 8) before the first use of jax"
        )


def _trial(
    forms: Iterable[Form],
    reference: StepFile,
    state: PyTree,
    batch: PyTree,
    key: Any,
    replicas: int | None,
) -> Trial:
    """Return the trial for a state and a batch on the host."""
    compiled = compiled_reference(reference, state, batch, key)
    state = _moving(compiled, state, batch, key)
    results = run_reference(compiled, state, batch, key)
    form = find_form(forms, state, batch, key, results["state"])
    form = dataclasses.replace(form, replicas=replicas or form.replicas)
    rows = rows_of_batch(batch)
    if rows % form.replicas:
        raise ConfigError(
            f"{rows} rows do not divide over {form.replicas} replicas; the checks need a batch "
            "that does: pass one (batches that do not divide are checked separately)"
        )
    shapes = {
        jax.tree_util.keystr(where): np.shape(leaf)
        for where, leaf in jax.tree_util.tree_leaves_with_path(results)
    }
    eps = coarsest_eps(compiled, arguments_of(state, batch, key))
    return Trial(form, compiled, state, key, eps, shapes)


def _moving(reference: StepFile, state: PyTree, batch: PyTree, key: Any) -> PyTree:
    """Return the state, advanced until the next step changes a float.

    The first learning rate of a warm-up is 0. Otherwise the given state is better: with a fresh
    optimizer state, a factor in the gradient is a factor in the update.
    """
    for _ in range(MOST_WARM_STEPS):
        later = host(run_reference(reference, state, batch, key)["state"])
        if any(is_float(value) and np.any(value) for value in step_changes(state, later).values()):
            break
        state = later
    return state


def _checks(
    trial: Trial, batch: PyTree, path: str | None, steps: int, show: Show
) -> Iterator[Check]:
    if trial.replicas == 1:
        yield one_device()
        return
    full, copies = parity(trial, "full batch", [batch])
    yield full
    if full.verdict == PASS:
        yield from _further(trial, batch, path, steps, show)
    else:
        yield Check("parity", "other cases", SKIP, "the full batch must pass first")
    assert copies is not None
    show("copies on every device")
    yield same_on_all_replicas(trial, [batch], copies, f"{trial.replicas} replicas")
    show("reductions and work")
    yield from program_checks(trial, batch, gradient_bytes(trial.state))
    yield parameters(trial, batch)
    show("two runs, and compilations")
    again = lambda: determinism(trial, batch, copies, trial.run([batch]))  # noqa: E731
    yield _unless_raised("determinism", "two runs", again)
    later = lambda: recompilation(consecutive(trial, shuffled(batch, 3)))  # noqa: E731
    yield _unless_raised("recompilation", "same shapes", later)


def _further(
    trial: Trial, batch: PyTree, path: str | None, steps: int, show: Show
) -> Iterator[Check]:
    """Yield the parity checks beyond one step on a full batch."""
    if steps > 1:
        show(f"{steps} steps")
        case = f"{steps} steps"
        feeding = partial(parity, trial, case, shuffled(batch, steps))
        yield _unless_raised("parity", case, lambda: feeding()[0])
    if path is not None:
        show("unequal weights")
        yield from weighted(trial, batch, path)
    else:
        text = "no array of the batch is known to hold weights; name it with weights= or --weights"
        yield Check("parity", "unequal weights", SKIP, text)
    show("a batch that does not divide")
    yield indivisible(trial, batch)


def _unless_raised(subject: str, case: str, check: Callable[[], Check]) -> Check:
    """Return the row of a check that calls the step again after it worked once."""
    try:
        return check()
    except ConfigError:
        raise
    except Exception as error:  # the user's step
        return Check(subject, case, FAIL, f"raises {first_line(error)}", RAISES)


RAISES = (
    "the step works once, but raises when it is called again or given what it returned: it reads a "
    "donated array (donate_argnums), or returns a different structure, shape or sharding than it "
    "takes"
)


def _name(step: Any) -> str:
    inner = getattr(step, "__wrapped__", step)
    return str(getattr(inner, "__qualname__", type(inner).__name__))
