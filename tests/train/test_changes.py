"""A run resumed with another configuration: changes that are named, and those refused."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cli.step_options import RoundOptions
from replicax.cli.train import OF_THIS_START, TrainOptions
from replicax.cluster.alike import compared_settings
from replicax.errors import ConfigError
from replicax.train.files.records import RunFolder
from replicax.train.folder.changes import (
    CHOOSING,
    HARMLESS,
    Change,
    check_changes,
    config_changes,
    read_config,
)

CONFIG: dict[str, Any] = {
    "recipe": "lenet",
    "preset": None,
    "fields": {"batch_size": 64, "epochs": 5, "learning_rate": 0.001, "betas": [0.9, 0.99]},
    "options": {
        "devices": 2,
        "mode": "jit",
        "layout": "replicated",
        "micro_shards": 8,
        "precision": "float32",
        "steps": None,
        "seed": 0,
        "log_every": 50,
        "run": "a",
    },
    "parallel": {
        "mode": "jit",
        "layout": "replicated",
        "precision": "float32",
        "accumulate": 1,
        "micro_shards": None,
        "mesh": {"data": 2},
        "device_kind": "cpu",
        "processes": 1,
    },
    "data": {"rows": 1000, "batch_size": 64, "padding": 0, "evaluation": "20 rows"},
    "versions": {"jax": "0.10.2", "python": "3.11.2"},
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc-_9.", max_size=9), inner)
    ),
    max_leaves=12,
)


def edited(**fields: Any) -> dict[str, Any]:
    """Return CONFIG with other values at `section__field`."""
    config = copy.deepcopy(CONFIG)
    for path, value in fields.items():
        *sections, last = path.split("__")
        inside = config
        for section in sections:
            inside = inside[section]
        inside[last] = value
    return config


def matter(**fields: Any) -> list[str]:
    return [each.field for each in config_changes(CONFIG, edited(**fields)) if each.matters]


def test_a_configuration_equals_itself_as_it_was_written(tmp_path: Path) -> None:
    class Thing:
        pass

    given_as = edited(
        fields__betas=(0.9, math.nan), fields__path=Path("a/b"), fields__rate=math.inf
    ) | {"thing": Thing(), "of": {1: 2, None: 3}}
    RunFolder(tmp_path / "run").write_config(given_as)
    read = read_config(tmp_path / "run" / "config.json")
    assert config_changes(read, given_as) == []
    assert config_changes(read, given_as | {"thing": Thing()}) == []  # another place in memory
    assert matter(fields__betas=(0.9, 0.99)) == []
    assert matter(fields__betas=(0.9, 0.98)) == ["fields.betas"]


def test_other_kernels_are_another_run_and_other_options_of_the_compiler_are_not() -> None:
    """Options of the compiler differ by the number of GPUs."""
    assert matter(parallel__tuning="3f2a91c0") == ["parallel.tuning"]
    assert matter(parallel__compiler_options={"xla_gpu_autotune_level": 0}) == []


@pytest.mark.parametrize(
    ("old", "new"), [(1, True), (1, 1.0), (0, None), ("1", 1), ([1], {"0": 1}), ({}, None)]
)
def test_values_that_only_resemble_each_other_differ(old: Any, new: Any) -> None:
    assert config_changes({"a": old}, {"a": new}) == [Change("a", old, new, matters=True)]
    with pytest.raises(ConfigError) as caught:
        check_changes({"a": old}, {"a": new}, accept=False)
    first, _, second = str(caught.value).partition(";")[0].partition(" -> ")
    assert first.rpartition("a ")[2] != second


@pytest.mark.parametrize(
    "path",
    [
        *("recipe", "fields__epochs", "fields__new", "options__seed", "options__precision"),
        *("data__rows", "data__batch_size", "parallel__precision", "options__skip_spikes", "own"),
    ],
)
def test_what_alters_the_results_matters(path: str) -> None:
    assert matter(**{path: 12}) == [path.replace("__", ".")]


@pytest.mark.parametrize("path", HARMLESS)
def test_what_is_listed_as_harmless_is_named_and_not_refused(path: str) -> None:
    section, _, field = path.partition(".")
    if path == "start":
        field = "commit"
    new = copy.deepcopy(CONFIG)
    if field:
        new.setdefault(section, {})[field] = "other"
    else:
        new[section] = {"other": 1}
    found = config_changes(CONFIG, new)
    assert found
    assert not any(each.matters for each in found)
    assert check_changes(CONFIG, new, accept=False)


def test_of_the_settings_those_that_choose_numbers_matter() -> None:
    known = dict.fromkeys((*CHOOSING, "jax_debug_nans"), "a")
    assert known.keys() < compared_settings({}).keys()
    old = {**CONFIG, "settings": known}
    for name in known:
        [found] = config_changes(old, {**CONFIG, "settings": known | {name: "b"}})
        assert (found.field, found.matters) == (f"settings.{name}", name in CHOOSING)
    flag = {"XLA_FLAGS --xla_cpu_enable_fast_math": "1"}
    assert [each.matters for each in config_changes(old, {**old, "settings": known | flag})] == [
        False
    ]
    other = with_program({**old, "settings": known | {CHOOSING[0]: "b"}}, loss="c3")
    with pytest.raises(ConfigError) as raised:
        check_changes(with_program(old), other, accept=False)
    assert "PYTHONHASHSEED" not in str(raised.value)
    assert str(raised.value).index(CHOOSING[0]) < str(raised.value).index("program.loss")


def with_program(config: dict[str, Any], **program: str) -> dict[str, Any]:
    return {**config, "program": {"loss": "a1", "optimizer": "b2", **program}}


def refused(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    return {each.field for each in config_changes(old, new) if each.matters}


@pytest.mark.parametrize(("value", "named"), [(None, 1), ("random", 1), ("0", 0), ("7", 0)])
def test_another_program_may_come_from_the_order_of_a_set(
    value: str | None, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if value is not None:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    changed = with_program(CONFIG, loss="c3", optimizer="d4")
    with pytest.raises(ConfigError) as caught:
        check_changes(with_program(CONFIG), changed, accept=False)
    assert str(caught.value).count("PYTHONHASHSEED") == named
    with pytest.raises(ConfigError) as caught:
        check_changes(CONFIG, edited(fields__learning_rate=1), accept=False)
    assert "PYTHONHASHSEED" not in str(caught.value)


def test_another_program_is_refused_with_what_it_means() -> None:
    old, new = with_program(CONFIG), with_program(CONFIG, loss="c3")
    assert refused(old, old) == set()
    assert refused(old, new) == {"program.loss"}
    with pytest.raises(ConfigError, match=r"program\.loss a1 -> c3 \(the loss\b.*code\);"):
        check_changes(old, new, accept=False)
    assert check_changes(old, new, accept=True) == ["change program.loss a1 -> c3 (accepted)"]


@pytest.mark.parametrize("library", ["jax", "flax"])
def test_a_program_of_other_versions_cannot_be_told(library: str) -> None:
    old = with_program(edited(versions={"jax": "1", "python": "3.11", "flax": "2"}))
    new = with_program(edited(versions={**old["versions"], library: "9"}), loss="c3")
    lines = check_changes(old, new, accept=False)
    assert any(line.startswith("change program.loss a1 -> c3 (versions") for line in lines)
    other_python = with_program(edited(versions={**old["versions"], "python": "4"}), loss="c3")
    assert refused(old, other_python) == {"program.loss"}


def test_a_program_that_one_of_them_does_not_have_is_not_compared() -> None:
    for old, new in ((CONFIG, with_program(CONFIG)), (with_program(CONFIG), CONFIG)):
        assert config_changes(old, new) == []
    lost = {**CONFIG, "program": {"loss": "a1"}}
    assert refused(with_program(CONFIG), lost) == {"program.optimizer"}


@pytest.mark.parametrize("config", [{"fields": {"epochs": 9}}, {"epochs": 9}, {"steps": 9}])
def test_how_far_it_goes_matters_where_the_program_follows_from_it(config: dict[str, Any]) -> None:
    ((name, value),) = config.items()
    more = {**CONFIG, name: {**CONFIG["fields"], **value} if name == "fields" else value}
    field = "fields.epochs" if name == "fields" else name
    assert refused(with_program(CONFIG), with_program(more)) == set()
    assert len(check_changes(with_program(CONFIG), with_program(more), accept=False)) == 1
    scheduled = with_program(more, optimizer="d4")
    assert refused(with_program(CONFIG), scheduled) == {field, "program.optimizer"}
    assert refused(CONFIG, with_program(more)) == {field}  # unknown without a program
    assert refused(with_program(CONFIG), more) == set()  # it is compared at the first batch


def test_harmless_paths_are_whole_paths() -> None:
    assert config_changes({"options.devices": 1}, {})[0].matters
    assert config_changes({"fields": {"options": {"devices": 1}}}, {})[0].matters
    assert config_changes({"devices": 1}, {})[0].matters
    assert config_changes({"options": {"devices": 1}}, {"options": 3})[0].matters


def test_bits_that_mode_exact_promises_are_kept() -> None:
    exact = edited(options__mode="exact", parallel__mode="exact", parallel__micro_shards=8)
    for old, new in ((CONFIG, exact), (exact, CONFIG)):
        refused = {each.field for each in config_changes(old, new) if each.matters}
        assert refused == {"options.mode", "parallel.mode"}
    other = copy.deepcopy(exact)
    other["options"]["micro_shards"] = other["parallel"]["micro_shards"] = 16
    refused = {each.field for each in config_changes(exact, other) if each.matters}
    assert refused == {"options.micro_shards", "parallel.micro_shards"}
    assert matter(options__micro_shards=16) == []
    assert matter(options__mode="pmap", parallel__mode="pmap") == []


def test_the_error_names_each_field_once_with_the_fix() -> None:
    new = edited(
        fields__learning_rate=0.01,
        options__seed=1,
        options__precision="bfloat16",
        parallel__precision="bfloat16",
        options__devices=4,
        fields__batch_size=32,
        data__batch_size=32,
    )
    with pytest.raises(ConfigError) as caught:
        check_changes(CONFIG, new, accept=False)
    named = str(caught.value).partition(": ")[2].partition(";")[0].split(", ")
    assert named == [
        "fields.batch_size 64 -> 32",
        "fields.learning_rate 0.001 -> 0.01",
        "options.precision float32 -> bfloat16",
        "options.seed 0 -> 1",
    ]
    for fix in ("--run", "--accept-changes", "accept_changes=True"):
        assert fix in str(caught.value)


def test_what_is_derived_is_named_where_nobody_asked_for_it() -> None:
    assert matter(data__batch_size=32) == ["data.batch_size"]
    with pytest.raises(ConfigError, match=r"data\.batch_size 64 -> 32;"):
        check_changes(CONFIG, edited(fields__batch_size=16, data__batch_size=32), accept=False)


def test_many_changes_are_counted_and_long_ones_shortened() -> None:
    new = edited(**{f"fields__f{number}": "x" * 500 for number in range(9)})
    with pytest.raises(ConfigError, match=", and 3 more; ") as caught:
        check_changes(CONFIG, new, accept=False)
    assert "fields.f5" in str(caught.value)
    assert "fields.f6" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_long_values_show_where_they_differ() -> None:
    old, new = ({"fields": {"text": f"{'/data' * 30}/{end}/b"}} for end in ("one", "two"))
    with pytest.raises(ConfigError, match=r"/one.* -> .*/two"):
        check_changes(old, new, accept=False)
    line = check_changes(old, new, accept=True)[0]
    assert "one" in line
    assert "two" in line


@given(json_values, json_values)
def test_any_changes_fit_80_columns_of_a_terminal(old: Any, new: Any) -> None:
    for line in check_changes({"a": old, "b" * 90: new}, {"a": new}, accept=True):
        assert len(line) <= 80
        assert line.isprintable()


def test_thousands_of_changes_are_a_screen() -> None:
    new = edited(versions={str(number): 1 for number in range(5000)})
    lines = check_changes(CONFIG, new, accept=False)
    assert len(lines) < 25
    assert "4,982 more" in lines[-1]  # with the two that are gone, and 20 shown


def test_a_configuration_that_is_no_json_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, {(1, 2): 3}):
        with pytest.raises(ConfigError, match=r"written\b.*JSON"):
            config_changes(CONFIG, {"value": value})


def test_every_option_of_the_command_is_judged() -> None:
    """A new option is either listed as harmless or known here to matter."""
    names = TrainOptions().flat().keys() - OF_THIS_START
    harmless = {path.removeprefix("options.") for path in HARMLESS}
    rounds = {field.name for field in dataclasses.fields(RoundOptions)}
    assert (
        names - harmless <= {"precision", "reduction", "seed", "skip_spikes", "init_from"} | rounds
    )
