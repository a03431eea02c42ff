"""Examine a step of one's own before it first runs: its losses, and what it takes from rows."""

from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from replicax.core.accumulate import Sequential
from replicax.core.batch import Batch
from replicax.core.inside import Inside
from replicax.core.look import Look, places_of
from replicax.core.objective import Objective
from replicax.core.own import keep
from replicax.core.program import Program
from replicax.core.reduction import as_they_are
from replicax.core.row_rules import MIXED, Place, Rows
from replicax.core.rows import follow
from replicax.core.update import TrainState
from replicax.errors import LossError


class StepLook:
    """An examination of a step, and of each loss in it, on the first step's state and batch.

    The step is traced once, as one device runs it, and each loss once beside it. A loss whose trace
    does not tell is computed as `Look` does; one in a loop of the step is then trusted.

    Raises:
        LossError: a loss does not keep its contract.
        StateError: the step does not keep its own.
    """

    def __init__(self, program: Program, state: TrainState, batch: Batch, *, divided: bool) -> None:
        self._divided = divided
        self._looks: list[Look] = []
        self._unsure: list[tuple[Look, Any]] = []
        self._weighs = self._gathers = False

        def run(state: TrainState, batch: Batch) -> Any:
            after, metrics = program.own_step(
                *(state, batch, None),
                accumulator=Sequential(),
                reduce=as_they_are,
                apply=keep,
                examiner=self,
            )
            return {"state": after.params, "metrics": metrics}, [each for _, each in self._unsure]

        try:
            traced, (shapes, _) = jax.make_jaxpr(run, return_shape=True)(state, batch)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise LossError(
                "the step reduces over the replicas itself (psum or pmean over an axis), and runs "
                "where there is none too: use rx.mean, rx.value_and_grad or rx.gather"
            ) from error
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        ]

        def depending(seed: Place, rows: Place) -> list[str]:
            paths = jax.tree_util.tree_leaves_with_path(state)
            inputs: list[Place] = [seed if leaf is state.seed else None for _, leaf in paths]
            places = follow(traced, [*inputs, *places_of(batch, rows)])[: len(names)]
            return [name for name, place in zip(names, places, strict=True) if place]

        self.from_rows = depending(None, Rows(0))
        """Names of what the step returns and takes from rows without summing over all of them."""
        self.from_key = depending(MIXED, None)
        """Names of what it takes from its key, of which each replica has its own."""
        if self._unsure:
            shares = jax.jit(lambda *leaves: jaxpr_as_fun(traced)(*leaves)[len(names) :])
            found = iter(shares(*jax.tree.leaves((state, batch))))
            for look, differences in self._unsure:
                look.decide([(next(found), next(found)) for _ in differences])
        del self._unsure

    def loss(self, objective: Objective, state: TrainState, rows: Batch, outside: bool) -> None:
        """Look at one of the step's losses."""
        look = Look(objective, state, rows, divided=self._divided, compute=False)
        self._looks.append(look)
        if look.unsure and outside:
            self._unsure.append((look, look.differences(state, rows)))

    def step(self, here: Inside) -> None:
        """Look at what the step itself asked for."""
        self._weighs, self._gathers = here.weighs, here.gathers

    @property
    def rows_meet(self) -> bool:
        """Whether some loss of a row depends on other rows, but for those that it gathers."""
        return any(look.rows_meet for look in self._looks)

    @property
    def writes_alone(self) -> bool:
        """Whether some loss writes to its model from the rows in sight."""
        return any(look.writes_alone for look in self._looks)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of what a loss returns as one number for the whole batch."""
        return tuple(name for look in self._looks for name in look.scalars)

    @property
    def needs_real_rows(self) -> bool:
        """Whether it is another step with padding among the rows."""
        of_body = bool(self.from_rows) or self._gathers
        return (of_body and not self._weighs) or any(look.needs_real_rows for look in self._looks)
