"""Parameters that never learn: no gradient reaches them, or the optimizer leaves them alone."""

from collections.abc import Iterator

import jax
import numpy as np

from replicax.checks import FAIL, NOTE, PASS, SKIP, Check
from replicax.core.loss import LOSS
from replicax.core.models.definition import PyTree
from replicax.verify.difference import leaves
from replicax.verify.subject import Subject
from replicax.wording import named

_DRAWS = 2
_SHARE, _LEAST = 0.1, 0.01
_SHOWN = 4


def check_parameters(subject: Subject) -> Iterator[Check]:
    """Rows on leaves without gradient, and on leaves that the optimizer does not change.

    Gradients are taken at parameters moved at random: where a gate is 0 at first, what is behind it
    has no gradient yet, and is not dead.
    """
    results = [subject.sums(moved(subject.state.params, seed)) for seed in range(_DRAWS)]
    if not all(np.isfinite(result[LOSS]) for result in results):
        yield Check(
            "parameters",
            "gradient",
            SKIP,
            "the loss is not finite where the parameters are moved by a tenth",
        )
        return
    paths = list(leaves(subject.state.params))
    without = [
        path for path in paths if not any(np.any(result[f"gradient{path}"]) for result in results)
    ]
    dead = [path for path in without if not _reacts(subject, path)]
    stopped = [path for path in without if path not in dead]
    figures = {"leaves": len(paths), "dead": dead, "stopped": stopped}
    if dead:
        text = f"{named(dead, _SHOWN)}: no gradient, and no effect on the loss"
        yield Check("parameters", "gradient", FAIL, text, DEAD, figures)
    elif not stopped:
        text = f"all {len(paths)} leaves get a gradient"
        yield Check("parameters", "gradient", PASS, text, "", figures)
    if stopped:
        text = f"{named(stopped, _SHOWN)}: frozen by stop_gradient; the loss reacts to it"
        yield Check("parameters", "gradient", NOTE, text, "", figures)
    yield _of_optimizer(subject, [path for path in paths if path not in without])


DEAD = (
    "a dead parameter: nothing that it feeds reaches the loss, which trains and reduces it for "
    "nothing; use its layer, or leave it out of the model"
)


def _of_optimizer(subject: Subject, paths: list[str]) -> Check:
    changed = subject.run(subject.single, subject.full).params
    found = subject.sums(subject.state.params)
    still = [
        path for path in paths if not np.any(changed[path]) and np.any(found[f"gradient{path}"])
    ]
    figures = {"still": still}
    if not still:
        return Check(
            "parameters", "update", PASS, f"the optimizer changes all {len(paths)}", "", figures
        )
    if len(still) == len(paths):
        text = "the optimizer changes no parameter in step 3: is its learning rate 0?"
        return Check("parameters", "update", NOTE, text, "", figures)
    text = f"{named(still, _SHOWN)}: the optimizer leaves it as it is, whatever the gradient"
    return Check("parameters", "update", NOTE, text, "", figures)


def moved(params: PyTree, seed: int) -> PyTree:
    """The parameters, each moved at random by a tenth of its leaf's size."""
    generator = np.random.default_rng(seed)

    def by_a_tenth(leaf: jax.Array) -> np.ndarray:
        values = np.asarray(leaf)
        wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
        size = float(np.sqrt(np.mean(np.abs(wide) ** 2))) if wide.size else 0.0
        step = _SHARE * size or _LEAST
        result: np.ndarray = (wide + step * generator.standard_normal(wide.shape)).astype(
            values.dtype
        )
        return result

    return jax.tree.map(by_a_tenth, params)


def _reacts(subject: Subject, path: str) -> bool:
    """Whether another value of one leaf gives another loss."""
    base = moved(subject.state.params, 0)
    other = moved(moved(base, _DRAWS), _DRAWS + 1)
    changed = jax.tree_util.tree_map_with_path(
        lambda where, left, right: right if jax.tree_util.keystr(where) == path else left,
        base,
        other,
    )
    losses = [subject.sums(params) for params in (base, changed)]
    return any(
        losses[0][name].tobytes() != losses[1][name].tobytes()
        for name in losses[0]
        if not name.startswith("gradient") or name == LOSS
    )
