"""parse_options: one parser for flags and YAML files, with errors that name what is wrong."""

import ast
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from cli import NotPossible, UserError, exit_on_error, option, parse_options
from cli.model_options import ModelOptions
from cli.names import check_name
from hf_infini.models.scratch.options import ScratchOptions
from hf_infini.options import MemoryOptions
from running import load_recipe


@dataclass
class Options:
    out: str = field(metadata={"help": "Where to."})
    rate: float = field(default=0.1, metadata={"help": "Rate."})
    layers: list[int] | None = field(default=None, metadata={"help": "Layers."})
    shuffle: bool = field(default=True, metadata={"help": "Shuffle."})


@dataclass
class Bounded:
    share: float = option(0.5, "A share.", at_least=0, below=1)
    sizes: list[int] | None = option(None, "Sizes.", greater_than=0, at_most=9)


def parse(*argv):
    return parse_options(Options, description="A test.", argv=list(argv))[0]


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_numbers_out_of_bounds_are_refused(config):
    def parsed(*argv):
        return parse_options(Bounded, description="A test.", argv=list(argv))[0]

    assert parsed() == Bounded() and parsed("--share", "0", "--sizes", "1", "9") == Bounded(
        0, [1, 9]
    )
    for argv, message in (
        (["--share", "1"], "--share must be at least 0 and below 1, got 1.0"),
        (["--share", "-0.1"], "--share must be at least 0 and below 1, got -0.1"),
        (["--sizes", "3", "0"], "--sizes must be greater than 0 and at most 9, got 0"),
        (
            ["--config", config("sizes: [10]\n")],
            "--sizes must be greater than 0 and at most 9, got 10",
        ),
    ):
        with pytest.raises(UserError) as refused:
            parsed(*argv)
        assert str(refused.value) == message


def test_a_file_and_flags_above_it(config):
    path = config("out: folder\nrate: 1.0e-3\nlayers: [1, 2]\nshuffle: false\n")
    assert parse("--config", path) == Options("folder", 0.001, [1, 2], False)
    assert parse("--rate", "2", "--config=" + path, "--shuffle") == Options(
        "folder", 2.0, [1, 2], True
    )
    assert parse("--config", config("out: x\nrate:\nlayers: null\n")) == Options("x")
    assert parse("--out", "x") == Options("x")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            UserError("there is no corpus in x: give --source"),
            "error: there is no corpus in x: give --source",
        ),
        (NotPossible("no"), "error: these model options do not go together: no"),
        (
            OSError(28, "No space left on device", "runs/a"),
            "error: No space left on device: runs/a",
        ),
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (MemoryError(), "error: MemoryError: MemoryError (--traceback shows where)"),
        (
            ModuleNotFoundError("x", name="peft"),
            "error: peft is not installed: pip install 'hf-infini[recipes]'",
        ),
        (ValueError("two\n lines"), "error: two lines"),
        (KeyError("name"), "error: KeyError: 'name' (--traceback shows where)"),
    ],
)
def test_errors_are_one_line_and_status_1(error, line, capsys):
    @exit_on_error(when_stopped="go on")
    def main(argv=None):
        raise error

    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 1
    assert capsys.readouterr().err == line + "\n"
    with pytest.raises(SystemExit):
        main(["--traceback"])
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "raise error" in shown and shown.endswith(line + "\n")


def test_standard_output_on_a_full_disk(capsys, monkeypatch):
    @exit_on_error(when_stopped="go on")
    def main(argv=None):
        print("a text")

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as stop:
            main([])
        full.flush()  # as the interpreter does when it ends: nothing is left to fail
    assert stop.value.code == 1 and "No space left on device" in capsys.readouterr().err


def test_nobody_reads_the_output_any_more(capsys):
    @exit_on_error(when_stopped="go on")
    def main(argv=None):
        raise BrokenPipeError

    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 141 and capsys.readouterr().err == (
        "stopped, as nobody reads the output any more: go on\n"
    )


def test_a_stopped_recipe_says_how_to_go_on(capsys):
    # what a shell starts behind itself ignores it
    restored = signal.signal(signal.SIGINT, signal.default_int_handler)

    @exit_on_error(when_stopped="the same command goes on")
    def main(argv=None):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(SystemExit) as stop:
        main([])
    signal.signal(signal.SIGINT, restored)
    assert stop.value.code == 130 and capsys.readouterr().err == (
        "stopped by Ctrl-C: the same command goes on\n"
    )


HELP = """
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[2]).parent))  # as for a script
flag, *recipes = sys.argv[1:]
for recipe in recipes:
    sys.argv = [recipe, flag]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, recipe
    assert not {"torch", "hf_infini"} & sys.modules.keys(), recipe
"""


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.py"))


def texts(flag: str, recipes: list[Path]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", HELP, flag, *map(str, recipes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("usage: ")[1:]
    return {recipe.name: text.splitlines() for recipe, text in zip(recipes, found, strict=True)}


def flags_of(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines if line.startswith("  --")}


@pytest.fixture(scope="module")
def helps() -> dict[str, list[str]]:
    """The lines of each recipe's --help. torch and the models take seconds to import: none of them
    is."""
    return texts("--help", RECIPES)


def test_help_shows_the_docstring_as_it_is_written_and_every_option_in_a_group(helps):
    for recipe in RECIPES:
        lines, written = (
            helps[recipe.name],
            recipe.read_text(encoding="utf-8").split('"""')[1].splitlines(),
        )
        assert lines[0].split()[0] == recipe.name and any(
            line.startswith("    python recipes/") for line in written
        )
        begin = lines.index(written[0])
        assert lines[begin : begin + len(written)] == written
        groups = {}
        for line in lines[begin + len(written) :]:  # where a line may end in a colon, too
            if line.endswith(":") and line[0].islower() and not line.startswith(" "):
                groups[line[:-1]] = options = []
            elif line.startswith("  -"):
                options.append(line.split()[0])
        assert (
            "options" not in groups and "optional arguments" not in groups and all(groups.values())
        )
        assert groups["general"][0] == "-h," and len(groups) >= 3
        found = [name for options in groups.values() for name in options]
        assert len(found) == len(set(found))


def test_the_help_of_what_turns_an_option_off_is_not_that_of_the_option(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    lines = capsys.readouterr().out.splitlines()
    [(on, off)] = [
        pair for pair in zip(lines, lines[1:], strict=False) if "--no_shuffle" in pair[1]
    ]
    assert "Shuffle." in on and "--shuffle false" in off and "Shuffle." not in off


def test_a_list_of_numbers_is_parsed_as_one_of_floats(config):
    argv = ["--kept_shares", "1", "0.5", "--layers", "0", "2"]
    (found,) = parse_options(ModelOptions, description="A test.", argv=argv)
    assert found.kept_shares == [1.0, 0.5] and found.layers == [0, 2]
    (found,) = parse_options(
        ModelOptions, description="A test.", argv=["--config", config("kept_shares: [1, 0.5]\n")]
    )
    assert found.kept_shares == [1.0, 0.5]


class Parsed(BaseException):
    pass


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_commands_of_the_docstring_are_parsed(recipe, monkeypatch):
    def parse(*classes, **arguments):
        parse_options(*classes, **arguments)
        raise Parsed

    text = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8")), clean=False).replace(
        "\\\n", " "
    )
    commands = re.findall(
        r"^    .*recipes/(\w+)\.py (.+)$", text.replace(" --config …", ""), re.MULTILINE
    )
    assert recipe.stem in dict(commands)
    for name, words in commands:
        module = load_recipe(name)
        monkeypatch.setattr(module, "parse_options", parse)
        with pytest.raises(Parsed):
            module.main(shlex.split(words))


def test_the_help_of_train_is_short_and_help_all_has_the_rest(helps):
    (train,) = (recipe for recipe in RECIPES if recipe.stem == "train")
    all_lines = texts("--help_all", [train])["train.py"]
    shown, everything = flags_of(helps["train.py"]), flags_of(all_lines)
    assert len(shown) <= 35 and shown < everything
    text = "\n".join(all_lines)
    options = {
        field.name: field
        for kind in (MemoryOptions, ScratchOptions)
        for field in dataclasses.fields(kind)
    }
    assert {f"--{name}" for name in options} <= everything  # as hf_infini tells them
    for name, kind in {
        **typing.get_type_hints(MemoryOptions),
        **typing.get_type_hints(ScratchOptions),
    }.items():
        if typing.get_origin(kind) is Literal and name not in ("attention", "position_encoding"):
            assert f"--{name} {{{','.join(typing.get_args(kind))}}}" in text
    assert (
        parse_options(
            ModelOptions, description="", argv=["--memory_conv", "3", "--rope_theta", "9"]
        )[0].memory_conv
        == 3
    )


def test_the_hub_is_not_asked_for_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    for name in ("gpt2", "user/model", "user/model/", ".", "models/there", "n" * 5000):
        check_name("--model", name)
    for name in (
        "runs/infini",
        "models/infini",
        "a/b/c",
        "./infini",
        "/nowhere",
        "~/infini",
        r"C:\models\infini",
    ):
        with pytest.raises(
            UserError, match="--model: there is no folder .*; give the folder of a saved model"
        ):
            check_name("--model", name)
