"""`DataParallel`: a loss, an optimizer and a mesh -> init, feed, step, evaluate."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from replicax.core.accumulate import Running
from replicax.core.agreed import agree_on_model, agree_on_program
from replicax.core.batch import Batch, described, host_rows, pad, place, row_count
from replicax.core.capacity import check_fits, check_state_fits
from replicax.core.exact import MICRO_SHARDS
from replicax.core.feed import Feed, Split
from replicax.core.job import Alone, Job
from replicax.core.layout import (
    Layout,
    check_layout,
    layout_name,
    on_devices_of,
    state_shardings,
)
from replicax.core.loss import LOSS, add_sums, scalars
from replicax.core.mesh import (
    AnyMesh,
    by_rows,
    check_mesh,
    check_processes,
    make_mesh,
    replica_count,
    replicated,
)
from replicax.core.models.split import Definition, PyTree, split_model
from replicax.core.modes import check_mode, lift, summation_for
from replicax.core.objective import LossFunction, Objective
from replicax.core.precision import Precision
from replicax.core.share import Share
from replicax.core.sources import as_source
from replicax.core.update import Metrics, TrainState, create, score, update
from replicax.errors import ConfigError, LossError, StateError

SETTINGS = ("mode", "accumulate", "micro_shards", "donate")


class DataParallel:
    """A training step on every device of a mesh.

    Example:
        >>> dp = DataParallel(loss, optax.adamw(3e-4))
        >>> state = dp.init(model)
        >>> for batch in dp.feed(source, batch_size=256):
        ...     state, metrics = dp.step(state, batch)
        >>> model = dp.model(state)

    Args:
        loss: `loss(model, batch, key) -> values`, with `batch` the user's pytree of arrays
            `[rows, ...]` and `values` floats `[rows, ...]`, an `rx.Weighted`, or a pair of either
            and a dict of metrics of the same kinds. The step minimises their global weighted mean.
            A scalar is taken as the mean over rows that all count alike, and refused where they do
            not. In evaluation `key` is None, and NNX and Equinox models are in evaluation mode.
        optimizer: an optax gradient transformation.
        mesh: the devices, with an axis named `data`; all attached devices by default, the first
            one in mode `single`.
        mode: `jit`, `shard_map`, `pmap`, `exact` or `single`; see `replicax.core.modes`.
        layout: `replicated`, `zero1`, `fsdp` or rules; see `replicax.core.layout.Layout`.
        accumulate: micro-batches a replica's rows are computed in, one after the other.
        micro_shards: in mode `exact`, the parts that a global batch is cut into on any number of
            devices, each computed alone; a power of two. Devices that share them out equally, at
            least `accumulate` for each, compute the same bits.
        precision: `float32` or `bfloat16`; see `replicax.core.precision.Precision`.
        donate: whether `step` reuses the memory of the state it is given, which is then gone.
        job: the processes that train together, from `rx.initialize()`; this one alone by default.

    Raises:
        ConfigError: arguments that cannot work, alone or together.
    """

    def __init__(
        self,
        loss: LossFunction,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh | None = None,
        mode: str = "jit",
        layout: Layout = "replicated",
        accumulate: int = 1,
        micro_shards: int = MICRO_SHARDS,
        precision: str = "float32",
        donate: bool = True,
        job: Job | None = None,
    ) -> None:
        self.job = Alone() if job is None else job
        if mesh is None:
            mesh = make_mesh(devices=jax.devices()[:1] if mode == "single" else None)
        self.mesh = check_mesh(mesh)
        self.mode = mode
        self.layout = layout
        self.accumulate = accumulate
        self.micro_shards = micro_shards
        self.precision = Precision(precision)
        self.donate = donate
        check_processes(self.mesh, self.job)
        check_mode(mode, self.mesh)
        check_layout(layout, mode)
        if accumulate < 1:
            raise ConfigError(
                f"accumulate={accumulate}; a step has at least 1 micro-batch: raise it"
            )
        self._summation = summation_for(mode, accumulate, micro_shards, self.mesh)
        self.loss = loss
        self._optimizer = optimizer
        self._definition: Definition | None = None
        self._step: Any = None
        self._score: Any = None
        self._scalars: tuple[str, ...] | None = None
        self._fits = self._finite = False
        self._agreed: set[Any] = set()
        self._guard = False  # see replicax.train.guarded

    def replace(self, **changes: Any) -> "DataParallel":
        """Another one, without a model, with some of the constructor's arguments changed.

        Args:
            changes: by name.
        """
        arguments = {name: getattr(self, name) for name in ("mesh", "layout", "job", *SETTINGS)}
        arguments |= {"loss": self.loss, "optimizer": self._optimizer}
        arguments |= {"precision": self.precision.name, **changes}
        return DataParallel(arguments.pop("loss"), arguments.pop("optimizer"), **arguments)

    @property
    def split(self) -> Split:
        """How a batch is divided: replicas and micro-batches."""
        return self.split_on(self.mesh)

    def split_on(self, mesh: AnyMesh) -> Split:
        """How a batch would be divided on another mesh."""
        replicas = replica_count(mesh)
        return Split(replicas, self._summation.micro_batches(replicas))

    def init(self, model: Any, *, seed: int = 0) -> TrainState:
        """The state before the first step, each array placed where its layout wants it.

        Args:
            model: a pytree of arrays, an Equinox module, a Flax NNX module, or a bound Linen one.
                It is copied; the caller's stays as it is.
            seed: of all random numbers in the run, 0 <= seed < 2**32.

        Raises:
            ConfigError: nothing to train, another structure than this object already trains, or
                more than the memory that is free.
        """
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed}; it is at least 0 and below 2**32: choose another")
        abstract = self.abstract_state(model)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        arrays = jax.block_until_ready(self._adopt(model))  # it takes its memory before we look
        check_state_fits(abstract, self.mesh)
        agree_on_model(self.job, arrays, seed)
        params, extras = jax.tree.map(on_devices_of, arrays, (shardings.params, shardings.extras))
        create_state = partial(create, optimizer=self._optimizer)
        place_state = jax.jit(create_state, out_shardings=shardings)
        state: TrainState = place_state(params, extras, np.uint32(seed))
        return state

    def abstract_state(self, model: Any) -> TrainState:
        """What `init(model)` gives, as shapes with shardings; `step` then takes such a state.

        Args:
            model: as for `init`; arrays or their shapes.

        Raises:
            ConfigError: as for `init`.
        """
        params, extras = self._adopt(model)
        shapes = self._state_shapes(params, extras)
        if self._step is None:
            self._step = self._lift_update(shapes, self.mesh)
            self._score = self._lift_score(shapes)
        shardings = self._shardings(shapes, self.mesh)
        abstract: TrainState = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
        )
        return abstract

    def feed(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        first: int = 0,
        prefetch: int = 2,
    ) -> Feed:
        """One epoch of `source` as batches for `step` and `evaluate`.

        Args:
            source: a dict or tuple of arrays `[rows, ...]`, a Grain dataset of rows, or an iterable
                of host batches.
            batch_size: rows of a global batch; the last one is padded to it. An iterable may leave
                it out.
            shuffle: whether the order is drawn from `seed` and `epoch`.
            seed: of the order.
            epoch: which epoch, from 0.
            first: which of its batches to begin with, from 0.
            prefetch: batches made ahead in the background.

        Raises:
            ConfigError: a batch that has fewer rows than there are micro-batches over all replicas,
                or a source that cannot do what is asked.
            DataError: leaves that disagree on the number of rows.
        """
        opened = as_source(source, batch_size, self.job, shuffle=shuffle, seed=seed)
        where, cut = by_rows(self.mesh), self.split
        return Feed(opened, cut, where, self.job, epoch=epoch, first=first, prefetch=prefetch)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update. Returns at once, unless the devices are `STEPS_IN_FLIGHT` steps behind.

        Args:
            state: the state before; with `donate` it cannot be used afterwards.
            batch: from `feed`, or a pytree of arrays `[rows, ...]`.

        Returns:
            The state after, and float32 scalars on the device, `"loss"` among them: each the exact
            weighted mean over the real rows of the global batch.

        Raises:
            ConfigError: the first step needs more memory than there is.
            LossError: the loss does not keep its contract, or is not finite in the first step.
            StateError: the state was given to `step` before.
        """
        _check_alive(state)
        if type(batch) is not Batch:
            batch = self._placed(batch)
        self.prepare(state, batch)
        state, metrics = self._step(state, batch)
        self.job.move()
        self.job.in_flight.add(metrics[LOSS])
        if not self._finite:
            self._finite = self._guard or _check_finite(metrics)
        return state, metrics

    def prepare(self, state: TrainState, batch: Batch) -> None:
        """What `step` does first: look at the loss, agree with the other processes, compile, see
        whether it fits. It raises what `step` does, and takes long the first time only.

        Args:
            state: of the step, from `init`.
            batch: from `feed`.
        """
        if self._scalars is None:
            self._scalars = self._inspect(state, batch)
        if self._scalars:
            self._refuse_padding(batch)
        if self.job.processes > 1:
            self._agree("the step", self.lower, state, batch)
        if not self._fits and self._are_placed(state, batch):
            check_fits(self.lower(state, batch).compile(), self.mesh, batch.size)
            self._fits = True

    def evaluate(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        """The loss and the metrics over all rows of `batches`, each row counted once.

        Args:
            state: used as it is; nothing in it changes.
            batches: from `feed`, or any pytrees of arrays `[rows, ...]`.

        Returns:
            The exact weighted mean of each, NaN where nothing has any weight, and `"rows"`, the
            number of rows.
        """
        _check_alive(state)
        totals: dict[str, np.ndarray] = {}
        pending: list[Any] = []
        for batch in batches:
            placed = batch if type(batch) is Batch else self._placed(batch)
            if self._scalars is None:
                self._scalars = self._inspect(state, placed)
            if self._scalars:
                self._refuse_padding(placed)
            if self.job.processes > 1:
                self._agree("the evaluation", self._score.lower, state, placed)
            pending.append(self._score(state, placed))
            self.job.move()
            if len(pending) > 2:
                add_sums(totals, pending.pop(0))
        for sums in pending:
            add_sums(totals, sums)
        if not totals:
            raise ConfigError("evaluate was given 0 batches; give at least 1")
        rows = int(totals.pop("rows")[0])
        means = {
            name: float(total / weight) if weight else math.nan
            for name, (total, weight) in totals.items()
        }
        return {**means, "rows": rows}

    def check(self, feed: Feed) -> None:
        """Raise `LossError` where the loss, once seen by `step`, cannot be exact on `feed`."""
        if self._scalars and feed.padding:
            raise self._scalar_with_padding(feed.split.padded(feed.source.batch_size), feed.padding)

    def model(self, state: TrainState) -> Any:
        """The user's model with the arrays of `state`, which it shares."""
        if self._definition is None:
            raise StateError("this DataParallel has no model yet; call init(model) first")
        return self._definition.merge(state.params, state.extras)

    def lower(self, model: Any, batch: Any, *, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """The step for `mesh`, attached or described, without running or placing anything.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            batch: a `Batch` or a pytree `[rows, ...]`; arrays or their shapes.
            mesh: this object's by default. `step` then runs what is compiled here, if `model` is a
                state and `batch` a batch of `feed`; nothing is compiled twice.

        Returns:
            A lowered step: `.compile()` it, and read it with `replicax.analysis.compiled.inspect`.
        """
        lowered: jax.stages.Lowered = self.trace(model, batch, mesh=mesh).lower()
        return lowered

    def trace(self, model: Any, batch: Any, *, mesh: Mesh | None = None) -> jax.stages.Traced:
        """What `lower` lowers: read its `jaxpr` with `replicax.analysis.flops.count_flops`."""
        function, arguments = self.program(model, batch, mesh=mesh)
        traced: jax.stages.Traced = function.trace(*arguments)
        return traced

    def program(
        self, model: Any, batch: Any, *, mesh: AnyMesh | None = None
    ) -> tuple[Any, tuple[TrainState, Batch]]:
        """What `trace` traces: a `jax.jit` function, and its arguments or their shapes.

        Args:
            model: as for `lower`.
            batch: as for `lower`.
            mesh: as for `lower`, or one without devices.
        """
        if mesh is None and self._step is not None and self._are_placed(model, batch):
            return self._step, (model, batch)
        mesh = check_mesh(self.mesh if mesh is None else mesh)
        if isinstance(model, TrainState):
            shapes = jax.eval_shape(lambda state: state, model)
        else:
            shapes = self._state_shapes(*self._adopt(model))
        if not isinstance(batch, Batch):
            parts = Split(replica_count(mesh), self.accumulate)
            batch = described(batch, parts.padded(row_count(batch)))
        batch = jax.eval_shape(lambda arrays: arrays, batch)
        return self._lift_update(shapes, mesh), (shapes, batch)

    def _adopt(self, model: Any) -> tuple[PyTree, PyTree]:
        """The arrays of `model`, whose structure becomes, or already is, this object's."""
        definition, params, extras = split_model(model)
        if self._definition is not None and definition != self._definition:
            raise ConfigError(
                "init was given a model of another structure than before; one DataParallel trains "
                "one: make a second DataParallel"
            )
        self._definition = definition
        return params, extras

    @property
    def _objective(self) -> Objective:
        if self._definition is None:
            raise StateError("this DataParallel has no model yet; call init(model) first")
        return Objective(self._definition, self.loss, self.precision)

    def _objective_in(self, state: TrainState) -> Objective:
        return self._objective.gathering(state.params) if self.layout == "fsdp" else self._objective

    def _state_shapes(self, params: PyTree, extras: PyTree) -> TrainState:
        create_state = partial(create, optimizer=self._optimizer)
        shapes: TrainState = jax.eval_shape(create_state, params, extras, np.uint32(0))
        return shapes

    def _shardings(self, shapes: TrainState, mesh: AnyMesh) -> TrainState:
        return state_shardings(shapes, mesh, self.layout)

    def _lift_update(self, shapes: TrainState, mesh: AnyMesh) -> Any:
        shardings = self._shardings(shapes, mesh)
        function = partial(
            update,
            objective=self._objective_in(shardings),
            optimizer=self._optimizer,
            summation=self._summation,
            guard=self._guard,
        )
        out = (shardings, replicated(mesh))
        return lift(function, self.mode, mesh, shardings, out, donate=self.donate)

    def _lift_score(self, shapes: TrainState) -> Any:
        shardings = self._shardings(shapes, self.mesh)
        objective = self._objective_in(shardings)
        summation = self._summation if self.mode == "exact" else Running()
        function = partial(score, objective=objective, summation=summation)
        return lift(function, self.mode, self.mesh, shardings, replicated(self.mesh))

    def _are_placed(self, state: Any, batch: Any) -> bool:
        """Whether these are a state and a batch that lie where `step` has them."""
        if not (isinstance(state, TrainState) and isinstance(batch, Batch)):
            return False
        rows = jax.tree.map(lambda _: by_rows(self.mesh), batch)
        wanted = jax.tree.leaves((self._shardings(state, self.mesh), rows))
        return all(
            isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf, sharding in zip(jax.tree.leaves((state, batch)), wanted, strict=True)
        )

    def _agree(self, what: str, lower: Any, state: TrainState, batch: Batch) -> None:
        """That all processes are about to run the same program, once for each shape of a batch."""
        shapes = (what, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)))
        if shapes in self._agreed:
            return
        settings = {name: getattr(self, name) for name in SETTINGS}
        settings |= {"layout": layout_name(self.layout), "precision": self.precision.name}
        arguments = (state, batch)
        agree_on_program(self.job, what, settings, self.mesh, arguments, lower(state, batch))
        self._agreed.add(shapes)

    def _placed(self, data: PyTree) -> Batch:
        rows = row_count(data)
        size = self.split.padded(rows)
        if rows < size or not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data)):
            data = host_rows(data, copy=True)
        share = Share(by_rows(self.mesh), size)
        return place(share.part(pad(data, size, np.arange(rows))), share)

    def _inspect(self, state: TrainState, batch: Batch) -> tuple[str, ...]:
        """Names of scalar outputs; raises what is wrong with the loss before anything compiles."""
        objective = self._objective
        found: list[tuple[str, ...]] = []

        def observed(model: Any, data: PyTree, key: jax.Array | None) -> Any:
            returned = self.loss(model, data, key)
            found.append(scalars(returned))
            return returned

        watching = Objective(objective.definition, observed, objective.precision)
        jax.eval_shape(
            partial(watching.means, axis=None),
            state.params,
            state.extras,
            batch,
            jax.random.key(0),
        )
        return found[0]

    def _refuse_padding(self, batch: Batch) -> None:
        rows = int(np.sum(batch.mask)) if batch.rows is None else batch.rows
        padding = batch.feed_padding or batch.size - rows
        if padding:
            raise self._scalar_with_padding(batch.size, padding)

    def _scalar_with_padding(self, size: int, padding: int) -> LossError:
        name = (self._scalars or (LOSS,))[0]
        return LossError(
            f"{name} is one number a batch, and {padding} of {size} rows in a batch of this feed "
            "are padding, which one number cannot leave out: return one value a row, or choose a "
            "batch size that divides the rows"
        )


def _check_alive(state: TrainState) -> None:
    # jax 0.10 does not raise for donated arrays on several devices: it kills the process.
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise StateError(
            "this state was consumed by an earlier step; use the one that step returned, or "
            "DataParallel(donate=False)"
        )


def _check_finite(metrics: Metrics) -> bool:
    loss = float(metrics[LOSS])
    if not math.isfinite(loss):
        raise LossError(
            f"the loss is {loss} in the first step; a run cannot recover from it: look at the "
            "batch and the initial parameters (jax_debug_nans finds the operation)"
        )
    return True
