"""Arguments of the public API: valid ones are converted, others are an error of one line."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.core.ground.train_state import ModelT
from replicax.errors import ConfigError, ReplicaxError
from replicax.text.arguments import Count, NotNegative, Positive, Range, Seed, fitted, typed

SOURCE = {"x": np.ones((16, 3), np.float32), "y": np.ones(16, np.float32)}
ODD: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        [
            np.int64(4),
            np.float32(2.5),
            np.bool_(True),
            jnp.int32(3),
            np.ones(3),
            [],
            [1],
            {},
            {"a": 1},
            "jit",
            "zero1",
            Path("x"),
            object(),
            int,
            rx.hooks.CSV,
            lambda *_: 1.0,
        ]
    ),
)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, np.int64(4), 4),
        (int, jnp.int32(4), 4),
        (Count, 1, 1),
        (Count | None, None, None),
        (float, np.float32(0.5), 0.5),
        (float, 3, 3.0),
        (NotNegative, 0, 0.0),
        (bool, np.bool_(True), True),
        (str | Path, Path("a"), Path("a")),
        (Sequence[int], (np.int8(1), 2), [1, 2]),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (Literal["a", "b"], "c", "c"),
        (Callable[[int], int], abs, abs),
        (Any, object, object),
    ],
)
def test_what_fits_is_pythons_own(hint: Any, value: Any, expected: Any) -> None:
    found = fitted("x", hint, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.promise("outside.any-argument")
@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (int, 16.0, ["x=16;", "pass 16"]),
        (int, 2.5, ["x=2.5;"]),
        (int, True, ["x=True;"]),
        (int, "16", ["x='16';"]),
        (int, math.inf, ["x=inf;"]),
        (Count, 0, ["x=0;", "least 1"]),
        (Seed, -1, ["x=-1;", "least 0"]),
        (Seed, 10**30, ["most 4,294,967,295"]),
        (Positive | None, 0, ["x=0;", "above 0"]),
        (float, math.nan, ["x=nan;"]),
        (float, "1", ["x='1';"]),
        (bool, 1, ["x=1;"]),
        (int | str, 1.5, ["x=1.5;", "whole", "str"]),
        (Sequence[int], "ab", ["x='ab';"]),
        (Sequence[int], [1, 2.5], ["x=[1, 2.5];"]),
        (dict[str, Any], [1], ["x=[1];", "dict"]),
        (Literal["a", "b"] | Path, 5, ["x=5;", "str", "Path"]),
        (Path, "b" * 200, ["a str"]),
        (rx.TrainState[ModelT] | None, {}, ["x={};", "a TrainState", "dp.init(model)"]),
        (Annotated[int, Range(0, 9)] | None, 10, ["most 9"]),
    ],
)
def test_what_does_not_fit_is_one_line(hint: Any, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted("x", hint, value)
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).isprintable()


def test_a_function_keeps_its_name_and_refuses_other_arguments() -> None:
    @typed
    def add(number: Count, *, to: Count = 1) -> int:
        """Add."""
        return number + to

    assert (add.__name__, add.__doc__, add(np.int8(2), to=3)) == ("add", "Add.", 5)
    with pytest.raises(ConfigError, match=r"of=2.*\bto=\.\.\."):
        add(1, of=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"int, to="):
        add(1, 2, to=3)  # type: ignore[misc]


def loss(model: Any, batch: Any, _key: Any) -> Any:
    return (batch["x"] @ model["w"] - batch["y"]) ** 2


def model() -> Any:
    return {"w": jnp.zeros(3)}


def step_once(**extra: Any) -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="single")
    usual: dict[str, Any] = {"batch_size": 8, "steps": 1, "progress": False}
    rx.fit(dp, dp.init(model()), SOURCE, **usual | extra)


API: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Saving": (rx.Saving, ("every", "minutes", "keep", "keep_every")),
    "Guard": (rx.Guard, ("max_bad_steps", "skip_spikes")),
    "Evaluation": (
        lambda **given: rx.Evaluation(SOURCE, **given),
        ("batch_size", "every_epochs", "every_steps", "at_start", "max_rows", "ema", "loss"),
    ),
    "KeepBest": (rx.hooks.KeepBest, ("metric", "mode", "file")),
    "EarlyStopping": (rx.hooks.EarlyStopping, ("metric", "patience", "mode", "min_delta")),
    "Audit": (lambda **given: rx.hooks.Audit(**{"every": 1} | given), ("every", "on_divergence")),
    "NoiseMeter": (rx.hooks.NoiseMeter, ("every",)),
    "Profile": (
        lambda **given: rx.hooks.Profile(**{"first": 1, "last": 2} | given),
        ("first", "last", "folder"),
    ),
    "Throughput": (rx.hooks.Throughput, ("tokens_per_row", "flops_per_row")),
    "DataParallel": (
        lambda **given: rx.DataParallel(**{"loss": loss, "optimizer": optax.sgd(0.1)} | given),
        (
            *("loss", "optimizer", "mesh", "mode", "layout", "accumulate", "micro_shards"),
            *("precision", "reduction", "trainable", "ema", "donate", "compiler_options"),
        ),
    ),
    "make_mesh": (rx.make_mesh, ("data", "model", "stage", "devices", "fsdp")),
    "Timeouts": (
        rx.types.Timeouts,
        ("stall_multiple", "stall_seconds", "start_seconds", "silent_seconds"),
    ),
    "init": (
        lambda **given: rx.DataParallel(loss, optax.sgd(0.1), mode="single").init(model(), **given),
        ("seed",),
    ),
    "feed": (
        lambda **given: rx.DataParallel(loss, optax.sgd(0.1)).feed(
            SOURCE, **{"batch_size": 8} | given
        ),
        ("batch_size", "shuffle", "seed", "epoch", "first", "prefetch"),
    ),
    "fit": (
        step_once,
        (
            *("batch_size", "epochs", "eval_source", "shuffle", "seed", "log_every", "hooks"),
            *("guard", "saving", "accept_changes", "config", "progress"),
        ),
    ),
}


def check(name: str, argument: str, value: Any) -> None:
    """Check that it works, or is refused in one line."""
    function, _ = API[name]
    try:
        function(**{argument: value})
    except ReplicaxError as error:
        said = error
    else:
        return
    assert str(said).isprintable()
    assert said.exit_code in (1, 2)


CASES = [(name, argument) for name, (_, arguments) in API.items() for argument in arguments]


@pytest.mark.promise("outside.any-argument")
@pytest.mark.parametrize(("name", "argument"), CASES, ids=lambda value: value)
def test_any_argument_works_or_is_one_line(name: str, argument: str) -> None:
    @settings(
        max_examples=6 if name == "fit" else 25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(ODD)
    def drawn(value: Any) -> None:
        check(name, argument, value)

    drawn()
