"""The card recipe on runs really trained: its numbers are the files', its samples generate.py's, its example runs."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from cli import parse_options
from running import CONTEXT, SIZES, load_recipe, prepared_data, recipe, result, run, straight_run

write_card, generate = load_recipe("write_card"), load_recipe("generate")
PROMPT = "To be"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def finished(source, folder):
    """A copy of a run without its checkpoints."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoint-*", "evaluation*"))
    return folder


@pytest.fixture
def infini(base, tmp_path):
    return finished(straight_run(base), tmp_path / "runs" / "infini")


@pytest.fixture(scope="module")
def attention_free(base):
    """A finished causal_mha run without attention, with learned positions."""
    options = ["--model", "causal_mha", "--attention", "none", *SIZES, "--batch_size", 8, "--max_steps", 3]
    run(*recipe("train"), "--data", prepared_data(base), *options, "--eval_steps", 3, "--out", base / "attention_free")
    return base / "attention_free"


def card_of(folder, out, *options) -> str:
    """Runs the recipe in this process and returns the card."""
    arguments = ["--run", folder, "--out", out, "--device", "cpu", "--max_new_tokens", 12, "--prompt", PROMPT, *options]
    write_card.main(list(map(str, arguments)))
    return out.read_text(encoding="utf-8")


def samples_of(folder) -> dict:
    return json.loads((folder / "samples.json").read_text(encoding="utf-8"))


def test_the_whole_card_in_processes_of_its_own(infini, base, tmp_path):
    data, out = prepared_data(base), tmp_path / "cards" / "infini.md"
    run(*recipe("evaluate_model"), "--model", infini, "--data", data, "--device", "cpu", "--batch_size", 16)
    long = infini / "evaluation_long"
    run(*recipe("evaluate_model"), "--model", infini, "--data", data, "--length", 200, "--device", "cpu", "--out", long)
    run(*recipe("ngram_baseline"), "--data", data, "--out", tmp_path / "ngrams.json")
    options = ["--baseline", tmp_path / "ngrams.json", "--data", data, "--figures", tmp_path / "cards" / "my figures"]
    options += ["--max_new_tokens", 12, "--device", "cpu", "--name", "Infini / characters"]
    done = run(*recipe("write_card"), "--run", infini, "--out", out, *options)
    assert "2 evaluation(s), 1 baseline(s), 5 samples" in done.stdout
    card, numbers = ModelCard.load(out), result(infini)
    measured = {(e.dataset_split, e.dataset_config, e.metric_type): e.metric_value for e in card.data.eval_results}
    far = json.loads(long.with_suffix(".json").read_text(encoding="utf-8"))
    assert measured == {  # the evaluation that repeats train.py's is not there twice
        ("validation", None, "perplexity"): numbers["perplexity"],
        ("validation", None, "cross_entropy"): numbers["cross_entropy"],
        ("validation", "rows of 200 tokens", "perplexity"): far["perplexity"],
        ("validation", "rows of 200 tokens", "cross_entropy"): far["cross_entropy"],
    }
    assert card.data.model_name == "Infini / characters" and f"{numbers['parameters']:,} parameters" in card.text
    bigrams = json.loads((tmp_path / "ngrams.json").read_text(encoding="utf-8"))["orders"][1]
    line = f"| bigrams | data, validation | {bigrams['tokens']:,} | {bigrams['cross_entropy']:.4f} |"
    assert line in re.sub(" +", " ", card.text)  # tables are padded
    # The ends of text among the rows
    assert ("judged on special tokens too" in card.text) == (bigrams["tokens"] != numbers["validation_tokens"])
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card.text)
    names = ("loss_curve", "gates", "evaluation", "evaluation_long")
    assert links == [f"my%20figures/Infini_characters_{name}.png" for name in names]
    for link in links:
        assert (out.parent / link.replace("%20", " ")).read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in card.content and str(base) not in card.content and sys.prefix not in card.content


def test_samples_are_those_of_generate(infini, tmp_path, capsys):
    card = card_of(infini, tmp_path / "card.md", "--seed", 3)
    found = samples_of(infini)["samples"]
    assert [sample["method"] for sample in found] == ["Greedy", "Temperature", "Top-k", "Top-p", "Beam search"]
    capsys.readouterr()
    for sample in found:
        flags = [part for name, value in sample["arguments"].items() if name != "do_sample"
                 and (value, name) not in ((0, "top_k"),) for part in (f"--{name}", value)]  # fmt: skip
        flags += ["--do_sample", sample["arguments"]["do_sample"], "--seed", sample["seed"], "--json", "true"]
        generate.main(["--model", str(infini), "--prompt", PROMPT, "--device", "cpu", *map(str, flags)])
        expected = json.loads(capsys.readouterr().out)
        assert (sample["text"], sample["new_tokens"]) == (expected["text"], expected["new_tokens"])
        assert f"text\n{sample['text']}\n```" in card
    assert len({sample["text"] for sample in found}) > 2  # sampling, beams and greedy search differ


def test_samples_are_kept_until_settings_or_weights_change(infini, tmp_path):
    card_of(infini, tmp_path / "card.md")
    first = samples_of(infini)
    marked = {**first, "samples": [sample | {"text": "kept"} for sample in first["samples"]]}
    (infini / "samples.json").write_text(json.dumps(marked), encoding="utf-8")
    assert card_of(infini, tmp_path / "card.md").count("\nkept\n") == 5
    assert "\nkept\n" not in card_of(infini, tmp_path / "card.md", "--max_new_tokens", 7)
    assert {sample["arguments"]["max_new_tokens"] for sample in samples_of(infini)["samples"]} == {7}
    assert "\nkept\n" not in card_of(infini, tmp_path / "card.md")
    assert samples_of(infini) == first  # the same seed and settings: the same samples
    weights = load_file(infini / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, infini / "model.safetensors", {"format": "pt"})
    card_of(infini, tmp_path / "card.md")
    assert samples_of(infini)["settings"]["weights"] != first["settings"]["weights"]
    assert samples_of(infini)["samples"] != first["samples"]


def test_the_example_of_the_card_gives_its_first_sample(infini, tmp_path):
    card = card_of(infini, tmp_path / "card.md")
    code = re.search("```python\n(.*?)\n```", card, re.DOTALL)[1]
    assert "from_pretrained('runs/infini')" in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PROMPT + samples_of(infini)["samples"][0]["text"] + "\n"


def test_learned_positions_end_a_sample(attention_free, tmp_path):
    folder = finished(attention_free, tmp_path / "none")
    card = card_of(folder, tmp_path / "card.md", "--max_new_tokens", 500, "--notes", __file__)
    assert {sample["arguments"]["max_new_tokens"] for sample in samples_of(folder)["samples"]} == {CONTEXT - len(PROMPT)}
    assert "| Attention | none: a block is its feed-forward alone, and a token sees only itself |" in card
    assert "`causal_mha`" in card and "The card recipe on runs really trained" in card.split("## Limits")[1]


def test_what_is_missing_is_named(infini, tmp_path, capsys):
    def error(*options) -> str:
        with pytest.raises(SystemExit) as stopped:
            card_of(infini, tmp_path / "card.md", *options)
        assert stopped.value.code == 1 and not (tmp_path / "card.md").exists()
        return capsys.readouterr().err

    other = tmp_path / "ngrams.json"
    other.write_text(json.dumps({"data_fingerprint": "feed", "orders": []}), encoding="utf-8")
    fingerprint = result(infini)["data_fingerprint"]
    assert f"is of other data (feed) than {infini} ({fingerprint})" in error("--baseline", other)
    other.write_text(json.dumps({"data_fingerprint": fingerprint}), encoding="utf-8")
    assert "has no 'orders'" in error("--baseline", other)
    other.write_text("{", encoding="utf-8")
    assert f"{other} is no JSON" in error("--baseline", other)
    assert "cannot read nowhere.md" in error("--notes", "nowhere.md")
    assert "cannot read" in error("--data", tmp_path)
    assert "give a file that ends in .md" in error("--out", tmp_path / "card")
    assert "--max_new_tokens must be at least 1, got 0" in error("--max_new_tokens", 0)
    assert "--prompt '' has no token" in error("--prompt", "")
    (infini / "model.safetensors").unlink()
    (infini / "loss_curve.png").unlink()
    assert f"{infini} has no loss_curve.png, model.safetensors:" in error("--figures", tmp_path)
    (infini / "result.json").unlink()
    message = error()
    assert "has no result.json, model.safetensors: it is no run of recipes/train.py, or not finished" in message


def test_a_prompt_that_fills_the_context(attention_free, tmp_path, capsys):
    folder = finished(attention_free, tmp_path / "none")
    with pytest.raises(SystemExit):
        card_of(folder, tmp_path / "card.md", "--prompt", "a" * CONTEXT)
    assert f"{CONTEXT + 1} tokens, but this model has {CONTEXT} learned positions" in capsys.readouterr().err


def test_the_commands_of_the_docstring_are_parsed():
    text = write_card.__doc__.replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("    python ")]
    assert len(commands) == 3
    for command in commands:
        (options,) = parse_options(write_card.Options, description="", argv=shlex.split(command)[2:])
        assert options.out.endswith(".md")
