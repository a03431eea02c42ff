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


def plan_failures(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("plan --failures", FailureOptions, arguments)
    names = [field.name for field in dataclasses.fields(Failures)]
    forecast = goodput_forecast(Failures(**{name: getattr(options, name) for name in names}))
    content: dict[str, Any] = dataclasses.asdict(forecast)
    options.write_json(content)
    options.say(*failure_lines(forecast))
    return 0


def failure_lines(forecast: FailureForecast) -> list[str]:
    """Return the forecast as lines of at most 80 columns."""
    job = forecast.failures
    lines: list[Line] = [("strategy", "goodput", "a failure costs")]
    for way in forecast.strategies:
        mark = " *" if way.strategy == forecast.recommended else ""
        lines.append((f"{way.strategy}{mark}", f"{100 * way.goodput:.1f}%", way.lost))
    about = (
        f"{counted(job.devices, 'device')}, one failure every {time_text(forecast.mtbf_seconds)}; "
        f"{counted(job.island_count, 'island')}, H = {job.every}; a checkpoint every "
        f"{time_text(forecast.save_every_seconds)}"
    )
    why = (
        "the simplest within 1 point of the best; exchanging every H steps also costs loss, and "
        "every step needs a network that carries it: see --network"
    )
    return [
        *labelled("fails", about),
        "",
        *columns("", lines),
        *labelled("use", f"{forecast.recommended} (*): {why}"),
    ]
