"""The evaluation recipe: train.py's number again, any length in chunks, documents of every length,
clear refusals."""

import json
import math
import shutil

import pytest
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from bad_input import refused
from corpora.blocks import save_rows
from running import (
    CONTEXT,
    DATA,
    infini_options,
    load_recipe,
    prepared_data,
    result,
    straight_run,
    trained,
)
from support.stages import sealed, write_json

evaluate_model = load_recipe("evaluate_model")


@pytest.fixture(scope="module")
def model_and_data(base):
    return straight_run(base), prepared_data(base)


def evaluate(tmp_path, *options) -> dict:
    """Runs the recipe in this process and returns its JSON."""
    evaluate_model.main(
        [*map(str, options), "--device", "cpu", "--out", str(tmp_path / "evaluation")]
    )
    return json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))


def naive_cross_entropy(folder, rows, dtype="float32") -> tuple[float, int]:
    """Over all tokens but each row's first and the special ones, and how many that are."""
    model, losses = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), []
    special = AutoTokenizer.from_pretrained(folder).all_special_ids
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1].double()
        found = (-logits.log_softmax(-1)).gather(-1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        losses += [loss for loss, token in zip(found, row[1:], strict=True) if token not in special]
    return math.fsum(losses) / len(losses), len(losses)


def tokens_of(folder, text: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def documents(data) -> list[str]:
    lines = (data / "validation_documents.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["text"] for line in lines if line]


@pytest.mark.slow
def test_the_prepared_rows_give_train_s_number(model_and_data, tmp_path, capsys):
    folder, data = model_and_data
    found = evaluate(tmp_path, "--model", folder, "--data", data)
    assert found["tokens"] == result(folder)["validation_tokens"]
    # The rows are in batches of another size, so float32 products are summed in another order
    assert found["cross_entropy"] == pytest.approx(result(folder)["cross_entropy"], rel=1e-5)
    assert sum(row["tokens"] for row in found["by_position"]) == found["tokens"]
    assert [row["first"] for row in found["by_position"]] == [1, 2, 4, 8, 16, 32]
    total = sum(row["cross_entropy"] * row["tokens"] for row in found["by_position"])
    assert total / found["tokens"] == pytest.approx(found["cross_entropy"], rel=1e-9)
    last_line = capsys.readouterr().out.splitlines()[-1].split()
    # 2 decimals
    assert last_line[0] == "all" and float(last_line[-1]) == pytest.approx(
        found["perplexity"], abs=0.006
    )


def test_joined_documents_far_beyond_the_trained_context(model_and_data, tmp_path):
    """In rows of any lengths, read in chunks; what is too short, or beyond the tokens asked for, is
    left out."""
    folder, data = model_and_data
    length = 8 * CONTEXT
    found = evaluate(tmp_path, "--model", folder, "--data", data, "--length", length, "--chunk", 50)
    stream = [token for text in documents(data) for token in tokens_of(folder, text)]
    rows = [stream[start : start + length] for start in range(0, len(stream), length)]
    expected, tokens = naive_cross_entropy(folder, [row for row in rows if len(row) > 1])
    assert (
        found["tokens"] == tokens
        and found["length"] == length
        and found["complete_rows"] == len(stream) // length
    )
    # float32 sums in another order
    assert found["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert found["by_position"][-1]["first"] == length // 2

    texts = [
        "First a text of one line.",
        "kurz",
        "O that this too too solid flesh would melt, " * 9,
    ]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    options = [
        *f"--text {tmp_path / 'texts.jsonl'} --length 100 --min_characters 10".split(),
        *"--max_tokens 201".split(),
    ]
    found = evaluate(tmp_path, "--model", folder, *options)
    stream = [token for text in (texts[0], texts[2]) for token in tokens_of(folder, text)]
    expected, tokens = naive_cross_entropy(
        folder, [stream[start : start + 100] for start in (0, 100, 200)]
    )
    assert (found["rows"], found["complete_rows"], found["tokens"]) == (3, 3, tokens)
    # float32 sums in another order
    assert found["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    in_bfloat16 = evaluate(tmp_path, "--model", folder, *options, "--precision", "bf16")[
        "cross_entropy"
    ]
    rounded, _ = naive_cross_entropy(
        folder, [stream[start : start + 100] for start in (0, 100, 200)], "bfloat16"
    )
    # nearer to that than to float32's
    assert in_bfloat16 == pytest.approx(rounded, abs=abs(rounded - expected) / 4)


def test_what_is_refused(model_and_data, base, tmp_path, capsys):
    folder, data = model_and_data
    for options, message in (
        (["--data", "x", "--text", "y"], "exactly one of --data and --text"),
        (["--text", "nowhere.txt"], "no file nowhere.txt"),
        (["--text", __file__, "--model", "nowhere"], "while loading the model nowhere"),
        (["--text", __file__, "--samples", 3], "--samples does nothing with --task perplexity"),
        (
            ["--data", data, "--split", "test"],
            f"--split test: {data} has no test rows; prepare it again with --test SHARE",
        ),
        (
            ["--text", __file__, "--split", "test"],
            "--split test chooses among the rows of --data, and --text has none",
        ),
        (
            ["--data", data, "--length", 64, "--min_characters", 10**9],
            "no document of at least --min_characters 1000000000",
        ),
    ):
        argv = ["--model", folder, "--device", "cpu", "--out", tmp_path / "evaluation", *options]
        refused(evaluate_model.main, argv, capsys, message, keeps=tmp_path)
    learned = trained(base, "infini")
    argv = [
        *f"--model {learned} --data {data} --length".split(),
        CONTEXT + 1,
        *f"--device cpu --out {tmp_path / 'e'}".split(),
    ]
    refused(
        evaluate_model.main,
        argv,
        capsys,
        f"{CONTEXT + 1} tokens, but this model has {CONTEXT}",
        "rope",
    )
    assert (
        evaluate(tmp_path, "--model", learned, "--data", data, "--length", CONTEXT)["length"]
        == CONTEXT
    )


@pytest.mark.slow
def test_the_test_split(model_and_data, base, tmp_path):
    folder, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(model_and_data[0], folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    options = [
        *f"--source {base / 'train_data' / 'text.jsonl'}".split(),
        *f"--tokenizer {model_and_data[1] / 'tokenizer'}".split(),
    ]
    options += ["--context", CONTEXT, "--validation", 0.1, "--test", 0.1, "--out", data]
    load_recipe("prepare").main([*map(str, options)])
    found = {}
    for split in ("validation", "test"):
        evaluate_model.main(
            ["--model", str(folder), "--data", str(data), "--split", split, "--device", "cpu"]
        )
        name = {"validation": "evaluation", "test": "evaluation_test"}[split]
        found[split] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        expected, tokens = naive_cross_entropy(
            folder, load_from_disk(str(data / split))["input_ids"]
        )
        assert found[split]["split"] == split and found[split]["tokens"] == tokens
        # float32 sums in another order
        assert found[split]["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert found["test"]["cross_entropy"] != found["validation"]["cross_entropy"]
    assert (
        found["test"]["data_fingerprint"]
        == found["validation"]["data_fingerprint"]
        != result(folder)["data_fingerprint"]
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "shakespeare").is_dir(), reason=f"no real text under {DATA} (HF_INFINI_DATA)"
)
def test_documents_kept_apart_and_labels_give_train_s_number(base, tmp_path):
    """A model that was trained with separate documents, and rows of which only some tokens are
    learned."""
    data = tmp_path / "data"
    shutil.copytree(prepared_data(base), data, ignore=shutil.ignore_patterns("validation"))
    rows = load_from_disk(str(prepared_data(base) / "validation"))
    labels = [
        [token if place % 3 else -100 for place, token in enumerate(row)]
        for row in rows["input_ids"]
    ]
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["validation"] |= save_rows(
        rows.add_column("labels", labels), data / "validation"
    )
    write_json(data / "manifest.json", sealed(manifest))
    options = [
        *infini_options(data),
        *f"--epochs 0.2 --separate_documents true --out {tmp_path / 'run'}".split(),
    ]
    load_recipe("train").main([*map(str, options)])
    options, expected = ["--model", tmp_path / "run", "--data", data], result(tmp_path / "run")
    found = evaluate(tmp_path, *options, "--separate_documents", "true")
    assert found["tokens"] == expected["validation_tokens"] < len(rows) * CONTEXT * 0.7
    # batches of another size
    assert found["cross_entropy"] == pytest.approx(expected["cross_entropy"], rel=1e-5)
    assert abs(evaluate(tmp_path, *options)["cross_entropy"] / expected["cross_entropy"] - 1) > 1e-4
