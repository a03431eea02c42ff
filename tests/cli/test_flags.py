"""Flags, presets and the fields of a recipe, through the command line."""

import ast
import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from support.command_line import RECIPE, Main, done, one_line, refusal

from replicax.cli.flags import parse
from replicax.cli.launch import LaunchOptions
from replicax.errors import ConfigError

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("field", ["seed", "steps", "mode"])
def test_a_field_named_as_an_option_is_refused(field: str, main: Main, folder: Path) -> None:
    (folder / "my_clash.py").write_text(RECIPE + f"    {field}: int = 5\n")
    assert field in refusal(main, "train", "my_clash.py:Mine", "--steps", "1")


PRESETS = """
    presets: ClassVar = {"small": {"points": 16, "epochs": 1}, "odd": {"offset": 3.5}}
"""


@pytest.fixture
def with_presets(folder: Path) -> str:
    (folder / "my_presets.py").write_text("from typing import ClassVar\n" + RECIPE + PRESETS)
    return "my_presets.py:Mine"


def test_help_shows_the_presets_and_their_values(with_presets: str, main: Main) -> None:
    def defaults(*arguments: str) -> dict[str, str]:
        out = done(main, "train", *arguments, "--help")
        text = " ".join(out.replace("│", " ").split())
        return dict(re.findall(r"(--[a-z-]+ [^ ]+)(?: (?!--)[^ ]+)*? \(default: ([^)]*)\)", text))

    plain, small = defaults(with_presets), defaults(with_presets, "--preset", "small")
    changed = {flag: value for flag, value in small.items() if plain[flag] != value}
    assert changed == {"--preset {small,odd}": "small", "--points INT": "16", "--epochs INT": "1"}
    assert plain["--points INT"] == "48"
    assert not [flag for flag in defaults("linear_regression") if "--preset" in flag]


def test_a_preset_may_fill_a_field_without_a_default(main: Main, folder: Path) -> None:
    needs = RECIPE.replace(
        "offset: float = 0.0",
        "offset: float = dataclasses.field(kw_only=True)\n"
        "    shift: float = dataclasses.field(kw_only=True)",
    )
    (folder / "my_need.py").write_text("from typing import ClassVar\n" + needs + PRESETS)
    code, _, err = main("train", "my_need.py:Mine", "--preset", "odd")
    assert code == 2
    assert "--shift" in one_line(err)
    assert "--offset" not in err
    assert main("train", "my_need.py:Mine", "--preset", "odd", "--shift", "1")[0] == 0


def test_a_field_may_be_named_preset_where_there_are_none(main: Main, folder: Path) -> None:
    field = "    preset: int = 5\n"
    (folder / "my_field.py").write_text(RECIPE + field)
    assert main("train", "my_field.py:Mine", "--preset", "7", "--run", "run")[0] == 0
    config = json.loads((folder / "runs/run/config.json").read_text())
    assert (config["preset"], config["fields"]["preset"]) == (None, 7)
    (folder / "my_both.py").write_text("from typing import ClassVar\n" + RECIPE + field + PRESETS)
    assert "'preset'" in refusal(main, "train", "my_both.py:Mine")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"


@pytest.mark.parametrize("terminal", [Terminal, AsciiTerminal])
def test_a_wrong_flag_is_one_plain_line_on_a_terminal(
    terminal: type[Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal())
    for flags, words in (
        (["--on", "moon"], "invalid choice 'moon' for argument '--on'"),
        (["--restart", "1"], "unknown flag '--restart' (did you mean '--restarts'?)"),
    ):
        with pytest.raises(ConfigError) as raised:
            parse("launch", LaunchOptions, flags)
        assert str(raised.value).startswith(words)
        assert not re.search(r"[\x1b\n│─]|---", str(raised.value))


@pytest.mark.parametrize("module", ["cli", "recipes"])
def test_the_help_of_a_flag_is_one_line(module: str) -> None:
    """Since tyro keeps the line breaks of a field's docstring."""
    helps = []
    for path in (Path(__file__).parents[2] / "src" / "replicax" / module).glob("*.py"):
        for each in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(each, ast.ClassDef):
                for field, after in itertools.pairwise(each.body):
                    if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                        helps.append(ast.literal_eval(after.value))
    assert len(helps) >= 15
    assert [text for text in helps if "\n" in text] == []


def test_an_optional_flag_shows_its_type_and_takes_none(main: Main) -> None:
    out = done(main, "train", "gpt2", "--help")
    assert re.search(r"--vocab-size INT\b", out)
    assert "{None}" not in out
    assert parse("launch", LaunchOptions, ["--processes", "3"]).processes == 3
    assert parse("launch", LaunchOptions, ["--processes", "None"]).processes is None
