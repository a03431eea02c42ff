"""`EveryStep`: jobs that add up the sums of every step, in float32 or encoded."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from replicax.core.between.exchanged_step import ExchangedStep
from replicax.core.between.rounds import Rounds
from replicax.core.between.seam import Between, Build
from replicax.core.ground.codecs import Codec
from replicax.core.ground.job import Parts, PartsExchange, Peers, Value
from replicax.core.ground.leaves import from_host, whole_on_host
from replicax.core.ground.train_state import TrainState
from replicax.core.ground.vectors import as_blocks, size_in_blocks
from replicax.core.modes.step_builder import StepSpec
from replicax.core.placement.mesh import AnyMesh, options_on, replicated
from replicax.core.step.base import CompiledFunction, StepProgram
from replicax.core.step.objective import only_read
from replicax.core.step.optimizer import Updater
from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep(Between):
    """The sums of a batch, of which each job computes some parts.

    With `settings`, gradients are encoded; otherwise the sum of parts is a tree, whoever adds them.
    """

    peers: Peers
    exchange: PartsExchange
    parts: int
    by_mode: bool
    """Whether the mode builds the exchange into its programs itself."""
    settings: Rounds | None = None

    apart = "islands, of which each has only its own rows"
    reshared = "islands, which share a batch anew when one is lost"

    def first_state(self, state: TrainState, updater: Updater, replicas: int) -> TrainState:
        if self.settings is None:
            return state
        read = jax.tree.leaves(only_read(state.params, updater.read))
        return dataclasses.replace(state, islands=jnp.zeros(size_in_blocks(read)))

    def step(self, program: Any) -> StepProgram:
        config = program.configuration
        if config.step is not None and not self.by_mode:
            raise ConfigError(
                f"step= in mode={config.mode.name!r} with islands, which exchange the sums of a "
                "step; only mode='exact' finds them in a custom step: use mode='exact'"
            )
        if self.settings is None:
            return super().step(program)
        parts = program.step_spec()
        coded = CodedSums(self.settings.codec, program.mesh, self.peers)
        own = LocalSpan(self.peers, anew=True)
        return ExchangedStep(parts, own, config.mode.build(parts), coded)

    def built(self, parts: StepSpec, build: Build) -> CompiledFunction[Any]:
        whole = build(parts)
        return whole if self.by_mode else ExchangedStep(parts, self.exchange, whole)

    def joined(self, step: StepProgram, state: TrainState) -> TrainState:
        nothing = jax.tree.map(jnp.zeros_like, state.islands)
        return dataclasses.replace(state, islands=nothing)


class LocalSpan:
    """The parts of a batch that one of several islands computes, without the others'.

    They are chosen `anew` in every step, or by `begin`.
    """

    def __init__(self, peers: Peers | None, *, anew: bool = False) -> None:
        self._peers, self._span, self._anew = peers, (0, 0), anew

    def begin(self) -> None:
        """Choose the parts for a round, by the islands that live now."""
        self._span = (0, 1) if self._peers is None else self._peers.span

    def __call__(self, parts: Parts[Value], /) -> list[Value]:
        if self._anew:
            self.begin()
        rank, islands = self._span
        if parts.add is None:
            raise ConfigError(
                "rx.gather in islands that exchange every so many steps; each sees its own rows "
                "alone: use every=1, or a loss that does not mix rows"
            )
        own = range(rank * parts.count // islands, (rank + 1) * parts.count // islands)
        if not own:
            raise ConfigError(
                f"micro_shards={parts.count} with {islands} islands; each computes at least one "
                f"part of a batch: use micro_shards={1 << (islands - 1).bit_length()}"
            )
        total = parts.compute(own[0])
        for number in own[1:]:
            total = parts.add(total, parts.compute(number))
        return [total]


class CodedSums:
    """Adds the sums of all islands; gradients travel by `codec`, everything else in float32.

    The residual is one float32 vector of each island: the sum of gradients that it did not send.
    Payloads are added in rank order, so that all islands get the same bits.
    """

    def __init__(self, codec: Codec, mesh: AnyMesh, peers: Peers) -> None:
        self._peers, self._everywhere = peers, replicated(mesh)
        compiled = partial(jax.jit, compiler_options=options_on(mesh))
        self._encode = compiled(partial(_encoded, codec), out_shardings=self._everywhere)
        self._add = compiled(partial(_added, codec), donate_argnums=0)
        self._decode = compiled(_decoded)

    def __call__(self, sums: Any, residual: jax.Array) -> tuple[Any, jax.Array]:
        """Return the sums over all islands, and the next residual."""
        payload, exact, left = self._encode(sums, residual)
        sent = [whole_on_host(array) for array in (payload, exact)]
        total = np.zeros(residual.shape, np.float32), np.zeros(exact.shape, np.float32)
        for arrays in self._peers.share(sent)():
            total = self._add(total, *(from_host(array, self._everywhere) for array in arrays))
        found: tuple[Any, jax.Array] = self._decode(sums, *total, left, residual)
        return found


def _encoded(codec: Codec, sums: Any, residual: jax.Array) -> tuple[jax.Array, ...]:
    total, *rest = sums
    gradient = residual + as_blocks(total.gradient)[0]
    payload = codec.encode(gradient)
    left = gradient - codec.decode(payload, gradient.size)
    return payload, ravel_pytree((total.weighted, rest))[0], left


def _added(codec: Codec, total: tuple[Any, Any], payload: jax.Array, exact: jax.Array) -> Any:
    return total[0] + codec.decode(payload, total[0].size), total[1] + exact


def _decoded(
    sums: Any, gradient: jax.Array, exact: jax.Array, left: jax.Array, residual: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the sums of all, and what is kept: `left`, or `residual` if the step is skipped."""
    total, *rest = sums
    kept = jnp.where(jnp.all(jnp.isfinite(gradient)), left, residual)
    _, unravel = ravel_pytree((total.weighted, rest))
    weighted, rest = unravel(exact)
    gradient = as_blocks(total.gradient)[1](gradient)
    return (type(total)(gradient, weighted), *rest), kept
