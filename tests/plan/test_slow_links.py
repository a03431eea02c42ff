"""Methods over slow links: figures by hand, published tables, and the one to use."""

import dataclasses

import jax
import numpy as np
import pytest
from plan.small_step import MODEL, rows, step, strict
from support.published_links import TABLE_4, TABLE_6, PublishedRow

import replicax as rx
from replicax.core.ground.vectors import size_in_blocks
from replicax.errors import ConfigError
from replicax.plan.network_entries import slow_links_entries
from replicax.plan.site_network import parse_network
from replicax.plan.slow_links import (
    METHODS,
    SlowLinks,
    forecast,
    method_title,
    slow_links,
    utilization,
)


def arrays(size: int, count: int = 1) -> list[jax.ShapeDtypeStruct]:
    """Return arrays of `size` values in all."""
    return [jax.ShapeDtypeStruct((size // count,), np.float32)] * count


def drawn(found: SlowLinks) -> list[str]:
    return [line for entry in slow_links_entries(found) for line in entry.lines()]


def cells(table: tuple[PublishedRow, ...]) -> list[int]:
    return [steps for row in table for steps in row.steps_apart()]


@pytest.mark.promise("plan.slow-links")
def test_published_table_of_streaming_diloco() -> None:
    found = cells(TABLE_4)
    assert len(found) == 75
    assert max(map(abs, found)) <= 1


@pytest.mark.promise("plan.slow-links")
def test_published_table_of_scaling_laws() -> None:
    """One of 90 cells is two steps away: with 0.8 s a step, as printed, not with 0.82."""
    found = cells(TABLE_6)
    assert len(found) == 90
    assert sum(abs(steps) > 1 for steps in found) == 1
    chinchilla = [row for row in TABLE_6 if row.step_seconds == 0.8]
    longer = tuple(dataclasses.replace(row, step_seconds=0.82) for row in chinchilla)
    assert max(map(abs, cells(longer))) <= 1


def test_waiting_by_hand() -> None:
    # 4 MB to one other at 1 MB/s and twice 50 ms: 4.1 s after 30 steps of 0.1 s.
    network = parse_network("8 Mbit/s, 50 ms")
    found = forecast(arrays(1_000_000), 0.1, 2, network, rx.Rounds(every=30))
    assert (found.sync_bytes, found.transfer_seconds) == (4_000_000, pytest.approx(4.1))
    assert found.exposed_seconds == pytest.approx(4.1)
    assert found.utilization == pytest.approx(3 / 7.1)
    three = forecast(arrays(1_000_000), 0.1, 3, network, rx.Rounds(every=30))
    assert three.transfer_seconds == pytest.approx(8.1)
    alone = forecast(arrays(1_000_000), 0.1, 1, network, METHODS[0])
    assert (alone.exposed_seconds, alone.utilization) == (0, 1)


def test_a_delay_hides_as_many_steps() -> None:
    network = parse_network("8 Mbit/s")
    whole = forecast(arrays(1_000_000), 0.1, 2, network, rx.Rounds(every=30, delay=5))
    assert whole.exposed_seconds == pytest.approx(4 - 0.5)
    # Six parts of 0.64 to 0.80 s after every 5 steps, of which 4 hide them: whole arrays.
    parts = rx.Rounds(every=30, fragments=6, delay=4)
    uneven = forecast(arrays(1_000_000, 25), 0.1, 2, network, parts)
    assert uneven.exposed_seconds == pytest.approx(4 - 6 * 0.4)
    assert uneven.utilization == pytest.approx(3 / (3 + 1.6))
    one = forecast(arrays(1_000_000), 0.1, 2, network, parts)
    assert one.exposed_seconds == pytest.approx(4 - 0.4)  # the other five send nothing
    # Links that are always busy set the pace.
    assert utilization(0.5, 0.8, 5.0) == pytest.approx(5 / 8)
    assert utilization(1.0, 0.2, 5.0) == 1


@pytest.mark.parametrize(
    ("network", "title", "every"),
    [
        ("100 Gbit/s, 1 ms", "data parallel float32", 1),
        ("10Gbit", "data parallel int8", 1),
        ("1Gbit", "DiLoCo bfloat16", 30),
        ("100Mbit", "streaming DiLoCo bfloat16", 30),
        ("10Mbit", "SparseLoCo sparse", 30),
    ],
)
def test_the_least_risk_that_is_fast_enough(network: str, title: str, every: int) -> None:
    found = slow_links(arrays(124_000_000, 124), 1.0, parse_network(network))
    assert found.recommended is not None
    best = found.forecasts[found.recommended]
    assert (method_title(best.method), best.method.every) == (title, every)
    assert best.utilization is not None
    assert best.utilization >= 0.9
    assert all(len(line) <= 80 for line in drawn(found))


def test_none_is_fast_enough() -> None:
    found = slow_links(arrays(10_000_000_000, 10), 0.01, parse_network("1Mbit, 1 s"))
    assert found.recommended is not None
    shares = [each.utilization or 0 for each in found.forecasts]
    assert shares[found.recommended] == max(shares)


def test_costs_in_loss() -> None:
    network, int4 = parse_network("1Gbit"), rx.Rounds(every=30, send="int4")
    costs = {
        size: forecast(arrays(size), 1.0, 4, network, int4).loss_cost
        for size in (1_000_000, 200_000_000, 10**10)
    }
    assert list(costs.values()) == [">+2.0% 35M", "+1.1% 180M", "+0.3% 2.4B"]
    three = forecast(arrays(10**6), 1.0, 3, network, int4).loss_cost
    assert three == ">+2.0% 35M"
    many = forecast(arrays(10**9), 1.0, 30, network, rx.Rounds(every=100, send="int4")).loss_cost
    assert many == ">+1.6% 1B"


@pytest.mark.parametrize(
    ("text", "rate", "seconds"),
    [("100 MB/s, 1 ms", 1e8, 1e-3), ("2.5Gbit/s,50us", 2.5e9 / 8, 5e-5), ("800 bit/s", 100, 0)],
)
def test_links(text: str, rate: float, seconds: float) -> None:
    link = parse_network(text).links[""]
    assert (link.bytes_per_second, link.round_trip_seconds) == pytest.approx((rate, seconds))


def test_pairs_of_sites() -> None:
    text = "oslo-paris=8Mbit, 10 ms; paris-rome=80Mbit; oslo-rome=16Mbit,1s"
    network = parse_network(text)
    assert (network.islands, network.sites) == (3, ("oslo", "paris", "rome"))
    assert network.seconds(1e6, 3) == pytest.approx(1.5)  # oslo-rome: 0.5 s and its round trip
    given = {"paris-oslo": "8Mbit,10ms", "rome-paris": "80Mbit", "oslo-rome": "16Mbit, 1 s"}
    assert parse_network(given).seconds(1e6, 3) == network.seconds(1e6, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rate"),
        ("1 Gb/s, 20 ms", "no rate"),
        ("20 ms, 1 Gbit/s", "no rate"),
        ("0 B/s, 1 s", "above 0"),
        ("a-b=fast", "'fast' is no rate"),
        ("a=1Gbit", "'a' is no pair"),
        ("a-b=1Gbit; b-a=1Gbit", "given twice"),
        ("a-b=1Gbit; b-c=1Gbit", "without a link for a-c"),
    ],
)
def test_no_network(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*100 Mbit/s, 20 ms"):
        parse_network(text)


def test_a_plan_has_the_methods() -> None:
    found = rx.plan(
        *(step(), MODEL, rows(64)),
        target="h100:8",
        by_formula=True,
        changes={},
        network="100Mbit, 20 ms",
    )
    slow, speed = found.slow_links, found.speed
    assert (slow.islands, len(slow.forecasts)) == (2, len(METHODS))
    assert slow.step_seconds == pytest.approx(speed.step.seconds / 2)
    assert slow.forecasts[0].sync_bytes == 4 * size_in_blocks(jax.tree.leaves(MODEL))
    assert strict(found)["slow_links"]["forecasts"][0]["method"]["send"] == "float32"
    lines = str(found).splitlines()
    assert any(line.startswith("links ") for line in lines)
    with pytest.raises(ConfigError, match=r"islands=3.*a, b"):
        rx.plan(
            *(step(), MODEL, rows(64)),
            target="h100:8",
            by_formula=True,
            changes={},
            islands=3,
            network="a-b=1Gbit",
        )


def test_the_time_of_a_step_may_be_unknown() -> None:
    found = slow_links(arrays(1_000_000), None, parse_network("100Mbit"))
    assert (found.recommended, found.forecasts[0].utilization) == (None, None)
    assert found.forecasts[0].transfer_seconds == pytest.approx(0.32)
    assert any(line.split()[:2] == ["use", "unknown:"] for line in drawn(found))
