"""`rx.verify`: the checks of a step, with the compiler of devices that `plan` describes."""

from collections.abc import Sequence
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.core.modes import Mode
from replicax.plan.steps import compiled_for
from replicax.plan.target import Target, parse_target
from replicax.verify import verify_program as checks
from replicax.verify.sums import Elsewhere, Text
from replicax.verify.verification import Verification


def verify(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    modes: Sequence[str | Mode] | None = None,
    micro_batches: int = checks.MICRO_BATCHES,
    batch_size: int | None = None,
    target: str | Target | None = None,
    seed: int = 0,
    show: checks.Show | None = None,
) -> Verification:
    """Check that the step of `dp` computes on its devices what it computes on one.

    Loss, metrics, gradient, parameters and the model's other arrays are compared leaf by leaf, in
    every mode that the model allows, with a full batch, a padded one, unequal weights, and several
    micro-batches; bounds are those that rounding explains. Then the traffic, work that is done
    twice, parameters without gradient, copies that differ, determinism, recompilation, and sums of
    many terms in 16-bit floats.

    It compiles the step about a dozen times and runs it about a hundred: give it few rows.

    Examples:
        >>> result = rx.verify(dp, model, batch.data, modes=["jit", "shard_map"])
        >>> assert result.ok, str(result)  # the table

    Args:
        dp: the step. It is not run itself, but others made as it is.
        model: as for `dp.init`.
        batch: a pytree of arrays `[rows, ...]`, the global batch. Rows that the replicas and
            `micro_batches` do not divide are left out.
        modes: those to compare; by default all, or those that one process or `dp`'s mesh allows.
        micro_batches: how many to compare with 1 and with `dp.accumulate`.
        batch_size: rows of the batch that is trained on, whose sums are looked at and not run; by
            default those of `batch`.
        target: hardware to compile for and look for those sums in, as for `rx.plan`: `h100:8`. By
            default it is the attached devices; nothing else is asked of a target.
        seed: of the model's random numbers, as for `dp.init`.
        show: told what is next, a line at a time.

    Returns:
        A row for each thing that was checked; `ok` where nothing failed.

    Raises:
        ConfigError: several processes, an unknown mode or target, or too few rows.
    """
    show = show or (lambda text: None)
    return checks.verify(
        dp,
        model,
        batch,
        modes=modes,
        micro_batches=micro_batches,
        batch_size=batch_size,
        elsewhere=None if target is None else compiling_for(target, show),
        seed=seed,
        show=show,
    )


def compiling_for(target: str | Target, show: checks.Show) -> Elsewhere:
    """Return the compiler of a target, for `check_sums`."""
    aim = parse_target(target) if isinstance(target, str) else target

    def compile(dp: DataParallel, model: Any, batch: Any) -> Text:
        step = compiled_for(dp, model, batch, aim, show)
        assert step.compilation is not None
        assert step.program is not None
        return Text(step.compilation.text, dict(step.dp.mesh.shape), step.program.notes)

    return Elsewhere(aim.text, compile)
