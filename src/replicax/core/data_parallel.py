"""`DataParallel`: init, feed, step and evaluate for a loss, an optimizer and a mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import optax
from jax.sharding import Mesh

from replicax.core.between.rounds import Rounds
from replicax.core.config import Configuration, resolved
from replicax.core.custom.custom_step import StepFunction
from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed, Split
from replicax.core.data.given import batches_given
from replicax.core.data.per_row import as_result, real_rows
from replicax.core.data.share import Batches, FeedItem
from replicax.core.data.sources import as_source
from replicax.core.first_step.argument_checks import check_is_state, check_kind, check_shapes
from replicax.core.first_step.memory_check import check_state_fits
from replicax.core.ground.codecs import ReductionName
from replicax.core.ground.job import Job
from replicax.core.ground.precision import PrecisionName
from replicax.core.ground.train_state import ModelT, TrainState
from replicax.core.models.definition import SplitModel
from replicax.core.modes.exact.exact_mode import MICRO_SHARDS
from replicax.core.modes.mode_table import Mode, ModeName, as_mode
from replicax.core.placement.dispatch_context import serialized
from replicax.core.placement.layout import Layout, LayoutName, copied
from replicax.core.placement.mesh import AnyMesh, by_rows, check_mesh
from replicax.core.placement.sharding_rules import Rules
from replicax.core.program import Program, parts_of, program_of
from replicax.core.step.base import Apply
from replicax.core.step.loss import LOSS
from replicax.core.step.objective import LossFunction
from replicax.core.step.optimizer import Trainable
from replicax.core.step.reduction import Reduction
from replicax.errors import ConfigError, StateError
from replicax.text.arguments import Count, Int32Count, Natural, Seed, typed, typed_but

if TYPE_CHECKING:  # imported on first use: they need twice as many modules as the rest
    from replicax.core.call_checks import CallChecks
    from replicax.core.evaluation import ProgramEvaluation
    from replicax.core.several_steps import SeveralSteps
    from replicax.core.state_summary import StateSummary


class DataParallel:
    """A data-parallel training step over the devices of a mesh.

    Examples:
        >>> dp = DataParallel(loss, optax.adamw(3e-4))
        >>> state = dp.init(model)
        >>> for batch in dp.feed(source, batch_size=256):
        ...     state, metrics = dp.step(state, batch)
        >>> model = dp.model(state)

    Args:
        loss: `loss(model, batch, key) -> values`, with `batch` the user's pytree of arrays
            `[rows, ...]` and `values` floats `[rows, ...]`, an `rx.Weighted`, or a pair of either
            and a dict of metrics of the same kinds, or with `merge` and `compute`. The step
            minimises their global weighted mean. A scalar must be the mean over equally weighted
            rows; unequal weights are an error.
            In a step, NNX and Equinox models are in training mode; in evaluation, `key` is None,
            and they are in inference mode.
        optimizer: an optax gradient transformation.
        step: `step(state, batch, key) -> (state, metrics)`, a custom step replacing the optimizer,
            over any pytree of state, written with `rx.value_and_grad` and `rx.mean`. `loss`, if
            given, is then used only by `evaluate`, on this state. See docs/step.md.
        mesh: the devices, with an axis named `data`; all attached devices by default, the first
            one in mode `single`.
        mode: `jit`, `shard_map`, `pmap`, `exact`, `single` or a custom
            `rx.types.Mode`.
        layout: `replicated`, `zero1`, `fsdp` or rules; see `rx.layout`.
        accumulate: gradient accumulation: the number of micro-batches per replica.
        micro_shards: in mode `exact`, the number of parts, a power of two, of a global batch on any
            number of devices. Device counts that divide it compute bitwise identical results.
        precision: `float32`, `bfloat16` or `float16`; see
            `Precision`.
        reduction: how the replicas' sums are added in the per-replica modes: `float32`, `bfloat16`,
            `int8`, `int4` (see `rx.Coded`), or a custom one (`rx.types.Reduction`).
        trainable: which parameters train, all by default; see
            `Trainable`.
        ema: decay of a moving average of the parameters; see
            docs/parameters.md.
        donate: whether `step` donates the input state's memory, which makes that state unusable.
        compiler_options: XLA options, by name, for the step, after those that avoid known wrong
            numbers. By default none, but on several GPUs reductions overlap with computation.
        tuning: in mode `exact` on NVIDIA GPUs, a file of kernels written by `record_tuning`. By
            default the first kernel of each product is used, which is slower.
        job: the processes that train together; by default those that `rx.initialize()` joined.
        rounds: `rx.Rounds` of several steps between exchanges; by default sums in each step.

    Raises:
        ConfigError: invalid or incompatible arguments.
    """

    @typed_but("loss", "optimizer", "step", "layout", "precision")
    def __init__(
        self,
        loss: LossFunction | None = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        step: StepFunction | None = None,
        mesh: Mesh | None = None,
        mode: ModeName | Mode = "jit",
        layout: LayoutName | Rules | Layout = "replicated",
        accumulate: Count = 1,
        micro_shards: int = MICRO_SHARDS,
        precision: PrecisionName = "float32",
        reduction: ReductionName | Reduction = "float32",
        trainable: Trainable = None,
        ema: float | None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        tuning: str | Path | None = None,
        job: Job | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        given = {**locals(), "wrap_apply": None}
        del given["self"]
        self._configure(resolved(**given))

    @serialized
    @typed
    def init(self, model: ModelT, *, seed: Seed = 0) -> TrainState[ModelT]:
        """Return the initial train state, each array placed by the layout.

        Args:
            model: a pytree of arrays, an Equinox module, a Flax NNX module, or a bound Linen one.
                It is copied; the caller's model is unchanged. Steps set training mode in all its
                parts: set the mode of a part in the loss.
            seed: the seed of all random numbers in the run, 0 <= seed < 2**32.

        Raises:
            ConfigError: nothing to train, a different model structure, only some parts in inference
                mode, or too little memory.
            DataError: a 64-bit number that has no 32-bit value, without `jax_enable_x64`.
        """
        from replicax.core.call_checks import agree_on_model

        definition, params, extras = self.configuration.split_model(model, self.mesh)
        program = self._adopt((definition, params, extras))
        jax.block_until_ready((params, extras))  # allocate before checking memory
        check_state_fits(program.abstract_state(), self.mesh)
        agree_on_model(self.job, (params, extras), seed)
        return program.init(params, extras, seed)

    @serialized
    def abstract_state(self, model: ModelT | None = None) -> TrainState[ModelT]:
        """Return the shapes and shardings of `init(model)`; without it, those of the model known.

        Raises:
            StateError: no model is known yet.
        """
        if model is None:
            return self._known.abstract_state()
        return self._adopt(self.configuration.split_model(model, self.mesh)).abstract_state()

    @typed
    def feed(
        self,
        source: Any,
        batch_size: Int32Count | None = None,
        *,
        shuffle: bool = False,
        seed: Seed = 0,
        epoch: Natural = 0,
        first: Natural = 0,
        prefetch: Natural | None = None,
        stack: Count | None = None,
    ) -> Feed:
        """Return one epoch of `source` as batches for `step` and `evaluate`.

        Args:
            source: a dict or tuple of arrays `[rows, ...]`, a Grain dataset of rows, or an iterable
                of host batches, which does not need `batch_size`.
            batch_size: rows in a global batch; the last batch is padded to this size.
            shuffle: whether to shuffle the rows by `seed` and `epoch`; `rx.fit` does by default.
            seed: the seed for shuffling.
            epoch: the epoch number, from 0.
            first: the number of the first batch, from 0.
            prefetch: the number of batches to prepare ahead in the background: by default 2, and 0
                of a generator, which may read what the loop changes (priorities, a replay buffer).
            stack: yield so many batches as one, for `steps`; the last of an epoch may be fewer.

        Raises:
            ConfigError: a batch with fewer rows than micro-batches over all replicas, or a source
                that does not support these arguments.
            DataError: leaves with different numbers of rows.
        """
        opened = as_source(source, batch_size, self.job, shuffle=shuffle, seed=seed)
        where, cut = by_rows(self.mesh), self.split
        feed = Feed(opened, cut, where, self.job, epoch=epoch, first=first, prefetch=prefetch)
        return feed if stack is None else feed.at(epoch, first, stack)

    @serialized
    def step(
        self, state: TrainState[ModelT], batch: Any
    ) -> tuple[TrainState[ModelT], dict[str, Any]]:
        """Run one training step; return without waiting unless devices are several steps behind.

        Inside `jax.jit`, `jax.lax.scan` or `jax.vmap` it is a pure function of whole arrays, and a
        part of that program; see docs/step.md.

        Args:
            state: the state before the step; with `donate`, it cannot be used afterwards.
            batch: from `feed`, or a pytree of arrays `[rows, ...]`, the same in every process.

        Returns:
            The state after the step, and metrics: `"loss"` and other float32 scalars, exact means
            over the real rows of the global batch, each `rx.ByRow`, and for each metric that is no
            mean an `rx.types.Merged`.

        Raises:
            ConfigError: the first step needs more memory than is available.
            LossError: the loss violates its contract, or is not finite in the first step.
            StateError: the state was already passed to `step`.
        """
        if self._program is None:
            self._of(state)
        if self._checks.is_traced(state, batch):
            return self._traced_step(state, self._checks.traced(state, batch))
        placed = batch if type(batch) is Batch else self._checks.placed(batch)
        state = self._checks.taken(state)
        batch = self.prepare(state, placed)
        self.job.move()
        self.job.in_flight.enter()  # before the dispatch, which may wait for other processes
        state, means, rows = self._checks.program.step(state, batch)
        self.job.in_flight.add(means[LOSS])
        self._checks.check_result(state, means)
        return state, means | {name: as_result(rows[name], batch.mask) for name in rows}

    @serialized
    def steps(
        self, state: TrainState[ModelT], batches: Any
    ) -> tuple[TrainState[ModelT], dict[str, Any]]:
        """Run a training step on each of several batches, as one dispatched program.

        In modes whose step takes several programs, and with `rounds`, steps are dispatched one
        after another, with the bits of `step`.

        Examples:
            >>> for batches in dp.feed(source, batch_size=32, stack=4):
            ...     state, metrics = dp.steps(state, batches)
            >>> metrics["loss"].shape
            (4,)

        Args:
            state: as for `step`.
            batches: from `feed` with `stack`; a list of batches of the same shapes, as for `step`;
                or a pytree of arrays `[steps, rows, ...]`.

        Returns:
            The state after the last step, and metrics as those of `step`, each `[steps, ...]`.
        """
        self._of(state)
        placed = batches if type(batches) is Batches else self._checks.placed_all(batches)
        state = self._checks.taken(state)
        program = self._several.prepare(state, placed)
        if program is None:
            return self._several.one_by_one(state, placed, self.step)
        state, means, rows = self._several.run(program, state, placed)
        mask = placed.stack.mask
        return state, means | {name: as_result(rows[name], mask) for name in rows}

    @serialized
    def place(self, state: TrainState[ModelT]) -> TrainState[ModelT]:
        """Return a state that another `DataParallel` may have made, placed by this one's layout.

        Other methods do so, too. Arrays that lie where they belong are not copied. `StateError` if
        the model, the optimizer, the precision or the reduction differs.
        """
        self._of(state)
        return self._checks.taken(state)

    @serialized
    def end_round(self, state: TrainState[ModelT]) -> TrainState[ModelT]:
        """Return the state after a last, shorter round of `rounds`; without them, `state`."""
        check_is_state(state)
        return self.configuration.between.end_round(self._of(state).step, state)

    @serialized
    def prepare(self, state: TrainState, batch: FeedItem) -> Any:
        """Prepare the first `step`, or `steps`: check the loss, agree with others, and compile.

        Returns the batch to compute, usually `batch`.
        """
        if isinstance(batch, Batches):
            self._several.prepare(state, batch)
            return batch
        return self._checks.checked_step(state, batch)

    @typed_but("state", "loss")
    def evaluate(
        self,
        state: TrainState,
        source: Any,
        *,
        batch_size: Int32Count | None = None,
        loss: LossFunction | None = None,
        ema: bool = False,
    ) -> dict[str, Any]:
        """Return loss and metrics over all rows of `source`, each row counted once.

        Examples:
            >>> dp.evaluate(dp.init(model), held_out, batch_size=32)["rows"]
            256

        Args:
            state: the train state; not modified.
            source: as for `feed`, or one. Arrays `[rows, ...]` without `batch_size` are one batch,
                as in `step`. A dict of feeds, or of other sources that are no arrays, is several.
            batch_size: rows in a global batch, into which `feed` cuts and pads the source.
            loss: another loss, or metrics, to evaluate.
            ema: whether to use the moving average of the parameters.

        Returns:
            The exact weighted mean of each, NaN if the total weight is 0, what metrics that are no
            means compute of all rows, and `"rows"`; for a dict of sources, a dict of these.
        """
        state = self.place(state)
        batches = batches_given(source, batch_size, self.feed)
        return self._evaluation.means(state, batches, loss, ema=ema)

    @typed_but("function", "state")
    def predict(
        self,
        state: TrainState,
        source: Any,
        function: LossFunction | Callable[[Any, Any], Any],
        *,
        batch_size: Int32Count | None = None,
        ema: bool = False,
    ) -> Any:
        """Return the outputs of `function` for all rows of `source`, without padding.

        Args:
            state: the train state; not modified.
            source: as for `evaluate`, but only one; rows are returned in this order.
            function: `function(model, batch)` -> a pytree of arrays `[rows, ...]`; the model is in
                evaluation mode. With a third parameter, `key`, it gets None, as a loss does.
            batch_size: as for `evaluate`.
            ema: as for `evaluate`.

        Returns:
            The pytree of NumPy arrays `[all rows, ...]`, on every process.

        Raises:
            LossError: an output without rows, or rows that mix where not all of a batch are seen.
        """
        state = self.place(state)
        batches = batches_given(source, batch_size, self.feed)
        return self._evaluation.rows(state, batches, function, ema=ema)

    @serialized
    def check(self, feed: Feed) -> None:
        """Raise `LossError` if the loss, once examined by `step`, cannot be evaluated on `feed`."""
        self._checks.check_feed(feed)

    @serialized
    def model(self, state: TrainState[ModelT], *, copy: bool = True, ema: bool = False) -> ModelT:
        """Return the user's model with the arrays of `state`, in inference mode.

        NNX as by `model.eval()`, Equinox as by `eqx.nn.inference_mode`; in Linen a call's arguments
        say it, as in `model(x, train=False)`. The state of a custom step has the modes that it was
        given with.

        Args:
            state: the train state; not modified.
            copy: whether to copy the arrays. Otherwise the next step deletes them.
            ema: as for `evaluate`.
        """
        check_kind(state)
        program = self._of(state)
        state = program.averaged(state) if ema else state
        arrays = real_rows((state.params, state.extras))
        definition = program.definition
        model = definition.merge(*(copied(arrays) if copy and self.donate else arrays))
        trained: ModelT = definition.in_inference(model)
        return trained

    def __repr__(self) -> str:
        usual = {"accumulate": 1, "precision": "float32", "reduction": "float32"}
        names, devices = self.configuration.names().items(), self.mesh.devices
        chosen = [f"{name}={value!r}" for name, value in names if value != usual.get(name)]
        where = f"{devices.size} x {devices.flat[0].device_kind}"
        return f"DataParallel({', '.join([*chosen, where])})"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some arguments changed, which knows no model yet.

        With an `AbstractMesh`, the copy compiles for devices that need not exist and runs nothing.
        """
        other = object.__new__(type(self))
        chosen = {"mesh": self.mesh, "job": self.job, **changes}
        if "mode" in changes and not as_mode(changes["mode"]).bitwise:
            chosen["tuning"] = None  # other modes record no kernels
        other._configure(resolved(**{**self.configuration.arguments, **chosen}))
        return other

    @serialized
    def wrapping(self, wrap: Callable[[Apply], Apply], state: TrainState) -> Self:
        """Return a cached copy whose optimizer part of the step is `wrap(apply)`.

        `wrap` is a module-level function; `state`, or its shapes, is this object's or `wrap`'s.
        """
        shapes = jax.eval_shape(lambda leaf: leaf, state)
        key = (wrap, jax.tree.structure(shapes))
        if key not in self._wrapped:
            other = self._wrapped[key] = self.replace(wrap_apply=wrap)
            other._program = program_of(other.configuration, shapes, self.mesh, self._program)
        return self._wrapped[key]

    @property
    def split(self) -> Split:
        """The split of a batch over replicas and micro-batches."""
        return self.configuration.split(self.mesh)

    @serialized
    def program(self, model: Any, *, mesh: AnyMesh | None = None) -> Program:
        """Return the step and the evaluation of a model, without compiling anything.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            mesh: of attached or described devices, or one that has only their number; default:
                `self.mesh`.
        """
        is_state = isinstance(model, TrainState)
        where = self.mesh if mesh is None else check_mesh(mesh)
        described = model if is_state else self.configuration.split_model(model, where)
        return program_of(self.configuration, described, where, self._program)

    @serialized
    def lower(self, model: Any, batch: Any, *, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """Lower the step for `mesh`, attached or described, without running or placing anything.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            batch: a `Batch` or a pytree `[rows, ...]`; arrays or their shapes.
            mesh: default: `self.mesh`. `step` reuses what is compiled here for its arguments.
        """
        lowered: jax.stages.Lowered = self.trace(model, batch, mesh=mesh).lower()
        return lowered

    @serialized
    def trace(self, model: Any, batch: Any, *, mesh: AnyMesh | None = None) -> jax.stages.Traced:
        """Trace the step as `lower` does, without lowering it."""
        program = self.program(model, mesh=mesh)
        placed = program.holds(model, batch)
        arguments = (model, batch) if placed else (program.shapes, program.batches.described(batch))
        traced: jax.stages.Traced = program.step.trace(*arguments)
        return traced

    @serialized
    def record_tuning(self, model: Any, batch: Any, folder: str | Path) -> Path:
        """Measure which kernels of the step are fastest, and write the choices to a new file.

        For mode `exact`, on one NVIDIA GPU. Train with the file in another process, on any number
        of GPUs of this kind. The step is compiled twice: first to choose, and then to check that
        all its kernels are in the file.

        Args:
            model: as for `init`, or a `TrainState`; arrays or their shapes.
            batch: a `Batch` or a pytree `[rows, ...]` as in training; arrays or their shapes.
            folder: of the file, whose name is the start of the SHA-256 of its content.

        Returns:
            The path, for the argument `tuning`.

        Raises:
            ConfigError: another mode, platform or number of devices, or a convolution.
        """
        from replicax.core.modes.exact.tuning import check_records, recorded_kernels

        check_records(self.mode, self.mesh)

        def compiled(options: Mapping[str, Any]) -> Sequence[Any]:
            program = self.replace(compiler_options=options, tuning=None).program(model)
            return program.step.compiled(program.shapes, program.batches.described(batch))

        return recorded_kernels(compiled, Path(folder))

    @serialized
    def summary(self, state: Any) -> "StateSummary":
        """Return the arrays of a state as a table to print: parts, what trains, memory.

        Paths are cut, and numbers in them are `*`, until there are at most 20 parts.

        Examples:
            >>> print(dp.summary(dp.init({"w": jnp.zeros(3), "b": jnp.zeros(())})))
                   numbers  per device
            model  b            1  4 B  trained  float32[]

        Args:
            state: a `TrainState`, or a model as for `init`; arrays or their shapes. Placed as by
                this object's layout.
        """
        from replicax.core.state_summary import summary_of

        return summary_of(self.program(state))

    @property
    def knows_model(self) -> bool:
        """Whether a model was given to it, by `init` or by a state."""
        return self._program is not None

    def _configure(self, configuration: Configuration) -> None:
        self.configuration = chosen = configuration
        self.loss, self.optimizer, self.mesh = chosen.loss, chosen.optimizer, chosen.mesh
        self.mode, self.layout, self.precision = chosen.mode, chosen.layout, chosen.precision
        self.accumulate, self.micro_shards = chosen.accumulate, chosen.micro_shards
        self.reduction, self.donate, self.job = chosen.reduction, chosen.donate, chosen.job
        self._program: Program | None = None
        self._wrapped: dict[Any, Self] = {}

    def _adopt(self, parts: SplitModel) -> Program:
        """Return the program of a model, and keep it as this object's if it is the first."""
        program = program_of(self.configuration, parts, self.mesh, self._program)
        self._program = self._program or program
        return program

    def _of(self, state: TrainState) -> Program:
        """Return the program of this object's model; the first state brings it, if not `init`."""
        if self._program is None:
            check_is_state(state)
            parts = parts_of(state, self.configuration, self.mesh)
            program = program_of(self.configuration, parts, self.mesh, None)
            check_shapes(dataclasses.replace(state, losses=()), program.shapes)
            self._program = program
        return self._program

    @property
    def _known(self) -> Program:
        if self._program is None:
            raise StateError(
                "this DataParallel has no model yet: write state = dp.init(model), or pass "
                "dp.abstract_state(model)"
            )
        return self._program

    @cached_property
    def _checks(self) -> "CallChecks":
        from replicax.core.call_checks import CallChecks

        return CallChecks(self._known)

    @cached_property
    def _evaluation(self) -> "ProgramEvaluation":
        from replicax.core.evaluation import ProgramEvaluation

        return ProgramEvaluation(self._known, self._checks)

    @cached_property
    def _several(self) -> "SeveralSteps":
        from replicax.core.several_steps import SeveralSteps

        return SeveralSteps(self._known, self._checks)

    def _traced_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        inline = self._known.step.inline
        if inline is None:
            raise ConfigError(
                f"dp.step inside a transformation with {self!r}, whose step takes several "
                "programs: call dp.steps(state, batches) outside of it, or use mode='jit' without "
                "rounds"
            )
        state, means, rows = inline(state, batch)
        return state, means | {name: as_result(rows[name], batch.mask) for name in rows}
