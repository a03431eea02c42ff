"""`EveryRound`: steps of each island's own state, and an outer step when it is due."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.between.arithmetic import Arithmetic, IslandState, Weighing, arithmetic_of
from replicax.core.between.every_step import EveryStep, LocalSpan
from replicax.core.between.rounds import Rounds
from replicax.core.between.seam import Between, Build
from replicax.core.between.transports import BetweenJobs, OverMesh, Sent, Transport
from replicax.core.data.batch import Batch
from replicax.core.ground.job import PartsExchange, Peers
from replicax.core.ground.leaves import from_host
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.step_builder import StepSpec
from replicax.core.placement.layout import Layout, copied
from replicax.core.placement.mesh import AnyMesh, by_rows, options_on, replicated
from replicax.core.step.base import CompiledFunction, StepProgram, StepResult
from replicax.core.step.loss import LOSS
from replicax.core.step.optimizer import Updater

ROUND_LOSS = f"round_{LOSS}"


class RoundStep:
    """A step of an outer state: of its islands' own states, with an outer step when it is due.

    The number of steps decides what is due, on the host. Metrics are those of this process's
    islands, and the loss of all islands in a round; NaN in steps in which no round ends.
    """

    inline = None

    def __init__(
        self,
        arithmetic: Arithmetic,
        transport: Transport,
        shardings: TrainState,
        begin: Callable[[], None],
    ) -> None:
        self.arithmetic, self.transport = arithmetic, transport
        self._rounds, self._shardings, self._begin = arithmetic.rounds, shardings, begin
        numbers = range(self._rounds.fragments)
        self._send = [transport.lift(partial(arithmetic.sent, number=n)) for n in numbers]
        self._take = [transport.lift(partial(arithmetic.taken, number=n)) for n in numbers]
        compiled = partial(jax.jit, compiler_options=options_on(shardings.step.mesh))
        self._nothing = jax.jit(arithmetic.nothing, static_argnums=2)
        self._add = compiled(arithmetic.added, donate_argnums=0)
        self._outer_step = compiled(arithmetic.stepped, static_argnums=4)
        self._next = jax.jit(lambda step: step + 1)
        # The last state, by its array of the step number, which would be waited for; held weakly.
        self._at: tuple[Any, int] = (lambda: None, 0)
        self._round_loss: jax.Array | None = None
        self._under_way: tuple[int, int, Callable[[], list[Sent]]] | None = None

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        step = self._number(state) + 1
        if self._under_way is not None and not 0 <= self._under_way[1] - step < self._rounds.delay:
            self._under_way[2]()  # of a state that the caller has left
            self._under_way = None
        # A state from elsewhere, such as a checkpoint, may be in the middle of a round.
        if self._at[0]() is not state.step or (step - 1) % self._rounds.interval == 0:
            self._begin()
        own, metrics = self.transport.advance(state.islands, batch)
        state = dataclasses.replace(state, step=self._next(state.step), islands=own)
        if (number := self._rounds.due(step)) is not None:
            state = self._send_fragment(state, number, step, later=self._rounds.delay > 0)
        if self._under_way is not None and self._under_way[1] == step:
            state = self._take_fragment(state)
        self._at = weakref.ref(state.step), step
        loss, self._round_loss = self._round_loss, None
        return state, {**metrics, ROUND_LOSS: self._unknown if loss is None else loss}, {}

    @cached_property
    def _unknown(self) -> jax.Array:
        return from_host(np.full((), np.nan, np.float32), self._shardings.step)

    def end_round(self, state: TrainState) -> TrainState:
        """Return the state after a last, shorter round, if steps were done since the last."""
        step = self._number(state)
        if self._under_way is not None:
            state = self._take_fragment(state)
        for number in range(self._rounds.fragments):
            if (step - number * self._rounds.interval) % self._rounds.every:
                state = self._take_fragment(self._send_fragment(state, number, step, later=False))
        self._at, self._round_loss = (weakref.ref(state.step), step), None
        return state

    def joined(self, state: TrainState) -> TrainState:
        """Return `state` of another island as that of one that joins: outer parameters, and nothing
        that was not sent.
        """
        own: IslandState = state.islands
        inner = dataclasses.replace(
            own.inner, **copied({"params": state.params, "extras": state.extras})
        )
        nothing = jax.tree.map(jnp.zeros_like, (own.residual, own.weights, own.loss))
        joined = dataclasses.replace(state, islands=IslandState(inner, *nothing))
        placed: TrainState = jax.device_put(joined, self._shardings)
        return placed

    def exchanges(self, state: TrainState) -> list[jax.stages.Compiled]:
        """Return the program that carries each fragment; none between jobs."""
        shapes = (jax.eval_shape(send, state.islands, state.params) for send in self._send)
        return [found for _, *sent in shapes for found in self.transport.carrying(tuple(sent))]

    def _send_fragment(
        self, state: TrainState, number: int, step: int, *, later: bool
    ) -> TrainState:
        own: IslandState = state.islands
        (residual, (weights, loss)), payload, exact = self._send[number](own, state.params)
        share = self.transport.share((payload, exact), later=later)
        self._under_way = number, step + self._rounds.delay, share
        return dataclasses.replace(state, islands=IslandState(own.inner, residual, weights, loss))

    def _take_fragment(self, state: TrainState) -> TrainState:
        assert self._under_way is not None
        (number, _, share), self._under_way = self._under_way, None
        sums = self._nothing(state.params, state.extras, number)
        for payload, exact in share():
            sums = self._add(sums, payload, exact)
        params, opt_state, extras, loss = self._outer_step(
            state.params, state.opt_state, state.extras, sums, number
        )
        if number == 0:
            self._round_loss = loss
        inner = state.islands.inner
        own, own_extras = self._take[number]((inner.params, inner.extras), params, extras)
        inner = dataclasses.replace(inner, params=own, extras=own_extras)
        after = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            extras=extras,
            islands=dataclasses.replace(state.islands, inner=inner),
        )
        placed: TrainState = jax.device_put(after, self._shardings)
        return placed

    def _number(self, state: TrainState) -> int:
        """Return the number of steps done, without waiting for the last one if it is known."""
        known, number = self._at
        return number if known() is state.step else int(state.step)

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        return self.transport.program.trace(self._subject(state), batch)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        return self.transport.program.lower(self._subject(state), batch)

    def compiled(self, state: TrainState, batch: Batch) -> Sequence[Any]:
        return self.transport.program.compiled(self._subject(state), batch)

    def text(self, state: TrainState, batch: Batch) -> str:
        text = self.transport.program.text(self._subject(state), batch)
        return f"{text}\n{self._rounds.names()}"

    def cache_size(self) -> int:
        return self.transport.program.cache_size()

    def _subject(self, state: TrainState) -> Any:
        return self.transport.subject(state.islands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryRound(Between):
    """EveryRound of steps, as `settings` say, of islands that are jobs or replicas of one."""

    settings: Rounds
    peers: Peers | None
    each_step: Between
    """The same without rounds: how a batch is cut, and an evaluation added up."""
    exchange: PartsExchange | None
    parts: int
    boundary_interval: int

    apart, reshared = EveryStep.apart, EveryStep.reshared

    def is_boundary(self, step: int) -> bool:
        return self.boundary_interval == 1 or self.settings.is_boundary(step)

    def first_state(self, state: TrainState, updater: Updater, replicas: int) -> TrainState:
        islands = None if self.settings.axis is None else replicas
        return arithmetic_of(self.settings, updater, state.params).outer(state, islands)

    def inner_shapes(self, shapes: TrainState) -> TrainState:
        inner: TrainState = shapes.islands.inner
        if self.settings.axis is not None:
            inner = jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), inner)
        return inner

    def shardings(
        self, where: TrainState, shapes: TrainState, state_layout: Layout, mesh: AnyMesh
    ) -> TrainState:
        if self.settings.axis is not None:
            own = jax.tree.map(lambda _: by_rows(mesh), shapes.islands)
        else:
            own = jax.tree.map(lambda _: replicated(mesh), shapes.islands)
            inner = state_layout.shardings(shapes.islands.inner, mesh)
            own = dataclasses.replace(own, inner=inner)
        return dataclasses.replace(where, islands=own)

    def step(self, program: Any) -> StepProgram:
        span, each_step = LocalSpan(self.peers), self.each_step
        if isinstance(each_step, EveryStep):
            each_step = dataclasses.replace(each_step, exchange=span)
        own = program.inner(each_step, Weighing(program.configuration.wrap_apply))
        arithmetic = arithmetic_of(self.settings, program.updater, program.shapes.params)
        transport: Transport
        if self.settings.axis is None:
            transport = BetweenJobs(own.step, arithmetic, program.mesh, self.peers)
        else:
            transport = OverMesh(own.step_spec(), arithmetic)
        return RoundStep(arithmetic, transport, program.shardings, span.begin)

    def built(self, parts: StepSpec, build: Build) -> CompiledFunction[Any]:
        return self.each_step.built(parts, build)

    def end_round(self, step: StepProgram, state: TrainState) -> TrainState:
        return cast(RoundStep, step).end_round(state)

    def joined(self, step: StepProgram, state: TrainState) -> TrainState:
        return cast(RoundStep, step).joined(state)
