"""Data-parallel training for JAX that proves itself.

Importing the package loads none of its modules; each public name is imported on first use.
"""

import importlib
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from replicax import losses as losses
    from replicax import remat as remat
    from replicax import weights as weights
    from replicax.bench.bench_result import Bench as Bench
    from replicax.bench.run import bench as bench
    from replicax.cluster.watchdog import Timeouts as Timeouts
    from replicax.core.between.rounds import Rounds as Rounds
    from replicax.core.custom.summing import mean as mean
    from replicax.core.custom.summing import value_and_grad as value_and_grad
    from replicax.core.data.batch import Batch as Batch
    from replicax.core.data.batch import RowSet as RowSet
    from replicax.core.data.batch import Shared as Shared
    from replicax.core.data.feed import Feed as Feed
    from replicax.core.data.merged import AllRows as AllRows
    from replicax.core.data.merged import Merged as Merged
    from replicax.core.data.per_row import PerRow as PerRow
    from replicax.core.data.sources import PerProcess as PerProcess
    from replicax.core.data_parallel import DataParallel as DataParallel
    from replicax.core.ground.job import Job as Job
    from replicax.core.ground.train_state import TrainState as TrainState
    from replicax.core.models.stateful import Stateful as Stateful
    from replicax.core.models.stateful import Written as Written
    from replicax.core.modes.mode_table import Mode as Mode
    from replicax.core.placement.layout import layout as layout
    from replicax.core.placement.mesh import make_mesh as make_mesh
    from replicax.core.step.coded import Coded as Coded
    from replicax.core.step.loss import Weighted as Weighted
    from replicax.core.step.loss_context import gather as gather
    from replicax.core.step.loss_context import independent as independent
    from replicax.core.step.loss_context import row_numbers as row_numbers
    from replicax.core.step.loss_context import row_weights as row_weights
    from replicax.core.step.loss_context import step_number as step_number
    from replicax.core.step.reduction import Reduction as Reduction
    from replicax.errors import AgreementError as AgreementError
    from replicax.errors import CheckpointError as CheckpointError
    from replicax.errors import ClusterError as ClusterError
    from replicax.errors import CompilerError as CompilerError
    from replicax.errors import ConfigError as ConfigError
    from replicax.errors import DataError as DataError
    from replicax.errors import DivergedError as DivergedError
    from replicax.errors import IslandLeftError as IslandLeftError
    from replicax.errors import LossError as LossError
    from replicax.errors import MissingDependencyError as MissingDependencyError
    from replicax.errors import ReplicasDifferError as ReplicasDifferError
    from replicax.errors import ReplicaxError as ReplicaxError
    from replicax.errors import RunInUseError as RunInUseError
    from replicax.errors import StateError as StateError
    from replicax.islands.initialize import initialize as initialize
    from replicax.load_run import load as load
    from replicax.load_run import load_model as load_model
    from replicax.optimizers import by_matrix as by_matrix
    from replicax.optimizers import muon as muon
    from replicax.plan.planned import Plan as Plan
    from replicax.plan.planner import plan as plan
    from replicax.train.folder.load import Loaded as Loaded
    from replicax.train.folder.saving import Saving as Saving
    from replicax.train.guarded import Guard as Guard
    from replicax.train.hooks.audit import Audit as Audit
    from replicax.train.hooks.best import EarlyStopping as EarlyStopping
    from replicax.train.hooks.best import KeepBest as KeepBest
    from replicax.train.hooks.dump_hlo import DumpHLO as DumpHLO
    from replicax.train.hooks.figures import DeviceMemory as DeviceMemory
    from replicax.train.hooks.figures import GradientNorm as GradientNorm
    from replicax.train.hooks.figures import LearningRate as LearningRate
    from replicax.train.hooks.figures import Throughput as Throughput
    from replicax.train.hooks.hook import Hook as Hook
    from replicax.train.hooks.logger import CSV as CSV
    from replicax.train.hooks.logger import Logger as Logger
    from replicax.train.hooks.noise_scale import NoiseMeter as NoiseMeter
    from replicax.train.hooks.profile import Profile as Profile
    from replicax.train.hooks.tensorboard import TensorBoard as TensorBoard
    from replicax.train.hooks.trackers import Comet as Comet
    from replicax.train.hooks.trackers import MLflow as MLflow
    from replicax.train.hooks.trackers import Trackio as Trackio
    from replicax.train.hooks.trackers import WandB as WandB
    from replicax.train.run.evaluator import Evaluation as Evaluation
    from replicax.train.run.fit import Run as Run
    from replicax.train.run.fit import fit as fit
    from replicax.train.run.stopping import Interrupt as Interrupt
    from replicax.train.run.summary import Fit as Fit
    from replicax.verified import verify as verify
    from replicax.verify.step import verify_step as verify_step
    from replicax.verify.verification import Verification as Verification
    from replicax.weights.load_weights import load_weights as load_weights
    from replicax.weights.save_weights import save_weights as save_weights

_MODULE_OF = {
    "AgreementError": "errors",
    "AllRows": "core.data.merged",
    "Audit": "train.hooks.audit",
    "Batch": "core.data.batch",
    "Bench": "bench.bench_result",
    "CSV": "train.hooks.logger",
    "CheckpointError": "errors",
    "ClusterError": "errors",
    "Coded": "core.step.coded",
    "Comet": "train.hooks.trackers",
    "CompilerError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DataParallel": "core.data_parallel",
    "DeviceMemory": "train.hooks.figures",
    "DivergedError": "errors",
    "DumpHLO": "train.hooks.dump_hlo",
    "EarlyStopping": "train.hooks.best",
    "Evaluation": "train.run.evaluator",
    "Feed": "core.data.feed",
    "Fit": "train.run.summary",
    "GradientNorm": "train.hooks.figures",
    "Guard": "train.guarded",
    "Hook": "train.hooks.hook",
    "Interrupt": "train.run.stopping",
    "IslandLeftError": "errors",
    "Job": "core.ground.job",
    "KeepBest": "train.hooks.best",
    "LearningRate": "train.hooks.figures",
    "Loaded": "train.folder.load",
    "Logger": "train.hooks.logger",
    "LossError": "errors",
    "MLflow": "train.hooks.trackers",
    "Merged": "core.data.merged",
    "MissingDependencyError": "errors",
    "Mode": "core.modes.mode_table",
    "NoiseMeter": "train.hooks.noise_scale",
    "PerProcess": "core.data.sources",
    "PerRow": "core.data.per_row",
    "Plan": "plan.planned",
    "Profile": "train.hooks.profile",
    "Reduction": "core.step.reduction",
    "ReplicasDifferError": "errors",
    "ReplicaxError": "errors",
    "Rounds": "core.between.rounds",
    "RowSet": "core.data.batch",
    "Run": "train.run.fit",
    "RunInUseError": "errors",
    "Saving": "train.folder.saving",
    "Shared": "core.data.batch",
    "StateError": "errors",
    "Stateful": "core.models.stateful",
    "TensorBoard": "train.hooks.tensorboard",
    "Throughput": "train.hooks.figures",
    "Timeouts": "cluster.watchdog",
    "Trackio": "train.hooks.trackers",
    "TrainState": "core.ground.train_state",
    "Verification": "verify.verification",
    "WandB": "train.hooks.trackers",
    "Weighted": "core.step.loss",
    "Written": "core.models.stateful",
    "bench": "bench.run",
    "by_matrix": "optimizers",
    "fit": "train.run.fit",
    "gather": "core.step.loss_context",
    "independent": "core.step.loss_context",
    "initialize": "islands.initialize",
    "layout": "core.placement.layout",
    "load": "load_run",
    "load_model": "load_run",
    "load_weights": "weights.load_weights",
    "make_mesh": "core.placement.mesh",
    "mean": "core.custom.summing",
    "muon": "optimizers",
    "plan": "plan.planner",
    "row_numbers": "core.step.loss_context",
    "row_weights": "core.step.loss_context",
    "save_weights": "weights.save_weights",
    "step_number": "core.step.loss_context",
    "value_and_grad": "core.custom.summing",
    "verify": "verified",
    "verify_step": "verify.step",
}

_MODULES = ("losses", "remat", "weights")

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"replicax.{name}")
    if (module := _MODULE_OF.get(name)) is None:
        raise AttributeError(f"module 'replicax' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"replicax.{module}"), name)
    return value


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: typing.Any) -> None:
        # Importing a subpackage would bind its name here: `rx.plan` stays the function.
        if not (name in _MODULE_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
