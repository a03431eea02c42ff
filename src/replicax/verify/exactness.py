"""Check mode `exact`: the same programs and the same bits on 1, 2, 4, ... devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from replicax.core.data.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.mode_table import Mode
from replicax.core.placement.mesh import replica_count
from replicax.core.program import Program
from replicax.errors import LossError, ReplicaxError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.train.files.fingerprint import sha256
from replicax.train.guarded import NOT_FINITE
from replicax.verify.facts import Facts
from replicax.verify.simulated_islands import SimulatedIslands
from replicax.verify.subject import Case, Subject

_STEPS = 2
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Bits:
    """Digests of consecutive steps and of the programs that computed them."""

    steps: list[dict[str, str]]
    """After each step, the SHA-256 of every leaf of state and metrics, by path."""
    programs: dict[str, str]
    """The digest of every program that rounds, by name."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the leaves after the last step."""
        return sha256(list(map(bytes.fromhex, self.steps[-1].values())))

    def parting(self, other: "Bits") -> str:
        """Return where `other` first differs in bits: the step, the leaf and the programs."""
        pairs = enumerate(zip(self.steps, other.steps, strict=True), start=1)
        step, leaves = next(
            (number, [path for path in mine if mine[path] != theirs[path]])
            for number, (mine, theirs) in pairs
            if mine != theirs
        )
        names = {**self.programs, **other.programs}
        programs = [n for n in names if self.programs.get(n) != other.programs.get(n)]
        said = f"the compiled {', '.join(programs)} differs" if programs else "all programs equal"
        return f"first in step {step}, {leaves[0]} of {len(leaves)} leaves; {said}"


def bits_of(program: Program, state: TrainState, batch: Batch) -> Bits:
    """Return the bits of `_STEPS` steps of `program` from `state`.

    Raises:
        LossError: a step is skipped because its results are not finite.
    """
    compiled = program.step.compiled(state, batch)
    steps = []
    for _ in range(_STEPS):
        state, metrics, rows = program.step(state, batch)
        metrics = dict(metrics)
        if NOT_FINITE in metrics and metrics.pop(NOT_FINITE):
            raise LossError("the loss or its gradient is not finite, so the step is skipped")
        found = {"state": state, "metrics": metrics, "rows": rows}
        leaves = jax.tree_util.tree_leaves_with_path(found)
        steps.append({jax.tree_util.keystr(path): sha256(leaf) for path, leaf in leaves})
    return Bits(steps, {each.name: each.digest for each in compiled})


def check_exactness(
    mode: Mode,
    counts: list[int],
    bits: Callable[[int], Bits],
    is_own: bool,
) -> Check:
    """Return the row on a mode with fixed bits: compare two steps on each of `counts` devices.

    A difference fails only for the step's own mode.
    """
    name = f"{mode}, {on_devices(counts)}"
    found: dict[int, Bits] = {}
    try:
        for count in counts:
            found[count] = bits(count)
    except ReplicaxError as error:
        return Check("parity", name, FAIL if is_own else SKIP, f"refused: {error}")
    first = found[counts[0]]
    figures: dict[str, Any] = {
        "sha256": {str(count): each.digest for count, each in found.items()},
        "programs": {str(count): each.programs for count, each in found.items()},
    }
    verdict: Verdict = FAIL if is_own else NOTE  # training uses another mode
    others = [count for count in counts if found[count] != first]
    if not others:
        text = (
            f"the same bits after {_STEPS} steps, SHA-256 {first.digest[:_SHOWN]}, from the same "
            f"{len(first.programs)} programs"
        )
        return Check("parity", name, PASS, text, "", figures)
    parted = [count for count in others if found[count].steps != first.steps]
    if not parted:
        text = f"different programs on {on_devices(others)} than on 1, with the same bits"
        return Check("parity", name, verdict, text, CAUSE, figures)
    where = first.parting(found[parted[0]])
    text = f"different bits on {on_devices(parted)} than on 1: {where}"
    return Check("parity", name, verdict, text, CAUSE, figures)


def check_simulated_islands(mode: Mode, bits: Callable[[int], Bits], is_own: bool) -> Check:
    """Return the row that compares `bits` of several islands, which exchange sums, with one device.

    `bits(1)` are those of one device.
    """
    name = f"{mode}, {ISLANDS_COMPARED} islands"
    try:
        one, islands = bits(1), bits(ISLANDS_COMPARED)
    except ReplicaxError as error:
        return Check("parity", name, FAIL if is_own else SKIP, f"refused: {error}")
    if one == islands:
        text = (
            f"the same bits as on 1 device, with the sums of {ISLANDS_COMPARED} islands exchanged"
        )
        return Check("parity", name, PASS, text, "", {"sha256": islands.digest})
    verdict: Verdict = FAIL if is_own else NOTE
    text = f"other bits than on 1 device: {one.parting(islands)}"
    return Check("parity", name, verdict, text, CAUSE, {"sha256": islands.digest})


ISLANDS_COMPARED = 3
"""Number of simulated islands: none divides the micro-shards."""
CAUSE = "a program was compiled differently, or is not deterministic; report it"


def on_devices(counts: list[int]) -> str:
    """Format device counts: `1, 2, 4 devices`."""
    return f"{', '.join(map(str, counts))} device{'s' if counts != [1] else ''}"


def replica_counts(dp: DataParallel) -> list[int]:
    """Return 1, 2, 4, ... up to the replicas of `dp`."""
    replicas = replica_count(dp.mesh)
    return [1 << power for power in range(replicas.bit_length())]


def compile_bits_ahead(subject: Subject, facts: Facts, mode: Mode, counts: list[int]) -> None:
    """Begin to compile what `bits_on` runs on each of `counts` devices."""
    for count in counts:
        subject.compile_ahead(Case(mode, 1, count), _batch(subject, facts))


def bits_on(subject: Subject, facts: Facts, mode: Mode, devices: int) -> Bits:
    """Return the bits of `subject` on this many devices."""
    return _bits_of_case(subject, facts, Case(mode, 1, devices), None)


def bits_of_islands(subject: Subject, facts: Facts, mode: Mode, islands: int) -> Bits:
    """Return the bits of `subject` on this many islands of one device."""
    job = SimulatedIslands(islands) if islands > 1 else None
    return _bits_of_case(subject, facts, Case(mode, 1, 1), job)


def _bits_of_case(subject: Subject, facts: Facts, case: Case, job: Job | None) -> Bits:
    dp = subject.parallel(case) if job is None else subject.with_job(case, job)
    batch = subject.batch_on(case, _batch(subject, facts))
    state = subject.placed(case, subject.state)
    dp.prepare(state, batch)
    return bits_of(dp.program(state), state, batch)


def _batch(subject: Subject, facts: Facts) -> Batch:
    return subject.padded if facts.takes_padding else subject.full
