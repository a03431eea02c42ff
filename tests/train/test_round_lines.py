"""The lines of a run with rounds: what it does, and settings that cost loss."""

import re

import optax
import pytest
from support.rounds import BATCH, MODEL, SOURCE, on, over

import replicax as rx
from replicax.core.between.rounds import OuterSGD
from replicax.core.ground.codecs import CODECS
from replicax.train.run.round_lines import doubtful_rounds, rounds_lines


def lines_of(rounds: rx.Rounds, devices: int = 2) -> str:
    dp = on(devices, rounds)
    found = rounds_lines(dp, dp.init(MODEL))
    assert max(map(len, found)) <= 80
    return " ".join(" ".join(found).split())


def test_the_line_has_every_setting_and_the_bytes() -> None:
    found = lines_of(over(30, send="int4", fragments=3, delay=5, outer=None))
    parts = found.removeprefix("rounds ").split(" · ")
    assert parts[:2] == ["30 steps", "int4"]
    assert re.findall(r"[\d.]+", parts[2]) == ["0.6", "0.9"]
    assert [re.findall(r"\d+", part) for part in parts[3:6]] == [["3"], ["5"], ["2"]]
    assert parts[6].endswith(f"{3 * 34} B")


def test_an_optimizer_of_ones_own_has_no_figures() -> None:
    part = lines_of(over(30, outer=optax.adam(0.1))).split(" · ")[2]
    assert re.findall(r"\d", part) == []


@pytest.mark.parametrize(
    ("rounds", "steps", "numbers"),
    [
        (over(30, outer=None), 3000, []),
        (over(30, outer=None), 2970, [["99", "0.9"]]),
        (over(30, outer=None), 100, [["3", "0.9"], ["100", "3", "30", "10"]]),
        (over(30), 100, [["100", "3", "30", "10"]]),
        (over(30, outer=None), None, []),
        (over(1, outer=OuterSGD(2, CODECS["int4"])), 3000, [["1"]]),
        (over(1), 3000, []),
        (over(30, outer=optax.sgd(0.7, momentum=0.5, nesterov=True)), 300, []),
        (over(30, send="sparse", outer=None), 30_000, []),
        (over(30, send="sparse", outer=None), 3000, [["100", "1", "000"]]),
    ],
)
def test_settings_that_cost_loss(
    rounds: rx.Rounds, steps: int | None, numbers: list[list[str]]
) -> None:
    lines = doubtful_rounds(on(2, rounds), steps)
    found = [re.findall(r"(?<![\w.])\d[\d.]*", line) for line in lines]
    assert [each[: len(wanted)] for each, wanted in zip(found, numbers, strict=True)] == numbers
    assert not any("\n" in line for line in lines)


def test_a_run_says_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    dp = on(2, over(3, outer=None))
    result = rx.fit(dp, dp.init(MODEL), SOURCE, batch_size=BATCH, steps=4)
    assert [r.step for r in result.records if "round_loss" in r.metrics] == [3]
    out, err = capsys.readouterr()
    assert len(re.findall(r"^rounds ", out, re.M)) == 1
    assert len(err.splitlines()) == 2
    assert all(line.startswith("ALARM") for line in err.splitlines())
