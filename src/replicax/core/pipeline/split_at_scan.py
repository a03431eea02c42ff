"""A traced loss, split at the scan over its layers: the part before, the scan, the rest."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.jaxprs.jaxpr import CALLS, inlined, of_scan, only, scan_counts, shapes_of
from replicax.errors import LossError

_CASTS = ("convert_element_type", "copy", "copy_p")
"""Primitives that keep each layer of a stack in place, for any number of layers."""

_Values = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class StageParts:
    """The parts of a loss, each a function of its inputs, or of a stage's part of them."""

    traced: ClosedJaxpr
    """The loss, inputs -> outputs, with calls inlined and dead code eliminated."""
    scan: JaxprEqn
    """The scan over the layers."""
    own: frozenset[int]
    """Indices of the scan's `xs` that hold only the stage's layers."""

    @cached_property
    def carried(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the scan's carry, which is sent from stage to stage."""
        return shapes_of(self._operands[1])

    @property
    def returned(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the loss's outputs."""
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.traced.out_avals]

    def first(self, inputs: _Values) -> list[jax.Array]:
        """Return the carry that is input to the first layer."""
        found = self._run(self._operands[1], inputs)
        pairs = zip(found, self.carried, strict=True)
        return [jnp.asarray(each, like.dtype) for each, like in pairs]

    def through(
        self, inputs: _Values, carry: list[jax.Array], stage: jax.Array, stages: int
    ) -> list[jax.Array]:
        """Return `carry` after the layers of stage `stage` of `stages`."""
        count = self.scan.params["length"] // stages
        of_consts, _, of_layers = self._operands
        consts = self._run(of_consts, inputs)
        stacks = [
            each if place in self.own else lax.dynamic_slice_in_dim(each, stage * count, count)
            for place, each in enumerate(self._run(of_layers, inputs))
        ]
        layer = jaxpr_as_fun(self.scan.params["jaxpr"])

        def step(carry: list[jax.Array], each: list[jax.Array]) -> tuple[list[jax.Array], None]:
            return list(layer(*consts, *carry, *each))[: len(carry)], None

        unroll = min(self.scan.params["unroll"], count)
        carry, _ = lax.scan(step, carry, stacks, length=count, unroll=unroll)
        return carry

    def rest(self, inputs: _Values, carry: list[jax.Array]) -> list[Any]:
        """Return the loss's outputs from the carry after the last layer."""
        jaxpr = self.traced.jaxpr
        return self._run(jaxpr.outvars, [*inputs, *carry], self.scan.outvars[: len(carry)])

    @property
    def _operands(self) -> tuple[list[Any], ...]:
        return of_scan(self.scan.params, self.scan.invars)

    def _run(self, wanted: Sequence[Any], values: _Values, more: Sequence[Any] = ()) -> list[Any]:
        """Compute the variables `wanted` from `values` of the inputs and of `more` variables."""
        whole = self.traced.jaxpr
        jaxpr = whole.replace(
            invars=[*whole.invars, *more],
            outvars=list(wanted),
            eqns=[eqn for eqn in whole.eqns if eqn is not self.scan],
            debug_info=whole.debug_info.with_unknown_names(),
        )
        function, used = only(ClosedJaxpr(jaxpr, self.traced.consts), [True] * len(wanted))
        return list(function(*compress(values, used)))


def stage_parts(
    traced: ClosedJaxpr, staged: Mapping[int, str], stages: int, outputs: int
) -> StageParts:
    """Split a loss, traced with whole parameters, at the scan over its layers.

    `staged` maps the indices of inputs that are split by layer to their paths; only the first
    `outputs` outputs of the loss are needed. `LossError` if no scan over these layers can be split.
    """
    flat = inlined(traced, lambda eqn: eqn.primitive.name in CALLS)
    jaxpr = flat.jaxpr.replace(outvars=flat.jaxpr.outvars[:outputs])
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * outputs, instantiate=True)
    traced = ClosedJaxpr(jaxpr, flat.consts)
    paths = {traced.jaxpr.invars[place]: path for place, path in staged.items()}
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive.name in _CASTS and (path := _of(eqn.invars[0], paths)):
            paths[eqn.outvars[0]] = path
    some, few = next(iter(staged.values())), f"{stages} stages"
    scans = [eqn for eqn in traced.jaxpr.eqns if _scanned(eqn, paths)]
    if len(scans) != 1:
        uses = sorted({name for name, _ in _other_uses(traced.jaxpr, paths, None)})
        raise LossError(
            f"the layout splits {some} over {few}, and the loss has {len(scans)} scans over it, "
            f"using it in {', '.join(uses) or 'nothing'}; stages need exactly one: write the "
            "layers as one lax.scan, with any jax.checkpoint inside its body"
        )
    scan = scans[0]
    for name, path in _other_uses(traced.jaxpr, paths, scan):
        raise LossError(
            f"the layout splits {path} over {few}, and the loss also uses it in {name}; a stage "
            "has only its own layers: use it only in the scan, or exclude it from the rule"
        )
    parts = StageParts(traced, scan, frozenset(_scanned(scan, paths)))
    _check(parts, some, few)
    return parts


def _check(parts: StageParts, path: str, few: str) -> None:
    """Raise `LossError` if the scan cannot be split into stages."""
    params, what = parts.scan.params, f"the scan over {path}, split over {few},"
    if params["reverse"]:
        raise LossError(f"{what} is reversed; layers go from first to last: flip the stack instead")
    by_layer = len(parts.scan.outvars) - scan_counts(params)[1]
    if by_layer:
        raise LossError(
            f"{what} returns {by_layer} of its results per layer, and the loss uses them; only the "
            "carry is sent between stages: sum them in the carry"
        )
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in parts.carried):
        raise LossError(
            f"{what} carries random keys; stages send only numbers: split the key once and scan "
            "over the keys, or carry jax.random.key_data"
        )


def _scanned(eqn: JaxprEqn, paths: Mapping[Any, str]) -> list[int]:
    """Return the indices of the scan's `xs` that are split; none if `eqn` is not a scan."""
    if eqn.primitive.name != "scan":
        return []
    _, _, layers = of_scan(eqn.params, eqn.invars)
    return [place for place, atom in enumerate(layers) if _of(atom, paths)]


def _other_uses(
    jaxpr: Jaxpr, paths: Mapping[Any, str], scan: JaxprEqn | None
) -> list[tuple[str, str]]:
    """Return uses of split arrays other than as `xs` of `scan`: pairs of primitive and path."""
    uses = []
    for eqn in jaxpr.eqns:
        count = len(eqn.invars)
        if eqn is scan:
            count = sum(scan_counts(eqn.params))
        if eqn.primitive.name not in _CASTS:
            found = (_of(atom, paths) for atom in eqn.invars[:count])
            uses += [(eqn.primitive.name, path) for path in found if path]
    return uses + [
        ("its return value", path) for atom in jaxpr.outvars if (path := _of(atom, paths))
    ]


def _of(atom: Any, paths: Mapping[Any, str]) -> str | None:
    return None if isinstance(atom, Literal) else paths.get(atom)
