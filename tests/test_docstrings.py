"""The example of each public name runs."""

import contextlib
import doctest
import io
import pathlib
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.public_names import PUBLIC
from support.tiers import EXHAUSTIVE

import replicax as rx

ELSEWHERE = {
    "Comet": "comet_ml",
    "MLflow": "mlflow",
    "TensorBoard": "tensorboard",
    "Trackio": "trackio",
    "WandB": "wandb",
}
"""Packages that an example needs, and takes seconds to import."""
NO_EXAMPLE = {
    "AgreementError",
    "ClusterError",
    "CompilerError",
    "MissingDependencyError",
    "ReplicasDifferError",
}
"""Errors that need several processes, another machine or a missing package."""
SLOW = {"Bench", "Verification", "bench", "verify"}
"""Examples that take seconds; other tests in `make test` cover them."""
EXAMPLES = [
    pytest.param(name, marks=pytest.mark.exhaustive if name in {*ELSEWHERE, *SLOW} else ())
    for name in PUBLIC
    if name not in NO_EXAMPLE
]


def known() -> dict[str, Any]:
    """Return the names that an example may use without an import."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        errors = batch["x"] @ model["w"] - batch["y"]
        return errors**2, {"accuracy": jnp.abs(errors) < 0.1}

    x = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    source = {"x": x, "y": x @ np.float32([1, 2, 3])}
    model, optimizer = {"w": jnp.zeros(3)}, optax.sgd(0.1)
    dp = rx.DataParallel(loss, optimizer, donate=False)
    return {
        **vars(rx),
        "P": jax.sharding.PartitionSpec,
        "batch": next(iter(dp.feed(source, batch_size=32))),
        "dp": dp,
        "held_out": source,
        "jax": jax,
        "jnp": jnp,
        "key": jax.random.key(0),
        "loss": loss,
        "model": model,
        "np": np,
        "optax": optax,
        "optimizer": optimizer,
        "partial": partial,
        "pathlib": pathlib,
        "rx": rx,
        "source": source,
        "state": dp.init(model),
    }


@EXHAUSTIVE
@pytest.mark.filterwarnings(  # Comet leaves one open
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ELSEWHERE:
        pytest.importorskip(ELSEWHERE[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")  # wandb keeps what it finds first, for all tests
    monkeypatch.setenv("WANDB_SILENT", "true")
    examples = doctest.DocTestParser().get_examples(PUBLIC[name].__doc__)
    assert examples
    assert "Examples:\n" in PUBLIC[name].__doc__  # the site shows another word as prose
    names = known()
    for example in examples:
        code, printed = compile(example.source, name, "single"), io.StringIO()
        with contextlib.redirect_stdout(printed):
            if example.exc_msg is None:
                exec(code, names)
            else:
                with pytest.raises(PUBLIC[re.findall(r"(\w+):", example.exc_msg)[0]]):
                    exec(code, names)
        if example.want and example.exc_msg is None:
            assert printed.getvalue() == example.want


def test_all_other_names_are_errors() -> None:
    assert all(issubclass(PUBLIC[name], rx.ReplicaxError) for name in NO_EXAMPLE)
