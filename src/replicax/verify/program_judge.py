"""Judge a compiled step: what it reduces, the bytes that it sends, and the work that it repeats."""

from collections import Counter
from collections.abc import Iterable, Sequence

from replicax.analysis.collectives import SLIGHTLY
from replicax.analysis.compiled import Collectives
from replicax.core.modes.mode_table import MODES
from replicax.text.checks import FAIL, NOTE, PASS, Verdict
from replicax.verify.facts import Facts
from replicax.verify.independence import DEPENDENT
from replicax.verify.subject import Case, Subject

REDUNDANT = 1.1
"""A device that computes more than this many times its share repeats work of others."""
_ALL = 0.9
"""At this share of the total work, a device counts as computing all of it."""
_FAR = 2.0
"""More than this many times the bytes of the layout is an error."""
_SLACK_BYTES = 4096
"""Excess bytes that are ignored: metrics, weights and counts, and padding of small transfers."""
_REDUCTIONS = ("all-reduce", "reduce-scatter", "all-gather")

Judgement = tuple[Verdict, str, str]
"""A verdict, what to add to the finding, and the cause."""
_Sent = tuple[int, float]
"""A number of collectives, and the bytes that a device sends in them."""


def counts_by_kind(collectives: Iterable[Collectives]) -> str:
    """Return `2 all-gather, 1 all-reduce`, or `nothing`."""
    counts: Counter[str] = Counter()
    for each in collectives:
        counts[each.kind] += each.count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"


def judge_traffic(
    subject: Subject, facts: Facts, case: Case, between: _Sent, of_one: _Sent, most: float
) -> Judgement:
    """Judge the collectives between replicas, compared with one micro-batch and with the layout."""
    (count, sent), layout = between, subject.parallel(case).layout
    share, statistics = sent / most, facts.writes or facts.rows.gathers
    statistics |= facts.rows.kind == DEPENDENT
    once = _ONCE if MODES["shard_map"].holds(layout) else ""
    if not sent:
        return FAIL, ": nothing is reduced over the replicas", ""
    grows = count > of_one[0] or sent > SLIGHTLY * of_one[1]
    if grows and not layout.splits_params:  # split parameters are gathered per micro-batch
        more = f"; {of_one[0]} with 1 micro-batch"
        if statistics and share <= _FAR:
            return NOTE, f"{more}: statistics of every micro-batch", ""
        if case == subject.own and once:
            return FAIL, more, f"{GROWS}{once}"
        return NOTE, f"{more}: {GROWS}{once}", ""
    if share > SLIGHTLY and statistics:
        return NOTE, "; this includes statistics or rows of the whole batch", ""
    if share > _FAR and sent - most > _SLACK_BYTES:
        return FAIL, "", f"{TWICE}{once}"
    if share <= SLIGHTLY:
        return PASS, "", ""
    if case.mode.per_replica:
        return NOTE, f"; {FILLED_UP}", ""
    return NOTE, f"; {WHOLE_FIRST if layout.splits_optimizer else TWO_SUMS}{once}", ""


def judge_step_traffic(
    collectives: Sequence[Collectives], replicas: int, gradient_bytes: int, *, repeats: bool
) -> Judgement:
    """Judge the collectives of a hand-written step. `repeats`: whether each device does all."""
    moved = sum(each.bytes for each in collectives)
    if replicas > 1 and not any(each.kind in _REDUCTIONS for each in collectives):
        text = f"nothing is reduced over {replicas} replicas"
        return (NOTE, text, "see redundant work") if repeats else (FAIL, text, NEVER)
    share = moved / max(gradient_bytes, 1)
    text = f"{counts_by_kind(collectives)}: {moved:,} bytes, {share:.2f} times one gradient"
    if moved <= REDUNDANT * gradient_bytes + _SLACK_BYTES:
        return PASS, text, ""
    return NOTE, text, SEVERAL


def judge_work(
    times: float, devices: int, of_each: int, everything: str, recomputed: float = 1.0
) -> Judgement:
    """Judge FLOPs that are `times` those needed, on `devices` of which a replica has `of_each`.

    `everything` is the cause if each device computes the whole batch; `recomputed` is the relative
    work that recomputing a forward pass allows for.
    """
    if times <= REDUNDANT * recomputed:
        return PASS, "", ""
    if of_each < devices and times >= _ALL * devices:
        return FAIL, "", everything
    if of_each > 1 and times >= _ALL * of_each:
        return FAIL, "", NOT_SPLIT.format(of_each)
    return NOTE, f": {PARTLY}", ""


NO_PRODUCTS = "its program has no matrix products to count"
FILLED_UP = "shards are padded, or more than the gradient and metrics is reduced"
WHOLE_FIRST = "the compiler reduces whole arrays of which each replica keeps only a shard"
TWO_SUMS = "the compiler reduces a leaf twice (a tied embedding) or a sum separately"
GROWS = "the compiler reduces inside the loop over micro-batches"
TWICE = (
    "more than the gradient sums crosses the network: an operation that mixes rows (a sort or a "
    "reshape over the row dimension), or a leaf that is reduced several times"
)
_ONCE = "; use mode='shard_map', which sends each sum once"
NEVER = "the replicas never exchange anything: apply lax.pmean to the gradient"
SEVERAL = (
    "more than one gradient is reduced: also statistics or activations, the same value twice, "
    "or every micro-batch separately (reduce once, after the last)"
)
EVERYTHING = (
    "every device computes the whole batch: an operation of the loss keeps the compiler from "
    "splitting the rows (a reshape or a gather that mixes them); use mode='shard_map', or "
    "constrain the rows to stay split"
)
STEP_EVERYTHING = (
    "every device computes the whole batch: it is replicated, not split over {} devices; give the "
    'batch the sharding P("data") (in_shardings, or jax.device_put)'
)
NOT_SPLIT = (
    "the {} devices of a replica all compute the same: the layout rules split none of the large "
    "matrices; add rules for these, or assign the devices to axis 'data'"
)
PARTLY = "some products do not depend on the rows or are not split; each device repeats them"
