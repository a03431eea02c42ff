"""`EarlyStopping`: when it stops, and what it remembers in the next start."""

import math
from collections.abc import Sequence

import pytest
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.hooks.best import HIGHER_IS_BETTER, LOWER_IS_BETTER, direction


def stops_at(
    hook: rx.hooks.EarlyStopping, values: Sequence[float], metric: str = "loss"
) -> int | None:
    """Return the number of the evaluation, from 1, that stops the run."""
    run = WatchedRun(hook)
    hook.start(run)
    for number, value in enumerate(values, 1):
        run.evaluated(10 * number, **{metric: value})
        if run.stopped:
            return number
    return None


def test_it_stops_after_so_many_evaluations_without_an_improvement() -> None:
    assert stops_at(rx.hooks.EarlyStopping(patience=2), [3.0, 2.0, 2.0, 2.5, 1.0]) == 4
    assert stops_at(rx.hooks.EarlyStopping(patience=2), [3.0, 2.0, 2.5, 1.0, 1.5]) is None


def test_of_an_accuracy_the_highest_is_the_best() -> None:
    rising = [0.1, 0.2, 0.3]
    assert stops_at(rx.hooks.EarlyStopping("accuracy", 1), rising, "accuracy") is None
    assert stops_at(rx.hooks.EarlyStopping("accuracy", 1, mode="min"), rising, "accuracy") == 2


def test_of_what_one_wants_less_of_the_lowest_is_the_best() -> None:
    for metric in (*LOWER_IS_BETTER, "dev/loss", "top5_error", "mean_squared_error"):
        assert stops_at(rx.hooks.EarlyStopping(metric, 1), [3.0, 2.0, 1.0], metric) is None
    for metric in (*HIGHER_IS_BETTER, "dev/top5_accuracy", "recall@10"):
        assert stops_at(rx.hooks.EarlyStopping(metric, 1), [1.0, 2.0, 3.0], metric) is None


def test_no_direction_is_guessed() -> None:
    names = (
        "score",
        "mse",
        "error_rate",
        "neg_mean_error",
        "dev/negative_loss",
        "myloss",
        "loss_scale",
    )
    assert set(map(direction, names)) == {None}
    assert not set(LOWER_IS_BETTER) & set(HIGHER_IS_BETTER)


def test_a_gain_below_the_least_is_none() -> None:
    assert stops_at(rx.hooks.EarlyStopping(patience=1, min_delta=0.5), [3.0, 2.75]) == 2
    assert stops_at(rx.hooks.EarlyStopping(patience=1, min_delta=0.5), [3.0, 2.5]) is None


def test_what_is_not_finite_is_no_improvement() -> None:
    values = [math.nan, math.inf, -math.inf]
    assert stops_at(rx.hooks.EarlyStopping("score", patience=3, mode="max"), values, "score") == 3


def test_a_run_that_it_stopped_stops_at_once_unless_there_is_more_patience() -> None:
    hook = rx.hooks.EarlyStopping(patience=1)
    run = WatchedRun(hook)
    run.evaluated(10, loss=1.0)
    run.evaluated(20, loss=2.0)
    assert len(run.stopped) == 1
    for patience, stops in ((1, 1), (2, 0)):
        again = rx.hooks.EarlyStopping(patience=patience)
        again.load_state(hook.save_state())
        resumed = WatchedRun(again)
        again.start(resumed)
        assert len(resumed.stopped) == stops


def test_what_was_known_of_another_metric_says_nothing() -> None:
    hook = rx.hooks.EarlyStopping("loss", patience=1)
    run = WatchedRun(hook)
    run.evaluated(10, loss=1.0)
    run.evaluated(20, loss=2.0)
    again = rx.hooks.EarlyStopping("accuracy", patience=1)
    again.load_state(hook.save_state())
    assert stops_at(again, [0.1, 0.2], "accuracy") is None


def test_one_hook_serves_one_run_after_the_other() -> None:
    hook = rx.hooks.EarlyStopping(patience=1)
    run = WatchedRun(hook)
    assert stops_at(hook, [1.0, 2.0]) == 2
    hook.end(run)
    assert stops_at(hook, [3.0, 2.0]) is None


@pytest.mark.parametrize("settings", [{"patience": 0}, {"least": -1.0}, {"mode": "least"}])
def test_settings_that_cannot_work(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        rx.hooks.EarlyStopping(**settings)
    assert "\n" not in str(raised.value)


def test_a_metric_that_the_evaluation_lacks_is_named_with_those_there_are() -> None:
    hook = rx.hooks.EarlyStopping("acuracy")
    with pytest.raises(ConfigError, match=r"'acuracy'.*loss, accuracy.*'accuracy'\?"):
        WatchedRun(hook).evaluated(10, loss=1.0, accuracy=0.5)
