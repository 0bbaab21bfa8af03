"""The card of a model that was really trained: its folder, its numbers, what is refused; and pushes
by the Trainer."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, hf_api
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.utils import hub as transformers_hub

from card_runs import cells
from cards import folder as cards_folder
from cards import run as cards_run
from cli import UserError
from hf_infini import load_adapter
from hf_infini.models import adapter as memory_adapter
from hf_infini.models.adapter import RECORD
from hub_files import code_of, config_of
from hub_repository import WRITE
from hub_server import HubServer
from running import CONTEXT, ROOT, load_recipe, prepared_data, result, straight_run
from training.run_folder import RESULT_ENTRIES

pytestmark = pytest.mark.slow  # they share trained runs


model_card = load_recipe("model_card")
NAME = "user/infini"
MODELS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
ADAPTERS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/infini_adapter.json"))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of recipes/train.py that was evaluated, with files that are nobody's business."""
    folder, data = tmp_path_factory.mktemp("runs") / "infini", prepared_data(base)
    shutil.copytree(
        straight_run(base), folder, ignore=shutil.ignore_patterns("checkpoint-*", "evaluation*")
    )
    (folder / "training_args.bin").write_text("/home/maria/secret")
    evaluate = load_recipe("evaluate_model")
    evaluate.main(
        ["--model", str(folder), "--data", str(data), "--length", "96", "--device", "cpu"]
    )
    passkey = ["--task", "passkey", "--lengths", "256", "--depths", "0.5", "--samples", "3"]
    evaluate.main(["--model", str(folder), "--data", str(data), *passkey, "--device", "cpu"])
    (folder / "passkey.cells.json").write_text("{}")  # an evaluation that was killed
    return folder


def options_of(trained, out, *more) -> list[str]:
    words = [
        *f"--run {trained} --out {out} --language en --data_license".split(),
        "public domain",
        "--prompt",
        "To be",
    ]
    return [
        *map(
            str,
            [*words, "--max_new_tokens", 12, "--dataset", "user/plays", "--device", "cpu", *more],
        )
    ]


@pytest.fixture(scope="module")
def published(trained, tmp_path_factory):
    """A folder that the recipe wrote and `hf upload` would push to a small Hub; what the recipe
    printed; the Hub."""
    hub, out = (
        HubServer(tmp_path_factory.mktemp("hub")),
        tmp_path_factory.mktemp("cards") / "infini",
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model_card.main(options_of(trained, out, "--repo_id", NAME))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        api = HfApi(hub.url, WRITE)
        api.create_repo(NAME, private=True)
        api.upload_folder(repo_id=NAME, folder_path=out)
    yield out, printed.getvalue(), hub
    hub.stop()


def test_what_is_in_the_folder(published, trained):
    out, printed, _ = published
    names = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "loss_curve.png",
    } <= names
    assert not names & {"result.json", "training_args.bin"}
    assert (
        {f"{entry.split('.')[0]}.py" for entry in config_of(out)["auto_map"].values()}
        < code_of(out).keys()
        < names
    )
    assert all(re.search(rf" {(out / name).stat().st_size:,}  {name}\n", printed) for name in names)
    assert f"next: hf upload {NAME} {out}\n" in printed
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, trained))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(torch.bfloat16)) for name in ours)


def test_the_card_has_the_numbers_of_the_json(published, trained):
    card, numbers = ModelCard.load(published[0] / "README.md"), result(trained)
    of = {
        name: json.loads((trained / f"{name}.json").read_text())
        for name in ("evaluation", "passkey")
    }
    rows = cells(card.text)
    for how, found in (
        ("", numbers | {"tokens": numbers["validation_tokens"]}),
        (", length 96", of["evaluation"]),
    ):
        loss = [
            f"{found['tokens']:,}",
            f"{found['cross_entropy']:.4f}",
            f"{found['perplexity']:.2f}",
        ]
        assert [f"data, validation{how}", *loss] in rows
    assert any(row[1].startswith(f"{of['passkey']['cells'][0]['correct']}/3 ") for row in rows)
    assert ["Parameters", f"{numbers['parameters']:,}"] in rows and [
        "`segment_length`",
        "16",
    ] in rows
    assert (
        card.data.model_name == "infini"
        and card.data.language == "en"
        and "public domain" in card.text
    )
    assert str(trained.parent) not in card.content and sys.prefix not in card.content


def test_a_stranger_gets_what_the_card_says(published, tmp_path):
    """The example of the card, by the name on the Hub, where nobody imports hf_infini."""
    out, _, hub = published
    text = (out / "README.md").read_text()
    code = re.search("```python\n(.*?)\n```", text, re.DOTALL)[1] + (
        "\nassert 'hf_infini' not in __import__('sys').modules"
    )
    change = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": WRITE,
    }
    environment = os.environ | change | {"HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    continuation = re.search(
        r"do_sample=False.*?Continuation:\n\n```text\n(.*?)\n```", text, re.DOTALL
    )[1]
    assert done.stdout == f"To be{continuation}\n" and f"name = '{NAME}'" in text


# --- what is refused ------------------------------------------------------------------------------


def test_runs_that_cannot_be_published(trained, tmp_path, capsys):

    def error(*more, folder=trained, out=tmp_path / "card") -> str:
        with pytest.raises(SystemExit) as stopped:
            model_card.main(options_of(folder, out, *more))
        assert stopped.value.code == 1 and not (tmp_path / "card" / "README.md").exists()
        return capsys.readouterr().err

    assert "is there: delete it, or choose another" in error(out=trained)
    assert "--notes: there is no file" in error("--notes", tmp_path / "none.md")
    assert "--prompt '' has no token" in error("--prompt", "")
    folder = shutil.copytree(trained, tmp_path / "runs" / "infini")
    weights = load_file(folder / "model.safetensors")
    max(weights.values(), key=torch.Tensor.numel).view(-1)[3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "model.safetensors has changed since the run was finished" in error(folder=folder)


def test_earlier_runs_are_those_that_were_continued(tmp_path):
    for name, date, start in (("first", 1, None), ("second", 2, "first")):
        (tmp_path / name).mkdir()
        options = {"init_from": start and str(tmp_path / start)}
        content = {entry: kind() for entry, kind in RESULT_ENTRIES.items()}
        content |= {"date": f"2026-11-0{date}T00:00:00+00:00", "options": options}
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    last = {"date": "2026-11-03T00:00:00+00:00", "options": {"init_from": str(tmp_path / "second")}}
    found = cards_run.earlier_runs(last)
    assert [name.split("/")[-1] for name, _ in found] == ["first", "second"] and None not in found[
        0
    ]
    # trained again since, so that it is another model now
    again = content | {"date": "2999-01-01T00:00:00+00:00"}
    (tmp_path / "second" / "result.json").write_text(json.dumps(again))
    assert [known for _, known in cards_run.earlier_runs(last)] == [None]


def test_samples_end_where_the_positions_do(base, tmp_path):
    out = tmp_path / "self"
    words = [
        *"--attention self --n_layer 1 --n_embd 16 --n_head 1 --use_cpu true".split(),
        *"--max_steps 1".split(),
    ]
    load_recipe("train").main([*map(str, ["--data", prepared_data(base), *words, "--out", out])])
    cards_folder.write_model(out, tmp_path / "card")
    assert code_of(tmp_path / "card") == {}  # transformers has that model
    short, sampled = cards_folder.generate_samples(
        tmp_path / "card", ["a" * (CONTEXT - 3)], 50, seed=0, device="cpu"
    )
    assert short["arguments"]["max_new_tokens"] == 3 and sampled["arguments"]["do_sample"]
    with pytest.raises(
        UserError, match=f"{CONTEXT + 1} tokens, but this model has {CONTEXT} learned positions"
    ):
        cards_folder.generate_samples(tmp_path / "card", ["a" * CONTEXT], 50, seed=0, device="cpu")


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_the_models_of_the_repository_are_as_published(folder, tmp_path):
    """But for the code, which is published with them."""
    card = shutil.copytree(folder, tmp_path / folder.name)
    AutoConfig.from_pretrained(card).save_pretrained(card, save_code=True)
    assert code_of(card)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 12e6
    card = ModelCard.load(folder / "README.md").data
    # and none that is nowhere
    assert {entry.dataset_type for entry in card.eval_results or ()} <= {*(card.datasets or ())}
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.dtype == torch.bfloat16 and len(tokenizer) <= model.config.vocab_size


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda folder: folder.name)
def test_the_adapters_of_the_repository_fit_models_of_their_sizes(folder, monkeypatch):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    described = json.loads((folder / RECORD).read_text("utf-8"))["model"]
    models = {
        "llama": ("HuggingFaceTB/SmolLM2-135M-Instruct", 3),
        "qwen2": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 2),
    }
    name, heads = models[described["model_type"]]  # heads of keys and values
    assert ModelCard.load(folder / "README.md").data.base_model == name
    sizes = {
        "hidden_size": described["width"],
        "num_hidden_layers": described["layers"],
        "num_key_value_heads": heads,
    }
    sizes |= {"num_attention_heads": described["heads"], "vocab_size": 99, "intermediate_size": 32}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(described["model_type"], **sizes))
    with pytest.raises(ValueError, match="was trained with another model: its weights are others"):
        load_adapter(plain, folder)
    monkeypatch.setattr(memory_adapter, "describe", lambda model: {"layer_signs": {}} | described)
    model = load_adapter(plain, folder).eval()  # every parameter, of its shape and finite
    assert any(
        (parameter != 0).any()
        for name, parameter in model.named_parameters()
        if "keep_weight" in name
    )
    assert model(torch.arange(600)[None] % 99).logits.isfinite().all()


# --- the Trainer ----------------------------------------------------------------------------------


def test_the_trainer_pushes_and_the_model_adds_its_code(published, trained, tmp_path, monkeypatch):
    folder, hub = shutil.copytree(trained, tmp_path / "infini"), published[2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # the client of older transformers
    # that of newer ones, made when it is first asked
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    options = dict(
        push_to_hub=True,
        hub_model_id="user/trainer",
        hub_strategy="end",
        save_strategy="no",
        max_steps=1,
    )
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    for push, start in (
        (trainer.push_to_hub, "needs_hf_infini"),
        (lambda: model.push_to_hub("user/trainer"), "hf_infini_"),
    ):
        push()
        repository = hub.repository("user/trainer")
        entries = json.loads(repository.read("config.json"))["auto_map"].values()
        assert all(entry.startswith(start) for entry in entries)
        assert {
            "model.safetensors",
            *(f"{entry.split('.')[0]}.py" for entry in entries),
        } < repository.files().keys()
