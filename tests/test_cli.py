"""parse_options: one parser for flags and YAML files, with errors that name what is wrong."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hf_infini_cli import UserError, exit_on_user_error, parse_options


@dataclass
class Options:
    out: str = field(metadata={"help": "Where to."})
    rate: float = field(default=0.1, metadata={"help": "Rate."})
    layers: list[int] | None = field(default=None, metadata={"help": "Layers."})
    shuffle: bool = field(default=True, metadata={"help": "Shuffle."})


def parse(*argv):
    return parse_options(Options, description="A test.", argv=list(argv))[0]


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_file_and_flags_above_it(config):
    path = config("out: folder\nrate: 1.0e-3\nlayers: [1, 2]\nshuffle: false\n")
    assert parse("--config", path) == Options("folder", 0.001, [1, 2], False)
    assert parse("--rate", "2", "--config=" + path, "--shuffle") == Options("folder", 2.0, [1, 2], True)
    assert parse("--config", config("out: x\nrate:\n")) == Options("x")
    assert parse("--out", "x") == Options("x")


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("out: x\nrates: 3\n", [], "unknown option 'rates'; did you mean rate?"),
        ("out: x\nrate: fast\n", [], "invalid float value: 'fast'"),
        ("rate: 1\n", [], "required: --out"),
        ("- a\n", [], "must hold `option: value` lines, got a list"),
        ("a: [", [], "is not valid YAML"),
        ("out: x\n", ["--rat", "3"], "unrecognised arguments: --rat 3; did you mean --rate?"),
        (None, ["--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
    ],
)
def test_errors(config, capsys, text, flags, message):
    argv = flags if text is None else ["--config", config(text), *flags]
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_user_errors_are_one_line_and_status_1(capsys):
    @exit_on_user_error
    def main():
        raise UserError("there is no corpus in x: give --source")

    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: there is no corpus in x: give --source\n"


HELP = """
import runpy, sys
for recipe in sys.argv[1:]:
    sys.argv = [recipe, "--help"]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, recipe
    assert not {"torch", "hf_infini"} & sys.modules.keys(), recipe
"""


def test_help_waits_for_no_library():
    """torch and the models take seconds to import; the options of every recipe are told without them."""
    recipes = sorted(map(str, (Path(__file__).parents[1] / "recipes").glob("*.py")))
    done = subprocess.run([sys.executable, "-c", HELP, *recipes], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(recipes)
