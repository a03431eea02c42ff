"""Check the gradient of one device: the derivative of the loss, and linear in its cotangent.

N devices and one share the rules of `jax.custom_vjp`, so that comparing them shows neither.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from replicax.core.ground.leaves import PyTree
from replicax.core.jaxprs.jaxpr import EXPANDS
from replicax.core.jaxprs.row_inner import backward_passes, derivative, shows_linear
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.text.wording import first_line, named
from replicax.verify.difference import Leaves, equations, leaves
from replicax.verify.own_rules import OwnRule, rules_in, without
from replicax.verify.plain_step import PlainStep

_SHARE, _UNITS = 1e-3, 16
"""A rule may differ from the derivative by this share of a leaf's norm, or by so many units of the
dtype that the loss computes in, as it rounds elsewhere."""
_FLUSHED = 2.0**-120
"""A difference that may come from a number too small for a float32, once it is halved."""
_FLOAT16 = float(np.finfo(np.float16).eps)
_TRANSPOSED = {EXPANDS, "custom_transpose_call", "linear_call"}
"""Primitives whose transpose code may define."""
DERIVATIVE, TWICE = "derivative", "twice the loss"


class GradientChecks:
    """The rows on the gradient of one device; `surrogates` are names of functions."""

    def __init__(self, reference: PlainStep, surrogates: Collection[str]) -> None:
        self._reference, self._surrogates = reference, surrogates
        self._state = reference.subject.state
        self._batch = reference.given(reference.subject.full)
        self._loss: ClosedJaxpr = reference.subject.scored

    @functools.cached_property
    def unlinear(self) -> str:
        """The functions whose rules may be why twice the loss has not twice the gradient."""
        return self._named() if self._apart else ""

    def checks(self) -> Iterator[Check]:
        """Yield the rows."""
        if not all(np.isfinite(leaf).all() for leaf in self._gradient.values()):
            yield Check("gradient", DERIVATIVE, SKIP, "the gradient is not finite")
            return
        yield from self._derivatives()
        yield self._linear()

    def _linear(self) -> Check:
        """Return the row on the gradients of twice the loss, and of 0 times the loss."""
        if self._is_linear:
            text = "the trace shows that twice the loss has twice the gradient"
            return Check("gradient", TWICE, PASS, text, "", {"differing": [], "kept": []})
        kept = [f"gradient{path}" for path, leaf in self._times(0).items() if np.any(leaf)]
        figures = {"differing": self._apart, "kept": kept, "functions": self._functions}
        if kept:
            verdict: Verdict = NOTE if set(self._functions) & set(self._surrogates) else FAIL
            text = f"{named(kept)}: not 0 for 0 times the loss; see {self._named()}"
            cause = "" if verdict == NOTE else IGNORES.format(self._functions[:1])
            return Check("gradient", TWICE, verdict, text, cause, figures)
        if self._apart:
            text = f"{named(self._apart)}: not twice as large for twice the loss: {NOT_LINEAR}"
            return Check("gradient", TWICE, NOTE, text.format(self._named()), "", figures)
        text = "twice the loss has twice the gradient, bit for bit"
        return Check("gradient", TWICE, PASS, text, "", figures)

    def _derivatives(self) -> Iterator[Check]:
        """Yield a row for each rule that is not the derivative, or one if all are."""
        rules = rules_in(self._loss)
        if not rules:
            yield Check("gradient", DERIVATIVE, PASS, "no rule of your own: JAX derives all of it")
            return
        agree = []
        for rule in rules:
            try:
                check = self._compared(rule)
            except Exception as error:  # it cannot be differentiated without its rule
                check = self._between(rule, rules, first_line(error))
            if check is None:
                agree.append(str(rule))
            else:
                yield check
        if agree:
            text = f"the rules of {named(agree)} are derivatives of what these compute"
            yield Check("gradient", DERIVATIVE, PASS, text, "", {"functions": agree})

    def _compared(self, rule: OwnRule) -> Check | None:
        """Compare the gradient with that of the same program without a rule."""
        run, scale = without(self._program, rule), self._scale

        def loss(params: PyTree) -> Any:
            return run(*jax.tree.leaves(params))[0] * scale

        quick = self._reference.subject.quick
        derived = jax.jit(jax.grad(loss), compiler_options=quick)(self._params)
        worst, where = 0.0, ""
        for path, other in leaves(derived).items():
            apart = float(np.linalg.norm(self._gradient[path] - other / scale))
            norm = float(np.linalg.norm(other / scale)) or math.nan
            share = apart / norm if apart else 0.0
            if not share <= worst:  # also if the derivative is 0
                worst, where = (math.inf if math.isnan(share) else share), path
        if worst <= self._most:
            return None
        times = "where the derivative is 0" if math.isinf(worst) else f"by {worst:.1e} of its norm"
        return self._other(rule, f"gradient{where} differs {times}", worst)

    def _other(self, rule: OwnRule, found: str, share: float) -> Check:
        """Return the row for a rule that is not the derivative."""
        figures = {"function": rule.name, "file": rule.file, "line": rule.line, "share": share}
        declared = rule.name in self._surrogates
        why = "is declared a surrogate" if declared else rule.surrogate
        if why:
            text = f"{rule} {why}, and its rule is another on purpose: {found}"
            return Check("gradient", DERIVATIVE, NOTE, text, "", figures)
        text = f"{found} without the rule of {rule}"
        return Check("gradient", DERIVATIVE, FAIL, text, WRONG.format(rule.name), figures)

    def _between(self, rule: OwnRule, rules: list[OwnRule], error: str) -> Check | None:
        """Compare the gradient with a central difference of the loss in a seeded direction."""
        others = any(each.surrogate or each.name in self._surrogates for each in rules)
        stops = (each.primitive.name == "stop_gradient" for each in equations(self._program.jaxpr))
        if others or any(stops):
            text = f"{rule}: it cannot be differentiated without its rule ({error})"
            return Check("gradient", DERIVATIVE, SKIP, text, "", {"function": rule.name})
        mean = jax.jit(self._mean, compiler_options=self._reference.subject.quick)
        eps = self._reference.subject.eps
        share = difference_in_direction(mean, self._params, self._gradient, eps)
        text = f"its derivative in a direction differs by {share:.1e} from a central difference"
        return self._other(rule, text, share) if share else None

    @functools.cached_property
    def _is_linear(self) -> bool:
        """Whether the trace shows it: JAX's own derivatives are linear in their cotangents."""
        jaxpr = self._loss.jaxpr
        if any(each.primitive.name in _TRANSPOSED for each in equations(jaxpr)):
            return False
        try:
            passes = [(derivative(each), len(each.outvars)) for each in backward_passes(jaxpr)]
        except Exception:  # the user's own refusal, of any type
            return False
        return all(shows_linear(*each) for each in passes)

    @functools.cached_property
    def _apart(self) -> list[str]:
        """Leaves of which twice the loss has not twice the gradient."""
        if self._is_linear:
            return []
        twice = self._times(2)
        return [
            f"gradient{path}"
            for path, leaf in self._gradient.items()
            if np.any(np.abs(twice[path] - 2 * leaf) > self._bound(leaf))
        ]

    def _bound(self, leaf: np.ndarray) -> float:
        if self._reference.subject.eps == _FLOAT16:  # whose small numbers have few bits
            return self._most * float(np.max(np.abs(leaf), initial=0.0))
        return _FLUSHED

    @functools.cached_property
    def _gradient(self) -> Leaves:
        return self._times(1)

    def _times(self, factor: float) -> Leaves:
        gradient, *_ = self._reference.gradient(self._state, self._batch, factor)
        return leaves(gradient)

    @property
    def _most(self) -> float:
        return max(_SHARE, _UNITS * self._reference.subject.eps)

    @functools.cached_property
    def _program(self) -> ClosedJaxpr:
        """The loss of the batch, by the parameters."""
        jaxpr: ClosedJaxpr = jax.make_jaxpr(self._mean)(self._params)
        return jaxpr

    def _mean(self, params: PyTree) -> jax.Array:
        return self._reference.mean(self._state, self._batch, params)

    @property
    def _params(self) -> PyTree:
        return self._state.params

    @property
    def _scale(self) -> float:
        return float(self._state.scale.value) if self._state.scale else 1.0

    @functools.cached_property
    def _functions(self) -> list[str]:
        """Names of the functions with a rule: the user's, or if there are none, of libraries."""
        rules = rules_in(self._loss) or rules_in(self._loss, of_libraries=True)
        return [rule.name for rule in rules]

    def _named(self) -> str:
        rules = rules_in(self._loss) or rules_in(self._loss, of_libraries=True)
        return named([str(rule) for rule in rules]) or "what it calls"


WRONG = (
    "the gradient is not the derivative of the loss: every device computes the same wrong one; "
    "correct the rule of {0} (defvjp, defjvp), or if it is meant to be another, such as a "
    "straight-through estimator's, declare it: rx.verify(..., surrogates=['{0}'])"
)
IGNORES = (
    "a backward pass ignores its cotangent, and returns a value in place of a gradient; multiply "
    "by the cotangent, or if that is meant, declare it: rx.verify(..., surrogates={})"
)
NOT_LINEAR = (
    "the backward pass of {} is not linear in its cotangent (a clip, a norm), so it depends on "
    "what the loss is divided by"
)


_STEP = 2e-3
"""Length of the step to each side, relative to the parameters."""
_SHARE = 0.02
"""Bound on the error of the difference, as a share of the derivative."""
_UNITS = 16
"""Bound on the rounding of the difference, in units of eps of the loss."""


def difference_in_direction(
    mean: Callable[[PyTree], Any], params: PyTree, gradient: Leaves, eps: float
) -> float:
    """Return by what share `gradient` differs from a central difference of `mean`, or 0.

    The direction is drawn, and weighs all leaves of the gradient alike. A difference counts if it
    is larger than what rounding of the two values, and the curvature between them, can explain.
    """
    numbers = np.random.default_rng(0)
    direction = {
        path: numbers.normal(size=leaf.shape) / (np.linalg.norm(leaf) or 1.0)
        for path, leaf in gradient.items()
    }
    before = leaves(params)
    lengths = (
        np.linalg.norm(each) / (np.linalg.norm(before[path]) or math.sqrt(each.size))
        for path, each in direction.items()
    )
    step = _STEP / max(lengths)

    def at(step: float) -> float:
        def moved(path: Any, leaf: Any) -> Any:
            return leaf + (step * direction[jax.tree_util.keystr(path)]).astype(leaf.dtype)

        return float(mean(jax.tree_util.tree_map_with_path(moved, params)))

    ahead, behind = at(step), at(-step)
    parts = {path: leaf * direction[path] for path, leaf in gradient.items()}
    scale = math.sqrt(sum(float(np.sum(np.abs(part) ** 2)) for part in parts.values()))
    found = sum(float(np.sum(part.real)) for part in parts.values())
    apart = abs(found - (ahead - behind) / (2 * step))
    bound = _SHARE * scale + _UNITS * eps * max(abs(ahead), abs(behind)) / step
    return 0.0 if apart <= bound else apart / scale if scale else math.inf
