"""A run loaded again: the same bits on any devices, with nothing written."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.command_line import RECIPE
from support.figures import refused
from support.recipe_runs import MLP, TINY_GPT2, Ended, train, write_texts
from support.resumable import bits, data_parallel, fit, model, rows, told
from support.saved_checkpoint import data_file
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.errors import CheckpointError, ConfigError, StateError
from replicax.recipes import mlp
from replicax.train.checkpoints.store import Store
from replicax.train.files.lease import take_lease
from replicax.train.folder import load as loading
from replicax.train.folder.changes import read_config
from replicax.train.guarded import with_losses


@pytest.fixture(scope="module")
def zero1(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """An MLP on two devices, its optimizer's state split over them, saved at steps 2, 4, ..., 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("zero1"))
        how = ["--devices", "2", "--layout", "zero1", "--save-every", "2", "--skip-spikes"]
        return train("it", *MLP, *how)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file in a folder."""
    stats = {str(path): path.stat() for path in folder.rglob("*")}
    return {path: (each.st_size, each.st_mtime_ns) for path, each in stats.items()}


def loaded(folder: Path, **settings: Any) -> Any:
    """Return a run of the small regression, loaded on one device."""
    dp = data_parallel(1)
    return rx.load(folder, dp=dp, **{"state": dp.abstract_state(model()), **settings})


def of_mlp(**settings: Any) -> rx.DataParallel:
    recipe = mlp.MLP(layers=2, hidden=16, rows=200, epochs=2)
    return rx.DataParallel(recipe.loss, recipe.optimizer(), **settings)


def without_losses(state: rx.TrainState) -> dict[str, bytes]:
    return {name: found for name, found in bits(state).items() if name != ".losses"}


def test_a_recipe_run_has_the_bits_and_records_of_its_end(zero1: Ended) -> None:
    before = files(zero1.folder)
    found = rx.load(zero1.folder)
    assert bits(found.state) == without_losses(zero1.result.state)
    assert told(found.records) == told(zero1.result.records)
    assert found.step == zero1.result.step == 8
    assert found.config == read_config(zero1.folder / "config.json")
    assert (found.recipe.layers, found.recipe.hidden, found.recipe.rows) == (2, 16, 200)
    assert files(zero1.folder) == before


def test_a_loaded_run_prints_as_one_line(zero1: Ended) -> None:
    loaded = rx.load(zero1.folder)
    assert repr(loaded).startswith(f"Loaded({loaded.path}, step={loaded.step}, DataParallel(")
    assert len(repr(loaded)) - len(str(loaded.path)) < 160


def test_split_over_two_devices_it_loads_on_one(zero1: Ended) -> None:
    mu = zero1.result.state.opt_state[0].mu["Dense_1"]["kernel"]
    assert mu.addressable_shards[0].data.size < mu.size  # split indeed
    found = rx.load(zero1.folder, dp=of_mlp(mesh=rx.make_mesh(1)))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(found.state)} == {1}
    assert bits(found.state) == without_losses(zero1.result.state)
    kernel = zero1.result.state.params["Dense_0"]["kernel"]
    np.testing.assert_array_equal(found.model.variables["params"]["Dense_0"]["kernel"], kernel)


def test_the_loaded_state_trains_on_and_the_model_outlives_it(zero1: Ended) -> None:
    found = rx.load(zero1.folder)
    made = found.model
    batch = next(iter(found.dp.feed(found.recipe.train_source(), 64)))
    found.dp.step(found.state, batch)
    np.asarray(made.variables["params"]["Dense_0"]["kernel"])
    with pytest.raises(StateError):
        _ = found.model


def test_the_window_of_losses_comes_with_a_state_that_has_one(zero1: Ended) -> None:
    dp = of_mlp()
    state = with_losses(rx.load(zero1.folder, dp=dp).state)
    shapes = jax.eval_shape(lambda state: state, state)
    assert bits(rx.load(zero1.folder, dp=dp, state=shapes).state) == bits(zero1.result.state)


def test_an_earlier_step_and_the_best(zero1: Ended, tmp_path: Path) -> None:
    found = rx.load(zero1.folder, step=6)
    assert found.step == int(found.state.step) == 6
    assert max(record.step for record in found.records) <= 6
    best = zero1.folder / "best.json"
    with pytest.raises(ConfigError, match=r"has no .*\.json"):
        rx.load(zero1.folder, step="best")
    try:
        best.write_text('{"metric": "loss", "value": 0.5, "step": 6}')
        assert bits(rx.load(zero1.folder, step="best").state) == bits(found.state)
        for wrong in ("", "[]", "{}", '{"step": "6"}', '{"step": true}'):
            best.write_text(wrong)
            with pytest.raises(ConfigError, match=r"best\.json"):
                rx.load(zero1.folder, step="best")
    finally:
        best.unlink()


@pytest.mark.parametrize(
    ("step", "words"), [(3, ["3", "8, 6, 4"]), ("last", ["'last'"]), (True, ["True"])]
)
def test_a_step_that_is_not_there_is_refused(step: Any, words: list[str], zero1: Ended) -> None:
    with pytest.raises(ConfigError) as caught:
        rx.load(zero1.folder, step=step)
    assert all(word in str(caught.value) for word in words)


@pytest.fixture
def mine(tmp_path: Path) -> tuple[Path, rx.types.Fit]:
    """Make a run of a user's program on eight devices."""
    return tmp_path / "run", fit(data_parallel(8), tmp_path / "run", eval_source=rows(20, 2))


def test_a_run_of_a_users_program(mine: tuple[Path, rx.types.Fit]) -> None:
    folder, result = mine
    with take_lease(folder):  # a run that is held can be loaded
        found = loaded(folder)
    assert bits(found.state) == bits(result.state)
    assert found.recipe is None
    np.testing.assert_array_equal(found.model["out"], result.state.params["out"])
    again = loaded(folder, state=found.state)  # shapes are as good as arrays
    assert bits(again.state) == bits(result.state)


def test_the_needs_of_a_run_of_a_users_program_are_named(mine: tuple[Path, rx.types.Fit]) -> None:
    folder, result = mine
    dp = data_parallel(1)
    for given in ({}, {"dp": dp}):
        with refused(ConfigError, match=r"state=dp\.abstract_state\(model\)"):
            rx.load(folder, **given)
    with pytest.raises(ConfigError, match="without dp="):
        rx.load(folder, state=result.state)
    with pytest.raises(ConfigError, match=r"\bstate=.*\bTrainState\b"):
        rx.load(folder, dp=dp, state=model())  # type: ignore[arg-type]


def test_another_optimizer_is_refused_by_its_arrays(mine: tuple[Path, rx.types.Fit]) -> None:
    dp = data_parallel(1).replace(optimizer=optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"opt_state\.0\.count"):
        rx.load(mine[0], dp=dp, state=dp.abstract_state(model()))


def harm(folder: Path) -> Path:
    """Flip a bit of a parameter in the newest checkpoint."""
    _, newest = Store(folder / "checkpoints", 1, None).paths()[-1]
    chunk = data_file(newest)
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)
    return newest


def test_a_harmed_checkpoint_is_refused_and_left_in_its_place(
    mine: tuple[Path, rx.types.Fit],
) -> None:
    folder, _ = mine
    newest = harm(folder)
    before = files(folder)
    with refused(CheckpointError, "default/", str(newest), "another step (12, 9)"):
        loaded(folder)
    assert files(folder) == before
    assert loaded(folder, step=12).step == 12


def test_a_checkpoint_deleted_while_it_is_read_is_no_state(
    mine: tuple[Path, rx.types.Fit], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = mine
    whole = loading.read

    def read(like: Any, state: Path) -> Any:
        found = whole(like, state)
        os.rename(state.parent, state.parent.with_name(".retired-x"))
        return found

    monkeypatch.setattr(loading, "read", read)
    with pytest.raises(CheckpointError, match=r"deleted while\b.*read"):
        loaded(folder)


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "nowhere", "not a folder"), (tmp_path, "not a run")):
        with refused(ConfigError, match=words):
            rx.load(folder)
    fit(data_parallel(1), tmp_path, save_every=None, save_seconds=None)
    with pytest.raises(ConfigError, match=r"\bno checkpoint: none"):
        rx.load(tmp_path)


@EXHAUSTIVE
def test_fields_come_back_as_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    ended = train("it", "gpt2", *TINY_GPT2, "--data", texts, "--steps", "2", "--remat", "none")
    found = rx.load(ended.folder)
    assert (found.recipe.data, found.recipe.remat, found.recipe.vocab_size) == (
        (texts,),
        "none",
        None,
    )
    assert bits(found.state) == bits(ended.result.state)


ODD = RECIPE.replace(
    "    offset: float = 0.0",
    """    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[str, float] = ("a", 0.5)
    nested: Nested = Nested()
    colour: Colour = Colour.RED
    maybe: list[float] | None = None
    offset: float = 0.0""",
).replace(
    "@dataclasses",
    """import enum

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass(frozen=True)
class Nested:
    depth: int = 3

@dataclasses""",
    1,
)


@pytest.fixture
def odd(folder: Path) -> Path:
    """Make a run of a user's recipe in my_recipe.py."""
    (folder / "my_recipe.py").write_text(ODD)
    flags = ["--sizes", "4", "5", "6", "--nested.depth", "7", "--colour", "BLUE"]
    return train("odd", "my_recipe.py:Mine", *flags).folder


def test_a_users_recipe_is_found_again(odd: Path) -> None:
    recipe = rx.load(odd, recipe="my_recipe.py:Mine").recipe
    assert (recipe.sizes, recipe.pair, recipe.maybe) == ((4, 5, 6), ("a", 0.5), None)
    assert (recipe.nested.depth, recipe.colour.name) == (7, "BLUE")


def test_a_recipe_that_has_changed_is_refused_by_its_field(odd: Path, folder: Path) -> None:
    (folder / "my_recipe.py").write_text(ODD.replace("sizes", "dims"))
    with pytest.raises(ConfigError, match="'sizes'"):
        rx.load(odd, recipe="my_recipe.py")
    (folder / "my_recipe.py").write_text(ODD.replace("tuple[int, ...] = (1, 2)", "int = 3"))
    with pytest.raises(ConfigError, match=r"sizes=\[4, 5, 6\] .*\bint\b"):
        rx.load(odd, recipe="my_recipe.py")


def test_a_run_brings_no_program_with_it(odd: Path, folder: Path) -> None:
    (folder / "my_recipe.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigError, match=r"my_recipe\.py:Mine.*--recipe"):
        rx.load(odd)
