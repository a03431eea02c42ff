"""Name the operations that mixed rows on the way to a value, and the lines they are on."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from replicax.core.jaxprs.jaxpr import RULED, called, closed
from replicax.core.jaxprs.row_counts import FROM_STEP_KEY, Index, Location, Ratio, RowCount, Total
from replicax.core.jaxprs.row_dependence import DRAWING, STEPPED, Follow
from replicax.core.jaxprs.row_labels import GATHERED, SEEN, label_of
from replicax.core.jaxprs.row_rules import MIXED, Rows

DRAWN, DRAWN_ALONE = "drawn", "drawn alone"
"""Random numbers by the step's key, and by another one, such as one of the state."""
PLACE, BACKWARD, ORDER, OTHER = "place", "backward", "order", "other"
"""The number or position of rows; a backward pass; rows that are sorted, paired or moved."""
SUMS, REDUCED = "sums", "reduced"
"""Sums over rows, as in a mean with weights; rows with these, or another reduction."""
_ORDERING = {
    *("sort", "top_k", "approx_top_k", "gather", "dynamic_slice", "dynamic_update_slice"),
    *("concatenate", "pad", "reshape", "rev", "slice", "transpose", "dot_general"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "argmax", "argmin"),
    *("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
}
_OF_SUMS = {"add", "clamp", "div", "max", "min", "mul", "select_n"}
GATHERED_BY = "rx.gather"
"""Name of what gathers rows, and padding with them."""
_LIBRARIES = str(Path(jax.__file__).parent), str(Path(__file__).parents[2])


@dataclasses.dataclass(frozen=True)
class Cause:
    """An operation that mixed rows."""

    name: str
    """The primitive."""
    kind: str = dataclasses.field(compare=False)
    line: str = ""
    """The user's line, such as `train.py:12`; empty if it is in a library."""

    def __str__(self) -> str:
        return f"{self.name} at {self.line}" if self.line else self.name


_Causes = tuple[Cause, ...]


@dataclasses.dataclass
class Causes:
    """The causes why values of a trace, followed by `follow`, are mixed."""

    follow: Follow
    rows: int
    """The number of rows in the trace."""
    seen: dict[str, _Causes] = dataclasses.field(default_factory=dict)
    """Causes of the argument of each function in `SEEN`, by name."""
    line: str = ""
    """The user's line around."""

    def __call__(self, jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[_Causes] = ()) -> list[_Causes]:
        """Return the causes of each result."""
        inner = closed(jaxpr).jaxpr
        known: dict[Any, _Causes] = dict(zip(inner.invars, inputs, strict=False))

        def of(atom: Any) -> _Causes:
            return () if isinstance(atom, Literal) else known.get(atom, ())

        for eqn in inner.eqns:
            given = list(map(of, eqn.invars))
            within = self._within(eqn, given)
            for n, out in enumerate(eqn.outvars):
                if self.follow.places.get(out) == MIXED:
                    own = within[n] if len(within) == len(eqn.outvars) else _every(within)
                    known[out] = own or _every(given) or (self._cause(eqn),)
        return list(map(of, inner.outvars))

    def _within(self, eqn: Any, given: list[_Causes]) -> list[_Causes]:
        """Return the causes of the results of what an equation calls, as far as they are inside."""
        label = label_of(eqn)
        if label in self.follow.known:
            return []
        if label.startswith(SEEN):
            self.seen[label] = _every([self.seen.get(label, ()), *given])
        if line := user_line(eqn):
            return dataclasses.replace(self, line=line)._inside(eqn, given)
        return self._inside(eqn, given)

    def _inside(self, eqn: Any, given: list[_Causes]) -> list[_Causes]:
        name = eqn.primitive.name
        if name in STEPPED:
            return self(called(eqn), given)
        if name == "cond":
            return self._each(eqn.params["branches"], given[1:])
        if name == "while":
            consts, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            goes_on = self(eqn.params["cond_jaxpr"], given[:consts] + given[consts + own :])
            return self._each([eqn.params["body_jaxpr"]], given[consts:]) or goes_on
        if name == "scan":
            return self._each([eqn.params["jaxpr"]], given)
        return []

    def _each(self, jaxprs: Sequence[Any], given: list[_Causes]) -> list[_Causes]:
        """Return the causes of any result: in a loop, each may be that of the next turn."""
        found = _every([each for jaxpr in jaxprs for each in self(jaxpr, given)])
        return [found] if found else []

    def _cause(self, eqn: Any) -> Cause:
        name = GATHERED_BY if label_of(eqn) == GATHERED else eqn.primitive.name
        places = [self.follow.places.get(a) for a in eqn.invars if not isinstance(a, Literal)]
        return Cause(name, self._kind(eqn, name, places), user_line(eqn) or self.line)

    def _kind(self, eqn: Any, name: str, places: list[Location]) -> str:
        if name in DRAWING:
            return DRAWN if FROM_STEP_KEY in places else DRAWN_ALONE
        if name in RULED:
            return BACKWARD
        rows = {place for place in places if isinstance(place, Rows)}
        if rows and name in _ORDERING:
            return ORDER
        counts = any(isinstance(place, Index | RowCount) for place in places)
        if counts or any(place.power for place in rows) or not any(places):
            return PLACE
        pairs = any(out.aval.shape.count(self.rows) > 1 for out in eqn.outvars)
        if pairs or len(rows) > 1:
            return ORDER
        if any(isinstance(place, Total | Ratio) for place in places):
            return SUMS if name in _OF_SUMS and not rows else REDUCED
        return REDUCED if name.startswith("reduce_") else OTHER


def _every(causes: Sequence[_Causes]) -> _Causes:
    """Return all of several causes, each once."""
    return tuple(dict.fromkeys(cause for each in causes for cause in each))


def user_line(eqn: Any) -> str:
    """Return the user's line of an equation; empty if it is in a library."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        if not frame.file_name.startswith(_LIBRARIES) and "site-packages" not in frame.file_name:
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""
