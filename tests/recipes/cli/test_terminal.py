"""What all recipes share in a terminal: names of models that are paths, bars, and flags that switch off."""

from dataclasses import dataclass

import pytest

from cli import UserError, option, parse_options
from cli.names import check_name
from running import load_recipe, prepared_data


@dataclass
class Switch:
    shown: bool = option(True, "Show it.")
    kept: bool = option(True, "Keep it.", rare=True)
    other: bool = option(False, "Another.")


def test_the_hub_is_not_asked_for_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    for name in ("gpt2", "user/model", "user/model/", ".", "models/there", "n" * 5000):
        check_name("--model", name)
    for name in ("runs/infini", "models/infini", "a/b/c", "./infini", "/nowhere", "~/infini", r"C:\models\infini"):
        with pytest.raises(UserError, match="--model: there is no folder .*; give the folder of a saved model"):
            check_name("--model", name)


@pytest.mark.parametrize("recipe", ["generate", "convert", "prepare"])
def test_a_model_that_is_not_there_is_named_at_once(recipe, tmp_path, monkeypatch, capsys, base):
    from transformers import AutoTokenizer, PreTrainedConfig

    data = prepared_data(base)

    def asked(*args, **kwargs):
        raise AssertionError("the Hub would be asked")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", asked)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", asked)
    (tmp_path / "text.txt").write_text("a text\n" * 200)
    words = {
        "generate": ["--model", "runs/nowhere", "--prompt", "a"],
        "convert": ["--model", "runs/nowhere", "--out", str(tmp_path / "out"), "--data", str(data),
                    "--segment_length", "8", "--narrow_to", "6"],
        "prepare": ["--tokenizer", "runs/nowhere", "--source", str(tmp_path / "text.txt"), "--split_by", "block", "--out",
                    str(tmp_path / "out")],
    }  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        load_recipe(recipe).main(words[recipe])
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and "there is no folder runs/nowhere; give the folder of a saved model" in error


def test_a_flag_that_switches_off_says_what_it_is(capsys):
    for flag, rare in (("--help", False), ("--help_all", True)):
        with pytest.raises(SystemExit):
            parse_options(Switch, description="", argv=[flag])
        shown = " ".join(capsys.readouterr().out.split())
        assert "--no_shown The same as --shown false. " in shown and "--no_other" not in shown
        assert ("--no_kept The same as --kept false." in shown) is rare
    for argv, values in (([], (True, True)), (["--no_shown"], (False, True)), (["--no_kept"], (True, False))):
        (found,) = parse_options(Switch, description="", argv=argv)
        assert (found.shown, found.kept) == values
