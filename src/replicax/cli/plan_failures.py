"""`replicax plan --failures`: forecast the goodput of a job whose devices fail."""

import dataclasses
from typing import Any

from replicax.cli.flags import parse
from replicax.cli.output import JsonOptions
from replicax.plan.failures import FailureForecast, Failures, goodput_forecast
from replicax.text.table import Line, columns, labelled
from replicax.text.wording import counted, time_text


@dataclasses.dataclass(frozen=True)
class FailureOptions(JsonOptions, Failures):
    """Forecast the goodput of three ways to survive failures, for any number of devices."""

    @property
    def job(self) -> Failures:
        """The options without those of the output."""
        names = [field.name for field in dataclasses.fields(Failures)]
        return Failures(**{name: getattr(self, name) for name in names})


def plan_failures(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("plan --failures", FailureOptions, arguments)
    found = goodput_forecast(options.job)
    content: dict[str, Any] = dataclasses.asdict(found)
    options.write_json(content)
    options.say(*failure_lines(found))
    return 0


def failure_lines(found: FailureForecast) -> list[str]:
    """Return the forecast as lines of at most 80 columns."""
    job = found.failures
    lines: list[Line] = [("strategy", "goodput", "a failure costs")]
    for each in found.strategies:
        mark = " *" if each.strategy == found.recommended else ""
        lines.append((f"{each.strategy}{mark}", f"{100 * each.goodput:.1f}%", each.lost))
    about = (
        f"{counted(job.devices, 'device')}, one failure every {time_text(found.mtbf_seconds)}; "
        f"{counted(job.island_count, 'island')}, H = {job.every}; a checkpoint every "
        f"{time_text(found.save_every_seconds)}"
    )
    why = (
        "the simplest within 1 point of the best; exchanging every H steps also costs loss, and "
        "every step needs a network that carries it: see --network"
    )
    return [
        *labelled("fails", about),
        "",
        *columns("", lines),
        *labelled("use", f"{found.recommended} (*): {why}"),
    ]
