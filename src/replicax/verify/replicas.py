"""Replicas stay equal: every device's own copy of every leaf has the same bits."""

import jax

from replicax.checks import FAIL, PASS, SKIP, Check
from replicax.verify.copies import read_copies
from replicax.verify.subject import Case, Subject
from replicax.wording import named

STEPS = 3
_SHOWN = 4


def check_replicas(subject: Subject, case: Case) -> Check:
    """Compare all copies after a few steps of one case."""
    dp = subject.parallel(case)
    state, batch = subject.placed(case, subject.state), subject.batch_on(case, subject.full)
    for _ in range(STEPS):
        state, _ = dp.step(state, batch)
    jax.block_until_ready(state)
    held = read_copies(state, {})
    counts = [
        len({shard.replica_id for shard in leaf.addressable_shards})
        for leaf in jax.tree.leaves(state)
    ]
    copied = sum(count > 1 for count in counts)
    figures = {"leaves": len(held.held), "copied": copied, "steps": STEPS}
    if not copied:
        text = "no leaf has copies on several devices"
        return Check("replicas", str(case), SKIP, text, "", figures)
    if not held.unequal:
        copies = " or ".join(str(count) for count in sorted({*counts} - {1}))
        text = f"all {copies} copies of {copied} leaves are equal after {STEPS} steps"
        return Check("replicas", str(case), PASS, text, "", figures)
    text = (
        f"{named([path.lstrip('.') for path in held.unequal], _SHOWN)} differ after {STEPS} steps"
    )
    return Check("replicas", str(case), FAIL, text, CAUSE, figures)


CAUSE = (
    "the replicas drift apart: something that each computes by itself (its own rows, key or index) "
    "is written and not reduced"
)
