"""Two runs, the same bits; the same program, however often it is traced."""

import re
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params

from replicax.checks import FAIL, PASS, Check
from replicax.verify.facts import all_of
from replicax.verify.subject import Subject
from replicax.wording import named

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def check_determinism(subject: Subject) -> list[Check]:
    """A row on two runs of one program, and one on two traces of it."""
    return [_of_runs(subject), _of_traces(subject)]


def _of_runs(subject: Subject) -> Check:
    first, second = (all_of(subject.run(subject.own, subject.full)) for _ in range(2))
    differing = [path for path, value in first.items() if value.tobytes() != second[path].tobytes()]
    if not differing:
        text = f"the same bits in all {len(first)} results"
        return Check("determinism", "two runs", PASS, text)
    text = f"{named(differing)} of {len(first)} differ in a second run"
    callbacks = _callbacks(subject.trace(subject.own, subject.full).jaxpr.jaxpr)
    cause = FROM_HOST.format(", ".join(sorted(callbacks))) if callbacks else FROM_DEVICE
    return Check("determinism", "two runs", FAIL, text, cause)


FROM_HOST = (
    "the loss calls back into Python ({}), and what the host answers changes from run to run: "
    "random numbers of the host, most often; draw them with jax.random from the loss's key"
)
FROM_DEVICE = (
    "an operation whose order of summation is left open (atomics on a GPU); set "
    "XLA_FLAGS=--xla_gpu_deterministic_ops=true there"
)


def _of_traces(subject: Subject) -> Check:
    first, second = (subject.trace(subject.own, subject.full).jaxpr for _ in range(2))
    if _text(first) == _text(second) and _constants(first) == _constants(second):
        return Check("determinism", "two traces", PASS, "the loss gives the same program again")
    return Check(
        "determinism",
        "two traces",
        FAIL,
        "the loss gives another program when it is traced again",
        TRACED,
    )


TRACED = (
    "the loss uses something that changes from call to call and becomes a constant of the program: "
    "host random numbers (np.random, random), the time, a counter; each process would compile "
    "another step: draw from the loss's key, or pass it in the batch"
)


def _text(closed: Any) -> str:
    return _ADDRESS.sub("", str(closed.jaxpr))


def _constants(closed: Any) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in closed.consts if hasattr(each, "dtype")]


def _callbacks(jaxpr: Jaxpr) -> set[str]:
    found: set[str] = set()
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            found.add(equation.primitive.name)
        for inner in jaxprs_in_params(equation.params):
            found |= _callbacks(inner)
    return found
