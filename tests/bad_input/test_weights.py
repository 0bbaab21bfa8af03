"""Weights that are not finite: every recipe that would compute with them refuses them by name."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bad_input import handled, refused
from evaluation import inference
from running import load_recipe
from small_runs import entry, remove, resealed, small_data, small_run, training
from support import stages

CARD = ["--language", "en", "--data_license", "none", "--prompt", "To"]
NUMBERS = {"NaN": torch.nan, "infinite": torch.inf, "minus infinite": -torch.inf}
PLAIN = ("generate", "evaluate_model", "compare_caches", "train")
RECIPES = (*PLAIN, "study", "model_card")


@pytest.fixture
def run(base, tmp_path):
    return shutil.copytree(small_run(base), tmp_path / "run")


def spoil(folder, number: float) -> str:
    """Puts it into one weight, in the middle of one of the tensors, whose name is returned."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if "mlp" in name)[0]
    tensors[name].view(-1)[tensors[name].numel() // 2] = number
    save_file(tensors, file, {"format": "pt"})
    return name


def words_of(name: str, base, run, out) -> list:
    data = small_data(base)
    return {
        "generate": ["--model", run, "--prompt", "To be", "--max_new_tokens", 2],
        "evaluate_model": ["--model", run, "--data", data, "--out", out],
        "compare_caches": ["--model", run, "--attribute", "--data", data, "--out", out],
        "train": training(data, out, "--init_from", run),
        "study": ["--runs", run, "--data", data, "--out", out],
        "model_card": ["--run", run, "--out", out, *CARD],
    }[name]


@pytest.mark.parametrize("name", RECIPES)
def test_all_recipes_refuse_them(name, base, run, tmp_path, capsys):
    """Also where no checksum tells: in a folder that is no run's, or a run that wrote them."""
    spoilt = spoil(run, torch.nan)
    if name in PLAIN:
        remove(run / "result.json")
    else:
        found = stages.checksums(run, [run / "model.safetensors"])
        resealed(entry("files", value=found))(run / "result.json")
    words = words_of(name, base, run, tmp_path / "out")
    refused(load_recipe(name).main, words, capsys, str(run), "not finite", spoilt, keeps=run)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_all_recipes_refuse_weights_that_are_not_the_run_s(name, base, run, tmp_path, capsys):
    file = run / "model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)] += 1.0
    save_file(tensors, file, {"format": "pt"})
    words = words_of(name, base, run, tmp_path / "out")
    refused(load_recipe(name).main, words, capsys, f"{file} has changed", "delete", keeps=run)


@pytest.mark.parametrize("number", NUMBERS)
def test_whichever_number_it_is(number, run, capsys):
    name = spoil(run, NUMBERS[number])
    remove(run / "result.json")
    words = ["--model", run, "--prompt", "To be"]
    refused(load_recipe("generate").main, words, capsys, str(run), "not finite", name)


def test_a_gate_that_is_closed_for_good_is_no_damage(base, run, tmp_path, capsys):
    model, tokenizer = inference.load_model(str(run), "cpu")
    inference.switch_memory_off(model)
    model.save_pretrained(tmp_path / "closed")
    tokenizer.save_pretrained(tmp_path / "closed")
    handled(
        load_recipe("generate").main,
        ["--model", tmp_path / "closed", "--prompt", "To be", "--max_new_tokens", 2],
        capsys,
    )
    file = tmp_path / "closed" / "model.safetensors"
    tensors = load_file(file)
    gate = next(name for name, value in tensors.items() if value.isneginf().all())
    tensors[gate].view(-1)[0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    words = ["--model", tmp_path / "closed", "--prompt", "To be"]
    refused(load_recipe("generate").main, words, capsys, "not finite", gate)
