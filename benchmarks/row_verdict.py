"""Whether what Replicax computed is what one device computes, or differs by more than rounding."""

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np
from row_programs import LOW, Case, Program, Told

TOLERANCE, EXACT = 2e-5, 1e-8
"""Difference relative to the size of a mean, a gradient or rows; the second in float64."""
LOW_TOLERANCE = 3e-2
"""The same where anything is computed in less than float32."""
TINY = 1e-6
"""Size below which a gradient is rounding, relative to the largest of its step."""


NOTHING = 1e-14
"""Difference in float64, relative to the loss, that is none: of a gradient that is 0."""


def gaps(found: Told, plain: Told, nothing: float = 0.0) -> Iterator[tuple[float, int, str]]:
    """Yield relative differences that are not 0, with the step and the name.

    A step whose numbers are not finite on one device is none to compare, and a difference of less
    than `nothing` times the loss is none.
    """
    for step, (one, other) in enumerate(zip(found, plain, strict=False)):
        if not all(np.isfinite(value).all() for value in other.values()):
            continue
        largest = max(np.abs(v).max() for n, v in other.items() if n.startswith("gradient"))
        for name, value in other.items():
            size = np.abs(value).max()
            least = TINY * max(largest, 1e-6) if name.startswith("gradient") else 1e-6
            difference = np.abs(one[name] - value).max()
            gap = difference / max(size, least)
            if not difference <= nothing * np.abs(other["loss"]).max():
                yield (np.inf if np.isnan(gap) else float(gap)), step, name


def differs(found: Told, plain: Told, nothing: float = 0.0) -> float:
    """Return the largest relative difference."""
    return max((gap for gap, _, _ in gaps(found, plain, nothing)), default=0.0)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a run that was accepted compares with one device."""

    kind: str
    """Same, rounding, or silent."""
    said: str = ""


def verdict(program: Program, case: Case, found: Told, plain: Told) -> Verdict:
    """Compare what was computed before any refusal with one device."""
    worst = max(gaps(found, plain), default=(0.0, 0, ""))
    usual = EXACT if program.dtype == "float64" else TOLERANCE
    if worst[0] <= (LOW_TOLERANCE if program.low else usual):
        return Verdict("same")
    said = f"{worst[2]} of step {worst[1]}: {worst[0]:.1e}"
    if program.low:
        noise = collections.defaultdict[str, float](float)
        for other in (_wide(program), *map(program.jittered, (1, 2, 3))):
            for gap, _, name in gaps(plain, other.plain()):
                noise[name] = max(noise[name], gap)
        off = [each for each in gaps(found, plain) if each[0] > LOW_TOLERANCE + 4 * noise[each[2]]]
        return Verdict("silent" if off else "rounding", said)
    twin = program.at("float64")
    again, why = ([], "float64 itself") if program.dtype == "float64" else twin.found(case)
    if len(again) >= len(found):
        exact = differs(again, twin.plain(), NOTHING)
        said += f", in float64 {exact:.1e}"
        return Verdict("rounding" if exact < EXACT else "silent", said)
    noise = max(differs(program.jittered(n).plain(), plain) for n in (1, 2, 3))
    said += f" ({why[:60]}), by rounding {noise:.1e}"
    return Verdict("rounding" if worst[0] < 10 * noise else "silent", said)


def _wide(program: Program) -> Program:
    """Return a program with the same numbers that computes in float64."""
    wide = tuple(
        (gate, "in its own precision" if name in LOW else name) for gate, name in program.parts
    )
    return dataclasses.replace(
        program, parts=wide, dtype="float64", given=program.given or program.dtype
    )
