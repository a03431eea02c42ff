"""`rx.verify`: the checks of a step, optionally compiled for a target of `plan`."""

from collections.abc import Sequence
from typing import Any, Literal

from replicax.core.data.given import batch_given, leading_rows, size_given
from replicax.core.data_parallel import DataParallel
from replicax.core.models.split import refuse_state
from replicax.core.modes.mode_table import Mode, ModeName
from replicax.plan.steps import compiled_for
from replicax.plan.target import Target, parse_target
from replicax.text.arguments import Count, Int32Count, Seed, typed
from replicax.verify import stages
from replicax.verify import verify_program as checks
from replicax.verify.sums import Elsewhere, Text
from replicax.verify.verification import Verification


@typed
def verify(
    dp: DataParallel,
    model: Any,
    source: Any,
    *,
    batch_size: Int32Count | None = None,
    modes: Sequence[ModeName | Mode] | Literal[ModeName, "all"] | None = None,
    micro_batches: Count = checks.MICRO_BATCHES_TRIED,
    target: str | Target | None = None,
    seed: Seed = 0,
    surrogates: Sequence[str] = (),
    show: stages.Show | None = None,
    found: stages.OnCheck | None = None,
) -> Verification:
    """Check that the step of `dp` computes the same on its devices as on one.

    Loss, metrics, gradient, parameters and the model's other arrays are compared leaf by leaf, with
    a full batch, a padded one, unequal weights, and several micro-batches, in the mode of `dp` or
    in those asked for; differences beyond rounding fail. It also checks communication, duplicated
    work, parameters without gradient, unequal copies, determinism, recompilation, and sums of many
    terms in 16-bit floats.

    In one mode, the step is compiled twice and run about a dozen times, with few rows.

    Examples:
        >>> result = rx.verify(dp, model, source, batch_size=32, modes=["jit", "shard_map"])
        >>> assert result.ok, str(result)  # the table

    Args:
        dp: the step. Identically configured copies are run, not `dp` itself.
        model: as for `dp.init`.
        source: as for `dp.feed`, or a feed; or a batch, a pytree of arrays `[rows, ...]`.
        batch_size: rows of the training batch, for which sums are inspected. The step is run on the
            source's first rows, as many as show everything. Without it, the source is the batch,
            and run as it is, but for rows that do not divide evenly among the replicas and
            `micro_batches`.
        modes: those to compare, or `"all"`: all that one process and `dp`'s mesh allow. By default
            that of `dp`.
        micro_batches: number of micro-batches to compare with 1 and with `dp.accumulate`.
        target: hardware to compile for when inspecting those sums, as for `rx.plan`: `h100:8`. By
            default the attached devices. It does not affect the other checks.
        seed: of the model's random numbers, as for `dp.init`.
        surrogates: names of functions of the loss whose own rule (`jax.custom_vjp`, `custom_jvp`)
            is on purpose not the derivative of what they compute, such as a straight-through
            estimator's.
        show: called with one line of progress at a time.
        found: called with each row as soon as it is known.

    Returns:
        A row for each check; `ok` is true if none failed.

    Raises:
        ConfigError: several processes, an unknown mode or target, or too few rows.
    """
    show = show or (lambda text: None)
    refuse_state(model)
    if (size := size_given(source, batch_size)) is None:
        batch = batch_given(source)
    else:
        batch = leading_rows(source, checks.rows_needed(dp, micro_batches))
    return checks.verify_program(
        dp,
        model,
        batch,
        modes=modes,
        micro_batches=micro_batches,
        batch_size=size,
        elsewhere=None if target is None else compiling_for(target, show),
        seed=seed,
        surrogates=surrogates,
        show=show,
        found=found,
    )


def compiling_for(target: str | Target, show: stages.Show) -> Elsewhere:
    """Return a compiler for a target, for use by `check_sums`."""
    aim = parse_target(target) if isinstance(target, str) else target

    def compile(dp: DataParallel, model: Any, batch: Any) -> Text:
        step = compiled_for(dp, model, batch, aim, show)
        assert step.compilation is not None
        assert step.program is not None
        return Text(step.compilation.text, dict(step.dp.mesh.shape), step.program.notes)

    return Elsewhere(aim.text, compile)
