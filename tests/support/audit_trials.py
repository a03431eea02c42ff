"""Random bit flips in an audited run, and their outcomes: shared with benchmarks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from support.bit_flips import before_step, flip_leaf, leaf_names, part_bytes
from support.cases import CASES, DROPOUT_CASES

import replicax as rx
from replicax.errors import DivergedError, ReplicasDifferError
from replicax.train.files.fingerprint import Fingerprint
from replicax.train.hooks.audit import Snapshot

AUDIT_EVERY = 10
STEPS = 30
BATCH = 16
SUBJECTS = (
    ("pytree", "jit"),
    ("gpt2", "shard_map"),
    ("nnx", "pmap"),
    ("linen", "exact"),
    ("nnx with dropout", "jit"),
    ("equinox", "shard_map"),
)
"""A case and a mode."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One flip."""

    case: str
    mode: str
    leaf: str
    device: int
    byte: int
    bit: int
    step: int
    """Step before which the bit was flipped."""
    outcome: str
    """`detected`, in time and the device named; `healed`, where all devices held the same bits at
    the next audit; anything else is a failure, in words."""
    message: str = ""


class Subject:
    """A model, a mode and 8 devices, on which trials are run one after the other."""

    def __init__(self, case: str, mode: str, devices: int = 8) -> None:
        self.name, self.mode = case, mode
        name, _, dropout = case.partition(" with ")
        self._case = (DROPOUT_CASES if dropout else CASES)[name]
        mesh = rx.make_mesh(data=devices)
        self.dp = rx.DataParallel(self._case.loss, optax.adamw(1e-3), mesh=mesh, mode=mode)
        state = self.dp.init(self._case.model())
        self._start = Snapshot(state)
        self.leaves = leaf_names(state)
        self._bytes = [part_bytes(leaf) for leaf in jax.tree.leaves(state)]

    def run(self, **options: Any) -> rx.types.Fit:
        """A run from the start."""
        options = {"steps": STEPS, "hooks": [rx.hooks.Audit(AUDIT_EVERY)], **options}
        return rx.fit(
            self.dp,
            self._start.restore(),
            self._case.source,
            batch_size=BATCH,
            progress=False,
            **options,
        )

    def trial(self, part: str, random: np.random.Generator) -> Trial:
        """Flip a bit in a leaf whose path starts with `part`."""
        leaf = int(random.choice([n for n, x in enumerate(self.leaves) if x.startswith(part)]))
        device = jax.devices()[int(random.integers(self.dp.mesh.devices.size))]
        byte, bit = int(random.integers(self._bytes[leaf])), int(random.integers(8))
        step = int(random.integers(2, STEPS + 1))  # a bad first step is refused without an audit
        change = partial(flip_leaf, leaf=leaf, device=device, byte=byte, bit=bit)
        message = ""
        with before_step(step, change), _watched() as differing:
            try:
                self.run()
            except (ReplicasDifferError, DivergedError) as error:
                message = str(error)
        told = Trial(self.name, self.mode, self.leaves[leaf], device.id, byte, bit, step, "")
        outcome = _outcome(told, differing, message)
        return dataclasses.replace(told, outcome=outcome, message=message)


def _outcome(trial: Trial, differing: list[list[str]], message: str) -> str:
    """Judge an outcome by the audited states, compared byte by byte."""
    due = -(-trial.step // AUDIT_EVERY) * AUDIT_EVERY
    good = due - AUDIT_EVERY
    last = next((each for each in reversed(differing) if each), [])  # not those of a replay
    if not message:
        return "healed" if not last else f"missed: {last}"
    if "holds wrong bits" not in message:
        return "not recognised"
    if f"device {trial.device} of process 0 holds wrong bits in {last[0]}" not in message:
        return "wrong device or leaf"
    when = int(message.split("after step ")[1].split(";")[0])
    if f"after step {good};" not in message + ";" and f"after step {good}:" not in message:
        return "wrong last good step"
    return "detected" if trial.step <= when <= due else f"late: {when}"


@contextlib.contextmanager
def _watched() -> Iterator[list[list[str]]]:
    """Return the leaves that differ, for each fingerprinted state."""
    take = Fingerprint.take
    found: list[list[str]] = []

    def watched(self: Fingerprint, state: Any) -> jax.Array:
        found.append(differing(state))
        return take(self, state)

    with mock.patch.object(Fingerprint, "take", watched):
        yield found


def differing(state: Any) -> list[str]:
    """Return the paths of the replicated leaves that differ between devices."""
    return [
        name
        for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True)
        if len({_bytes(shard.data) for shard in leaf.addressable_shards}) > 1
    ]


def _bytes(array: jax.Array) -> bytes:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
