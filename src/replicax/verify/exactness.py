"""Mode `exact`: the same bits on 1, 2, 4, ... devices."""

from collections.abc import Callable
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replica_count
from replicax.core.modes import Mode
from replicax.errors import LossError, ReplicaxError
from replicax.train.fingerprint import sha256
from replicax.train.guarded import NOT_FINITE
from replicax.verify.check import FAIL, PASS, SKIP, Check
from replicax.verify.facts import Facts
from replicax.verify.subject import Case, Subject

STEPS = 2
_SHOWN = 12


def check_exactness(
    mode: Mode,
    counts: list[int],
    digest: Callable[[int], str],
    is_own: bool,
    show: Callable[[str], None],
) -> Check:
    """Return the row on a mode whose bits are fixed: those of two steps on 1, 2, 4, ... devices.

    Args:
        mode: the mode.
        counts: of devices, from `replica_counts`.
        digest: the bits on as many.
        is_own: whether the step is configured with it, and must not be refused.
        show: told what is next.
    """
    name = f"{mode}, {on_devices(counts)}"
    digests: dict[int, str] = {}
    try:
        for count in counts:
            show(f"parity: the bits of {mode} on {count} of {counts[-1]} devices")
            digests[count] = digest(count)
    except ReplicaxError as error:
        return Check("parity", name, FAIL if is_own else SKIP, f"refused: {error}")
    figures = {"sha256": {str(count): found for count, found in digests.items()}}
    first = digests[counts[0]]
    others = [count for count in counts if digests[count] != first]
    if not others:
        text = f"the same bits after {STEPS} steps, SHA-256 {first[:_SHOWN]}"
        return Check("parity", name, PASS, text, "", figures)
    text = f"other bits on {on_devices(others)} than on 1: {first[:_SHOWN]}, " + ", ".join(
        digests[count][:_SHOWN] for count in others
    )
    return Check("parity", name, FAIL, text, CAUSE, figures)


CAUSE = (
    "an operation of the model that XLA computes otherwise beside other operations; find it by "
    "leaving layers out, and report it"
)


def on_devices(counts: list[int]) -> str:
    """`1, 2, 4 devices`."""
    return f"{', '.join(map(str, counts))} device{'s' if counts != [1] else ''}"


def replica_counts(dp: DataParallel) -> list[int]:
    """Return 1, 2, 4, ... up to the replicas of `dp`."""
    replicas = replica_count(dp.mesh)
    return [1 << power for power in range(replicas.bit_length())]


def digest_of(subject: Subject, facts: Facts, mode: Mode, devices: int) -> str:
    """Return the SHA-256 of state and metrics after `STEPS` steps on as many devices."""
    case = Case(mode, 1, devices)
    dp = subject.parallel(case)
    batch = subject.batch_on(case, subject.padded if facts.takes_padding else subject.full)
    state = subject.placed(case, subject.state)
    metrics: dict[str, Any] = {}
    for _ in range(STEPS):
        state, metrics = dp.step(state, batch)
        if metrics.pop(NOT_FINITE):
            raise LossError("the loss or its gradient is not finite, and the step is skipped")
    return sha256((state, metrics))
