"""Goodput under failures: formulas, published figures and our own, and the strategy to use."""

import json
import math
import random

import pytest
from support.published_goodput import ROWS, GoodputRow

from replicax.cli import main
from replicax.errors import ConfigError
from replicax.plan.failures import (
    EVERY_H,
    EVERY_STEP,
    RESTART,
    Failures,
    goodput_forecast,
    islands_goodput,
    kept,
    restarted,
    save_interval,
)

POINTS = 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_published_goodput(row: GoodputRow) -> None:
    assert abs(row.error) <= POINTS


def test_at_most_one_published_figure_gives_a_parameter() -> None:
    assert sum(row.solved for row in ROWS) == 1


def test_the_interval_loses_least() -> None:
    for mtbf, save in ((10_000.0, 3.0), (600.0, 30.0)):
        best = save_interval(save, mtbf)
        assert best == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.3)
        there = kept(mtbf, save, best)
        assert there >= max(kept(mtbf, save, 0.8 * best), kept(mtbf, save, 1.25 * best))
    assert save_interval(100.0, 10.0) == 10.0  # Daly: not more often than failures
    assert kept(10.0, 0.0, 0.0) == 1


def test_a_simulated_job() -> None:
    """Segments of computing that end at an exponential failure are lost whole."""
    chance, mtbf, restart, save, interval = random.Random(0), 300.0, 40.0, 5.0, 60.0
    clock = useful = 0.0
    for _ in range(100_000):
        left = chance.expovariate(1 / mtbf)
        done = int(left // (interval + save))
        clock, useful = clock + left + restart, useful + done * interval
    assert restarted(mtbf, restart, save, interval) == pytest.approx(useful / clock, abs=0.005)


def test_islands_by_hand() -> None:
    # Of 4 islands, each fails every 400 s and is away for 100; the others pause 1 s in 100.
    assert islands_goodput(100.0, 4, 100.0) == pytest.approx(0.8)
    assert islands_goodput(100.0, 4, 100.0, 1.0) == pytest.approx(0.8 / 1.008)


@pytest.mark.parametrize(
    ("job", "strategy"),
    [
        (Failures(devices=64), RESTART),
        (Failures(devices=1000), EVERY_STEP),
        (
            Failures(1_200_000, 8760.0, islands=16, recovery_seconds=60.0, step_seconds=2.0),
            EVERY_H,
        ),
    ],
)
def test_the_simplest_that_is_nearly_best(job: Failures, strategy: str) -> None:
    found = goodput_forecast(job)
    assert found.recommended == strategy
    assert all(0 < each.goodput <= 1 for each in found.strategies)


def test_rate_of_the_job() -> None:
    assert Failures(devices=10, device_mtbf_hours=1.0).mtbf_seconds == 360
    assert Failures(devices=10, failures_per_hour=60.0).mtbf_seconds == 60


@pytest.mark.parametrize("islands", [1, 5])
def test_islands_that_cannot_be(islands: int) -> None:
    with pytest.raises(ConfigError, match=f"islands={islands} with devices=4.*from 2"):
        goodput_forecast(Failures(devices=4, islands=islands))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--failures", "--devices", "1000"]) == 0
    text = capsys.readouterr().out
    assert f"{EVERY_STEP} *" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert main(["plan", "--failures", "--devices", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == EVERY_STEP
    assert main(["plan", "--failures", "--devices", "1"]) == 2
    assert "from 2" in capsys.readouterr().err
