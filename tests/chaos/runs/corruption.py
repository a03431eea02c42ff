"""Ways to corrupt a checkpoint."""

import random
from pathlib import Path

KINDS = ("flip", "truncate", "delete", "swap", "stale", "extra")


def corrupt(newest: Path, older: Path | None, chance: random.Random) -> str:
    """Change one thing in the checkpoint `newest`; what it was, in words.

    Args:
        newest: its folder.
        older: the folder of another one, or None where there is none.
        chance: what, and where.
    """
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    full = [path for path in files if path.stat().st_size]
    kind = chance.choice(KINDS)
    path = chance.choice(full)
    name = path.relative_to(newest)
    content = path.read_bytes()
    if kind == "flip":
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        return f"bit {bit} of {name} flipped"
    if kind == "truncate":
        size = chance.randrange(len(content))
        path.write_bytes(content[:size])
        return f"{name} truncated from {len(content)} to {size} bytes"
    if kind == "extra":
        path.with_name(f"{path.name}.0").write_bytes(content)
        return f"{name}.0 added"
    if kind == "stale" and older is not None and (older / name).is_file():
        old = (older / name).read_bytes()
        if old != content:
            path.write_bytes(old)
            return f"{name} replaced by that of {older.name}"
    others = [other for other in files if other.read_bytes() != content]
    if kind == "swap" and others:
        other = chance.choice(others)
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"{name} and {other.relative_to(newest)} swapped"
    path.unlink()
    return f"{name} deleted"
