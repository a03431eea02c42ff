"""What to change first, and what another batch asks of the learning rate."""

from collections.abc import Iterator, Sequence

from replicax.analysis.traffic import SLIGHTLY
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import AnyMesh, replica_count
from replicax.plan.critical_batch import batch_cost, learning_rates
from replicax.plan.largest import MOST_ROWS
from replicax.plan.need import Need, holder
from replicax.plan.result import Alternative, BatchAdvice, MicroBatches, Speed
from replicax.plan.traffic import Traffic
from replicax.wording import size_text

_WORTH = 1.1
"""Times as fast: below this a change is not worth a word."""
_WAITING = 0.1
"""Share of a step that the devices wait for the network."""


def first_change(
    dp: DataParallel,
    asked: Need,
    largest: Need | None,
    micro_batches: MicroBatches | None,
    alternatives: Sequence[Alternative],
    traffic: Traffic | None,
    speeds: Sequence[Speed],
) -> str:
    """The one change that does most for a step, in a sentence."""
    if not asked.fits:
        return _to_fit(dp.mesh, asked, largest, micro_batches, alternatives)
    if not speeds:
        return "nothing that can be told: it fits, and the target's speed is not known"
    times, said = max(_faster(dp, speeds, alternatives), default=(0.0, ""))
    if times > _WORTH:
        return said
    now = speeds[0]
    waiting = now.step.exposed_seconds / now.step.seconds
    other = not dp.mode.per_replica and dp.layout.is_whole  # which shard_map can hold
    if other and traffic is not None and traffic.share > SLIGHTLY and waiting > _WAITING:
        return (
            f"mode=shard_map: it sends {1 / traffic.share:.0%} of what this mode does, and "
            f"{waiting:.0%} of a step waits for the network"
        )
    if waiting > _WAITING:
        return f"fewer devices, or faster links: {waiting:.0%} of a step waits for the network"
    return "nothing: the step is as large and as fast as this target allows"


def _faster(
    dp: DataParallel, speeds: Sequence[Speed], alternatives: Sequence[Alternative]
) -> Iterator[tuple[float, str]]:
    """Changes that may be faster: by how many times the rows a second, and the sentence."""
    now, most = speeds[0], speeds[-1]
    if now.rows < most.rows < MOST_ROWS // 2:  # beyond, nobody trains
        times = most.rows_per_second / now.rows_per_second
        yield (
            times,
            f"a batch of {most.rows * replica_count(dp.mesh):,} rows, {most.rows:,} a "
            f"{holder(dp.mesh)}: up to {times:.1f} times the rows a second",
        )
    for each in alternatives:
        if each.need.fits and each.step_seconds is not None:
            times = now.step.seconds / each.step_seconds
            frees = f", and {size_text(each.freed_bytes)} less a device" * (each.freed_bytes > 0)
            yield times, f"{each.change}: up to {times:.1f} times as fast{frees}"


def _to_fit(
    mesh: AnyMesh,
    asked: Need,
    largest: Need | None,
    micro_batches: MicroBatches | None,
    alternatives: Sequence[Alternative],
) -> str:
    each = holder(mesh)
    if micro_batches is not None:
        return (
            f"accumulate={micro_batches.accumulate}: the same batch in micro-batches of "
            f"{micro_batches.need.rows // micro_batches.accumulate:,} rows a {each} fits"
        )
    fitting = [other for other in alternatives if other.need.fits]
    if fitting:
        least = min(fitting, key=lambda other: other.need.bytes)
        return f"{least.change}: it then fits with {size_text(least.need.bytes)} a device"
    if largest is not None:
        rows = largest.rows * replica_count(mesh)
        return f"a batch of {rows:,} rows, {largest.rows:,} a {each}, fits"
    return "more memory a device, or a smaller model: none of the changes below makes it fit"


def batch_advice(
    asked_rows: int, planned: Sequence[int], noise_scale: float | None
) -> tuple[BatchAdvice, ...]:
    """For each planned batch, against the one that was asked for.

    Args:
        asked_rows: of the global batch.
        planned: rows of other global batches.
        noise_scale: in rows, where a run measured it.
    """
    return tuple(_advice(asked_rows, rows, noise_scale) for rows in dict.fromkeys(planned))


def _advice(asked_rows: int, rows: int, noise_scale: float | None) -> BatchAdvice:
    rates = learning_rates(1.0, asked_rows, rows)
    cost = batch_cost(rows, noise_scale) if noise_scale else None
    return BatchAdvice(
        rows,
        rates.linear,
        rates.square_root,
        cost.steps if cost else None,
        cost.rows if cost else None,
    )
