"""Follow the rows of a device through its compiled program, up to the reduction over the replicas.

One all-reduce is not enough: what is added to a gradient after it is never reduced, and is another
number on every device.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax.analysis import hlo
from replicax.analysis.collectives import axes_of_group, first_group
from replicax.analysis.compiled import collective_kind
from replicax.core.ground.leaves import PyTree
from replicax.core.placement.mesh import DATA, FSDP
from replicax.text.checks import FAIL, PASS, Check
from replicax.text.wording import named
from replicax.verify.form import parts_returned
from replicax.verify.trial import renamed

_INDEX = re.compile(r"index=(\d+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLS = ("fusion", "call", "async-start")
_SAME = ("opt-barrier", "copy", "async-update", "async-done")
Own = bool | tuple[Any, ...]
"""Whether a value has a part of this device's rows that was not reduced; of each in a tuple."""


def unreduced(
    compiled: jax.stages.Compiled,
    state: PyTree,
    sizes: Mapping[str, int] | None = None,
    checked: tuple[str, ...] = (),
) -> list[str] | None:
    """Return the results of a step that rows of one device reach without a reduction, by name.

    These are results that are the same on all devices, and others whose names begin as `checked`.
    Rows are the arguments after the first, a `state`, that are split over devices. `sizes` are
    those of the mesh, by axis. None if the program cannot be read.
    """
    shardings = jax.tree.leaves(compiled.input_shardings[0][1:])
    of_state = len(jax.tree.leaves(compiled.input_shardings)) - len(shardings)
    rows = [not sharding.is_fully_replicated for sharding in shardings]
    module = hlo.read_module(compiled.as_text() or "")
    found = _Following(module, sizes)(module.entry, ((False,) * of_state + tuple(rows)))
    same = [each.is_fully_replicated for each in jax.tree.leaves(compiled.output_shardings)]
    count = len(same)
    numbered = jax.tree.unflatten(compiled.out_tree, [*np.arange(count)])
    named = {
        number: jax.tree_util.keystr(path)
        for path, number in jax.tree_util.tree_leaves_with_path(parts_returned(numbered, state))
    }
    own = found if isinstance(found, tuple) else (found,)
    if len(own) != count:
        return None
    names = renamed({path: number for number, path in named.items()})
    return [
        name
        for name, number in names.items()
        if _any(own[number]) and (same[number] or name.startswith(checked))
    ]


def check_reduced(found: list[str] | None, case: str) -> Check:
    """Return the row on a program, from what `unreduced` found."""
    if found:
        text = f"{named(found)}: a device's rows reach it without a reduction"
        return Check("reduction", case, FAIL, text, ADDED_AFTER, {"unreduced": found})
    text = "nothing of a device's rows reaches the new state but through a reduction"
    return Check("reduction", case, PASS, text, "", {"unreduced": []})


ADDED_AFTER = (
    "a gradient is added after the reduction, or was not reduced: reduce once, after the last "
    "backward pass of the step, what is added up from all of them"
)


@dataclasses.dataclass(frozen=True)
class _Following:
    """Follows what is a device's own through the computations of a module."""

    module: hlo.Module
    sizes: Mapping[str, int] | None

    def __call__(self, computation: str, given: tuple[Own, ...]) -> Own:
        """Return whether the result of a computation is a device's own."""
        own: Own = self._of((computation, given))
        return own

    @functools.cached_property
    def _of(self) -> Any:
        return functools.cache(self._followed)

    def _followed(self, called: tuple[str, tuple[Own, ...]]) -> Own:
        computation, given = called
        known: dict[str, Own] = {}
        result: Own = False
        for each in self.module.computations.get(computation, ()):
            if each.opcode == "parameter":
                known[each.name] = given[int(each.argument)]
            else:
                known[each.name] = self._result(each, [known[name] for name in each.inputs])
            if each.is_root:
                result = known[each.name]
        return result

    def _result(self, each: hlo.Instruction, inputs: list[Own]) -> Own:
        if collective_kind(each) and self._joins_replicas(each):
            return False
        if each.opcode == "tuple":
            return tuple(inputs)
        if each.opcode == "get-tuple-element":
            index = _INDEX.search(each.attributes)
            whole = inputs[0]
            return whole[int(index[1])] if index and isinstance(whole, tuple) else whole
        if each.opcode in _SAME and len(inputs) == 1:
            return inputs[0]
        if each.opcode == "while" and (body := _BODY.search(each.attributes)):
            return self._loop(body[1], inputs[0])
        if each.opcode == "conditional":
            which, *operands = inputs
            branches = [self(name, (own,)) for name, own in zip(each.called, operands, strict=True)]
            found = functools.reduce(_either, branches)
            return True if _any(which) else found
        if each.opcode in _CALLS and each.called:
            return self(each.called[0], tuple(inputs))
        return any(map(_any, inputs))

    def _loop(self, body: str, carry: Own) -> Own:
        while True:
            after = _either(carry, self(body, (carry,)))
            if after == carry:
                return carry
            carry = after

    def _joins_replicas(self, each: hlo.Instruction) -> bool:
        if self.sizes is None:
            return True
        axes = axes_of_group(first_group(each.attributes), self.sizes)
        return axes is None or bool({DATA, FSDP} & set(axes))


def _any(own: Own) -> bool:
    return any(map(_any, own)) if isinstance(own, tuple) else own


def _either(one: Own, other: Own) -> Own:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_either, one, other))
    return _any(one) or _any(other)
