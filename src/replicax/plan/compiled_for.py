"""A step as the compiler of a target has it, for whoever reads compiled programs."""

from typing import Any

from replicax.core.batch import row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replica_count
from replicax.errors import CompilerError
from replicax.plan.need import holder
from replicax.plan.plan import compiler_for, in_fit
from replicax.plan.steps import Show, Step, Steps, rows_of_a_replica
from replicax.plan.target import Target


def compiled_for(dp: DataParallel, model: Any, batch: Any, target: Target, show: Show) -> Step:
    """Return the step of `rx.fit` with its `program` and `compilation` for a target.

    Args:
        dp: the step; its own mesh may be of any devices.
        model: as for `dp.init`; arrays or their shapes.
        batch: the global batch, or its shapes; filled up to what the replicas divide.
        target: the devices; none need be there.
        show: told what is next.

    Raises:
        CompilerError: there is no compiler for it here, or it fails, or the step needs more memory
            than the target has.
        ConfigError: jax wants another version of the compiler, or the mesh does not fit.
    """
    dp = in_fit(dp, model, target)
    with compiler_for(target) as (compiler, notes):
        if compiler is None:
            raise CompilerError("; ".join(notes).removeprefix("by formula: "))
        steps = Steps(model, batch, target, compiler, show)
        rows = rows_of_a_replica(row_count(batch), replica_count(dp.mesh), steps.unit(dp))
        step = steps.step(dp, rows, target.text)
    if step.compilation is None:
        raise CompilerError(
            f"{rows:,} rows a {holder(dp.mesh)} need more memory than {target.text} has: give fewer"
        )
    return step
