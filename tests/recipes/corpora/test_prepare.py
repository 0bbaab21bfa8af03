"""The prepare recipe end to end: its blocks are its text, runs repeat and resume, bad input ends
with a message."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from corpora.biographies import biography_documents
from running import kill_when, load_recipe

prepare = load_recipe("prepare")

COUNT = 40
BIOGRAPHIES = [
    *f"--source biographies --biographies {COUNT} --vocab_size 500 --context 128".split(),
    *"--validation 0.1".split(),
]


def run(*arguments, out: Path) -> dict:
    """Runs the recipe in this process and returns its manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *map(str, arguments), "--out", str(out)])
        prepare.main()
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


def fails(capsys, *arguments, out: Path) -> str:
    """Runs the recipe, which must end with status 1, and returns what it said on standard error."""
    with pytest.raises(SystemExit) as exit:
        run(*arguments, out=out)
    assert exit.value.code == 1
    return capsys.readouterr().err


def stream_of(out: Path, split: str) -> np.ndarray:
    table = datasets.load_from_disk(str(out / split))
    assert table.features == datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32"), length=128)}
    )
    return table.with_format("numpy")["input_ids"][:].reshape(-1).astype(np.int32)


def documents_of(out: Path, split: str) -> dict[str, str]:
    """Id and text of the documents of a held-out split."""
    rows = map(json.loads, open(out / f"{split}_documents.jsonl", encoding="utf-8"))
    return {row["id"]: row["text"] for row in rows}


def reused(manifest: dict) -> list[str]:
    return [name for name, stage in manifest["stages"].items() if stage["reused"]]


def packed_stream(tokenizer) -> np.ndarray:
    """All documents one after the other, encoded one by one, each with an end-of-text token behind
    it."""
    texts = [document.text for document in biography_documents(COUNT)]
    return np.concatenate(
        [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    ).astype(np.int32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "biographies"
    return out, run(*BIOGRAPHIES, out=out)


def test_blocks_are_the_documents_between_end_of_text_tokens(made):
    out, manifest = made
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert len(tokenizer) == manifest["tokenizer"]["vocabulary"] == 500
    held_out = [
        json.loads(line) for line in open(out / "validation_documents.jsonl", encoding="utf-8")
    ]
    corpus = {document.id: document.text for document in biography_documents(COUNT)}
    assert {row["id"]: row["text"] for row in held_out}.items() <= corpus.items() and len(
        held_out
    ) == COUNT // 10
    assert all(row["title"] for row in held_out)
    train = [text for name, text in corpus.items() if name not in {row["id"] for row in held_out}]
    for split, texts in (("train", train), ("validation", [row["text"] for row in held_out])):
        expected = "".join(text + tokenizer.eos_token for text in texts)
        stream, counts = stream_of(out, split), manifest["splits"][split]
        decoded = tokenizer.decode(stream)
        # only the tail is missing
        assert expected.startswith(decoded) and len(expected) - len(decoded) < 128 * 20
        assert counts["documents"] == len(texts) and counts["characters"] == sum(map(len, texts))
        assert counts["tokens"] == len(stream) == counts["blocks"] * 128
        assert counts["tokens"] + counts["dropped_tail_tokens"] == counts["stream_tokens"]
        assert 0 <= counts["dropped_tail_tokens"] < 128
        assert counts["sha256"] == hashlib.sha256(stream.astype("<i4").tobytes()).hexdigest()
    # 35 % of the 36 training documents, and none that is held out.
    assert manifest["tokenizer"]["learned_from_documents"] == 13
    assert manifest["source"]["documents"] == COUNT and manifest["peak_memory_bytes"] > 2**20


def test_a_second_run_reuses_and_changed_options_redo_what_depends_on_them(made, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(made[0], out)
    hashes = {name: split["sha256"] for name, split in made[1]["splits"].items()}

    same = run(*BIOGRAPHIES, out=out)
    assert reused(same) == ["documents", "tokenizer", "train", "validation"]
    assert same["splits"] == made[1]["splits"]
    wider = run(*BIOGRAPHIES, "--context", 256, out=out)
    assert reused(wider) == ["documents", "tokenizer"] and wider["splits"]["train"]["blocks"] > 0
    larger = run(*BIOGRAPHIES, "--vocab_size", 600, out=out)
    assert reused(larger) == ["documents"] and larger["tokenizer"]["vocabulary"] == 600
    other = run(*BIOGRAPHIES, "--seed", 1, out=out)
    assert reused(other) == []
    back = run(*BIOGRAPHIES, out=out)
    assert (
        reused(back) == []
        and {name: split["sha256"] for name, split in back["splits"].items()} == hashes
    )


@pytest.mark.slow
@pytest.mark.parametrize("split_by", ["document", "block"])
def test_a_test_split_takes_from_training_alone(made, tmp_path, split_by):
    out = tmp_path / "out"
    without = run(*BIOGRAPHIES, "--split_by", split_by, out=out)
    held_out = (out / "validation_documents.jsonl").read_bytes()
    validation = stream_of(out, "validation")
    manifest = run(*BIOGRAPHIES, "--split_by", split_by, "--test", 0.2, out=out)
    splits, tokenizer = manifest["splits"], AutoTokenizer.from_pretrained(out / "tokenizer")
    assert list(splits) == ["train", "validation", "test"]
    assert (out / "validation_documents.jsonl").read_bytes() == held_out
    if split_by == "document":
        rows = {name: documents_of(out, name) for name in ("validation", "test")}
        assert len(rows["test"]) == splits["test"]["documents"] == COUNT // 5
        train = (
            {document.id for document in biography_documents(COUNT)}
            - set(rows["validation"])
            - set(rows["test"])
        )
        assert (
            not set(rows["validation"]) & set(rows["test"])
            and splits["train"]["documents"] == len(train) == 28
        )
        # 35 % of the 28 training documents: the tokenizer has read neither held-out split.
        assert manifest["tokenizer"]["learned_from_documents"] == 10
        for name in ("validation", "test"):
            decoded = tokenizer.decode(stream_of(out, name))
            assert "".join(text + tokenizer.eos_token for text in rows[name].values()).startswith(
                decoded
            )
    else:
        assert (stream_of(out, "validation") == validation).all() and splits[
            "validation"
        ] == without["splits"]["validation"]
        blocks = {name: list(map(bytes, stream_of(out, name).reshape(-1, 128))) for name in splits}
        whole = packed_stream(tokenizer)
        everything = whole[: len(whole) // 128 * 128].reshape(-1, 128)
        # each block once, in one of the splits
        assert sorted(sum(blocks.values(), [])) == sorted(map(bytes, everything))
        assert len(blocks["test"]) == splits["test"]["blocks"] == round(0.2 * len(everything))
        assert (out / "test_documents.jsonl").read_text() == ""
    same = run(*BIOGRAPHIES, "--split_by", split_by, "--test", 0.2, out=out)
    rows = [] if split_by == "document" else ["rows"]
    assert reused(same) == ["documents", "tokenizer", *rows, "train", "validation", "test"]

    back = run(*BIOGRAPHIES, "--split_by", split_by, out=out)
    assert back["splits"] == without["splits"] and not list(out.glob("test*"))


def test_texts_that_come_again_are_counted_and_can_be_left_out(tmp_path, capsys):
    texts = [f"{word} " * 300 for word in ("um", "dois", "três", "quatro")]
    rows = [{"text": text} for text in texts * 49 + ["só aqui " * 300] * 4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        *f"--source {tmp_path / 'rows.jsonl'} --vocab_size 300 --context 16".split(),
        *"--validation 0.1".split(),
    ]
    for _ in range(2):  # the second reuses what the first has made
        manifest = run(*options, out=tmp_path / "out")
        assert manifest["source"]["duplicates"] == 195 and manifest["source"]["documents"] == 200
        assert (
            "195 documents have exactly the text of an earlier one, so that held-out text"
            in capsys.readouterr().out
        )
    source = run(*options, "--drop_duplicates", out=tmp_path / "out")["source"]
    assert (source["documents"], source["duplicates"], source["dropped"]) == (
        5,
        0,
        {"duplicate": 195},
    )
    assert "duplicate" not in capsys.readouterr().out


def test_caps_and_fractions(tmp_path):
    capped = run(*BIOGRAPHIES, "--max_tokens", 1500, "--max_documents", 20, out=tmp_path / "capped")
    assert (
        capped["splits"]["train"]["stream_tokens"] == 1500
        and capped["splits"]["train"]["documents"] == 1
    )
    assert capped["source"]["documents"] == 20
    half = run(*BIOGRAPHIES, "--fraction", 0.5, out=tmp_path / "half")
    dropped = half["source"]["dropped"]["outside the fraction"]
    assert half["source"]["documents"] + dropped == COUNT and 10 <= dropped <= 30


def test_characters_and_ready_tokenizers(made, tmp_path):
    text = "O rato roeu a roupa do rei de Roma.\n" * 200
    (tmp_path / "text.txt").write_text(text)
    options = ["--source", tmp_path / "text.txt", "--split_by", "block", "--context", 128]
    manifest = run(*options, "--tokenizer", "characters", out=tmp_path / "characters")
    assert manifest["tokenizer"]["vocabulary"] == len(set(text)) + 3
    # and the end-of-text token
    assert manifest["splits"]["train"]["stream_tokens"] == len(text) + 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "characters" / "tokenizer")
    assert tokenizer.decode(stream_of(tmp_path / "characters", "validation")[:128]) in text
    ready = run(*options, "--tokenizer", made[0] / "tokenizer", out=tmp_path / "ready")
    assert ready["tokenizer"] == made[1]["tokenizer"] | {"learned_from_documents": 0}


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_half_made(made, tmp_path):
    out = tmp_path / "out"
    options = [*BIOGRAPHIES, "--biographies", 4000]
    kill_when(
        lambda: list(out.glob(".stages/documents.*.part/documents.arrow")),
        "prepare",
        *options,
        "--out",
        out,
    )
    assert not (out / ".stages" / "documents").exists() and not (out / "manifest.json").exists()
    manifest = run(*BIOGRAPHIES, out=out)
    assert manifest["splits"] == made[1]["splits"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in made[0].iterdir()
    )
    assert not list(out.rglob("*.part"))
