"""The prepare_recall recipe: a folder that train.py reads, labels on the answers alone, runs that
repeat and resume."""

import functools
import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Features, List, Value, load_from_disk
from transformers import AutoTokenizer

from corpora.biographies import SENTENCES, biography_documents
from hf_infini.tools.asking_rows import TOKENS_PER_FACT, fact_forms
from recall.examples import WORDING
from recall.rows import deal_kinds, read_mix
from running import load_recipe

prepare_recall = load_recipe("prepare_recall")
CONTEXT = 512
MIX = ["--mix", "passkey=0.25", "facts=0.5", "text=0.25"]
OPTIONS = ["--context", CONTEXT, "--rows", 80, "--validation_rows", 12, *MIX, "--questions", 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prepare_recall")


@functools.cache
def source(base: Path) -> Path:
    """A folder by recipes/prepare.py: articles of several hundred tokens, BPE."""
    rows = [
        json.dumps({"id": d.id, "text": d.text}) + "\n"
        for d in biography_documents(40, seed=9, distance=1500)
    ]
    (base / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    options = [
        *f"--source {base / 'text.jsonl'} --vocab_size 600 --context 128".split(),
        *"--validation 0.1".split(),
    ]
    load_recipe("prepare").main([*map(str, options), "--out", str(base / "source")])
    return base / "source"


@functools.cache
def prepared(base: Path) -> Path:
    prepare(base / "recall", base, *OPTIONS)
    return base / "recall"


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def prepare(out: Path, base: Path, *options) -> dict:
    """Runs the recipe in this process and returns its manifest."""
    prepare_recall.main(["--data", str(source(base)), *map(str, options), "--out", str(out)])
    return manifest_of(out)


def rows_of(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    rows = load_from_disk(str(folder / split)).with_format("numpy")
    return rows["input_ids"][:], rows["labels"][:]


def learned_words(tokenizer, ids, labels) -> list[str]:
    """The text of each stretch of labels."""
    counted = np.flatnonzero(labels != -100)
    return [
        tokenizer.decode(ids[part])
        for part in np.split(counted, np.flatnonzero(np.diff(counted) > 1) + 1)
    ]


@pytest.mark.slow
def test_rows_labels_and_manifest(base):
    folder, data = prepared(base), source(base)
    manifest, tokenizer = manifest_of(folder), AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(data / "tokenizer").get_vocab()
    column = List(Value("int32"), length=CONTEXT)
    for split, count in (("train", 80), ("validation", 12)):
        assert load_from_disk(str(folder / split)).features == Features(
            {"input_ids": column, "labels": column}
        )
        ids, labels = rows_of(folder, split)
        assert ids.shape == labels.shape == (count, CONTEXT)
        assert ((labels == ids) | (labels == -100)).all()
        record = manifest["splits"][split]
        # batches of 512 rows
        digest = b"".join(part[:512].astype("<i4").tobytes() for part in (ids, labels))
        assert record["sha256"] == hashlib.sha256(digest).hexdigest()
        assert (record["blocks"], record["tokens"]) == (count, count * CONTEXT)
        assert record["rows_by_kind"] == {
            "passkey": count // 4,
            "facts": count // 2,
            "text": count // 4,
        }
        kinds = {"passkey": 0, "facts": 0, "text": 0}
        blocks = load_from_disk(str(data / split)).with_format("numpy")["input_ids"][:].reshape(-1)
        blocks = {
            tuple(block)
            for block in blocks[: len(blocks) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        }
        for row, wanted in zip(ids, labels, strict=True):
            text, words = tokenizer.decode(row), learned_words(tokenizer, row, wanted)
            if (wanted == row).all():
                kinds["text"] += 1
                assert tuple(row) in blocks
            elif re.fullmatch(r" \d{5}", words[-1]) and len(set(words)) == 1:
                kinds["passkey"] += 1
                assert (
                    len(words) == 3
                    and text.count(words[0]) == 5
                    and text.endswith(f"secreto é{words[0]}")
                )
            else:
                kinds["facts"] += 1
                name = re.match(r"\n\n(.+)\n", text)[1]
                for word in words:
                    (question,) = re.findall(
                        rf"\n[^\n]*{re.escape(name)}[^\n.]*{re.escape(word)}\.\n?", text
                    )
                    assert len(question) < 200 and text.index(word) < text.index(question)
        assert kinds == record["rows_by_kind"]
    text = (folder / "validation_documents.jsonl").read_text(encoding="utf-8")
    assert text == (data / "validation_documents.jsonl").read_text(encoding="utf-8")


def test_a_run_repeats_and_redoes_what_changed(base, tmp_path):
    first, again = manifest_of(prepared(base)), prepare(tmp_path / "a", base, *OPTIONS)
    assert first["splits"] == again["splits"]
    assert not any(stage["reused"] for stage in again["stages"].values())
    again = prepare(tmp_path / "a", base, *OPTIONS)
    assert first["splits"] == again["splits"] and all(
        stage["reused"] for stage in again["stages"].values()
    )
    other = prepare(tmp_path / "a", base, *OPTIONS, "--answers_only", "false")
    assert {name: stage["reused"] for name, stage in other["stages"].items()} == {
        "tokenizer": True,
        "train": False,
        "validation": False,
    }
    ids, labels = rows_of(tmp_path / "a", "train")
    assert (ids == labels).all() and (ids == rows_of(prepared(base), "train")[0]).all()
    assert sum(other["splits"]["train"]["counted_tokens"].values()) == 80 * CONTEXT
    seeded = prepare(tmp_path / "a", base, *OPTIONS, "--seed", 1)
    assert seeded["splits"]["train"]["sha256"] != first["splits"]["train"]["sha256"]


def test_invented_paragraphs_are_learned_as_a_whole(base, tmp_path):
    manifest = prepare(
        tmp_path / "p",
        base,
        "--context",
        200,
        "--rows",
        9,
        "--validation_rows",
        3,
        "--mix",
        "paragraphs=1",
    )
    assert manifest["splits"]["train"]["counted_tokens"] == {"paragraphs": 9 * 200}
    ids, labels = rows_of(tmp_path / "p", "train")
    assert (ids == labels).all() and len(np.unique(ids, axis=0)) == 9


def test_drills_make_rows_of_any_length(base, tmp_path):
    options = "--context 256 --rows 30 --validation_rows 4 --mix codes=0.5 echo=0.5".split()
    record = prepare(tmp_path / "drills", base, *options)["splits"]["train"]
    assert record["rows_by_kind"] == {"codes": 15, "echo": 15}
    # Rows ask until they are full: far more often than the three questions of a passkey row
    assert all(record["counted_tokens"][kind] > 15 * 20 for kind in ("codes", "echo"))
    with pytest.raises(SystemExit):
        prepare(tmp_path / "drills", base, "--context", 16, "--mix", "codes=1")


def test_rows_of_many_forms_ask_at_their_end_for_what_they_said(base, tmp_path):
    options = "--context 700 --rows 40 --validation_rows 4 --mix forms=1 --language en".split()
    record = prepare(tmp_path / "forms", base, *options)["splits"]["train"]
    assert record["rows_by_kind"] == {"forms": 40}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "forms" / "tokenizer")
    for row, labels in zip(*rows_of(tmp_path / "forms", "train"), strict=True):
        text, answers = tokenizer.decode(row), learned_words(tokenizer, row, labels)
        assert len(answers) == 700 // TOKENS_PER_FACT and text.endswith(answers[-1])
        for answer in answers:  # stated once before it is asked for, by the same words
            (question,) = re.findall(rf"\n([^\n]*{re.escape(answer)})(?=\.?\n?)", text[-400:])[-1:]
            assert text.count(f"\n{question.strip()}") >= 2
    with pytest.raises(SystemExit):
        prepare(tmp_path / "forms", base, "--context", 30, "--mix", "forms=1")


def test_forms_of_an_evaluation_are_never_fitted():
    """Of every sentence of the evaluations no run of four words is in a form, nor what names their
    needles."""
    evaluated = [
        words for words in WORDING.values() for words in (*words["needles"], *words["questions"])
    ]
    evaluated += [sentence for fact in SENTENCES["facts"].values() for sentence in strings(fact)]
    hidden = load_recipe("prepare_facts")
    evaluated += [
        sentence
        for language in ("en", "pt")
        for fact in hidden.facts_of(language)
        for sentence in (fact["fact"], fact["question"])
    ]
    evaluated += [
        "One of the special magic numbers for key is: value",
        "What are all the special magic numbers for key",
    ]
    runs = {
        tuple(words[at : at + 4])
        for words in map(words_of, evaluated)
        for at in range(len(words) - 3)
    }
    for language in fact_forms().values():
        for form in language["forms"]:
            words = words_of(" ".join(form))
            assert not runs & {tuple(words[at : at + 4]) for at in range(len(words) - 3)}, form
            assert not {"secret", "secreto", "magic", "special", "kingdom", "reino"} & {*words}


def words_of(sentence: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"{\w+}", " ", sentence.lower()))


def strings(content) -> list[str]:
    """All texts in a nested structure."""
    if isinstance(content, str):
        return [content]
    parts = (
        content.values()
        if isinstance(content, dict)
        else content
        if isinstance(content, list)
        else ()
    )
    return [text for part in parts for text in strings(part)]


def test_every_row_is_dealt():
    shares = read_mix(["passkey=0.3", "text=0.7"])
    assert shares == {
        "passkey": 0.3,
        "facts": 0.0,
        "codes": 0.0,
        "echo": 0.0,
        "forms": 0.0,
        "paragraphs": 0.0,
        "text": 0.7,
    }
    for rows in (1, 2, 3, 7, 10):
        kinds = deal_kinds(rows, shares, random.Random(0))
        assert (
            len(kinds) == rows
            and abs(kinds.count("passkey") - 0.3 * rows) < 1
            and "facts" not in kinds
        )
