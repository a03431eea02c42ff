"""The way from an island to the others: what is measured, and what is wrong with it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.figures import assert_mentions
from support.island_networks import SECRET, islands, places

from replicax.doctor import between_islands
from replicax.doctor.between_islands import check_islands
from replicax.islands.inquiry import Distance
from replicax.islands.island_place import IslandPlace
from replicax.net.secret import Secret
from replicax.text.checks import FAIL, NOTE, PASS, Check


def examined(*given: IslandPlace, seconds: float = 20.0) -> list[list[Check]]:
    """Return the rows of doctors at these places, all at once."""

    def rows(place: IslandPlace) -> list[Check]:
        env = {
            "REPLICAX_ISLAND": str(place.index),
            "REPLICAX_ISLANDS": ",".join(place.addresses),
            "REPLICAX_JOB_ID": place.job,
            "REPLICAX_SECRET": place.secret._key.decode(),
        }
        return check_islands(env, seconds, lambda line: None)

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(rows, given))


def at(place: IslandPlace, **changed: Any) -> IslandPlace:
    return replace(place, **changed)


def test_without_islands_there_is_no_row() -> None:
    assert check_islands({}, 1.0, print) == []


def test_doctors_measure_each_other() -> None:
    for number, rows in enumerate(examined(*places(3))):
        assert [row.verdict for row in rows] == [PASS, PASS]
        assert [row.figures["island"] for row in rows] == sorted({0, 1, 2} - {number})
        for row in rows:
            assert not row.figures["trains"]
            assert 0 < row.figures["round_trip_seconds"] < 10
            assert abs(row.figures["ahead_seconds"]) < 10
            assert row.figures["bytes_per_second"] > 1e5


def test_an_island_that_trains_answers_and_notices_nothing() -> None:
    there = places(2)
    with islands(there[:1]) as (island,):
        ((row,),) = examined(there[1])
        assert (row.verdict, row.figures["trains"]) == (PASS, True)
        assert "bytes_per_second" not in row.figures
        assert not island.told
        with islands(there[1:]):
            island.peer(1)
            rows = examined(there[1])[0]  # of an island that trains here
        assert [row.verdict for row in rows] == [FAIL, PASS]
        assert_mentions(rows[0].found, there[1].addresses[1])
        assert len(island.only("joined")) == 1


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"secret": Secret(b"another")}, "secret", "REPLICAX_SECRET"),
        ({"job": "theirs"}, "another job", "REPLICAX_JOB_ID"),
        ({"index": 2}, "island 2 of 3", "REPLICAX_ISLANDS"),
        ({"more": True}, "4", "REPLICAX_ISLANDS"),
    ],
    ids=["secret", "job", "index", "count"],
)
def test_others_are_named(changes: dict[str, Any], found: str, fix: str) -> None:
    there, given = places(3), dict(changes)
    if given.pop("more", False):
        given["addresses"] = (*there[1].addresses, "127.0.0.1:9")
    if "index" in given:  # the addresses of two islands are swapped
        one, two, three = there[1].addresses
        given["addresses"] = (one, three, two)
    with islands([at(there[1], **given)]):
        rows = examined(there[0], seconds=0.5)[0]
    row = next(row for row in rows if row.figures["island"] == 1)
    assert row.verdict == FAIL
    assert_mentions(row.found, found)
    assert fix in row.cause


def test_what_is_not_there_is_named() -> None:
    place = places(3)[0]
    one, two, three = place.addresses
    place = at(place, addresses=(one, two, f"no-such-host.invalid:{three.rpartition(':')[2]}"))
    rows = examined(place, seconds=0.3)[0]
    assert [row.verdict for row in rows] == [FAIL, FAIL]
    assert_mentions(rows[0].found, two, "refused")
    assert "island 1" in rows[0].cause
    assert_mentions(rows[1].found, "no-such-host.invalid")
    assert "REPLICAX_ISLANDS" in rows[1].cause


@pytest.mark.parametrize(("ahead", "verdict"), [(0.9, PASS), (-5.0, NOTE), (5.0, NOTE)])
def test_a_clock_that_is_off_is_a_warning(ahead: float, verdict: str) -> None:
    inquiries = between_islands._Inquiries(places(2)[0], 1.0, print)
    row = inquiries.judge(1, Distance(True, 0.001, ahead))
    assert row.verdict == verdict
    assert row.figures["ahead_seconds"] == ahead
    assert_mentions(row.found, "1.00 ms", "0.50 ms")


def test_the_secret_is_not_shown() -> None:
    for row in examined(*places(2))[0]:
        assert SECRET._key.decode() not in str(vars(row))
