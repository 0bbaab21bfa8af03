"""Public sets in one form: what each file's form becomes, halves that stay, and files that are
not so."""

import copy
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import document_files
from bad_input import handled, refused
from document_sets.documents import HALVES, KINDS, Question, Text, half_of, joined
from document_sets.sets import SETS
from running import load_recipe

recipe = load_recipe("prepare_documents")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return document_files.download(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def prepared(raw, tmp_path_factory):
    out = tmp_path_factory.mktemp("documents") / "out"
    recipe.main(["--source", str(raw), "--out", str(out)])
    return out


def lines_of(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SETS)
def test_each_set_becomes_documents_with_questions_about_what_they_say(name, prepared):
    documents = lines_of(prepared, name)
    files = len(SETS[name].files)
    if not SETS[name].short:
        assert len(documents) == document_files.COUNT * files
    assert len({document["id"] for document in documents}) == len(documents)
    assert {document["half"] for document in documents} == {*HALVES}
    text = "\n".join(document["text"] for document in documents)
    for number in range(document_files.COUNT):
        assert document_files.fact(number)[0] in text
    evident = 0
    for document in documents:
        assert (document["set"], document["language"]) == (name, SETS[name].language)
        for asked in document["questions"]:
            assert asked["kind"] in KINDS and asked["answers"] and asked["question"]
            assert bool(asked["options"]) == (asked["kind"] == "choice")
            assert not asked["options"] or asked["answers"][0] in asked["options"]
            spans = [document["text"][first:last] for first, last in asked["evidence"]]
            evident += bool(spans)
            facts = " ".join(document_files.fact(n)[0] for n in range(document_files.COUNT))
            # whole sentences, turns or descriptions of the fact, or, in articles, the answer
            assert all(
                span in facts or "gate was painted" in span or "Bye" in span for span in spans
            )
    quoted = name not in ("quality", "tpo", "coursera", "bamboo_numbers", "bamboo_claims")
    assert bool(evident) == quoted


def test_the_forms(prepared):
    chat = next(each for each in lines_of(prepared, "locomo") if "Bye 3!" in each["text"])
    assert chat["text"] == (
        "1 May, 2024\nAna: Hi! [photo: a dog]\nRui: The drift gate was painted in 1903 by order of "
        "the council.\n\n2 May, 2024\nRui: Bye 3!"
    )
    (asked,) = chat["questions"]
    assert asked["answers"] == ["1903"]
    assert [chat["text"][slice(*span)][:7] for span in asked["evidence"]] == ["Rui: Th", "Rui: By"]
    manifest = json.loads((prepared / "documents.json").read_text())["sets"]
    assert manifest["locomo"]["left_out"] == {"not answered by the text": 8}
    assert manifest["coursera"]["left_out"] == {"several right options": 8}
    (asked,) = lines_of(prepared, "quality")[0]["questions"]
    assert asked["question"] == "Which gate was it?" and asked["answers"] == ["the amber gate"]
    assert asked["options"] == ["no gate at all", "the amber gate"]
    articles = [asked for each in lines_of(prepared, "faquad") for asked in each["questions"]]
    assert len(articles) == 8 and all(len(asked["evidence"]) == 1 for asked in articles)
    meeting = lines_of(prepared, "qmsum")[2]
    (span,) = meeting["questions"][1]["evidence"]
    assert meeting["text"][slice(*span)] == f"cedar: {document_files.fact(2)[0]}"
    for each in lines_of(prepared, "bamboo_numbers"):
        assert "Question" not in each["text"] and each["questions"][0]["question"].endswith(
            "painted"
        )
    answers = Counter(
        each["questions"][0]["answers"][0] for each in lines_of(prepared, "bamboo_claims")
    )
    assert answers == {"Yes": 16, "No": 16}
    described = lines_of(prepared, "bamboo_code")[3]
    (asked,) = described["questions"]
    assert asked["question"] == "import lib\n\n# 3\ndef f(x):\n    a = 3"
    assert asked["answers"] == ["return drift(a)", "return a"]
    (span,) = asked["evidence"]  # not of `other`, which the answer does not call
    assert described["text"][slice(*span)] == f"drift(x): {document_files.fact(3)[0]}"
    assert not any(mark in described["text"] for mark in ("# #", "[start]", "[end]"))


def test_documents_of_ones_own_say_their_language(tmp_path):
    entries = [entry | {"language": "pt"} for entry in document_files.own()[:3]]
    document_files.write(tmp_path / "own_contracts.jsonl", entries)
    recipe.main(["--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert {each["language"] for each in lines_of(tmp_path / "out", "own")} == {"pt"}
    # what was made is no source, although it has such a name
    entries[0]["questions"][0]["question"] = "Which one?"
    document_files.write(tmp_path / "own_contracts.jsonl", entries)
    recipe.main(["--source", str(tmp_path), "--out", str(tmp_path / "out")])
    [found] = [each for each in lines_of(tmp_path / "out", "own") if "amber gate" in each["text"]]
    assert [each["question"] for each in found["questions"]] == ["Which one?", "Was it?"]


def test_the_halves_of_ones_own_are_not_of_their_beginnings(tmp_path):
    entries = document_files.own()
    for entry in entries:
        entry["text"] = "Agreement. " * 30 + entry["text"]
        entry["questions"][0].pop("evidence")
    document_files.write(tmp_path / "own.jsonl", entries)
    recipe.main(["--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert {each["half"] for each in lines_of(tmp_path / "out", "own")} == {*HALVES}


def test_a_list_of_sets_that_was_changed_says_what_to_do(raw, tmp_path, capsys):
    words = ["--source", raw, "--out", tmp_path / "out", "--sets", "tpo"]
    handled(recipe.main, words, capsys)
    manifest = tmp_path / "out" / "documents.json"
    manifest.write_text(manifest.read_text().replace("tpo", "tqo", 1))
    refused(recipe.main, words, capsys, "has changed since", "delete it and make its sets again")


def test_the_same_files_give_the_same_bytes_and_halves_do_not_move(raw, prepared, tmp_path):
    recipe.main(["--source", str(raw), "--out", str(tmp_path / "again")])
    names = [f"{name}.jsonl" for name in SETS]
    assert [(prepared / name).read_bytes() for name in names] == [
        (tmp_path / "again" / name).read_bytes() for name in names
    ]
    file = tmp_path / "few" / "LEval-data" / "Open-ended-tasks" / "meeting_summ.jsonl"
    document_files.write(file, document_files.leval("meeting_summ")[5:2:-1])
    recipe.main(["--source", str(file), "--out", str(tmp_path / "fewer")])
    before = {each["id"]: each["half"] for each in lines_of(prepared, "meetings")}
    after = {each["id"]: each["half"] for each in lines_of(tmp_path / "fewer", "meetings")}
    assert len(after) == 3 and after.items() <= before.items()


def test_a_text_that_two_sets_have_is_in_one_half(prepared):
    halves: dict[str, set] = {}
    for name in SETS:
        for each in lines_of(prepared, name):
            if not SETS[name].short and name not in ("locomo", "own"):
                halves.setdefault(each["text"][:100], set()).add(each["half"])
    assert len(halves) >= document_files.COUNT
    assert all(len(found) == 1 for found in halves.values())


def test_another_call_adds_sets_and_keeps_the_others(raw, prepared, tmp_path, capsys):
    out = tmp_path / "out"
    for name in ("tpo", "faquad"):
        shown = handled(recipe.main, ["--source", raw, "--out", out, "--sets", name], capsys)
        assert shown.count("| ") and name in shown
    assert [*json.loads((out / "documents.json").read_text())["sets"]] == ["tpo", "faquad"]
    for name in ("tpo", "faquad"):
        assert (out / f"{name}.jsonl").read_bytes() == (prepared / f"{name}.jsonl").read_bytes()


texts = st.lists(
    st.tuples(st.text("ab\n", min_size=1, max_size=30), st.integers(0, 99)), min_size=1, max_size=12
)


@given(texts, st.integers(1, 80))
def test_joined_texts_keep_their_half_their_questions_and_the_places_of_evidence(
    given_, characters
):
    parts = [
        Text(text, [Question(str(at), "short", ["a"], [], [(0, len(text))])], f"{at}/{key}")
        for at, (text, key) in enumerate(given_)
    ]
    seen = []
    for half, whole in joined(parts, characters):
        for asked in whole.questions:
            ((first, last),) = asked.evidence
            number = int(asked.question)
            seen.append(number)
            assert whole.text[first:last] == given_[number][0]
            assert half_of(f"{number}/{given_[number][1]}") == half
        before_the_last = len(whole.text) - (last - first)
        assert before_the_last < characters + 2 * len(whole.questions)
    assert sorted(seen) == [*range(len(given_))]


# --- files that are not so ---


def entries_of(name: str):
    """A file's content, and its entries, which may be changed in place."""
    content = copy.deepcopy(document_files.content_of(name, SETS[name].files[0]))
    return content, content["data"] if name == "faquad" else content


FIELDS = [(name, field) for name in SETS for field in entries_of(name)[1][1]]
UNREAD = {("qmsum", "topic_list"), ("bamboo_claims", "title"), ("bamboo_code", "task_id")}


@pytest.mark.parametrize("name, field", [each for each in FIELDS if each not in UNREAD])
@pytest.mark.parametrize("change", ("missing", "of another type"))
def test_a_field_that_is_not_there_is_named_with_its_file_and_place(
    name, field, change, tmp_path, capsys
):
    content, entries = entries_of(name)
    if change == "missing":
        del entries[1][field]
    else:
        entries[1][field] = 1.5
    file = tmp_path / SETS[name].files[0].replace("*", "test")
    document_files.write(file, content)
    words = ["--source", tmp_path, "--out", tmp_path / "out"]
    place = "line 2" if file.suffix == ".jsonl" else "entry 2"
    refused(recipe.main, words, capsys, str(file), place, field, "needs", "--skip_damaged")
    shown = handled(recipe.main, [*words, "--skip_damaged", "true"], capsys, f"{file}: {place}")
    assert "1 damaged" in shown
    asked = sum(len(each["questions"]) for each in lines_of(tmp_path / "out", name))
    whole = json.loads((tmp_path / "out" / "documents.json").read_text())["sets"][name]
    assert asked == whole["questions"] > 0


def broken_files():
    """A name, a file's text, and words of the message."""
    lines = [json.dumps(entry) for entry in document_files.leval("tpo")]
    other = json.loads(lines[0])
    yield "empty", "", ["tpo.jsonl is empty", "needs entries"]
    yield "blank", "\n\n", ["tpo.jsonl is empty"]
    yield "cut off", "\n".join([lines[0], lines[1][:-9]]), ["line 2 is not JSON"]
    yield "a list", "[]\n", ["line 1 must hold an object"]
    yield "a pointer of Git LFS", "version https://git-lfs\noid sha256:1\n", ["line 1 is not JSON"]
    for what, answer, words in (
        ("no answers", [], ["1 instructions and 0 outputs", "as many of both"]),
        ("no texts", [3], ["as many of both, all texts"]),
        ("no such option", ["F"], ["instruction 1", "'F'", "one of the options ['A', 'B', 'C']"]),
        ("an empty answer", [""], ["instruction 1", "''"]),
    ):
        yield what, json.dumps({**other, "outputs": answer}), ["line 1", *words]
    yield "an empty text", json.dumps({**other, "input": " \n"}), ["line 1 has an empty text"]
    none = {**other, "instructions": [], "outputs": []}
    yield "no questions", json.dumps(none), ["line 1 has no questions"]


@pytest.mark.parametrize("what, text, words", [*broken_files()], ids=lambda value: str(value)[:20])
def test_broken_files(what, text, words, tmp_path, capsys):
    file = tmp_path / SETS["tpo"].files[0]
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    given_ = ["--source", tmp_path, "--out", tmp_path / "out", "--sets", "tpo"]
    refused(recipe.main, given_, capsys, str(file), *words)
    assert not (tmp_path / "out" / "tpo.jsonl").exists()


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("faquad", lambda e: e["paragraphs"][1]["qas"][0].update(answers=[]), "no question or no"),
        ("faquad", lambda e: e["paragraphs"].clear(), "has no questions"),
        ("locomo", lambda e: e["qa"][0].pop("answer"), "question 1 has no answer"),
        ("locomo", lambda e: e["conversation"].pop("session_1_date_time"), "session_1_date_time"),
        ("locomo", lambda e: e["conversation"]["session_1"][0].pop("speaker"), "no speaker"),
        ("qmsum", lambda e: e["meeting_transcripts"][0].pop("speaker"), "no speaker"),
        (
            "qmsum",
            lambda e: e["specific_query_list"][0].update(relevant_text_span=[["3", "99"]]),
            "numbers of turns",
        ),
        ("bamboo_papers", lambda e: e.update(answer="D"), "the letter of one of them"),
        ("bamboo_papers", lambda e: e.update(options="[1"), "a list of texts"),
        ("bamboo_numbers", lambda e: e.update(content="Answer"), "Document: and Question:"),
        ("own", lambda e: e.update(language="de"), "the language 'de'"),
        ("own", lambda e: e["questions"][0].pop("answers"), "question 1 has no answers"),
        ("own", lambda e: e["questions"][0].update(answers=[1903]), "are no texts"),
        ("own", lambda e: e["questions"][1].update(kind="short"), "'short' and 2 options"),
        ("own", lambda e: e["questions"][0].update(kind="long"), "the kind 'long'"),
        ("own", lambda e: e["questions"][0].update(evidence=[[9, 9999]]), "the evidence [9, 9999]"),
        ("own", lambda e: e["questions"][0].update(evidence=["9"]), "the evidence '9'"),
        ("own", lambda e: e["questions"][1].update(kind="choice", options=[]), "needs them"),
        ("own", lambda e: e.update(title="T"), "has title, and takes text, questions, language"),
        ("own", lambda e: e["questions"][0].update(option=["a"]), "question 1 has option, and"),
        ("own", lambda e: e["questions"].insert(0, 3), "question 1 must hold an object"),
        ("bamboo_code", lambda e: e.update(prompt="import lib"), "# [start] and # [end]"),
        ("bamboo_code", lambda e: e.update(canonical_solution=[1]), "a list of texts"),
        ("bamboo_code", lambda e: e.update(canonical_solution=[]), "no question or no answer"),
    ],
)
def test_entries_of_another_form(name, change, words, tmp_path, capsys):
    content, entries = entries_of(name)
    change(entries[1])
    file = tmp_path / SETS[name].files[0].replace("*", "test")
    document_files.write(file, content)
    given_ = ["--source", tmp_path, "--out", tmp_path / "out"]
    refused(recipe.main, given_, capsys, str(file), " 2", words)


@pytest.mark.parametrize("name", ("locomo", "faquad"))
@pytest.mark.parametrize("text", ("{}", "3", '{"data": 3}', "{", '"data"'))
def test_a_file_that_is_no_list(name, text, tmp_path, capsys):
    file = tmp_path / SETS[name].files[0]
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    refused(recipe.main, ["--source", tmp_path, "--out", tmp_path / "out"], capsys, str(file))


def test_sources_that_are_not_there(raw, prepared, tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    refused(recipe.main, ["--source", tmp_path / "none", *out], capsys, "none is not there")
    (tmp_path / "notes.txt").write_text("notes")
    words = (
        "has no file of locomo: data/locomo10.json of github.com/snap-research/LoCoMo",
        "own: own*.jsonl",
    )
    refused(recipe.main, ["--source", tmp_path, *out], capsys, *words)
    only = raw / "OpenLMLab_LEval"
    refused(
        recipe.main, ["--source", only, "--sets", "tpo", "qmsum", *out], capsys, "qmsum: data/ALL"
    )
    recipe.main(["--source", str(only), *map(str, out)])  # others are named, and no error
    said = capsys.readouterr().err
    assert "are left out: locomo, faquad, qmsum, bamboo_papers" in said and "tpo" not in said
    refused(recipe.main, ["--source", raw, "--out", raw], capsys, "holds other files", keeps=raw)
    folder = shutil.copytree(prepared, tmp_path / "changed")
    manifest = folder / "documents.json"
    manifest.write_text(manifest.read_text().replace('"en"', '"xx"').replace("8", "9"))
    refused(recipe.main, ["--source", raw, "--out", folder], capsys, str(manifest), keeps=folder)
