"""`DataParallel`: init, feed, step and evaluate for a loss, an optimizer and a mesh."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from replicax.arguments import Count, Natural, Rows, Seed, typed, typed_but
from replicax.core.batch import Batch
from replicax.core.capacity import check_state_fits
from replicax.core.configuration import configure
from replicax.core.configured import Configured
from replicax.core.evaluation import ProgramEvaluation
from replicax.core.exact import MICRO_SHARDS
from replicax.core.feed import Feed
from replicax.core.job import Job
from replicax.core.layout import Layout, copied
from replicax.core.loss import LOSS
from replicax.core.mesh import by_rows
from replicax.core.modes import Mode
from replicax.core.objective import LossFunction
from replicax.core.optimizer import Trainable
from replicax.core.own import StepFunction
from replicax.core.partition import Rules
from replicax.core.ready import STEP, Ready, agree_on_model
from replicax.core.reduction import Reduction
from replicax.core.refused import check_kind
from replicax.core.sources import as_source
from replicax.core.undisturbed import of_one_thread
from replicax.core.update import Metrics, TrainState


class DataParallel(Configured):
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
            and a dict of metrics of the same kinds. The step minimises their global weighted mean.
            A scalar must be the mean over equally weighted rows; unequal weights are an error.
            In evaluation, `key` is None, and NNX and Equinox models are in evaluation mode.
        optimizer: an optax gradient transformation.
        step: `step(state, batch, key) -> (state, metrics)`, a custom step replacing the optimizer,
            over any pytree of state, written with `rx.value_and_grad` and `rx.mean`. `loss`, if
            given, is then used only by `evaluate`, on this state. See docs/step.md.
        mesh: the devices, with an axis named `data`; all attached devices by default, the first
            one in mode `single`.
        mode: `jit`, `shard_map`, `pmap`, `exact`, `single` or a custom `Mode`; see
            `replicax.core.modes`.
        layout: `replicated`, `zero1`, `fsdp` or rules; see `replicax.core.layout`.
        accumulate: gradient accumulation: the number of micro-batches per replica.
        micro_shards: in mode `exact`, the number of parts, a power of two, of a global batch on any
            number of devices. Device counts that divide it compute bitwise identical results.
        precision: `float32`, `bfloat16` or `float16`; see `replicax.core.precision.Precision`.
        reduction: how the replicas' sums are added in the per-replica modes: `float32`, `bfloat16`
            (half the bytes), or a custom one; see `replicax.core.reduction.Reduction`.
        trainable: which parameters train, all by default; see `replicax.core.optimizer.Trainable`.
        ema: decay of a moving average of the parameters; see `replicax.core.optimizer.averaging`.
        donate: whether `step` donates the input state's memory, which makes that state unusable.
        compiler_options: XLA options, by name, for the step. By default none, except on several
            GPUs, where reductions are allowed to overlap with computation.
        job: the processes that train together, from `rx.initialize()`; default: only this one.

    Raises:
        ConfigError: invalid or incompatible arguments.
    """

    @typed_but("loss", "optimizer", "step", "layout")
    def __init__(
        self,
        loss: LossFunction | None = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        step: StepFunction | None = None,
        mesh: Mesh | None = None,
        mode: str | Mode = "jit",
        layout: str | Rules | Layout = "replicated",
        accumulate: Count = 1,
        micro_shards: int = MICRO_SHARDS,
        precision: str = "float32",
        reduction: str | Reduction = "float32",
        trainable: Trainable = None,
        ema: float | None = None,
        donate: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        job: Job | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._configure(configure(**arguments))

    def __repr__(self) -> str:
        usual = {"accumulate": 1, "precision": "float32", "reduction": "float32"}
        names, devices = self.configuration.names().items(), self.mesh.devices
        chosen = [f"{name}={value!r}" for name, value in names if value != usual.get(name)]
        where = f"{devices.size} x {devices.flat[0].device_kind}"
        return f"DataParallel({', '.join([*chosen, where])})"

    @of_one_thread
    @typed
    def init(self, model: Any, *, seed: Seed = 0) -> TrainState:
        """Return the initial train state, each array placed by the layout.

        Args:
            model: a pytree of arrays, an Equinox module, a Flax NNX module, or a bound Linen one.
                It is copied; the caller's model is unchanged.
            seed: the seed of all random numbers in the run, 0 <= seed < 2**32.

        Raises:
            ConfigError: nothing to train, a different model structure, or too little memory.
        """
        definition, params, extras = self.configuration.split_model(model)
        program = self._adopt((definition, params, extras))
        jax.block_until_ready((params, extras))  # allocate before checking memory
        check_state_fits(program.abstract_state(), self.mesh)
        agree_on_model(self.job, (params, extras), seed)
        return program.init(params, extras, seed)

    @of_one_thread
    def abstract_state(self, model: Any) -> TrainState:
        """Return the shapes and shardings of `init(model)`; `step` then accepts such a state."""
        return self._adopt(self.configuration.split_model(model)).abstract_state()

    @typed
    def feed(
        self,
        source: Any,
        batch_size: Rows | None = None,
        *,
        shuffle: bool = False,
        seed: Seed = 0,
        epoch: Natural = 0,
        first: Natural = 0,
        prefetch: Natural = 2,
    ) -> Feed:
        """Return one epoch of `source` as batches for `step` and `evaluate`.

        Args:
            source: a dict or tuple of arrays `[rows, ...]`, a Grain dataset of rows, or an iterable
                of host batches, which does not need `batch_size`.
            batch_size: rows in a global batch; the last batch is padded to this size.
            shuffle: whether to shuffle the rows, depending on `seed` and `epoch`.
            seed: the seed for shuffling.
            epoch: the epoch number, from 0.
            first: the number of the first batch, from 0.
            prefetch: the number of batches to prepare ahead in the background. With 0, a source
                that reads what the loop changes (priorities, a replay buffer) sees all of it.

        Raises:
            ConfigError: a batch with fewer rows than micro-batches over all replicas, or a source
                that does not support these arguments.
            DataError: leaves with different numbers of rows.
        """
        opened = as_source(source, batch_size, self.job, shuffle=shuffle, seed=seed)
        where, cut = by_rows(self.mesh), self.split
        return Feed(opened, cut, where, self.job, epoch=epoch, first=first, prefetch=prefetch)

    @of_one_thread
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run one training step; return without waiting unless devices are several steps behind.

        Args:
            state: the state before the step; with `donate`, it cannot be used afterwards.
            batch: from `feed`, or a pytree of arrays `[rows, ...]`, the same in every process.

        Returns:
            The state after the step, and metrics including `"loss"`: float32 scalars on the device,
            each the exact weighted mean over the real rows of the global batch.

        Raises:
            ConfigError: the first step needs more memory than is available.
            LossError: the loss violates its contract, or is not finite in the first step.
            StateError: the state was already passed to `step`.
        """
        if type(batch) is not Batch:
            batch = self._checks.placed(batch)
        batch = self.prepare(state, batch)
        self.job.move()
        self.job.in_flight.enter()
        state, metrics = self._known.step(state, batch)
        self.job.in_flight.add(metrics[LOSS])
        self._checks.check_result(state, metrics)
        return state, metrics

    @of_one_thread
    def prepare(self, state: TrainState, batch: Batch) -> Batch:
        """Prepare the first `step`: check the loss, agree with other processes, and compile.

        Returns the batch to compute, usually `batch`.
        """
        batch = self._checks.check(STEP, self._known.step, state, batch)
        self._checks.check_memory(state, batch)
        return batch

    def evaluate(
        self,
        state: TrainState,
        batches: Any,
        *,
        loss: LossFunction | None = None,
        ema: bool = False,
    ) -> dict[str, Any]:
        """Return loss and metrics over all rows of `batches`, each row counted once.

        Args:
            state: the train state; not modified.
            batches: from `feed`, or any pytrees of arrays `[rows, ...]`; or a dict of these.
            loss: another loss, or metrics, to evaluate.
            ema: whether to use the moving average of the parameters.

        Returns:
            The exact weighted mean of each, NaN if the total weight is 0, and `"rows"`; for a dict
            of batches, a dict of these.
        """
        state = self._known.averaged(state) if ema else state
        if isinstance(batches, Mapping):
            means = self._evaluation.means
            return {name: means(state, each, loss) for name, each in batches.items()}
        return self._evaluation.means(state, batches, loss)

    def predict(
        self,
        function: LossFunction,
        state: TrainState,
        batches: Iterable[Any],
        *,
        ema: bool = False,
    ) -> Any:
        """Return the outputs of `function` for all rows of `batches`, without padding.

        Args:
            function: `function(model, batch, key)` -> a pytree of arrays `[rows, ...]`; the model
                is in evaluation mode, and `key` is None.
            state: the train state; not modified.
            batches: as for `evaluate`; rows are returned in this order.
            ema: as for `evaluate`.

        Returns:
            The pytree of NumPy arrays `[all rows, ...]`, on every process.

        Raises:
            LossError: an output without rows, or rows that mix where not all of a batch are seen.
        """
        state = self._known.averaged(state) if ema else state
        return self._evaluation.rows(function, state, batches)

    @of_one_thread
    def check(self, feed: Feed) -> None:
        """Raise `LossError` if the loss, once examined by `step`, cannot be evaluated on `feed`."""
        self._checks.check_feed(feed)

    @of_one_thread
    def model(self, state: TrainState, *, copy: bool = True, ema: bool = False) -> Any:
        """Return the user's model with the arrays of `state`.

        Args:
            state: the train state; not modified.
            copy: whether to copy the arrays. Otherwise the next step deletes them.
            ema: as for `evaluate`.
        """
        check_kind(state)
        state = self._known.averaged(state) if ema else state
        arrays = state.params, state.extras
        return self._known.definition.merge(*(copied(arrays) if copy and self.donate else arrays))

    @cached_property
    def _checks(self) -> Ready:
        return Ready(self._known)

    @cached_property
    def _evaluation(self) -> ProgramEvaluation:
        return ProgramEvaluation(self._known, self._checks)
