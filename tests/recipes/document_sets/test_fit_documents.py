"""The fit on documents' own questions: what its rows hold, whose they are, and bad input."""

import json
import string
from collections import Counter

import pytest
import torch

import document_files
from bad_input import refused
from cli import UserError
from corpora.tokenization import build_character_tokenizer
from decoders import decoder
from document_sets.asked import asked_rows, fact_rows
from evaluation.prompts import ASKED
from hf_infini import fit_keep_score, load_adapter, patch_model
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.loading import load_causal_lm, load_tokenizer, opening
from hf_infini.tools.asking_rows import fact_forms
from hf_infini.tools.ready import WINDOW
from running import load_recipe

recipe = load_recipe("fit_documents")
prepare = load_recipe("prepare_documents")
PASSAGE, LENGTH = 1200, 1490  # characters, which are tokens here
SMALL = ["--rows", "3", "--facts", "2", "--passage", str(PASSAGE), "--length", str(LENGTH)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and prepared sets: articles with several questions a passage, lectures that do not
    say where answers are."""
    path = tmp_path_factory.mktemp("fit")
    raw = document_files.download(path / "raw")
    prepare.main(["--source", str(raw), "--out", str(path / "data"), "--sets", "faquad", "tpo"])
    seen = "".join(file.read_text() for file in (path / "data").glob("*.jsonl"))
    words = json.dumps([ASKED, fact_forms(), string.printable], ensure_ascii=False)
    tokenizer = build_character_tokenizer([seen, words])
    decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(
        path / "model"
    )
    tokenizer.save_pretrained(path / "model")
    return path


def prepared(folder, half, name="faquad") -> list[dict]:
    lines = (folder / "data" / f"{name}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["half"] == half]


def words_for(folder, out, *options) -> list[str]:
    given = ["--model", folder / "model", "--data", folder / "data", "--out", out]
    return [*map(str, [*given, "--device", "cpu", *SMALL, *options])]


def document(name: str, numbers: range) -> dict:
    """A prepared document of facts, each of which a question asks for."""
    text, questions = "", []
    for number in numbers:
        text += f"{document_files.prose(number)}\n"
        fact, word = document_files.fact(number)
        place = text.index(fact)
        asked = {"question": f"When was the {word} gate painted?", "kind": "short"}
        asked |= {"answers": [str(1900 + number)], "evidence": [[place, place + len(fact)]]}
        questions.append(asked)
    questions.append({**asked, "answers": ["nowhere"], "evidence": []})
    return {"id": name, "set": name[0], "language": "en", "text": text, "questions": questions}


def test_rows_are_passages_with_the_questions_whose_answers_lie_in_them(folder):
    documents = [
        document("a1", range(8)),
        document("a2", range(30, 44)),
        document("b", range(50, 62)),
    ]
    seen = json.dumps([documents, ASKED], ensure_ascii=False)
    tokenizer, how = (
        build_character_tokenizer([seen, "\n"]),
        {"passage": PASSAGE, "least": 3, "length": LENGTH},
    )
    rows = asked_rows(tokenizer, documents, rows=7, **how, seed=0)
    assert rows == asked_rows(tokenizer, documents, rows=7, **how, seed=0)
    assert rows != asked_rows(tokenizer, documents, rows=7, **how, seed=1)
    assert len({tuple(row) for row in rows}) == 7
    shortened, of_set, begin = 0, Counter(), opening(tokenizer)
    for row in rows:
        assert len(row) <= LENGTH and row[: len(begin)] == begin
        place = len(begin) + PASSAGE
        passage, asked = tokenizer.decode(row[len(begin) : place]), tokenizer.decode(row[place:])
        own = next(each for each in documents if passage in each["text"])
        of_set[own["set"]] += 1
        first = own["text"].index(passage)
        there = {
            f"Question: {each['question']} Answer in a few words, from the text. "
            f"{each['answers'][0]}"
            for each in own["questions"]
            for low, high in each["evidence"]
            if first <= low and high <= first + PASSAGE
        }
        said = asked.removeprefix("\n").split("\n")
        assert len(said) == len({*said}) >= 3 and {*said} <= there
        if len(said) < len(there):
            shortened += 1
            assert len(row) + max(map(len, there)) + 1 > LENGTH
    assert of_set == {"a": 4, "b": 3} and 0 < shortened


def test_it_writes_the_fit_on_rows_of_the_development_half(folder, tmp_path):
    recipe.main(words_for(folder, tmp_path / "out", "--sets", "faquad"))
    record = json.loads((tmp_path / "out.json").read_text())
    documents = prepared(folder, "development")
    assert record["documents"] == [each["id"] for each in documents]
    model = load_causal_lm(folder / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder / "model", model)
    rows = asked_rows(tokenizer, documents, rows=3, passage=PASSAGE, least=3, length=LENGTH, seed=0)
    rows += fact_rows(tokenizer, documents, rows=2, length=LENGTH, seed=0)
    assert record["tokens"] == [len(row) for row in rows]
    patch_model(model, **WINDOW, kept_tokens=252, keep_score="learned")
    fit_keep_score(model, rows, progress=False)
    found = load_adapter(load_causal_lm(folder / "model", dtype=torch.float32), tmp_path / "out")
    for own, other in zip(
        memory_layers(model).values(), memory_layers(found).values(), strict=True
    ):
        assert torch.equal(own.keep_weight.bfloat16(), other.keep_weight.bfloat16())
    assert found.config.kept_shares == model.config.kept_shares


def test_another_fit_of_the_same_name_is_not_replaced(folder, tmp_path, capsys):
    words = words_for(folder, tmp_path / "out", "--sets", "faquad")
    recipe.main(words)
    recipe.main([*words, "--out", f"{tmp_path}/./out"])  # the same may be made again
    other = "has a fit with other seed: choose another --out"
    refused(recipe.main, [*words, "--seed", 1], capsys, other)


def test_no_score_is_fitted_on_the_facts_that_measure_it(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("A line of text.\n" * 400)
    words = ["--source", tmp_path / "text.txt", "--out", tmp_path / "facts", "--characters", 5000]
    load_recipe("prepare_facts").main([*map(str, words)])
    words = [*words_for(folder, tmp_path / "out", "--sets", "facts_en")]
    words += ["--data", tmp_path / "facts"]
    refused(recipe.main, words, capsys, "no score may be fitted on facts that measure it")


def test_rows_of_facts_are_text_of_a_document_with_facts_in_its_language():
    documents = [document("a", range(40)), document("b", range(40, 90))]
    documents[1]["language"] = "pt"
    words = json.dumps([documents, fact_forms(), string.printable], ensure_ascii=False)
    tokenizer, how = build_character_tokenizer([words, "\n"]), {"length": 3000, "seed": 0}
    rows, texts = fact_rows(tokenizer, documents, rows=6, **how), Counter()
    assert rows == fact_rows(tokenizer, documents, rows=6, **how)
    assert rows[:3] == fact_rows(tokenizer, documents, rows=3, **how)  # a row is of its number
    assert rows[0] != fact_rows(tokenizer, documents, rows=1, length=3000, seed=1)[0]
    begin = opening(tokenizer)
    for number, row in enumerate(rows):
        assert len(row) == 3000 and row[: len(begin)] == begin
        own, lines = documents[number % 2], tokenizer.decode(row[len(begin) :]).split("\n")
        forms = fact_forms()[own["language"]]["forms"]
        heads = tuple(head for form in forms if (head := form[0].split("{")[0]))
        stated = [line for line in lines if line.startswith(heads)]
        # ten facts, some of whose forms begin with a name, are said in the text and at its end
        again = [line for line, times in Counter(stated).items() if times == 2]
        assert len(again) >= 5, stated
        texts[own["id"]] += sum(line in own["text"] for line in lines if len(line) > 20)
    assert min(texts.values()) > 10
    assert fact_rows(tokenizer, documents, rows=0, **how) == []
    with pytest.raises(UserError, match="--length 40 is too short for --facts: 1 facts and their"):
        fact_rows(tokenizer, documents, rows=1, length=40, seed=0)


BAD = {
    "no evidence": (["--sets", "tpo"], "the set tpo has 0 passages of 1,200 tokens"),
    "too many rows": (["--sets", "faquad", "--rows", "500"], "and 500 are needed"),
    "too many questions": (["--sets", "faquad", "--least", "20"], "of --least 20 questions"),
    "rows without room": (["--sets", "faquad", "--length", "1210"], "has 0 passages"),
    "a set twice": (["--sets", "faquad", "faquad"], "--sets faquad faquad: name each once"),
    "a set of another name": (["--sets", "novels"], "has faquad, tpo"),
    "a document of another name": (
        ["--sets", "faquad", "--without", "faquad-0"],
        "--without faquad-0: no document of the development half of --sets has this id",
    ),
    "no rest": (["--sets", "faquad", "--without", "ALL"], "--without leaves no document"),
    "longer than the model": (
        ["--sets", "faquad", "--length", "3000"],
        "trained with 2,048 positions; give at most as many",
    ),
    "no model": (["--sets", "faquad", "--model", "nowhere"], "There is no folder nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_fit(name, folder, tmp_path, capsys):
    words, message = BAD[name]
    ids = [each["id"] for each in prepared(folder, "development")]
    words = [other for word in words for other in (ids if word == "ALL" else [word])]
    refused(recipe.main, words_for(folder, tmp_path / "out", *words), capsys, message)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.json").exists()


def test_documents_to_choose_by_are_left_out():
    documents = [document(name, range(2)) for name in ("a", "b", "c")]
    assert [each["id"] for each in recipe.without(documents, ["c", "a"])] == ["b"]
    assert recipe.without(documents, []) == documents


def test_the_adapter_is_not_written_over_what_is_there(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    refused(
        recipe.main, words_for(folder, tmp_path / "file", "--sets", "faquad"), capsys, "is a file"
    )
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "link").symlink_to(folder / "model")
    words = words_for(folder, tmp_path / "link", "--sets", "faquad")
    refused(recipe.main, words, capsys, "which is read", keeps=folder / "model")


def test_a_model_with_a_memory_and_a_file_in_the_way_are_refused(folder, tmp_path, capsys):
    model = patch_model(load_causal_lm(folder / "model"), **WINDOW, kept_tokens=8)
    model.save_pretrained(tmp_path / "memory")
    load_tokenizer(folder / "model", model).save_pretrained(tmp_path / "memory")
    words = ["--sets", "faquad", "--model", str(tmp_path / "memory")]
    refused(recipe.main, words_for(folder, tmp_path / "out", *words), capsys, "has a memory")
    (tmp_path / "out.json").write_text("{}")
    words = words_for(folder, tmp_path / "out", "--sets", "faquad")
    refused(recipe.main, words, capsys, "out.json")
    assert (tmp_path / "out.json").read_text() == "{}" and not (tmp_path / "out").exists()
