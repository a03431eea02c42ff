"""`Audit`: the hook that compares the bits of the replicas while a run goes on."""

from replicax.train.auditor import TABLE, Auditor
from replicax.train.dispatched import Dispatched
from replicax.train.hook import Hook, Running


class Audit(Hook):
    """Compares the bits of all that the devices hold copies of, every so many steps.

    See docs/audit.md.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, hooks=[rx.Audit(every=100)])

    Args:
        every: steps between two audits.
        on_divergence: what to do where a device holds other bits: `stop`, or `restore` the state of
            the last clean audit, which is kept in host memory, and go on from there.

    Raises:
        ConfigError: when the run starts: nothing to compare, or a source that cannot go back.
        ReplicasDifferError: in the run: the replicas are no longer equal.
        DivergedError: in the run: the state is no longer finite, and no device is at fault.
    """

    def __init__(self, every: int, on_divergence: str = "stop") -> None:
        self._every, self._on_divergence = every, on_divergence
        self._auditor: Auditor | None = None
        self._done: list[Dispatched] = []

    @property
    def clean(self) -> int:
        """Audits that found all replicas equal, in this start."""
        return 0 if self._auditor is None else self._auditor.clean

    @property
    def restores(self) -> int:
        """Times that the run went back to the state of a clean audit, in this start."""
        return 0 if self._auditor is None else self._auditor.restores

    def start(self, run: Running) -> None:
        """Audit the state that the run starts from."""
        auditor = Auditor(run.dp, run.state, run.source, self._every, self._on_divergence)
        self._auditor, self._done = auditor, []
        auditor.begin(run.state, run.place)
        run.note_good()
        for line in auditor.describe():
            run.say(line)

    def dispatched(self, run: Running, step: Dispatched) -> None:
        """Have the devices compute the fingerprints of the state, where it is to be audited."""
        assert self._auditor is not None
        table = self._auditor.take(run.state, step.place)
        if table is not None:
            step.attached[TABLE] = table
        if self._auditor.waits(step.place):
            run.wait()

    def step(self, run: Running, step: Dispatched) -> None:
        """Note a step that has finished."""
        self._done.append(step)

    def settle(self, run: Running, due: bool) -> None:
        """Read the audits that are due."""
        assert self._auditor is not None
        done, self._done = self._done, []
        back = self._auditor.after(run.state, run.place, done, look=due)
        if back is not None:
            told = {f"device_{device}": 1.0 for device in back.devices}
            run.go_back(back.state, back.place, back.text, told)
        elif self._auditor.keeps and self._auditor.good == run.place:
            run.note_good()

    def summary(self) -> list[str]:
        """How many audits there were."""
        clean = "1 audit, clean" if self.clean == 1 else f"{self.clean:,} clean"
        times = f"{self.restores} time{'s' * (self.restores != 1)}"
        return [f"audit  {clean}{f' · went back {times}' if self.restores else ''}"]
