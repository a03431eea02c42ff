"""Networks in a plan: collectives, sums between islands, methods over slow links."""

from collections.abc import Iterator

from replicax.plan.planned import Plan
from replicax.plan.slow_links import SlowLinkForecast, SlowLinks, method_title
from replicax.text.blocks import Entry
from replicax.text.table import Line
from replicax.text.wording import UNKNOWN, counted, number_text, percent, size_text, time_text

_HEAD = ("method", "bytes", "every", "waits", "util.", "loss")
_MARK = " *"


def traffic_entries(plan: Plan) -> list[Entry]:
    """Return the collectives of a step, and how much they overlap with computation."""
    traffic = plan.traffic
    if traffic is None:
        return []
    lines: list[Line] = [("per device and step", "count", "result", "sent", "compute overlap")]
    for each in traffic.movements:
        meanwhile = "none"
        if each.asynchronous and each.between_seconds != 0:
            known = each.between_seconds is not None
            meanwhile = f"{time_text(each.between_seconds or 0)}" if known else "yes"
        figures = (number_text(each.count), size_text(each.bytes), size_text(each.wire_bytes))
        over = f" over {', '.join(each.axes)}" if each.axes else ""
        lines.append((f"{each.kind}{over}", *figures, meanwhile))
    if traffic.least_bytes:
        least = size_text(traffic.least_bytes)
        lines.append(("minimum", "", "", least, f"sends {traffic.share:.2f} x this"))
    warned = [Entry("note", traffic.warning)] if traffic.warning else []
    return [Entry("sends", lines), *warned]


def island_entries(plan: Plan) -> Iterator[Entry]:
    """Yield the bytes of a step between islands, and what they take."""
    found = plan.islands
    if found is None:
        return
    sent, received = (size_text(max(each)) for each in (found.sent_bytes, found.received_bytes))
    text = (
        f"{counted(found.islands, 'island')}, {counted(found.parts, 'part')} of "
        f"{size_text(found.sums_bytes)} per step: one sends up to {sent} and receives up to "
        f"{received}"
    )
    if found.network is not None and found.seconds is not None:
        text += f"; {time_text(found.seconds)} over {found.network.text}"
    if found.share is not None:
        text += f", at most {percent(found.share)} of a step"
    yield Entry("sums", text)


def slow_links_entries(found: SlowLinks) -> list[Entry]:
    """Return one line for each method, and which to use."""
    lines: list[Line] = [_HEAD]
    for index, each in enumerate(found.forecasts):
        marked = _MARK if index == found.recommended else ""
        lines.append((f"{method_title(each.method)}{marked}", *_figures(each), each.loss_cost))
    step = "a step of unknown time"
    if found.step_seconds is not None:
        step = f"a step of at least {time_text(found.step_seconds)}"
    about = f"{counted(found.islands, 'island')} over {found.network.text}, {step}"
    links = found.network.links.values()
    if not any(link.round_trip_seconds for link in links):
        about += "; no round trip is given, so none is counted"
    return [Entry("links", about), Entry("", lines), Entry("use", _advice(found))]


def _figures(each: SlowLinkForecast) -> tuple[str, ...]:
    waits = UNKNOWN if each.exposed_seconds is None else time_text(each.exposed_seconds)
    computes = UNKNOWN if each.utilization is None else percent(each.utilization)
    return size_text(each.sync_bytes), str(each.method.every), waits, computes


def _advice(found: SlowLinks) -> str:
    if found.recommended is None:
        return f"unknown: {found.why}"
    best = found.forecasts[found.recommended]
    when = "every step" if best.method.every == 1 else f"every {best.method.every} steps"
    return f"{method_title(best.method)}, {when} (*): {found.why}"
