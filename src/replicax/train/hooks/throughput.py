"""`Throughput`: tokens a second, and the share of the devices' peak that the steps reach."""

import math

from replicax.analysis.flops import count_flops
from replicax.analysis.hardware import chip_of_kind
from replicax.core.batch import Batch
from replicax.train.hook import Hook, Running
from replicax.train.hooks.watched import check_at_least
from replicax.train.records import Record


class Throughput(Hook):
    """Adds the figures `tokens_per_second` and `peak_flops_fraction` to each train record.

    The second is the FLOPs of matrix products and convolutions over what all devices of the mesh
    could do in that time by their data sheet, in the step's precision. Both follow from the
    record's `rows_per_second`, of which evaluations and checkpoints are no part.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10,
        ...        hooks=[rx.Throughput(tokens_per_row=1024)])

    Args:
        tokens_per_row: without it there is no such figure.
        flops_per_row: of a step; counted in its program by default, recomputation included. Where
            nobody knows the devices' peak, as of a CPU, there is no such figure.

    Raises:
        ConfigError: a number below 0.
    """

    def __init__(
        self, tokens_per_row: float | None = None, flops_per_row: float | None = None
    ) -> None:
        check_at_least("Throughput with tokens_per_row", tokens_per_row or 0, 0)
        check_at_least("Throughput with flops_per_row", flops_per_row or 0, 0)
        self._tokens, self._given = tokens_per_row, flops_per_row
        self._flops: float | None = None
        """FLOPs of a row, once they are known."""
        self._peak: float | None = None
        """FLOP/s of all devices, where they are known."""

    def start(self, run: Running) -> None:
        devices = run.dp.mesh.devices
        chip = chip_of_kind(devices.flat[0].device_kind)
        peak = None if chip is None else chip.flops_per_second.get(run.dp.precision.name)
        self._peak = None if peak is None else peak * devices.size
        self._flops = self._given

    def before_step(self, run: Running, batch: Batch) -> None:
        if self._flops is None and self._peak is not None:
            traced = run.dp.trace(run.state, batch)
            platform = run.dp.mesh.devices.flat[0].platform
            self._flops = count_flops(traced.jaxpr.jaxpr, platform) / batch.size

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        figures, rate = {}, record.rows_per_second
        if math.isnan(rate):  # of the first step, whose time is not known
            return {}
        if self._tokens is not None:
            figures["tokens_per_second"] = rate * self._tokens
        if self._flops is not None and self._peak is not None:
            figures["peak_flops_fraction"] = rate * self._flops / self._peak
        return figures
