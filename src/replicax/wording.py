"""Format lists, sizes, durations and errors for messages."""

from collections.abc import Sequence


def named(paths: Sequence[str], most: int = 1) -> str:
    """Return `a, b and 3 more`: the first `most` paths and the number of others."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(path or "the result" for path in paths[:most]) + more


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: int, noun: str) -> str:
    """Return `1 process`, `2 processes` or `3 nodes`."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size_text(size_bytes: float) -> str:
    """Return a size such as `1.5 MB`, in powers of 1000."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and units[1:]:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """Return a human-readable duration."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message, in at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return shortened(text, 200)


def shortened(text: str, width: int) -> str:
    """Return `text`, truncated to `width` characters."""
    return text if len(text) <= width else f"{text[: width - 3]}..."
