"""`verify` for a custom step: compare every mode with one device, and bits where promised."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.mode_table import Mode
from replicax.core.placement.mesh import make_mesh
from replicax.core.step.base import StepProgram, StepResult
from replicax.errors import ReplicaxError
from replicax.text.checks import FAIL, SKIP, Check
from replicax.train.files.fingerprint import sha256
from replicax.verify.devices_asked import check_devices_asked, devices_asked
from replicax.verify.exactness import Bits, bits_of, check_exactness, replica_counts
from replicax.verify.form import StepFile
from replicax.verify.plain_custom import PlainCustomStep
from replicax.verify.step import verify_step
from replicax.verify.step_parity import INDIVISIBLE, UNEQUAL
from replicax.verify.verification import failed_on_one_device


def verify_custom_step(
    dp: DataParallel,
    model: Any,
    data: Any,
    modes: Sequence[Mode],
    micro_batches: int,
    seed: int,
    show: Callable[[str], None],
) -> Iterator[Check]:
    """Yield a row for each check of a custom step, in each of `modes`.

    Each mode's compiled step is compared with the step in plain JAX, as in `verify_step`. The mask
    serves as the row weights, so padding is one of the cases.
    """
    rows = len(jax.tree.leaves(data)[0])
    batch = opened(data).on_host(copy=True).padded(rows)
    base = dp.replace(donate=False, accumulate=1)
    whole = {"layout": "replicated", "reduction": "float32"}
    show("one device")
    try:
        alone = base.replace(mode="single", mesh=_first(dp, 1), **whole)
        state = alone.init(model, seed=seed)
        with devices_asked() as asked:
            alone.prepare(state, alone.program(state).batches.placed(data))
    except Exception as error:  # the user's step
        yield failed_on_one_device(error)
        return
    yield from check_devices_asked(asked)
    full_only = _without_padding(alone, state, data)
    if full_only is not None:
        yield full_only
    reference = PlainCustomStep(alone, state)
    state = jax.tree.map(np.asarray, state)
    for mode in modes:
        own = whole if mode != dp.mode else {}
        for parts in sorted({1, dp.accumulate, micro_batches}) if not mode.bitwise else [1]:
            name = f"{mode}, {parts} micro-batches" if parts > 1 else str(mode)
            try:
                chosen = base.replace(mode=mode, accumulate=parts, **own)
                begun = chosen.init(model, seed=seed)
                program = chosen.program(begun)
                chosen.prepare(begun, program.batches.placed(data))
            except ReplicaxError as error:
                verdict = FAIL if mode == dp.mode else SKIP
                yield Check("parity", name, verdict, f"refused: {error}")
                continue
            show(name)
            found = verify_step(
                _Counted(program.step), reference, state, batch, micro_batches=parts, show=show
            )
            for check in found.checks:
                left_out = (INDIVISIBLE, *(UNEQUAL if full_only else ()))  # feeds pad
                if check.case in left_out:
                    continue
                own_draws = mode.per_replica or parts > 1
                if check.verdict == FAIL and check.subject == "parity" and own_draws:
                    check = dataclasses.replace(check, **_if_random(reference, state, batch))
                yield dataclasses.replace(check, case=f"{name}, {check.case}")
        if mode.bitwise:

            def bits(count: int, mode: Mode = mode) -> Bits:
                counted = base.replace(mode=mode, mesh=_first(dp, count), **whole)
                return bits_of(counted.program(model), state, batch)

            yield check_exactness(mode, replica_counts(dp), bits, mode == dp.mode)


class _Counted:
    """A step that is called with batches whose mask was changed."""

    def __init__(self, step: StepProgram) -> None:
        self._step = step

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        return self._step(state, _counted(batch))

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        return self._step.lower(state, _counted(batch))


def _counted(batch: Batch) -> Batch:
    """Return a batch that knows the number of its real rows, as those of a feed do."""
    return dataclasses.replace(
        batch, count=jnp.full_like(batch.mask, jnp.count_nonzero(batch.mask))
    )


def _if_random(reference: StepFile, state: TrainState, batch: Batch) -> dict[str, Any]:
    """Return changes to a failed check if the step draws random numbers."""
    reseeded = dataclasses.replace(state, seed=np.uint32(int(state.seed) ^ 1))
    one, other = (reference(each, batch) for each in (state, reseeded))
    if sha256((one[0].params, one[1])) == sha256((other[0].params, other[1])):
        return {}
    text = (
        "random: each replica and micro-batch draws different numbers; to compare them, pass a "
        "step that draws none (dropout rate 0)"
    )
    return {"verdict": SKIP, "found": text, "cause": ""}


def _without_padding(alone: DataParallel, state: TrainState, data: Any) -> Check | None:
    """Return a row if the step is not run on padded batches, else None."""
    fewer = jax.tree.map(lambda leaf: leaf[1:], data)
    batch = next(iter(alone.feed(fewer, len(jax.tree.leaves(data)[0]))))
    if alone.prepare(state, batch) is batch:
        return None
    text = "it depends on padded rows: short batches are computed without padding, or refused"
    return Check("parity", " and ".join(UNEQUAL), SKIP, text)


def _first(dp: DataParallel, devices: int) -> Any:
    return make_mesh(devices=list(dp.mesh.devices.flat)[:devices])
