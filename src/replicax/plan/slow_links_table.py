"""The methods over a network as lines of a table."""

from replicax.plan.slow_links import SlowLinkForecast, SlowLinks
from replicax.text.blocks import Entry
from replicax.text.table import Line
from replicax.text.wording import UNKNOWN, counted, percent, size_text, time_text

_HEAD = ("method", "bytes", "every", "waits", "util.", "loss")
_MARK = " *"


def slow_links_entries(found: SlowLinks) -> list[Entry]:
    """Return one line for each method, and which to use."""
    lines: list[Line] = [_HEAD]
    for index, each in enumerate(found.forecasts):
        marked = _MARK if index == found.recommended else ""
        lines.append((f"{each.method.title}{marked}", *_figures(each), each.loss_cost))
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
    return f"{best.method.title}, {when} (*): {found.why}"
