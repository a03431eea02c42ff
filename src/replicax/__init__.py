"""Data-parallel training for JAX that proves itself."""

from replicax.bench.result import Bench as Bench
from replicax.bench.run import bench as bench
from replicax.data.batch import Batch as Batch
from replicax.data.feed import Feed as Feed
from replicax.errors import ConfigError as ConfigError
from replicax.errors import DataError as DataError
from replicax.errors import LossError as LossError
from replicax.errors import MissingDependencyError as MissingDependencyError
from replicax.errors import ReplicaxError as ReplicaxError
from replicax.errors import StateError as StateError
from replicax.parallel.loss import Weighted as Weighted
from replicax.parallel.mesh import make_mesh as make_mesh
from replicax.parallel.step import DataParallel as DataParallel
from replicax.parallel.update import TrainState as TrainState
from replicax.train.fit import Fit as Fit
from replicax.train.fit import fit as fit

__all__ = [
    "Batch",
    "Bench",
    "ConfigError",
    "DataError",
    "DataParallel",
    "Feed",
    "Fit",
    "LossError",
    "MissingDependencyError",
    "ReplicaxError",
    "StateError",
    "TrainState",
    "Weighted",
    "bench",
    "fit",
    "make_mesh",
]
