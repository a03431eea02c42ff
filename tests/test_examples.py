"""Each example's first losses, on devices and in modes, against plain JAX on one device."""

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.examples import (
    EXACT,
    FOLDER,
    FURTHER,
    IN_PARTS,
    NAMES,
    NOT_RESUMED,
    RESUMED,
    WHOLE,
    Metrics,
    by_hand,
    changed_lines,
    lines_here,
    load,
    plain_lines,
    resumed,
    sources,
    with_replicax,
)
from support.tiers import EXHAUSTIVE, only

KEPT = [("shard_map", 4)]
PAGE = (FOLDER.parent / "docs/examples.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[`(\w+)`\].*\| (\d+) \| (\d+) \| (\d+) \| (\S+) \|$", re.MULTILINE)
TABLE = ROW.findall(PAGE)
MOST_CHANGED = 15
"""Lines of an example that use Replicax; a run with hooks may have more."""
OF_PEERS = {"torch_dataloader"}
QUICK = {"clip", "lora", "ppo"}

# torch's tensors do not know of NumPy 2's `copy`, and are copied all the same.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


def loaded(name: str) -> Any:
    if name in OF_PEERS:
        pytest.importorskip("torch", reason="no torch to load rows with: `make peers` installs it")
    return load(name)


def assert_equal(found: list[Metrics], expected: list[Metrics]) -> None:
    """Compare what plain JAX has too: the losses, and all metrics of a custom step."""
    for name in expected[0]:
        mine, theirs = ([each[name] for each in of_steps] for of_steps in (found, expected))
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6, err_msg=name)


OTHERS = ([("jit", 1), ("pmap", 2)], [("jit", 2), ("pmap", 1)])
"""Cases beside KEPT: every other example has the first two, so that all values meet."""
FIRST_LOSSES = [
    (name, *case)
    for number, name in enumerate(name for name in NAMES if name not in WHOLE)
    for case in KEPT + OTHERS[number % 2]
]


@functools.cache
def expected_of(name: str) -> list[Metrics]:
    """The losses of plain JAX on one device."""
    return by_hand(name, load(name))


@pytest.mark.parametrize(
    ("name", "mode", "devices"),
    only(
        [case for case in FIRST_LOSSES if case[0] in QUICK and case[1:] in KEPT],
        FIRST_LOSSES,
        FIRST_LOSSES[::2],
    ),
)
def test_the_first_losses_are_those_of_plain_jax(name: str, mode: str, devices: int) -> None:
    example = loaded(name)
    for source in sources(example).values():
        found, _ = with_replicax(name, example, source, mode, devices)
        assert_equal(found, expected_of(name))


@pytest.mark.parametrize("devices", only([4], [1, 2, 4]))
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_whole_batches_are_those_of_one_device(name: str, devices: int) -> None:
    example = load(name)
    for mode, count in (("single", 1), ("jit", devices)):
        found, _ = with_replicax(name, example, example.rows(), mode, count)
        assert_equal(found, expected_of(name))


def each_with(cases: list[Any], kept: set[str], but: Iterable[str] = ()) -> Any:
    """Each example of `FURTHER` with each case; of those `kept` the first is not exhaustive."""
    every = [(name, *case) for name in sorted(FURTHER.difference(but)) for case in cases]
    return only([case for case in every if case[0] in kept and case[1:] == cases[0]], every)


@pytest.mark.parametrize(("name", "mode", "devices"), each_with(EXACT, {"dp_sgd", "grpo", "pinn"}))
def test_sums_in_a_fixed_order_are_those_of_plain_jax(name: str, mode: str, devices: int) -> None:
    example = load(name)
    *_, source = sources(example).values()
    found, _ = with_replicax(name, example, source, mode, devices)
    assert_equal(found, expected_of(name))


@pytest.mark.parametrize(
    ("name", "mode", "devices"), each_with(IN_PARTS, {"diffusion", "dqn", "lbfgs"})
)
def test_so_are_sums_of_micro_batches(name: str, mode: str, devices: int) -> None:
    example = load(name)
    *_, source = sources(example).values()
    found, _ = with_replicax(name, example, source, mode, devices, accumulate=2)
    assert_equal(found, expected_of(name))


@pytest.mark.parametrize(
    ("name", "mode", "devices"), each_with(RESUMED, {"tbptt", "vqvae"}, but=NOT_RESUMED)
)
def test_a_run_that_was_stopped_has_the_losses_of_plain_jax(
    name: str, mode: str, devices: tuple[int, int], tmp_path: Path
) -> None:
    assert_equal(resumed(name, load(name), tmp_path, mode, devices), expected_of(name))


@pytest.mark.parametrize("name", ["grain_pipeline", *only([], ["iterables", "clip"])])
def test_so_they_are_in_an_order_that_replicax_draws(name: str) -> None:
    example = load(name)
    *_, source = sources(example).values()
    found, order = with_replicax(name, example, source, "shard_map", 4, shuffle=True)
    assert sorted(np.concatenate(order[:3])) == list(range(84))
    assert list(order[0]) != sorted(order[0])
    assert list(order[0]) != list(order[3])
    assert_equal(found, by_hand(name, example, order))


@EXHAUSTIVE
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    loaded(name).main()
    assert capsys.readouterr().out


@EXHAUSTIVE
def test_an_epoch_of_a_torch_loader_can_be_had_again() -> None:
    example = loaded("torch_dataloader")
    first, again, other = (
        np.concatenate([batch["x"].numpy() for batch in example.loader(epoch)])
        for epoch in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(other, axis=0))


@pytest.mark.parametrize("name", NAMES)
def test_each_header_says_what_it_shows(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert len((ast.get_docstring(tree) or "").split("\n\n")) == 2


def test_the_page_lists_each_with_its_lines() -> None:
    counted = [(name, plain_lines(name), lines_here(name), changed_lines(name)) for name in NAMES]
    assert [(name, *map(int, lines)) for name, *lines, _ in TABLE] == counted
    assert all(float(difference) < 1e-6 for *_, difference in TABLE)
    assert all(changed_lines(name) <= MOST_CHANGED for name in FURTHER)


def test_the_page_says_for_each_whose_it_is() -> None:
    of_trainings = PAGE.partition("## Which example is mine")[2].partition("## ")[0]
    assert set(re.findall(r"`(\w+)`", of_trainings)) == set(NAMES)
