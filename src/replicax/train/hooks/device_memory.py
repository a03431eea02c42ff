"""`DeviceMemory`: the most memory that a device has had in use."""

from replicax.train.hook import Hook, Running
from replicax.train.records import Record


class DeviceMemory(Hook):
    """Adds the figure `device_memory_bytes`: the peak of the fullest device of this process.

    It is what the allocator of GPUs and TPUs reports since the process began. CPU devices report
    none, and their records have no such figure.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=10, hooks=[rx.DeviceMemory()])
    """

    def figures(self, run: Running, record: Record) -> dict[str, float]:
        told = [device.memory_stats() or {} for device in run.dp.mesh.local_devices]
        peaks = [each["peak_bytes_in_use"] for each in told if "peak_bytes_in_use" in each]
        return {"device_memory_bytes": float(max(peaks))} if peaks else {}
