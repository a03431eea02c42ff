"""Checks of a step with rounds: identities that they keep, bytes sent, and equal bits."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import numpy as np
import optax

from replicax.analysis.compiled import inspect
from replicax.core.between.every_round import RoundStep
from replicax.core.between.rounds import Rounds
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.job import Alone
from replicax.core.ground.leaves import PyTree, numbers
from replicax.core.ground.quick_compile import quick_options
from replicax.core.ground.train_state import TrainState
from replicax.core.ground.vectors import as_blocks
from replicax.core.placement.mesh import make_mesh
from replicax.errors import ReplicaxError
from replicax.known_wrong.avoidance import avoiding
from replicax.text.checks import FAIL, PASS, SKIP, Check
from replicax.text.wording import size_text
from replicax.verify.simulated_islands import SharingIsland, on_sharing_islands

MOST_ISLANDS_COMPARED = 4
"""Number of islands simulated, at most; more show nothing new."""
CLOSE = 1e-6
"""Largest difference relative to the norm of the parameters, or 1,000 times that of the change."""
_RATE = 1e-2
_PLAIN = optax.sgd(1.0)


class RoundsSubject:
    """A step with rounds, its model and its rows, on replicas of one job as islands."""

    def __init__(self, dp: DataParallel, model: Any, batch: PyTree, seed: int) -> None:
        devices = list(dp.mesh.devices.flat)[:MOST_ISLANDS_COMPARED]
        self.count, self._devices, self._model, self._seed = len(devices), devices, model, seed
        given = dp.configuration.arguments["rounds"]
        assert given is not None
        self.rounds: Rounds = given.resolved(self.count)
        self.custom = dp.configuration.step is not None
        rows = opened(batch).on_host(copy=False)
        each = rows.count // self.count
        self.rows = jax.tree.map(lambda leaf: leaf[: each * self.count], rows.data)
        self.of_one = jax.tree.map(lambda leaf: leaf[:each], rows.data)
        self.alike = jax.tree.map(lambda leaf: np.concatenate([leaf] * self.count), self.of_one)
        quick = quick_options(devices[0].platform)
        self._base = {
            "mode": "shard_map",
            "layout": "replicated",
            "reduction": "float32",
            "accumulate": 1,
            "compiler_options": dp.configuration.compiler_options or quick,
        }
        self._dp = dp

    def step(
        self, replicas: int, rounds: Rounds | None, job: SharingIsland | None = None, **more: Any
    ) -> DataParallel:
        """Return the step on some replicas, or on the device of the island that `job` is."""
        first = 0 if job is None else job.span[0]
        mesh = make_mesh(devices=self._devices[first : first + replicas])
        where = {"mesh": mesh, "job": job or Alone(), "rounds": rounds}
        return self._dp.replace(**{**self._base, **where, **more})

    def begun(self, dp: DataParallel) -> TrainState:
        """Return the first state."""
        return dp.init(self._model, seed=self._seed)

    def trained(self, dp: DataParallel, rows: PyTree, steps: int) -> TrainState:
        """Return the state after some steps on the same rows."""
        state = self.begun(dp)
        for _ in range(steps):
            state, _ = dp.step(state, rows)
        return state

    def compared(self, case: str, text: str, found: TrainState, wanted: TrainState) -> Check:
        """Return the row on parameters that should be equal up to rounding."""
        begun = self.begun(self.step(1, None)).params
        one, other, start = (_vector(each) for each in (found.params, wanted.params, begun))
        vectors = (one - other, other, other - start)
        off, norm, change = (float(np.linalg.norm(each)) for each in vectors)
        relative = off / max(norm, float(np.finfo(np.float32).tiny))
        close = relative <= CLOSE or off <= 1000 * CLOSE * change
        figures = {"relative": relative, "islands": self.count}
        said = f"{text}: largest difference {relative:.1e} of the parameters"
        return Check("rounds", case, PASS if close else FAIL, said, "" if close else OFF, figures)


OFF = (
    "the optimizer, the loss or the model reads something beside its arguments, or differs between "
    "two programs; or report it"
)


def check_rounds(
    dp: DataParallel, model: Any, batch: PyTree, seed: int, show: Callable[[str], None]
) -> Iterator[Check]:
    """Yield the rows on a step with rounds, in the user's own model and loss."""
    subject = RoundsSubject(dp, model, batch, seed)
    groups = (_against_data_parallelism, _of_equal_islands, _arithmetic)
    for group in groups:
        show(f"rounds: {(group.__doc__ or '').partition(',')[0].lower()}")
        try:
            yield from group(subject)
        except ReplicaxError as error:
            yield Check("rounds", group.__name__.strip("_"), SKIP, f"refused: {error}")


def _against_data_parallelism(subject: RoundsSubject) -> Iterator[Check]:
    """Rounds of one step, with SGD inside and a plain outer step."""
    case = "SGD, 1 step"
    if subject.custom:
        yield Check("rounds", case, SKIP, "a custom step has its own optimizer")
        return
    rounds = dataclasses.replace(
        subject.rounds, every=1, send="float32", outer=_PLAIN, fragments=1, delay=0, mix=0.0,
        decay=None, axis="data",
    )  # fmt: skip
    inner = optax.sgd(_RATE)
    found, wanted = (
        subject.trained(subject.step(subject.count, each, optimizer=inner), subject.rows, 2)
        for each in (rounds, None)
    )
    text = f"{subject.count} islands as data parallelism"
    yield subject.compared(case, text, found, wanted)


def _of_equal_islands(subject: RoundsSubject) -> Iterator[Check]:
    """Rounds of one island, or of islands with equal rows."""
    count = subject.count
    rounds = Rounds(2, outer=_PLAIN, axis="data")
    alone = subject.trained(subject.step(1, rounds), subject.of_one, 4)
    plain = subject.trained(subject.step(1, None), subject.of_one, 4)
    yield subject.compared("1 island, 2 steps", "as training without rounds", alone, plain)
    several = subject.step(count, rounds)
    state, _ = several.step(subject.begun(several), subject.alike)
    losses = np.asarray(state.islands.loss.total)
    if np.ptp(losses) > 1e-5 * np.abs(losses).max():
        text = "islands draw different random numbers, so equal rows differ"
        yield Check("rounds", f"{count} equal islands", SKIP, text)
    else:
        for _ in range(3):
            state, _ = several.step(state, subject.alike)
        yield subject.compared(f"{count} equal islands", "as 1 island", state, alone)
    yield _silent(several, state, subject.alike)


def _silent(dp: DataParallel, state: TrainState, rows: PyTree) -> Check:
    """Return the row on the programs of steps between two exchanges."""
    program = dp.program(state)
    found = [
        moved
        for compiled in program.step.compiled(state, program.batches.placed(rows))
        for moved in inspect(compiled).collectives
    ]
    kinds = {each.kind: each.bytes for each in found}
    if not found:
        text = "no collective in the steps between two exchanges"
        return Check("rounds", "inner steps", PASS, text, "", {"collectives": {}})
    text = f"{', '.join(sorted(kinds))} in the steps of an island"
    return Check("rounds", "inner steps", FAIL, text, ASKS, {"collectives": kinds})


ASKS = "the loss or the optimizer reduces over the axis of the replicas by itself: leave it out"


def _arithmetic(subject: RoundsSubject) -> Iterator[Check]:
    """One exchange, of random changes of the user's parameters."""
    own = subject.rounds
    rounds = dataclasses.replace(own, every=2 * own.fragments, delay=0, axis="data")
    dp = subject.step(subject.count, rounds)
    program = dp.program(subject.begun(dp))
    step = cast(RoundStep, program.step)
    state = _moved(jax.device_get(subject.begun(dp)))
    yield _codec(step, state)
    yield _bytes(step, state, subject.count)
    placed = jax.device_put(state, program.shardings)
    after = step.end_round(placed)
    copies = {
        tuple(np.asarray(shard.data).tobytes() for shard in shards)
        for shards in zip(
            *(leaf.addressable_shards for leaf in jax.tree.leaves(after.params)), strict=True
        )
    }
    wanted = jax.device_get(after)
    jobs = on_sharing_islands(subject.count, partial(_between_jobs, subject, rounds, state))
    yield _equal_bits("outer parameters", "on all islands", len(copies) == 1, subject.count)
    same = all(
        _same(_agreed(found), _agreed(wanted)) and _same(found.islands, _part(wanted, rank))
        for rank, found in enumerate(jobs)
    )
    yield _equal_bits("two transports", "over a mesh and between jobs", same, subject.count)


def _equal_bits(case: str, where: str, same: bool, count: int) -> Check:
    if same:
        return Check("rounds", case, PASS, f"the same bits {where}", "", {"islands": count})
    return Check("rounds", case, FAIL, f"other bits {where}", DIFFERENT, {"islands": count})


DIFFERENT = "the outer optimizer, or this platform, does not compute equal bits twice; report it"


def _codec(step: RoundStep, state: TrainState) -> Check:
    """Return the row on what a payload and the residual keep of a difference."""
    arithmetic, own = step.arithmetic, _part(state, 0)
    codec, worst, kept = arithmetic.rounds.codec, 0.0, 0.0
    options = avoiding(jax.default_backend())
    for number in range(arithmetic.rounds.fragments):
        outer, inner = (
            np.asarray(as_blocks(arithmetic.fragment(each, number))[0])
            for each in (state.params, own.inner.params)
        )
        send = jax.jit(partial(arithmetic.sent, number=number), compiler_options=options)
        ((residual, _), payload, _) = jax.device_get(send(own, state.params))
        decoded = np.asarray(codec.decode(payload, outer.size))
        there_was = outer - inner
        if residual:
            there_was = there_was + (arithmetic.rounds.decay or 0) * own.residual[number]
            left = residual[number] + decoded - there_was
            kept = max(kept, float(np.abs(left).max(initial=0) / np.abs(there_was).max()))
        size = codec.block
        wide = (0, -outer.size % size)
        blocks, error = (
            np.abs(np.pad(each, wide)).reshape(-1, size)
            for each in (there_was, decoded - there_was)
        )
        largest = np.maximum(blocks.max(1), np.finfo(np.float32).tiny)
        worst = max(worst, float((error.max(1) / largest).max(initial=0)))
    figures = {"error": worst, "bound": codec.error, "residual": kept}
    text = f"error {worst:.2g} of a block's largest value, of at most {codec.error:.2g}"
    good = worst <= codec.error * (1 + CLOSE) and kept <= CLOSE
    text += "; what is sent and the residual add up" if kept <= CLOSE else f"; lost {kept:.1e}"
    cause = "" if good else "the codec promises a smaller error than it has"
    return Check("rounds", f"send {codec.name}", PASS if good else FAIL, text, cause, figures)


def _bytes(step: RoundStep, state: TrainState, count: int) -> Check:
    """Return the row on the bytes of the compiled exchanges."""
    arithmetic = step.arithmetic
    payload = arithmetic.payload_bytes(state.params)
    exact = sum(
        jax.eval_shape(partial(arithmetic.nothing, number=n), state.params, state.extras)[1].size
        for n in range(arithmetic.rounds.fragments)
    )
    found = [m for program in step.exchanges(state) for m in inspect(program).collectives]
    moved, wanted = sum(each.bytes for each in found), count * (payload + 4 * exact)
    kinds = {each.kind for each in found}
    text = f"each island sends {size_text(payload)} and {exact:,} numbers"
    figures = {"payload": payload, "exact": exact, "moved": moved, "expected": wanted}
    if count == 1 or (moved == wanted and kinds == {"all-gather"}):
        return Check("rounds", "bytes", PASS, text, "", figures)
    text = f"{size_text(moved)} in {', '.join(sorted(kinds))}, and not {size_text(wanted)}"
    return Check("rounds", "bytes", FAIL, text, "the compiler moves more than is sent", figures)


def _between_jobs(
    subject: RoundsSubject, rounds: Rounds, state: TrainState, job: SharingIsland
) -> TrainState:
    """Return the state of one island after the exchange, with a job for each island."""
    rank = job.span[0]
    dp = subject.step(1, dataclasses.replace(rounds, axis=None), job, mode="jit")
    mine = dataclasses.replace(state, islands=_part(state, rank))
    placed = jax.device_put(mine, dp.program(subject.begun(dp)).shardings)
    found: TrainState = jax.device_get(dp.end_round(placed))
    return found


def _moved(state: TrainState) -> TrainState:
    """Return a state in step 1 whose islands have moved at random, by a tenth of each array."""
    generator = np.random.default_rng(0)

    def noise(leaf: Any, scale: float) -> Any:
        drawn = generator.normal(size=leaf.shape) * scale * (np.abs(leaf).max(initial=0) or 1.0)
        return (leaf + drawn).astype(leaf.dtype)

    own = state.islands
    params = jax.tree.map(lambda leaf: noise(leaf, 0.1), own.inner.params)
    residual = jax.tree.map(lambda leaf: noise(leaf, 0.01), own.residual)
    weights = generator.integers(1, 9, size=own.weights.shape).astype(np.float32)
    inner = dataclasses.replace(own.inner, params=params)
    own = dataclasses.replace(own, inner=inner, residual=residual, weights=weights)
    return dataclasses.replace(state, islands=own, step=np.int32(1))


def _part(state: TrainState, rank: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[rank], state.islands)


def _agreed(state: TrainState) -> PyTree:
    return state.params, state.opt_state, state.extras


def _same(one: PyTree, other: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(_bits(a) == _bits(b) for a, b in pairs)


def _vector(params: PyTree) -> np.ndarray:
    arrays = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)]
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _bits(leaf: Any) -> bytes:
    return np.asarray(numbers(leaf)).tobytes()
