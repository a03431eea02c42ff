"""Render a plan as one screen: fit, speed and limits first, then the largest batch and changes."""

from collections.abc import Callable, Iterator, Sequence

from replicax.plan.network_entries import island_entries, slow_links_entries, traffic_entries
from replicax.plan.planned import AT_RATES, LATER_PARTS, Need, Plan, Scaling, Speed, unclear
from replicax.text.blocks import GAP, Entry, ReportBlock, report_of
from replicax.text.table import MARGIN, Line, width
from replicax.text.wording import (
    UNKNOWN,
    counted,
    number_text,
    part_text,
    percent,
    size_text,
    time_text,
)

_KERNELS = 3
_LONGEST_NAME = 40
_SMALL = 0.005
"""Share of a step's memory below which a part is omitted."""
_NETWORK = "network"
PLAN_PARTS = ("target", "soon", "", *LATER_PARTS)
"""Parts of the screen, in order."""
_MAY = "may fit or not"
_EFFICIENCY = "efficiency at most"
_COLUMN = 9
"""Width of a device count up to 131,072, and the gap before it."""


def plan_lines(plan: Plan, part: str) -> list[str]:
    """Return one part and an empty line: a name in `PLAN_PARTS`."""
    return [text for block in _blocks(plan, part) for text in block.lines()]


@report_of.register
def _(plan: Plan) -> list[ReportBlock]:
    return [block for part in PLAN_PARTS for block in _blocks(plan, part)][:-1]


def _blocks(plan: Plan, part: str) -> list[ReportBlock]:
    """Return the sections of one part, each followed by an empty line.

    The speed and what follows from it are those of the requested batch if it fits, and otherwise
    come with the largest batch.
    """
    beyond = [
        [*traffic_entries(plan), *island_entries(plan)],
        slow_links_entries(plan.slow_links) if plan.slow_links else [],
        [*_scaling(plan), *_cost(plan)],
    ]
    alone = plan.fits or plan.target.chip.usable_bytes is None
    sections: Sequence[Sequence[ReportBlock]]
    if part == "target":
        sections = [[*_header(plan)]]
    elif part == "soon":  # by formula, while it is compiled
        answer = [*_fits(plan), *_speed(plan, plan.speeds), *_limit(plan)]
        sections = [answer] if "" in plan.left else []
    elif part == "":
        answer = [*_fits(plan), *(_speed(plan, plan.speeds[:1]) if alone else ())]
        answer += [*(_limit(plan) if alone else ()), *_memory(plan)]
        sections = [answer, *(beyond if alone else ())]
    elif part == "batch":
        more = plan.speeds[1:] if alone else plan.speeds
        batch = [*_batch(plan), *(_speed(plan, more) if more or not alone else ())]
        sections = [[*batch, *(() if alone else _limit(plan))], *(() if alone else beyond)]
    else:
        first = [Entry("first", plan.first)] if plan.first else []
        changes = [*_changes(plan), *first, *_learning_rates(plan)]
        sections = [changes, [Entry("note", note) for note in plan.notes]]
    return [block for section in sections if section for block in (*section, GAP)]


def _header(plan: Plan) -> Iterator[Entry]:
    about, target = plan.about, plan.target
    model = [
        about.get("name"),
        "parameters" in about and f"{about['parameters']:,} parameters",
        about.get("precision"),
        about.get("mode"),
        about.get("layout"),
        *(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1 and plan.is_shared),
        about.get("accumulate", 1) > 1 and f"{about['accumulate']} micro-batches",
        about.get("reduction", "float32") != "float32" and f"reduction {about['reduction']}",
    ]
    yield Entry("plan", " · ".join(str(each) for each in model if each))
    kind = f"{target.devices:,} x {target.chip.title}"
    if target.chip.platform == "cpu":
        kind = f"{counted(target.devices, 'CPU device')} of this host"
    known = [
        target.text,
        kind,
        target.hosts > 1 and counted(target.hosts, "host"),
        f"compiled by {about['compiler']}" if about.get("compiler") else "by formula",
    ]
    yield Entry("target", " · ".join(str(each) for each in known if each))


def _fits(plan: Plan) -> Iterator[Entry]:
    asked, chip = plan.asked, plan.target.chip
    rows, how = f"{_each(plan, asked)} take", _how(asked)
    if chip.usable_bytes is None:
        text = f"{rows} {size_text(asked.bytes)}; the memory of a device is unknown"
        yield Entry("fits", f"unknown{how}: {text}")
        return
    reserved = ""
    if chip.memory_bytes and chip.platform == "cuda" and chip.usable_bytes < chip.memory_bytes:
        reserved = f" that JAX preallocates of {size_text(chip.memory_bytes)}"
    near = not asked.compiled and unclear(asked.bytes, asked.bytes, chip.usable_bytes)
    if asked.fits:
        size = part_text(asked.bytes, chip.usable_bytes)
        yield Entry("fits", f"{_MAY if near else 'yes'}{how}: {rows} {size}{reserved}")
        return
    least = f"{'at least ' if asked.is_least else ''}{size_text(asked.bytes)}"
    there = f"{size_text(chip.usable_bytes)}{reserved}"
    yield Entry("fits", f"{_MAY if near else 'no'}{how}: {rows} {least}; a device has {there}")


def _batch(plan: Plan) -> Iterator[Entry]:
    largest, above = plan.largest, plan.too_large
    if plan.target.chip.usable_bytes is None or (largest is None and plan.fits):
        return
    if largest is None:
        least = above.rows if above else 1
        even = _rows(plan, least)
        yield Entry("batch", f"none{_how(above or plan.asked)}: not even {even}")
        return
    beyond = "; more may fit"
    if above:
        how = ", by formula" if largest.compiled and not above.compiled else ""
        beyond = f"; {above.rows:,} do not fit{how}"
    data_rows = plan.about.get("data_rows")
    if above is None and data_rows and (largest.rows + 1) * plan.replicas > data_rows:
        beyond = f": the whole dataset, {data_rows:,} rows"
    size = f"{size_text(largest.bytes)}{_how(largest)}"
    yield Entry("batch", f"up to {_each(plan, largest)} take {size}{beyond}")
    if plan.micro_batches is not None:
        count, need = plan.micro_batches.accumulate, plan.micro_batches.need
        size = f"{size_text(need.bytes)}{_how(need)}"
        yield Entry("", f"accumulate={count}: {_each(plan, need)} take {size}")


def _speed(plan: Plan, speeds: Sequence[Speed]) -> Iterator[Entry]:
    if not speeds:
        why = "unknown; see the notes"
        if plan.target.chip.usable_bytes is not None and plan.largest is None and not plan.fits:
            why = "none: no batch fits"
        yield Entry("speed", why)
        return
    rows = [
        (name, each)
        for speed in speeds
        for name, each in ((_rows(plan, speed.rows), speed), (AT_RATES, speed.at_rates))
        if each is not None
    ]
    shown: dict[str, list[str]] = {
        f"at best{', by formula' * (speeds[0].compute_share is None)}": [name for name, _ in rows],
        "step": [time_text(each.step.seconds) for _, each in rows],
        "rows/s": [number_text(each.rows_per_second) for _, each in rows],
        "tokens/s": [_known(each.tokens_per_second, number_text) for _, each in rows],
        "MFU": [_known(each.model_share, percent) for _, each in rows],
        "HFU": [percent(each.peak_share) for _, each in rows],
    }
    if shown["MFU"] == shown["HFU"]:  # nothing is recomputed
        del shown["HFU"]
    known = {name: texts for name, texts in shown.items() if any(texts)}
    cells = zip(*known.values(), [""] * len(rows), strict=True)
    yield Entry("speed", [(*known, ""), *cells])


def _limit(plan: Plan) -> Iterator[Entry]:
    chip, word = plan.target.chip, "limit"
    if not plan.fits and chip.usable_bytes is not None:
        state = f"{size_text(plan.formula.state)}; a device has {size_text(chip.usable_bytes)}"
        if plan.formula.state <= chip.usable_bytes:
            state = part_text(plan.formula.state, chip.usable_bytes)
        if plan.largest is not None:
            state += f", leaving room for {_counted(plan.largest.rows, 'row')}"
        yield Entry(word, f"memory: the state takes {state}")
        word = ""
    if plan.speed is None:
        return
    shares = sorted(_shares(plan.speed).items(), key=lambda each: -each[1])
    waited = {_NETWORK: f" ({time_text(plan.speed.step.exposed_seconds)})"}
    text = ", ".join(
        f"{name} {percent(share)}{waited.get(name, '')}"
        for name, share in shares
        if share >= _SMALL
    )
    where = "" if word else f"with {_counted(plan.speed.rows, 'row')}: "
    yield Entry(word, f"{where}{text} of a step")
    if plan.speed.kernels:
        yield Entry("", f"longest: {', '.join(_longest(plan.speed))}")


def _shares(speed: Speed) -> dict[str, float]:
    """Return each resource's share of a step's time."""
    step = speed.step
    if not step.seconds:
        return {}
    waiting, computing = step.exposed_seconds / step.seconds, step.compute_seconds / step.seconds
    idle, computing = computing * speed.bubble, computing * (1 - speed.bubble)
    if speed.compute_share is None:
        return {"computation": computing, _NETWORK: waiting, "pipeline bubble": idle}
    return {
        "pipeline bubble": idle,
        "arithmetic": computing * speed.compute_share,
        "memory bandwidth": computing * (1 - speed.compute_share),
        _NETWORK: waiting,
    }


def _longest(speed: Speed) -> list[str]:
    """Describe the longest kernels, merging those of the same name and bound."""
    shares: dict[tuple[str, str], float] = {}
    for each in speed.kernels:
        name = "/".join(each.name.split("/")[-2:])  # the operation and its enclosing scope
        if len(name) > _LONGEST_NAME:
            name = f"...{name[3 - _LONGEST_NAME :]}"
        shares[name, each.bound] = shares.get((name, each.bound), 0.0) + each.share
    most = sorted(shares.items(), key=lambda each: -each[1])[:_KERNELS]
    return [f"{name} {percent(share)} ({bound})" for (name, bound), share in most]


def _memory(plan: Plan) -> Iterator[Entry]:
    """Describe the parts by formula, the compiled total, and the back-of-the-envelope formula."""
    formula = plan.formula
    parts = {
        "parameters": formula.parameters,
        "optimizer": formula.optimizer,
        "other state": formula.extras,
        "new state": formula.new_state,
        "batch": formula.batch,
        "compute copy": formula.compute_copy,
        "gradient": formula.gradient,
        "activations": formula.activations,
        "workspace": formula.workspace,
    }
    sizes = [
        f"{name} {size_text(size)}" for name, size in parts.items() if size > _SMALL * formula.total
    ]
    apart = ""
    if formula.never_together > _SMALL * formula.total:
        apart = f", less {size_text(formula.never_together)} not live at the peak"
    text = f"{', '.join(sizes)}{apart}: {size_text(formula.total)} by formula"
    if plan.asked.compiled and plan.asked.fits:
        text += f", {size_text(plan.asked.bytes)} compiled"
    yield Entry("memory", f"{_rows(plan, formula.rows)}: {text}")
    if plan.on_paper is not None:
        size, rows = size_text(plan.on_paper.bytes_per_row), _counted(plan.on_paper.rows, "row")
        text = f"M B T²/(4 N D²): activations of {size} per row, {rows} per device"
        yield Entry("paper", text)


def _changes(plan: Plan) -> list[Entry]:
    if not plan.alternatives:
        return []
    of = plan.asked if plan.fits or plan.largest else plan.too_large or plan.asked
    compiled = of.compiled or any(each.need.compiled for each in plan.alternatives)
    rows = f"with {_rows(plan, of.rows)}{'' if compiled else ', by formula'}"
    lines: list[Line] = [(rows, "takes", "frees", "step", "sends", "")]
    if plan.fits and plan.speed is not None:
        sent = size_text(plan.traffic.wire_bytes) if plan.traffic else ""
        took = time_text(plan.speed.step.seconds)
        lines.append(("unchanged", size_text(plan.asked.bytes), "", took, sent, ""))
    for each in plan.alternatives:
        texts = [
            _MAY if each.unclear else "" if each.need.fits else "does not fit",
            "by formula" if compiled and not each.need.compiled else "",
            each.note,
        ]
        little = abs(each.freed_bytes) < _SMALL * plan.asked.bytes
        figures = (
            size_text(each.need.bytes),
            "nothing" if little else size_text(each.freed_bytes),
            _known(each.step_seconds, time_text),
            _known(each.wire_bytes, size_text),
        )
        lines.append((each.change, *figures, "; ".join(filter(None, texts))))
    return [Entry("change", lines)]


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _scaling(plan: Plan) -> list[Entry]:
    scaling = plan.scaling
    if scaling is None or plan.speed is None:
        return []
    rows = plan.speed.rows
    names = (f"{_counted(rows, 'row')} each", f"{_counted(rows * plan.replicas, 'row')} in all")
    named = MARGIN + max(len(_EFFICIENCY), *map(len, names)) + len("  devices")
    most = max((width() - named) // _COLUMN, 2)
    fewer, devices = plan.fewer_devices, plan.target.devices
    counts = shown_counts(scaling, devices, most)
    counts = [count for count in counts if fewer is None or count <= devices]
    lines: list[Line] = [(_EFFICIENCY, *map(number_text, counts), "devices")]
    pays = []
    curves = ((scaling.weak, scaling.weak_pays), (scaling.strong, scaling.strong_pays))
    for name, (points, paid) in zip(names, curves, strict=True):
        efficiencies = {point.devices: percent(point.efficiency) for point in points}
        lines.append((name, *(efficiencies.get(count, UNKNOWN) for count in counts), ""))
        last = points and paid == points[-1].devices
        reach = f"up to {number_text(paid)} (maximum)" if last else f"up to {number_text(paid)}"
        if fewer is None or points is scaling.strong:
            pays.append(f"{reach} with {name}")
    reached = "to the same loss, " if plan.about.get("noise_scale") else ""
    return [Entry("scales", lines), Entry("pays", f"{reached}{'; '.join(pays)}")]


def shown_counts(scaling: Scaling, devices: int, most: int) -> list[int]:
    """Return at most `most` counts of the curves: the ends, the target's, and some between."""
    known = sorted({point.devices for point in (*scaling.weak, *scaling.strong)})
    wanted = [known[0], known[-1], devices, scaling.strong_pays, scaling.weak_pays]
    chosen = sorted([count for count in dict.fromkeys(wanted) if count in known][:most])
    while len(chosen) < min(most, len(known)):
        # The count whose ratio to the chosen counts is largest.
        rest = [count for count in known if count not in chosen]
        chosen.append(max(rest, key=lambda count: min(_ratio(count, other) for other in chosen)))
    return sorted(chosen)


def _ratio(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


def _cost(plan: Plan) -> list[Entry]:
    hours, rows = plan.device_hours, plan.about.get("wished_rows")
    if hours is None or rows is None:
        return []
    tokens = plan.about.get("tokens_per_row")
    of = _counted(rows * tokens, "token") if tokens else _counted(rows, "row")
    return [Entry("cost", f"at least {_counted(hours, 'device-hour')} for {of} on this target")]


def _learning_rates(plan: Plan) -> Iterator[Entry]:
    noise, word = plan.about.get("noise_scale"), "rate"
    if plan.fewer_devices is not None:
        return
    for each in plan.batches:
        parts = []
        if each.linear != 1:
            linear, root = _times(each.linear), _times(each.square_root)
            parts.append(f"{linear} the learning rate for SGD, {root} for Adam")
        if each.steps is not None and each.examples is not None:
            steps, rows = _times(each.steps), _times(each.examples)
            parts.append(f"{steps} the minimum steps, {rows} the minimum rows")
        if parts:
            yield Entry(word, f"a batch of {number_text(each.batch_size)}: {'; '.join(parts)}")
            word = ""
    if noise and not word:
        yield Entry("", f"critical batch {number_text(noise)} rows, from the noise scale")
    elif not word:
        yield Entry("", "critical batch unknown: measure it with train --measure-noise-scale")


def _times(factor: float) -> str:
    return f"{factor:.3g} x" if factor < 1000 else f"{number_text(factor)} x"


def _each(plan: Plan, need: Need) -> str:
    """Format exact row counts, for use as a batch size."""
    total = f" ({need.rows * plan.replicas:,} in all)" if plan.target.devices > 1 else ""
    return f"{counted(need.rows, 'row')} per {plan.holder}{total}"


def _counted(number: float, noun: str) -> str:
    return counted(number, noun, number_text)


def _rows(plan: Plan, count: int) -> str:
    return f"{_counted(count, 'row')} per {plan.holder}"


def _how(need: Need) -> str:
    return "" if need.compiled else ", by formula"
