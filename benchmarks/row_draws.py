"""Draw programs: half of them keep rows apart, half are custom steps."""

import dataclasses
import random

from row_backward import CURVED, LINEAR
from row_parts import APART, DRAWN, ENDS, GATES, METRICS, MIXING
from row_programs import ROWS, Program
from row_weighed import CAREFUL, CARELESS, WEIGHED_ENDS

KINDS = {
    "apart": 40,
    "mixing": 8,
    "careful": 10,
    "careless": 18,
    "curved": 10,
    "draws": 8,
    "end": 6,
}
"""Weights of what decides about a program."""
LENGTH = 6


def drawn(seed: int) -> Program:
    """Return the program of `seed`."""
    draw = random.Random(seed)
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    own = draw.random() < 0.4
    rows = _rows(draw)
    padded = min(rows) < ROWS
    own_kind = {"mixing": MIXING, "careful": CAREFUL, "careless": CARELESS, "curved": CURVED}
    names = draw.choices([*APART, *LINEAR], k=draw.randint(0 if kind in own_kind else 1, 3))
    parts = [("always", name) for name in names]
    if parts and draw.random() < 0.4:  # a gate around a part that keeps rows apart
        n = draw.randrange(len(parts))
        parts[n] = (draw.choice(list(GATES)), parts[n][1])
    if kind in own_kind:
        gate = draw.choice(list(GATES)) if draw.random() < 0.6 else "always"
        name = draw.choice(list(own_kind[kind]))
        parts.insert(draw.randint(0, len(parts)), (gate, name))
        if kind in ("careful", "careless") and draw.random() < 0.25:
            parts.append(("always", draw.choice(list(CAREFUL))))
    if kind == "draws":
        parts.insert(draw.randint(0, len(parts)), ("always", draw.choice(list(DRAWN))))
        own = False
    number = {"mean"} if padded else set()  # one number cannot leave padding out
    end = draw.choice([name for name, (fine, _) in ENDS.items() if fine and name not in number])
    metrics = [name for name, (fine, _) in METRICS.items() if fine and name not in number]
    metric = draw.choice(metrics)
    if kind == "end":
        wrong = [name for name, (fine, _) in ENDS.items() if not fine]
        end = draw.choice([*wrong, *WEIGHED_ENDS, *WEIGHED_ENDS])
        if not own and draw.random() < 0.3:
            metric = draw.choice([name for name, (fine, _) in METRICS.items() if not fine])
    memory, before = None, draw.randint(0, len(parts)) if own else None
    if own and draw.random() < 0.3:
        memory = ROWS
        if padded and draw.random() < 0.6:  # some entries were never written
            memory, rows = min(rows), (min(rows),) * LENGTH
        place = draw.randint(0, len(parts))
        parts.insert(place, ("always", draw.choice(["memory", "unit of memory"])))
    return Program(
        tuple(parts),
        end,
        metric,
        before=before,
        closure=own and draw.random() < 0.3,
        updates=draw.randint(1, 2) if own else 1,
        rows=rows,
        numbers=draw.choice(["normal", "normal", "other sign", "larger", "smaller", "far"]),
        dtype=draw.choices(["float32", "bfloat16", "float16", "float64"], [70, 12, 8, 10])[0],
        memory=memory,
    )


def _rows(draw: random.Random) -> tuple[int, ...]:
    """Return the sizes of batches: full, short, or both."""
    short = draw.choices([13, 5, 15, 12], [50, 25, 15, 10])[0]
    order = draw.choices(["mixed", "full", "short", "short first"], [45, 20, 20, 15])[0]
    full = {"full": 6, "short": 0, "mixed": 2, "short first": 0}[order]
    rows = [ROWS] * full + [short] * (LENGTH - full)
    if order == "short first":
        rows[2] = rows[4] = ROWS
    return tuple(rows)


def smaller(program: Program) -> list[Program]:
    """Return programs with less in them, the simplest first."""

    def other(**changes: object) -> list[Program]:
        changed = dataclasses.replace(program, **changes)
        return [changed] if changed != program else []

    found = []
    for n, (_, name) in enumerate(program.parts):
        before = program.before
        if before is not None and n < before:
            before -= 1
        state = program.memory is not None and "memory" in name
        rest = program.parts[:n] + program.parts[n + 1 :]
        found += [] if state else other(parts=rest, before=before)
        simple = (*program.parts[:n], ("always", name), *program.parts[n + 1 :])
        found += other(parts=simple)
    found += other(metrics="none") + other(end="rows") + other(updates=1) + other(closure=False)
    found += other(dtype="float32") + other(numbers="normal")
    if program.own and program.memory is None:
        found += other(before=None, closure=False, updates=1)
    if program.own:
        found += other(before=0)
    if len(program.rows) > 1:
        found += other(rows=program.rows[1:]) + other(rows=program.rows[:-1])
    return found
