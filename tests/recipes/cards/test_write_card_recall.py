"""The card recipe on models really trained in stages to recall, and on a study: all of it from their files."""

import json
import re
import shutil
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from card_runs import cells
from running import SIZES, load_recipe, recipe, result, run, sample_text
from studies.evaluation import validation_documents
from study_runs import arguments

write_card, evaluate_model = load_recipe("write_card"), load_recipe("evaluate_model")
COMMON = [*SIZES, "--eval_steps", 2, "--eval_rows", 4, "--batch_size", 2, "--gradient_accumulation", 1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("cards")


@pytest.fixture(scope="module")
def recalling(base):
    """A run in two stages, on generated biographies and then on rows that ask, with all that was measured on it."""
    data, recall, out = base / "data" / "people", base / "data" / "recall", base / "runs" / "recalling"
    options = ["--biographies", 40, "--biography_distance", 1500, "--vocab_size", 600, "--context", 128]
    run(*recipe("prepare"), "--source", "biographies", *options, "--validation", 0.1, "--out", data)
    options = ["--context", 512, "--rows", 20, "--validation_rows", 4, "--mix", "passkey=0.5", "codes=0.25", "text=0.25"]
    run(*recipe("prepare_recall"), "--data", data, *options, "--out", recall)
    infini = ["--segment_length", 32, "--position_encoding", "segment", "--memory_conv", 2, "--gate_init", -1, *COMMON]
    run(*recipe("train"), "--data", data, "--max_steps", 3, *infini, "--out", base / "runs" / "first")
    start = ["--init_from", base / "runs" / "first", "--max_steps", 2]
    run(*recipe("train"), "--data", recall, *start, *COMMON, "--out", out)
    passkey = ["--task", "passkey", "--data", data, "--lengths", 128, 256, "--depths", 0.5, "--samples", 3]
    facts = ["--task", "facts", "--distances", 2, 3, "--samples", 4]
    for task in (passkey, facts):
        for memory in ("on", "off"):
            words = ["--model", out, "--device", "cpu", "--memory", memory, *task]
            evaluate_model.main(list(map(str, words)))
    (out / "passkey_started.cells.json").write_text("{}")  # an evaluation that was killed
    return out


def card_of(out, *options) -> ModelCard:
    write_card.main(list(map(str, ["--out", out, "--device", "cpu", "--max_new_tokens", 8, *options])))
    return ModelCard.load(out)


def evaluated(folder, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_a_model_that_was_trained_to_recall(base, recalling, capsys):
    card = card_of(base / "cards" / "r.md", "--run", recalling, "--figures", base / "cards" / "figures")
    assert "4 evaluation(s), 0 baseline(s), 5 samples" in capsys.readouterr().out
    assert card.data.language == "pt" and "text: generated biographies" in card.text
    rows = {row[0]: row[1:] for row in cells(card.text)}
    first, last = result(base / "runs" / "first"), result(recalling)
    stages = [row for row in cells(card.text) if row[1] in ("runs/first", "recalling") and len(row) == 9]
    assert [row[3] for row in stages] == [f"{first['tokens']:,}", f"{last['tokens']:,}"]
    assert stages[1][2] == "biographies, recall (rows of 512: 50 % passkey, 25 % codes, 25 % text)"
    assert f"{first['tokens'] + last['tokens']:,} tokens in all." in card.text
    assert rows["Short convolution"] == ["over 2 tokens, added to the input of these layers"]
    gates = cells(card.text.split("### Gates")[1])[2:4]
    assert gates == [[layer, *(f"{value:.3f}" for value in values)] for layer, values in last["gates"].items()]
    assert "Gates at the start" not in rows  # they went on from those of the first stage
    found, off = evaluated(recalling, "passkey"), evaluated(recalling, "passkey_memory_off")
    for here, there in zip(found["cells"], off["cells"], strict=True):
        line = rows[f"{here['length']}"]
        assert line[0] == f"{here['correct']} of 3" and line[3] == f"{here['cross_entropy']:.4f}"
        assert line[4].startswith(f"{there['correct']}/3 (")
    facts, off = evaluated(recalling, "facts"), evaluated(recalling, "facts_memory_off")
    table = cells(card.text.split("### Facts")[1])
    for line, here, there in zip(table[2:4], facts["cells"], off["cells"], strict=True):
        assert line[:2] == [str(here["distance"]), f"{here['correct']} of 4"] and line[5] == f"{100 * here['chance']:.1f} %"
        assert line[6] == f"{there['correct']}/4 ({100 * there['low']:.1f}–{100 * there['high']:.1f} %)"
    for name in ("loss_curve", "gates", "passkey", "passkey_memory_off", "facts", "facts_memory_off"):
        assert f"](figures/recalling_{name}.png)" in card.text
        assert (base / "cards" / "figures" / f"recalling_{name}.png").read_bytes().startswith(b"\x89PNG")
    seconds = first["seconds"] + last["seconds"]
    assert [row for row in cells(card.text) if row[0] == "all"][0][2] == f"{seconds / 3600:.4f}"
    assert str(base) not in card.content and sys.prefix not in card.content


def test_the_prompt_is_from_a_validation_document(base, recalling):
    card = card_of(base / "cards" / "r.md", "--run", recalling)
    samples = evaluated(recalling, "samples")
    (prompt,) = samples["settings"]["prompts"]
    documents = validation_documents(base / "data" / "people")
    assert len(prompt.split()) == 12 and any(document["text"].strip().startswith(prompt) for document in documents)
    assert "the beginning of “" in card.text and "How it really goes on:" in card.text


def test_a_stage_that_was_trained_again_is_not_the_one_that_was_continued(base, recalling, tmp_path):
    first = base / "runs" / "first" / "result.json"
    before = first.read_text(encoding="utf-8")
    first.write_text(before.replace(result(base / "runs" / "first")["date"], "2999-01-01T00:00:00+00:00"), encoding="utf-8")
    try:
        assert "nothing known of it" in card_of(tmp_path / "r.md", "--run", recalling).text
    finally:
        first.write_text(before, encoding="utf-8")


def test_evaluations_of_something_else_are_refused(base, recalling, tmp_path, capsys):
    def error(*options) -> str:
        with pytest.raises(SystemExit):
            card_of(tmp_path / "r.md", "--run", recalling, *options)
        return capsys.readouterr().err

    content = evaluated(recalling, "facts")
    file = tmp_path / "facts_more.json"
    for changes, message in (
        ({"model": "runs/other"}, f"{file} is of the model runs/other, not of {recalling}"),
        ({"date": "2001-01-01T00:00:00+00:00"}, "is older than the training in"),
    ):
        file.write_text(json.dumps(content | changes), encoding="utf-8")
        assert message in error("--evaluation", file)
    file.write_text("{}", encoding="utf-8")
    assert f"{file} has no options, model, date" in error("--evaluation", file)
    (base / "elsewhere" / "recalling").mkdir(parents=True)
    assert "--prompt is needed: no data with Portuguese" in error("--language", "pt", "--data", empty_copy(base, tmp_path))


def empty_copy(base, tmp_path):
    """The data of the recall run, without its validation documents."""
    shutil.copytree(base / "data" / "recall", tmp_path / "recall")
    (tmp_path / "recall" / "validation_documents.jsonl").write_text("")
    return tmp_path / "recall"


# --- studies ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(base):
    """A study of self-attention and Infini-attention, and of a variant with data of its own, each of 40 steps."""
    lines = sample_text().splitlines()
    texts = ["\n".join(lines[start : start + 30]) for start in range(0, len(lines), 30)]
    rows = [json.dumps({"id": f"{number:03}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (base / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    own = "attention: infini\npositions: segment\ndata_fraction: 0.6\ndata_tokenizer: characters\n"
    (base / "letters.yaml").write_text(own, encoding="utf-8")
    load_recipe("study").main(arguments(base, variants=("s1", "best", str(base / "letters.yaml"))))
    return base / "out"


def test_a_model_of_a_study(base, study):
    options = ["--study", study, "--variant", "best", "--figures", base / "cards" / "f"]
    card = card_of(base / "cards" / "study_best.md", *options)
    content = json.loads((study / "report.json").read_text(encoding="utf-8"))
    s1, best, _ = content["variants"]
    assert card.data.model_name == "study_best" and "from_pretrained('out/best/run')" in card.text
    measured = {entry.metric_type: entry.metric_value for entry in card.data.eval_results}
    assert measured["cross_entropy"] == result(study / "best" / "run")["cross_entropy"]
    lines = {row[0]: row[1:] for row in cells(card.text.split("### In the mini study")[1])}
    for variant, line in ((best, lines["best"]), (s1, lines["s1"])):
        for place, numbers in ((1, variant["cross_entropy"]), (3, variant["per_character"]["bits"])):
            assert line[place] == f"{numbers['value']:.4f} ({numbers['low']:.4f} to {numbers['high']:.4f})"
    difference = best["difference"]
    assert lines["best"][2] == f"{difference['value']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})"
    assert lines["s1"][2] == lines["s1"][4] == "–"
    assert lines["all, in rows of 512"][1] == f"{best['positions']['long']['perplexity']:,.2f}"
    assert lines["cache after 32 tokens"] == [f"{best['state_bytes']['bytes']['32']:,} bytes"]
    assert "Cut short: every run of this study was stopped after at most 40 steps" in card.text
    assert f"text\n{content['prompt']['prompt']}\n```" in card.text and best["sample"]["text"] in card.text
    assert not (study / "best" / "run" / "samples.json").exists()  # nothing was generated again
    for name in ("study_best_loss_curve", "study_best_gates", "out_loss", "out_loss_difference", "out_gates_best"):
        assert f"](f/{name}.png)" in card.text and (base / "cards" / "f" / f"{name}.png").is_file()


def test_the_example_of_a_study_s_card_gives_its_sample(base, study, tmp_path):
    card = card_of(base / "cards" / "study_best.md", "--study", study, "--variant", "best")
    code = re.search("```python\n(.*?)\n```", card.text, re.DOTALL)[1].replace("'out/", f"'{study}/")
    done = run(sys.executable, "-c", code)
    sample = json.loads((study / "best" / "sample.json").read_text(encoding="utf-8"))
    prompt = json.loads((study / "report.json").read_text(encoding="utf-8"))["prompt"]["prompt"]
    tokenizer = AutoTokenizer.from_pretrained(study / "best" / "run")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert done.stdout == tokenizer.decode(ids) + sample["text"] + "\n"


def test_other_variants_of_a_study(base, study):
    s1 = card_of(base / "cards" / "study_s1.md", "--study", study, "--variant", "s1")
    assert [row[0] for row in cells(s1.text.split("### In the mini study")[1])[2:3]] == ["s1"]
    assert "| Attention | causal self-attention over the whole context |" in re.sub(" +", " ", s1.text)
    letters = card_of(base / "cards" / "study_letters.md", "--study", study, "--variant", "letters", "--prompt", "To be")
    assert "cannot be compared with theirs, its bits per character can" in letters.text
    assert "60 % of the documents, drawn at random" in letters.text and "**Beam search**" in letters.text


def test_several_seeds_are_said_to_be_means(base, study, tmp_path):
    shutil.copytree(study, tmp_path / "out")
    content = json.loads((study / "report.json").read_text(encoding="utf-8"))
    best = content["variants"][1]
    best["by_seed"]["1"], best["folders"]["1"] = 2.5, "best-seed1"
    (tmp_path / "out" / "report.json").write_text(json.dumps(content), encoding="utf-8")
    card = card_of(tmp_path / "best.md", "--study", tmp_path / "out", "--variant", "best")
    assert "Its numbers here are means over 2 seeds" in card.text and "seed 1 2.5000" in card.text
    assert "how much the losses vary with the seed" not in card.text


def test_what_is_no_model_of_a_study_is_named(base, study, tmp_path, capsys):
    def error(*options) -> str:
        with pytest.raises(SystemExit):
            card_of(tmp_path / "card.md", *options)
        assert not (tmp_path / "card.md").exists()
        return capsys.readouterr().err

    shutil.copytree(study, tmp_path / "out")
    out = tmp_path / "out"
    assert "--variant i1: the study in" in error("--study", out, "--variant", "i1")
    assert "--study and --variant go together" in error("--study", out)
    assert "exactly one of --run and --study" in error("--study", out, "--variant", "s1", "--run", out / "s1" / "run")
    assert "--data does nothing with --study" in error("--study", out, "--variant", "s1", "--data", out / "data" / "base")
    trained = result(out / "s1" / "run")
    (out / "s1" / "run" / "result.json").write_text(json.dumps(trained | {"date": "2999-01-01T00:00:00+00:00"}))
    assert "is of another training of s1: start recipes/study.py again" in error("--study", out, "--variant", "s1")
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    del content["variants"][0]["cross_entropy"]
    content["variants"][0]["reasons"] = {"s1": "failed: no memory"}
    (out / "report.json").write_text(json.dumps(content), encoding="utf-8")
    assert "--variant s1 was not finished: s1: failed: no memory" in error("--study", out, "--variant", "s1")
    (out / "report.json").unlink()
    assert "has no report.json" in error("--study", out, "--variant", "s1")
