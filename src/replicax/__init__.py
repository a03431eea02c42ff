"""Data-parallel training for JAX that proves itself.

Importing the package loads none of its modules; each public name is imported on first use.
"""

import importlib
import sys
import typing
from types import ModuleType

if typing.TYPE_CHECKING:
    from replicax import errors as errors
    from replicax import hooks as hooks
    from replicax import losses as losses
    from replicax import optimizers as optimizers
    from replicax import remat as remat
    from replicax import types as types
    from replicax import weights as weights
    from replicax.bench.run import bench as bench
    from replicax.core.between.rounds import Rounds as Rounds
    from replicax.core.custom.summing import mean as mean
    from replicax.core.custom.summing import value_and_grad as value_and_grad
    from replicax.core.data.batch import Batch as Batch
    from replicax.core.data.batch import ExtraRows as ExtraRows
    from replicax.core.data.batch import Replicated as Replicated
    from replicax.core.data.merged import HostMetric as HostMetric
    from replicax.core.data.per_row import ByRow as ByRow
    from replicax.core.data.sources import ProcessLocal as ProcessLocal
    from replicax.core.data_parallel import DataParallel as DataParallel
    from replicax.core.ground.train_state import TrainState as TrainState
    from replicax.core.models.stateful import NewState as NewState
    from replicax.core.models.stateful import Stateful as Stateful
    from replicax.core.placement.layout import layout as layout
    from replicax.core.placement.mesh import make_mesh as make_mesh
    from replicax.core.step.coded import Coded as Coded
    from replicax.core.step.loss import Weighted as Weighted
    from replicax.core.step.loss_context import gather as gather
    from replicax.core.step.loss_context import independent as independent
    from replicax.core.step.loss_context import row_numbers as row_numbers
    from replicax.core.step.loss_context import row_weights as row_weights
    from replicax.core.step.loss_context import step_number as step_number
    from replicax.errors import ReplicaxError as ReplicaxError
    from replicax.islands.initialize import initialize as initialize
    from replicax.load_run import load as load
    from replicax.load_run import load_model as load_model
    from replicax.plan.planner import plan as plan
    from replicax.train.folder.saving import Saving as Saving
    from replicax.train.guarded import Guard as Guard
    from replicax.train.hooks.hook import Hook as _Hook
    from replicax.train.run.evaluator import Evaluation as Evaluation
    from replicax.train.run.fit import Run as Run
    from replicax.train.run.fit import fit as fit
    from replicax.verified import verify as verify
    from replicax.verify.step import verify_step as verify_step
    from replicax.weights.load_weights import load_weights as load_weights
    from replicax.weights.save_weights import save_weights as save_weights

    Hook = _Hook[Run]
    """A hook whose methods get an `rx.Run`, which the module of hooks cannot name."""

_MODULE_OF = {
    "Batch": "core.data.batch",
    "ByRow": "core.data.per_row",
    "Coded": "core.step.coded",
    "DataParallel": "core.data_parallel",
    "Evaluation": "train.run.evaluator",
    "ExtraRows": "core.data.batch",
    "Guard": "train.guarded",
    "Hook": "train.hooks.hook",
    "HostMetric": "core.data.merged",
    "NewState": "core.models.stateful",
    "ProcessLocal": "core.data.sources",
    "Replicated": "core.data.batch",
    "ReplicaxError": "errors",
    "Rounds": "core.between.rounds",
    "Run": "train.run.fit",
    "Saving": "train.folder.saving",
    "Stateful": "core.models.stateful",
    "TrainState": "core.ground.train_state",
    "Weighted": "core.step.loss",
    "bench": "bench.run",
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
    "plan": "plan.planner",
    "row_numbers": "core.step.loss_context",
    "row_weights": "core.step.loss_context",
    "save_weights": "weights.save_weights",
    "step_number": "core.step.loss_context",
    "value_and_grad": "core.custom.summing",
    "verify": "verified",
    "verify_step": "verify.step",
}

_MODULES = ("errors", "hooks", "losses", "optimizers", "remat", "types", "weights")
_ROOMS = ("hooks", "errors", "optimizers", "types")
"""Modules of public names that few programs write."""

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __dir__() -> list[str]:
    return __all__


if not typing.TYPE_CHECKING:  # or type checkers take every misspelt name

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return importlib.import_module(f"replicax.{name}")
        if (module := _MODULE_OF.get(name)) is None:
            raise AttributeError(f"module 'replicax' has no attribute {name!r}{_elsewhere(name)}")
        globals()[name] = value = getattr(importlib.import_module(f"replicax.{module}"), name)
        return value


def _elsewhere(name: str) -> str:
    """Return the place of a name of one of the rooms, for an error."""
    rooms = () if name[:1] == "_" else _ROOMS  # whoever looks for others does not want imports
    modules = {room: importlib.import_module(f"replicax.{room}") for room in rooms}
    found = [room for room, module in modules.items() if name in module.__all__]
    return "".join(f"; it is rx.{room}.{name}" for room in found)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: typing.Any) -> None:
        # Importing a subpackage would bind its name here: `rx.plan` stays the function.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
