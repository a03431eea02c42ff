"""A step that somebody wrote by hand, held against its single-device form."""

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from replicax.checks import FAIL, PASS, SKIP, Check
from replicax.errors import ConfigError
from replicax.verify.batch_rows import find_weights, row_count, with_weights
from replicax.verify.difference import changes, coarsest_eps, is_float
from replicax.verify.form import Step, host
from replicax.verify.step_checks import (
    determinism,
    one_device,
    parameters,
    recompilation,
    same_on_all_replicas,
    shuffled,
)
from replicax.verify.step_parity import consecutive, indivisible, parity, weighted
from replicax.verify.step_program import gradient_bytes, program_checks
from replicax.verify.trial import (
    Trial,
    compiled_reference,
    find_form,
    run_reference,
)
from replicax.verify.verification import Verification
from replicax.wording import first_line

PyTree = Any
MOST_WARM_STEPS = 2
"""Steps of the reference at most before anything is compared; see `_moving`."""


def verify_step(
    step: Step,
    reference: Step,
    state: PyTree,
    batch: PyTree,
    *,
    key: jax.Array | None = None,
    replicas: int | None = None,
    stacked: bool | None = None,
    micro_batches: int = 1,
    weights: str | None = None,
    steps: int = 2,
    show: Callable[[str], None] | None = None,
) -> Verification:
    """Hold a `pmap`, `jit` or `shard_map` step against the step of one device.

    Both are called as `step(state, batch)`, or `step(state, *batch)` where the batch is a tuple and
    the reference takes as many arguments, with the key last where one is given, and return the new
    state or `(state, metrics)`. A step of another form fits with a lambda. Each gets fresh arrays,
    so that it may donate them, and matrix products are computed in their dtype's full precision.

    Args:
        step: the step as the training loop calls it.
        reference: the same step for one device: the whole batch, and no collective.
        state: all that a step changes (parameters, optimizer state, statistics), any pytree, for
            one device. A step that takes it stacked, [replicas, ...], gets it so. A fresh one, of
            an optimizer that remembers nothing yet, lets causes be named best.
        batch: the global batch, a pytree of arrays [rows, ...] with rows a multiple of replicas.
            Arrays that live on several devices stay placed as they are, and so does the state.
        key: a random key for both, the same on all replicas.
        replicas: devices that the step splits a batch over; found where it is not given.
        stacked: whether the step takes its batch as [replicas, rows / replicas, ...], as `pmap`
            does; found where it is not given.
        micro_batches: parts that each replica computes its rows in, which helps to name causes.
        weights: the name of the array of the batch with each row's weight; "mask", "weights" and
            the like are found.
        steps: consecutive steps whose state is compared.
        show: told what is next, a line at a time.

    Returns:
        the checks, with a verdict each.

    Raises:
        ConfigError: the step or the reference cannot be called so, the rows do not divide, a
            count is not possible, or there is one device only.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"verify_step in a job of {jax.process_count()} processes; it compares with one device "
            "and runs in one process: start it by itself"
        )
    _check_counts(replicas=replicas, micro_batches=micro_batches, steps=steps)
    takes = partial(_takes, reference, state, key=key)
    if isinstance(batch, tuple) and takes(batch) and not takes(*batch):
        batch = (batch,)  # one argument
    begun = time.monotonic()
    show = show or (lambda _text: None)
    # TF32 or bfloat16 products would differ by more than a mistake of some percent.
    with jax.default_matmul_precision("highest"):
        show("the step on the full batch")
        trial, ones, path = _trial(
            step,
            reference,
            state,
            batch,
            key=key,
            replicas=replicas,
            stacked=stacked,
            weights=weights,
        )
        checks = _checks(trial, ones, path, micro_batches=micro_batches, steps=steps, show=show)
    about = {
        "step": _name(step),
        "reference": _name(reference),
        "devices": trial.replicas,
        "mode": "stacked by replica" if trial.form.stacked else "global arrays",
        "rows": row_count(ones),
        "weights": path,
        "micro_batches": micro_batches,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "seconds": round(time.monotonic() - begun, 1),
    }
    return Verification(checks, about)


def _takes(function: Step, *arguments: Any, key: Any) -> bool:
    """Whether a function can be called with as many arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*arguments, *(() if key is None else (key,)))
    except TypeError:
        return False
    except ValueError:  # written in C, or by a library that hides it
        pass
    return True


def _check_counts(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; there is at least 1: raise it")
    devices, replicas = jax.device_count(), given["replicas"]
    if replicas is not None and replicas > devices:
        raise ConfigError(
            f"replicas={replicas} with {devices} devices; each has one of its own: lower it"
        )
    if (replicas or devices) < 2:
        raise ConfigError(
            "there is 1 device, and N are compared with 1; on a CPU set JAX_NUM_CPU_DEVICES=8, or "
            "jax.config.update('jax_num_cpu_devices', 8) before the first use of jax"
        )


def _trial(
    step: Step,
    reference: Step,
    state: PyTree,
    batch: PyTree,
    *,
    key: Any,
    replicas: int | None,
    stacked: bool | None,
    weights: str | None,
) -> tuple[Trial, PyTree, str | None]:
    """Return what is compared, the full batch with all weights 1, and where its weights are."""
    rows, path = row_count(batch), find_weights(batch, weights)
    on_host, ones = host(state), host(batch)
    if path is not None:
        ones = with_weights(ones, path, np.ones(rows))
    compiled = compiled_reference(reference, on_host, ones, key)
    on_host = _moving(compiled, on_host, ones, key)
    results = run_reference(compiled, on_host, ones, key)
    form = find_form(
        step,
        on_host,
        ones,
        key,
        given=(state, batch),
        replicas=replicas,
        stacked=stacked,
        expected=results["state"],
    )
    if rows % form.replicas:
        raise ConfigError(
            f"{rows} rows do not divide over {form.replicas} replicas; the checks start from a "
            "batch that does: give one (batches that do not are a check of their own)"
        )
    shapes = {
        jax.tree_util.keystr(where): np.shape(leaf)
        for where, leaf in jax.tree_util.tree_leaves_with_path(results)
        if not jax.tree_util.keystr(where).startswith("['state']")
    }
    arguments = ones if isinstance(ones, tuple) else (ones,)
    keys = () if key is None else (key,)
    eps = coarsest_eps(compiled, on_host, *arguments, *keys)
    return Trial(form, compiled, on_host, key, eps, shapes), ones, path


def _moving(reference: Step, state: PyTree, batch: PyTree, key: Any) -> PyTree:
    """The state as given, or after as many steps as it takes until a step moves a float.

    A warm-up's first learning rate is 0. Otherwise the state as given is the better one: where an
    optimizer remembers nothing yet, a factor in the gradient is a factor in what it does.
    """
    for _ in range(MOST_WARM_STEPS):
        later = host(run_reference(reference, state, batch, key)["state"])
        if any(is_float(value) and np.any(value) for value in changes(state, later).values()):
            break
        state = later
    return state


def _checks(
    trial: Trial,
    batch: PyTree,
    path: str | None,
    *,
    micro_batches: int,
    steps: int,
    show: Callable[[str], None],
) -> list[Check]:
    if trial.replicas == 1:
        return [one_device()]
    full, copies = parity(trial, "full batch", [batch], micro_batches=micro_batches)
    checks = [full]
    if full.verdict == PASS:
        checks += _further(trial, batch, path, micro_batches=micro_batches, steps=steps, show=show)
    else:
        checks.append(Check("parity", "other cases", SKIP, "the full batch comes first"))
    assert copies is not None
    show("what every device holds")
    case = f"{trial.replicas} replicas"
    checks.append(same_on_all_replicas(trial, [batch], copies, case))
    show("reductions and work")
    checks += program_checks(trial, batch, gradient_bytes(trial.state))
    checks.append(parameters(trial, batch))
    show("two runs, and compilations")
    again = partial(determinism, trial, batch, copies)
    checks.append(_unless_raised("determinism", "two runs", again))
    later = partial(recompilation, trial, shuffled(batch, 3))
    checks.append(_unless_raised("recompilation", "same shapes", later))
    return checks


def _unless_raised(subject: str, case: str, check: Callable[[], Check]) -> Check:
    """The row of a check that calls the step again, which worked once."""
    try:
        return check()
    except ConfigError:
        raise
    except Exception as error:  # the user's step
        return Check(subject, case, FAIL, f"raises {first_line(error)}", RAISES)


RAISES = (
    "the step works once, and raises when it is called again or fed what it returned: it reads an "
    "array that it donated (donate_argnums), or returns another structure, shape or sharding than "
    "it takes"
)


def _further(
    trial: Trial,
    batch: PyTree,
    path: str | None,
    *,
    micro_batches: int,
    steps: int,
    show: Callable[[str], None],
) -> list[Check]:
    """Parity beyond one step on a full batch."""
    checks = []
    if steps > 1:
        show(f"{steps} steps")
        feeding = partial(consecutive, trial, batch, steps, micro_batches)
        checks.append(_unless_raised("parity", f"{steps} steps", feeding))
    if path is not None:
        show("unequal weights")
        checks += weighted(trial, batch, path, micro_batches)
    else:
        checks.append(
            Check(
                "parity",
                "unequal weights",
                SKIP,
                "no array of the batch is known to hold weights; name it: weights=, or --weights",
            )
        )
    show("a batch that does not divide")
    checks.append(indivisible(trial, batch, micro_batches))
    return checks


def _name(step: Any) -> str:
    inner = getattr(step, "__wrapped__", step)
    return str(getattr(inner, "__qualname__", type(inner).__name__))
