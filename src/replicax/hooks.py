"""Hooks of a run: figures, checks and loggers; `rx.Hook` and `Logger` for your own."""

from replicax.train.hooks.audit import Audit as Audit
from replicax.train.hooks.best import EarlyStopping as EarlyStopping
from replicax.train.hooks.best import KeepBest as KeepBest
from replicax.train.hooks.dump_hlo import DumpHLO as DumpHLO
from replicax.train.hooks.figures import DeviceMemory as DeviceMemory
from replicax.train.hooks.figures import GradientNorm as GradientNorm
from replicax.train.hooks.figures import LearningRate as LearningRate
from replicax.train.hooks.figures import Throughput as Throughput
from replicax.train.hooks.logger import CSV as CSV
from replicax.train.hooks.logger import Logger as Logger
from replicax.train.hooks.noise_scale import NoiseMeter as NoiseMeter
from replicax.train.hooks.profile import Profile as Profile
from replicax.train.hooks.tensorboard import TensorBoard as TensorBoard
from replicax.train.hooks.trackers import Comet as Comet
from replicax.train.hooks.trackers import MLflow as MLflow
from replicax.train.hooks.trackers import Trackio as Trackio
from replicax.train.hooks.trackers import WandB as WandB

__all__ = [
    "CSV",
    "Audit",
    "Comet",
    "DeviceMemory",
    "DumpHLO",
    "EarlyStopping",
    "GradientNorm",
    "KeepBest",
    "LearningRate",
    "Logger",
    "MLflow",
    "NoiseMeter",
    "Profile",
    "TensorBoard",
    "Throughput",
    "Trackio",
    "WandB",
]
