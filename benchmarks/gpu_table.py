"""The final table of `gpu.py`, 80 columns wide: GPT-2's contenders, then the other parts."""

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 80
KERNELS_SHOWN = 8
Row = Mapping[str, Any]


def state(row: Row) -> str:
    """Return `done`, `left out` or `failed`."""
    return "failed" if "error" in row else "left out" if "left_out" in row else "done"


def reason(row: Row) -> str:
    """Return the reason why a part has no figures, as one line."""
    return " ".join(str(row.get("error") or row.get("left_out")).split())


def summary(result: Mapping[str, Any]) -> list[str]:
    """Return all lines of the table."""
    parts: dict[str, Row] = result["parts"]
    timed = contenders(parts)
    lines = ["", *head(result["environment"])]
    if timed:
        lines += [*steps(timed), *(disagreements(parts) or agreed(timed))]
    for name, row in timed.items():
        lines += kernels(name, row)
    for name, row in parts.items():
        if state(row) == "done" and name not in timed:
            lines += figures(name, row)
    lost = [name for name in parts if state(parts[name]) != "done"]
    for name in lost:
        lines += ["", *wrapped(f"{name}: {state(parts[name])}: {reason(parts[name])}")]
    return [*lines, ""]


def contenders(parts: Mapping[str, Row]) -> dict[str, Row]:
    """Return the parts that timed GPT-2's step."""
    return {name: row for name, row in parts.items() if "tokens_per_second" in row}


def disagreements(parts: Mapping[str, Row]) -> list[str]:
    """List contenders whose losses differ from the first one with the same batch and vocabulary."""
    found = []
    first: dict[tuple[int, int], tuple[str, Row]] = {}
    for name, row in contenders(parts).items():
        reference, expected = first.setdefault((row["rows"], row["vocabulary"]), (name, row))
        for step, tolerance in zip((0, -1), row["tolerances"], strict=True):
            difference = abs(row["losses"][step] - expected["losses"][step])
            if not difference <= tolerance:
                found.append(
                    f"{name}: loss differs by {difference:.1e} from {reference}: another model"
                )
                break
    return found


def agreed(timed: Mapping[str, Row]) -> list[str]:
    losses = next(iter(timed.values()))["losses"]
    return [f"their losses agree: {losses[0]:.4f}, and {losses[-1]:.4f} after three steps"]


def head(machine: Row) -> list[str]:
    """Return the device, the versions and the date."""
    names = ("jax", "jaxlib", "torch", "driver", "python")
    versions = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    return wrapped(" · ".join([machine["device"], *versions, machine["date"]]))


def steps(timed: Mapping[str, Row]) -> list[str]:
    """Return a line for each contender: measurements, and the plan from the program's text."""
    first = next(iter(timed.values()))
    size = f"{first['rows']} rows of {first['context']:,} tokens"
    lines = ["", f"GPT-2, {size}, bfloat16 (plan: the program at the chip's peaks,"]
    lines += ["and at the rates that single kernels reach)"]
    heads = f"{'ms':>9}{'plan':>8}{'rates':>8}{'tokens/s':>11}{'MFU':>7}{'GB':>8}{'plan':>7}"
    lines.append(f"{'':<22}{heads}")
    for name, row in timed.items():
        names = "ms", "planned_ms", "planned_ms_at_rates"
        times = [number(row.get(each)) for each in names]
        memory = number(row.get("peak_gb")), number(row.get("planned_gb"))
        used = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"{name.removeprefix('gpt2, '):<22}{times[0]:>9}{times[1]:>8}{times[2]:>8}"
            f"{row['tokens_per_second']:>11,}{used:>7}{memory[0]:>8}{memory[1]:>7}"
        )
    return lines


def kernels(name: str, row: Row) -> list[str]:
    """List the slowest kernels of a profiled contender; gpu.json has more."""
    if "profile" not in row:
        return []
    lines = ["", f"kernels of {name}: {row['profile']}"]
    if not row.get("kernels"):
        return lines
    lines[-1] = f"{lines[-1]:<62.62}{'ms':>9}{'plan':>9}"
    total = ("all", row["profiled_ms"], row["planned_ms"])
    for kernel, measured, planned in (total, *row["kernels"][:KERNELS_SHOWN]):
        lines.append(f"  {kernel:<60.60}{number(measured):>9}{number(planned):>9}")
    return lines


def figures(name: str, row: Row) -> list[str]:
    """Return a line for each figure, as named by the part."""
    lines = ["", name]
    for key, value in row.items():
        if key != "seconds":
            line = f"  {key:<50} {number(value):>27}"
            lines += [line] if len(line) <= WIDTH else wrapped(f"  {key}: {value}")
    return lines


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def number(value: Any) -> str:
    """Format floats with four digits, and anything else unchanged."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
