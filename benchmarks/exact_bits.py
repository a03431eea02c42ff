"""Bits of a case in mode `exact` on some devices, and where they differ from those on others."""

import hashlib
from typing import Any

import jax
import numpy as np
from exact_cases import begin, parallel, rows_of
from exact_draws import Draw

from replicax.core.ground.job import Job
from replicax.core.ground.leaves import numbers
from replicax.core.placement.mesh import replicated
from replicax.errors import ReplicaxError
from replicax.train.guarded import guarded, with_losses

STEPS = 6
DEVICES = (1, 2, 4, 8)


class Differs(AssertionError):  # noqa: N818
    """The same case has other bits, or other programs, on other devices."""


class RefusedOnSome(Differs):
    """The same case is refused on some devices, and trains on others."""


def bits(draw: Draw, devices: int, job: Job | None = None) -> dict[str, str]:
    """SHA-256 by path: of the state after six steps, of each step's metrics, of an evaluation, and
    of the programs that computed them, in their order.
    """
    dp, rows, told = parallel(draw, devices, job), rows_of(draw), []
    state = dp.init(begin(draw), seed=draw.seed)
    if draw.guarded:
        state = with_losses(state)
        dp = guarded(dp, state)
    while len(told) < STEPS:
        epoch = len(told)
        for batch in dp.feed(rows, draw.batch_size, shuffle=True, seed=draw.seed, epoch=epoch):
            state, metrics = dp.step(state, batch)
            told.append(jax.device_get(metrics))
            if len(told) == STEPS:
                break
    programs = dp.program(state).step.compiled(state, batch)
    evaluated = dp.evaluate(state, dp.feed(rows, draw.batch_size), ema=draw.ema is not None)
    if dp.job.processes > 1:
        state = jax.jit(lambda state: state, out_shardings=replicated(dp.mesh))(state)
    found = {"state": state, "step": told, "evaluation": evaluated}
    digests = {f"program {each.name}": each.digest for each in programs}
    return {**_by_path(found), **digests}


def _by_path(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): hashlib.sha256(_bytes(leaf)).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _bytes(leaf: Any) -> bytes:
    array = np.asarray(numbers(leaf))
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def outcome(draw: Draw, devices: int, job: Job | None = None) -> dict[str, str]:
    """`bits`, or the name of the error with which the case is refused."""
    try:
        return bits(draw, devices, job)
    except ReplicaxError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def compared(draw: Draw, counts: tuple[int, ...] = DEVICES) -> dict[str, str]:
    """The outcome on one device, which is that on each of `counts`; raises `Differs` otherwise."""
    fits = [devices for devices in counts if devices <= draw.micro_shards]
    first, *others = ((devices, outcome(draw, devices)) for devices in fits)
    for devices, found in others:
        check_same(draw, first, (devices, found))
    return first[1]


def check_same(
    draw: Draw, first: tuple[Any, dict[str, str]], other: tuple[Any, dict[str, str]]
) -> None:
    """Raise `Differs` where two outcomes do, each with what it was computed on."""
    refused = [kind(outcome) for _, outcome in (first, other)]
    if any(refused) and refused[0] != refused[1]:
        told = first[1].get("refused") or other[1]["refused"]
        raise RefusedOnSome(f"{first[0]} devices: {refused[0]}, {other[0]}: {refused[1]}: {told}")
    names = dict.fromkeys([*first[1], *other[1]])
    wrong = [name for name in names if first[1].get(name) != other[1].get(name)]
    if wrong and not any(refused):
        raise Differs(
            f"{first[0]} and {other[0]} devices differ in {wrong[0]} and {len(wrong) - 1} more of "
            f"{len(names)}; {draw}"
        )


def kind(outcome: dict[str, str]) -> str:
    """The class of the error of a case that is refused; else empty."""
    return outcome.get("refused", "").partition(":")[0]
