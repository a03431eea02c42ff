"""The subject of a verification: a `DataParallel` with its model and rows, in every mode."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from replicax.analysis.compiled import inspect
from replicax.analysis.flops import count_flops
from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged, named_values
from replicax.core.data.per_row import ByRow
from replicax.core.data.rows import OpenedRows, opened
from replicax.core.data.share import Share
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.quick_compile import quick_options
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext
from replicax.core.modes.mode_table import Mode
from replicax.core.placement.mesh import Axis, by_rows, make_mesh, replica_count, replicated
from replicax.core.program import Program
from replicax.core.step.base import StepSums
from replicax.core.step.loss import LOSS
from replicax.core.step.loss_scale import SMALLEST, overflows, settled, value_of
from replicax.core.step.reduction import Reduction, Wire
from replicax.errors import LossError
from replicax.train.guarded import NOT_FINITE, guarded
from replicax.verify.difference import Leaves, coarsest_eps, step_changes

WARM_STEPS = 2
"""Steps before the comparison: the first learning rate of a warm-up is 0, and Adam's first update
depends only on the gradient's sign."""
_LONG = 2 * 10**8
"""FLOPs of a step above which it pays to optimize the program, as it runs dozens of times."""
_OPTIMIZED = {"xla_backend_optimization_level": "1"}
_FORWARD_AND_BACK = 3
_LEAST_WEIGHT, _MOST_WEIGHT = 0.1, 10.0
_SCALE_MARGIN = 16
"""A power of two larger than the largest weight."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration in which the step runs."""

    mode: Mode
    micro_batches: int = 1
    devices: int = 1
    magnitudes: bool = False
    """Whether to reduce the magnitudes of contributions, which bound a reduction's error."""

    def __str__(self) -> str:
        if self.micro_batches == 1 or self.mode.bitwise:
            return self.mode.name
        return f"{self.mode}, {self.micro_batches} micro-batches"


class SkippedStepError(Exception):
    """Raised if a step's loss or gradient was not finite or overflowed and nothing changed."""


class Subject:
    """A step as run by `rx.fit`, with its model and rows, which can be run in other cases.

    `micro_batches` is compared with `dp.accumulate`.
    """

    def __init__(
        self, dp: DataParallel, model: Any, batch: PyTree, micro_batches: int, seed: int
    ) -> None:
        rows = opened(batch).on_host(copy=False)
        self.data, self.rows = rows.data, rows.count
        self.replicas = replica_count(dp.mesh)
        self.micro_batches = sorted({1, dp.accumulate, micro_batches})
        self._model, self._seed = model, seed
        # All cases are of one loss on one model, so they know one examination.
        self._base = dp.replace(donate=False, trainable=None, ema=None, examinations={})
        usual = dp.configuration.compiler_options is None
        platform = dp.mesh.devices.flat[0].platform
        self.on_accelerators = platform != "cpu"
        self.quick = quick_options(platform) if usual else None
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._compiling: dict[Any, Future[Any]] = {}
        self._known: dict[Any, tuple[Any, Any]] = {}
        program = dp.program(model)
        self.objective = program.objective
        """The loss on the model."""
        self.scored, self.sums = _scored(program, self.full)
        if self.quick and _FORWARD_AND_BACK * count_flops(self.scored.jaxpr, "cpu") > _LONG:
            self.quick = {**self.quick, **_OPTIMIZED}
        self.updater = program.updater
        self._optimizer = optax.with_extra_args_support(self.updater.optimizer)
        leaves, structure = jax.tree.flatten(program.shapes.params)
        read = self.updater.read or (True,) * len(leaves)
        self.trained = jax.tree.unflatten(structure, read)
        self.own = self.case(dp.mode, dp.accumulate)
        self.parallel = functools.cache(self._parallel)
        self.abstract = functools.cache(self._abstract)
        self._reduction = functools.cache(self._first_reduction)
        self.state = self._first_state()
        """The state before the step that is compared: the first one, until `warm`."""

    # Running.

    def case(self, mode: Mode, micro_batches: int = 1) -> Case:
        """Return the case of a mode on all devices, or on one device per replica."""
        devices = self._base.mesh.devices.size if mode.partitions else self.replicas
        return Case(mode, micro_batches, min(devices, mode.most_devices or devices))

    def _parallel(self, case: Case) -> DataParallel:
        """Return the step in one case, recording the gradient that its optimizer receives."""
        base = self._base
        settings: dict[str, Any] = {"mode": case.mode, "accumulate": case.micro_batches}
        if case.magnitudes or not case.mode.holds(base.layout):
            settings["layout"] = "replicated"
        if case.devices != base.mesh.devices.size:
            devices = list(base.mesh.devices.flat)[: case.devices]
            settings["mesh"] = make_mesh(devices=devices)
        if case.magnitudes:
            settings["reduction"] = magnitudes(base.reduction)
        elif not case.mode.per_replica:
            settings["reduction"] = "float32"
        if not case.mode.bitwise and self.quick:
            settings["compiler_options"] = self.quick
        recorded = optax.chain(record_gradient(self.trained), self._optimizer)
        made = base.replace(optimizer=recorded, **settings)
        return guarded(made, made.abstract_state(self._model))

    def run(
        self, case: Case, batch: Batch, state: TrainState | None = None
    ) -> tuple[TrainState, Metrics]:
        """Return the result of one step from `state` (default: the warm state), which is kept.

        Raises:
            SkippedStepError: the step changed nothing.
        """
        if not case.mode.bitwise and (compiling := self._compiling.get((case, batch.size))):
            compiling.exception()  # raised again below
        before = self.state if state is None else state
        placed = self.placed(case, before)
        after, metrics = self.parallel(case).step(placed, self.batch_on(case, batch))
        metrics = {name: value_of(metric) for name, metric in metrics.items()}
        if bool(metrics.pop(NOT_FINITE)) or overflows(after) > overflows(before):
            raise SkippedStepError(str(case))
        return after, as_arrays(metrics, batch.mask)

    def trace(self, case: Case, batch: Batch, *, anew: bool = False) -> jax.stages.Traced:
        """Return the step of a case as traced when it first ran, or `anew`."""
        dp = self.parallel(case)
        if anew:
            dp = dp.replace()
            dp.abstract_state(self._model)
        return dp.trace(self.placed(case, self.state), self.batch_on(case, batch))

    def has_no_16_bits(self) -> bool:
        """Whether the trace of the program's own step has no 16-bit floats."""
        with contextlib.suppress(Exception):  # the user's loss; parity reports it
            traced = self.trace(self.own, self.full).jaxpr
            return coarsest_eps(traced, traced.in_avals) <= 2.0**-23  # that of float32
        return False

    def compiled(self, case: Case, batch: Batch) -> jax.stages.Compiled:
        """Return the compiled step that `run` uses; raises the errors of `run`."""
        placed = self.placed(case, self.state), self.batch_on(case, batch)
        self.parallel(case).prepare(*placed)
        return self._begun(case, *placed).result()

    def compile_ahead(self, case: Case, batch: Batch) -> None:
        """Trace the step of a case, and begin to compile it; `run` and `compiled` wait for it.

        Errors are ignored here and raised again by `run`.
        """
        with contextlib.suppress(Exception):
            placed = self.placed(case, self.state), self.batch_on(case, batch)
            if case.mode.bitwise:  # what runs is parts, which are compiled in the background
                self.parallel(case).program(placed[0]).step.compiled(*placed)
            else:
                self._begun(case, *placed)

    def _begun(self, case: Case, state: TrainState, batch: Batch) -> Future[jax.stages.Compiled]:
        """Return the step of a case as one program, which is being compiled."""
        # In a mode with fixed bits, this program is only read, never run.
        options = self.quick if case.mode.bitwise else None
        lower = functools.partial(self.parallel(case).lower, state, batch)
        return self.begun((case, batch.size), lower, options)

    def begun(
        self, key: Any, lower: Callable[[], jax.stages.Lowered], options: Any = None
    ) -> Future[jax.stages.Compiled]:
        """Return the program that `lower` traces, once for a key; it is being compiled."""
        if key not in self._compiling:
            self._compiling[key] = self._pool.submit(lower().compile, options)
        return self._compiling[key]

    def once(self, key: Any, given: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, called once for a key until something else is `given`."""
        if key not in self._known or self._known[key][0] is not given:
            self._known[key] = given, make()
        return self._known[key][1]

    def placed(self, case: Case, state: TrainState) -> TrainState:
        """Return `state` placed for the step of `case`, with its initial reduction state."""
        abstract = self.abstract(case)
        trees: list[Any] = [jax.tree.structure(each.reduction) for each in (state, abstract)]
        if trees[0] != trees[1]:
            state = dataclasses.replace(state, reduction=self._reduction(case))
        placed: TrainState = jax.device_put(
            state, jax.tree.map(lambda leaf: leaf.sharding, abstract)
        )
        return placed

    def _abstract(self, case: Case) -> TrainState:
        """Return the shapes of a state with the shardings of the step of `case`."""
        return self.parallel(case).abstract_state()

    def _first_reduction(self, case: Case) -> PyTree:
        return self.parallel(case).init(self._model, seed=self._seed).reduction

    def batch_on(self, case: Case, batch: Batch) -> Batch:
        """Return `batch` placed for the step of `case`."""
        return Share(by_rows(self.parallel(case).mesh), batch.size).place(batch)

    # Batches.

    @functools.cached_property
    def full(self) -> Batch:
        """Return a batch of all rows."""
        return self.some(np.arange(self.rows))

    @functools.cached_property
    def padded(self) -> Batch:
        """Return a batch whose real rows do not divide, padded with repeated rows of mask 0."""
        real = np.arange(self.real_rows)
        return OpenedRows(self.some(real).data).padded(self.rows, real)

    @functools.cached_property
    def negated(self) -> Batch:
        """Return the padded batch with the other sign of all floats."""
        data = jax.tree.map(
            lambda leaf: -leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            self.padded.data,
        )
        return dataclasses.replace(self.padded, data=data)

    @functools.cached_property
    def weighted(self) -> Batch:
        """Return all rows with weights from 0.1 to 10, so that no two replicas have equal sums."""
        low, high = np.log(_LEAST_WEIGHT), np.log(_MOST_WEIGHT)
        generator = np.random.default_rng(self._seed)
        weights = np.exp(generator.uniform(low, high, self.rows)).astype(np.float32)
        return dataclasses.replace(self.full, mask=weights, rows=None)

    @property
    def real_rows(self) -> int:
        """Return the real rows of the padded batch: about 4/5, and no multiple of the replicas."""
        return max(1, self.rows - max(1, self.rows // 5) | 1 if self.rows > 2 else 1)

    def some(self, indices: np.ndarray) -> Batch:
        """Return a batch of the rows at these indices."""
        rows = OpenedRows(jax.tree.map(lambda leaf: leaf[indices], self.data))
        return rows.padded(len(indices), indices)

    # Properties.

    @functools.cached_property
    def one_device(self) -> NamedSharding:
        """The placement of the reference."""
        # On a mesh of its own: without one, older versions of JAX take that of an earlier trace.
        return replicated(make_mesh(devices=list(self._base.mesh.devices.flat[:1])))

    @functools.cached_property
    def eps(self) -> float:
        """Return the eps of the coarsest dtype that the loss computes in."""
        return coarsest_eps(self.scored, jax.tree.leaves(self.state.params))

    def updated(self, results: Leaves, state: TrainState) -> Leaves:
        """Return one device's parameter updates for the gradient in `results`."""
        gradient = jax.tree_util.tree_map_with_path(
            lambda path, leaf: results[f"gradient{keystr(path)}"].astype(leaf.dtype), state.params
        )
        _, inner = state.opt_state
        after, _ = self.apply(state.params, inner, gradient, np.float32(results[LOSS]))
        return {f"params{path}": value for path, value in step_changes(state.params, after).items()}

    def with_job(self, case: Case, job: Job) -> DataParallel:
        """Return the step of a case as a part of `job`, with the model."""
        dp = self.parallel(case).replace(job=job)
        dp.init(self._model, seed=self._seed)
        return dp

    # Helpers.

    def apply(self, params: PyTree, opt_state: Any, gradient: PyTree, loss: Any) -> Any:
        """Return parameters and the optimizer's state after an update on one device."""
        given = jax.device_put((params, opt_state, gradient, loss), self.one_device)
        return self._begun_update(*given).result()(*given)

    def _begun_update(self, *given: Any) -> Future[jax.stages.Compiled]:
        def apply(params: PyTree, opt_state: Any, gradient: PyTree, loss: Any) -> Any:
            value = {"value": loss} if self.updater.takes_value else {}
            updates, after = self._optimizer.update(gradient, opt_state, params, **value)
            return optax.apply_updates(params, updates), after

        made = jax.jit(apply, compiler_options=self.quick)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(given))
        return self.begun(("update", kinds), functools.partial(made.lower, *given))

    def compile_update_ahead(self) -> Future[jax.stages.Compiled] | None:
        """Begin to compile the optimizer's update on one device."""
        gradient, inner = self.state.opt_state
        given = self.state.params, inner, gradient, np.float32(0)
        with contextlib.suppress(Exception):  # raised again by `apply`
            return self._begun_update(*jax.device_put(given, self.one_device))
        return None

    def update_flops(self) -> int:
        """Return the FLOPs of products in an update on one device; 0 if it is elementwise."""
        update = self.compile_update_ahead()
        return 0 if update is None else inspect(update.result()).flops

    def _first_state(self) -> TrainState:
        """Return the first state, on one device; with a loss scale, the first without overflow."""
        dp = self.parallel(self.own)
        state = dp.init(self._model, seed=self._seed)
        if state.scale:
            batch = self.batch_on(self.own, self.full)
            state = settled(lambda state: dp.step(state, batch), state)
        placed: TrainState = jax.device_put(state, self.one_device)
        return placed

    def warm(self, step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]) -> None:
        """Do the steps before the comparison with `step`, that of one device.

        Raises:
            LossError: the loss or its gradient is not finite.
        """
        state = self.state
        for number in range(1, WARM_STEPS + 1):
            try:
                state, _ = step(state, self.full)
            except SkippedStepError:
                raise LossError(
                    f"the loss or its gradient is not finite in step {number}, so a run would skip "
                    "the step: check the batch and the initial parameters (jax_debug_nans finds "
                    "the operation)"
                ) from None
        if state.scale:  # larger weights must not overflow
            value = jnp.maximum(state.scale.value / _SCALE_MARGIN, SMALLEST)
            state = dataclasses.replace(state, scale=dataclasses.replace(state.scale, value=value))
        # The gradient recorded in the last warm-up step is not a result.
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.params)
        self.state = dataclasses.replace(state, opt_state=(nothing, state.opt_state[1]))


def _scored(program: Program, batch: Batch) -> tuple[ClosedJaxpr, StepSums]:
    """Trace loss and metrics on one device, by parameters, extras and batch; the loss comes last.

    Also return their shapes.
    """

    def score(params: PyTree, extras: PyTree, batch: Batch) -> tuple[StepSums, jax.Array]:
        context = CallContext(jax.random.key(0))
        found, _ = program.objective.score_sums(params, extras, batch, context)
        return found, found.weighted[LOSS].total

    make = jax.make_jaxpr(score, return_shape=True)
    jaxpr, (sums, _) = make(program.shapes.params, program.shapes.extras, batch)
    return jaxpr, sums


NAMES = (
    ("['state'].params", "params"),
    ("['state'].extras", "extras"),
    ("['state'].opt_state[0]", "gradient"),
    ("['state']", "state"),
)


def results_of(before: TrainState, after: TrainState, metrics: Metrics) -> Leaves:
    """Return the results of a step by path: loss, metrics, gradient and changes."""
    found = named_results(step_changes({"state": before}, {"state": after, "metrics": metrics}))
    return {path: value for path, value in found.items() if not path.startswith("state")}


def as_arrays(metrics: Metrics, mask: Any) -> Metrics:
    """Return metrics as arrays: rows without padding, and the values of those that are no means.

    The latter count rows, and are left out of a batch with other weights than 0 and 1.
    """
    counts, found = bool(np.isin(mask, (0, 1)).all()), Metrics()
    for name, value in metrics.items():
        if isinstance(value, Merged):
            values = named_values(name, value.compute()) if counts else {}
            found |= {each: np.asarray(values[each], np.float32) for each in values}
        else:
            found[name] = value.whole() if isinstance(value, ByRow) else value
    return found


def named_results(by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten paths: `['state'].params['w']` to `params['w']`, `['metrics']['loss']` to `loss`."""

    def name(path: str) -> str:
        for start, short in NAMES:
            if path.startswith(start):
                return short + path.removeprefix(start)
        return path.removeprefix("['metrics']")[2:-2]

    return {name(path): value for path, value in by_path.items()}


def record_gradient(trained: PyTree) -> optax.GradientTransformation:
    """Return a transformation that records the latest gradient in its state.

    Only `trained` leaves are recorded, since recording forces their computation.
    """

    def kept(gradient: PyTree, _state: PyTree, _params: PyTree = None) -> tuple[PyTree, PyTree]:
        recorded = jax.tree.map(
            lambda leaf, is_trained: leaf if is_trained else jnp.zeros_like(leaf), gradient, trained
        )
        return gradient, recorded

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), kept)


def _absolute(leaf: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jnp.abs(leaf.real), jnp.abs(leaf.imag))
    return jnp.abs(leaf)


@dataclasses.dataclass(frozen=True)
class _Magnitudes(Wire):
    """Sum the magnitudes of the replicas' contributions, in any per-replica mode."""

    of: Callable[[jax.Array], jax.Array] = _absolute
    """Returns the magnitude of each value of a leaf."""

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        """Return the sum of the replicas' magnitudes."""
        return super().__call__(self.rounded(sums), state, axis)

    def round(self, leaf: jax.Array) -> jax.Array:
        """Return the magnitudes of a contribution; sums of magnitudes are unchanged."""
        return self.of(leaf)


def magnitudes(reduction: Reduction) -> Wire:
    """Return the sum of what the errors of `reduction` are relative to."""
    return _Magnitudes("magnitudes", of=getattr(reduction, "magnitude", _absolute))
