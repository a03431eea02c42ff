"""Types for annotations, which functions return or take."""

from replicax.bench.bench_result import Bench as Bench
from replicax.cluster.watchdog import Timeouts as Timeouts
from replicax.core.data.feed import Feed as Feed
from replicax.core.data.merged import Merged as Merged
from replicax.core.ground.job import Job as Job
from replicax.core.modes.mode_table import Mode as Mode
from replicax.core.step.reduction import Reduction as Reduction
from replicax.plan.planned import Plan as Plan
from replicax.train.folder.load import Loaded as Loaded
from replicax.train.run.stopping import Interrupt as Interrupt
from replicax.train.run.summary import Fit as Fit
from replicax.verify.verification import Verification as Verification

__all__ = [
    "Bench",
    "Feed",
    "Fit",
    "Interrupt",
    "Job",
    "Loaded",
    "Merged",
    "Mode",
    "Plan",
    "Reduction",
    "Timeouts",
    "Verification",
]
