"""Format lists, numbers, sizes, durations and errors for messages and tables."""

from collections.abc import Callable, Sequence

UNKNOWN = "-"


def named(paths: Sequence[str], most: int = 1) -> str:
    """Return `a, b and 3 more`: the first `most` paths and the number of others."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(path or "the result" for path in paths[:most]) + more


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: float, noun: str, text: Callable[[float], str] = "{:,}".format) -> str:
    """Return `1 process`, `2 processes` or `3 nodes`, with the number formatted by `text`."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{text(number)} {noun if number == 1 else plural}"


def number_text(value: float) -> str:
    """Format in at most 7 characters: `131,072`, else three digits such as `3.14` or `46.3M`."""
    if value < 999_999.5:
        return f"{value:,.{0 if isinstance(value, int) else decimals(value)}f}"
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.5 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.1e}"


def decimals(value: float) -> int:
    """Return the decimals for three significant digits, at most 4."""
    if not 0 < value < 100:
        return 0
    return min(2 - int(f"{value:.2e}".partition("e")[2]), 4)


def percent(share: float | None) -> str:
    """Return `97%`, or `0.3%` below one percent."""
    if share is None:
        return UNKNOWN
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def size_text(size_bytes: float) -> str:
    """Return a size such as `1.5 MB`, in powers of 1000."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and units[1:]:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def part_text(part: float, whole: float) -> str:
    """Return `11.2 of 16.9 GB`, or both units if they differ."""
    first, second = size_text(part), size_text(whole)
    same = first.split()[-1] == second.split()[-1]
    return f"{first.split()[0] if same else first} of {second}"


def duration(seconds: float) -> str:
    """Return a human-readable duration."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def time_text(seconds: float) -> str:
    """Return `45.3 ms`: three digits, or minutes and hours for long times."""
    if seconds >= 59.5:
        return duration(seconds) if seconds < 3.6e6 else f"{number_text(seconds / 3600)} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{float(f'{seconds / size:.3g}'):g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message, in at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return shortened(text, 200)


def shortened(text: str, width: int) -> str:
    """Return `text`, truncated to `width` characters."""
    return text if len(text) <= width else f"{text[: width - 3]}..."
