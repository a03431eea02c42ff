"""What a run says of where its time went."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from replicax.train.goodput import Goodput
from replicax.train.goodput_file import BUCKETS, nothing_spent


def test_the_closing_summary() -> None:
    seconds = nothing_spent() | {"productive": 674.0, "compiling": 14.5, "lost": 22.4}
    seconds |= {"saving": 2.9, "restoring": 4.3, "waiting": 3.6, "starting": 2.3}
    lines = Goodput(seconds, starts=3, down_seconds=80.0).lines()
    assert lines[0].startswith(
        "time   12 min 04 s over 3 starts: productive 93.1% · compiling 2.0%"
    )
    assert all(line.startswith("       · ") for line in lines[1:])
    text = " ".join(lines)
    for part in ("lost 3.1%", "saving 0.4%", "waiting 0.5%", "1 min 20 s between the starts"):
        assert part in text
    assert Goodput(nothing_spent(), 1, 0.0).lines() == ["time   0.0 s"]
    alone = Goodput(nothing_spent() | {"productive": 5.0}, 1, 0.0)
    assert alone.lines() == ["time   5.0 s: productive 100.0%"]


@given(
    st.lists(st.floats(0, 1e9), min_size=len(BUCKETS), max_size=len(BUCKETS)),
    st.integers(1, 10**6),
    st.floats(0, 1e10),
)
def test_any_summary_fits_80_columns(spent: list[float], starts: int, down: float) -> None:
    goodput = Goodput(dict(zip(BUCKETS, spent, strict=True)), starts, down)
    assert all(len(line) <= 80 for line in goodput.lines())
    plain = json.loads(json.dumps(goodput.to_json(), allow_nan=False))
    assert math.fsum(plain["seconds"].values()) == plain["wall_seconds"]
    assert 0 <= plain["productive_fraction"] <= 1
