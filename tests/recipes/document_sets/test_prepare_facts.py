"""Facts that are hidden in texts: each once, where its evidence says, and the text around them as
it was."""

import json
import re

import pytest

import document_files
from bad_input import refused
from document_sets.prepared import read_prepared
from running import load_recipe

recipe = load_recipe("prepare_facts")
LANGUAGES = "en", "pt"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Documents of lines that tell each other apart, some of them empty."""
    file = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    lines = ["" if number % 7 == 3 else f"Line {number} says little." for number in range(300)]
    parts = [{"text": "\n".join(lines[first : first + 100])} for first in (0, 100, 200)]
    file.write_text("".join(json.dumps(part) + "\n" for part in parts))
    return file


def prepared(source, out, *words):
    recipe.main(["--source", str(source), "--out", str(out), *map(str, words)])
    return out


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_fact_is_a_line_and_the_rest_is_the_text(language, source, tmp_path):
    words = "--documents", 2, "--characters", 2000, "--language", language, "--half", "test"
    prepared(source, tmp_path, *words)
    documents = read_prepared(tmp_path, [f"facts_{language}"], "test")
    facts = {each["fact"]: each for each in recipe.facts_of(language)}
    whole = "\n\n".join(json.loads(line)["text"] for line in source.read_text().splitlines())
    assert len({each["id"] for each in documents}) == 2 and len(facts) == 20
    for number, document in enumerate(documents):
        lines, found = document["text"].split("\n"), {}
        first = len(whole) * number // 2
        left = [line for line in lines if line not in facts]
        assert "\n".join(left) == whole[first : first + 2000]
        assert sorted(line for line in lines if line in facts) == sorted(facts)
        for asked in document["questions"]:
            [[begin, end]] = asked["evidence"]
            fact = facts[document["text"][begin:end]]
            assert (asked["question"], asked["answers"]) == (fact["question"], fact["answers"])
            found[fact["fact"]] = begin
        assert found.keys() == facts.keys()
        assert [*found.values()] == sorted(found.values())  # asked in the order of the text
    orders = [[asked["question"] for asked in each["questions"]] for each in documents]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_first_answer_is_in_its_fact_and_in_no_other(language):
    facts = recipe.facts_of(language)
    for each in facts:
        first = re.compile(rf"\b{re.escape(each['answers'][0])}\b")
        assert [other for other in facts if first.search(other["fact"])] == [each]
        assert not any(answer in each["question"] for answer in each["answers"])


def test_the_same_seed_makes_the_same_set_and_another_hides_elsewhere(source, tmp_path):
    words = "--characters", 3000
    one, again = (prepared(source, tmp_path / name, *words) for name in ("one", "again"))
    file = "facts_en.jsonl"
    assert (one / file).read_bytes() == (again / file).read_bytes()
    other = prepared(source, tmp_path / "other", *words, "--seed", 1)
    assert (other / file).read_bytes() != (one / file).read_bytes()
    # sets are added, and made again
    prepared(source, one, *words, "--language", "pt")
    prepared(source, one, *words, "--seed", 1)
    assert (other / file).read_bytes() == (one / file).read_bytes()
    assert len(read_prepared(one, [], "development")) == 2


def test_facts_are_not_put_beside_sets_that_a_score_is_fitted_on(source, tmp_path, capsys):
    load_recipe("prepare_documents").main(
        ["--source", str(document_files.download(tmp_path / "raw")), "--out", str(tmp_path / "out")]
    )
    words = ["--source", source, "--out", tmp_path / "out", "--characters", 3000]
    refused(recipe.main, words, capsys, "prepare_documents.py", keeps=tmp_path / "out")


def test_what_is_refused(source, tmp_path, capsys):
    words = ["--source", source, "--out", tmp_path / "out"]
    refused(recipe.main, words, capsys, "characters, and --documents 1 of --characters 100000 need")
    few = tmp_path / "few.txt"
    few.write_text("One line only. " * 100)
    words = ["--source", few, "--out", tmp_path / "out", "--characters", 1000]
    refused(recipe.main, words, capsys, "has 1 lines, and 20 facts, each between two of them")
    refused(recipe.main, [*words, "--language", "fr"], capsys, "--language", code=2)
    missing = ["--source", tmp_path / "no.txt", "--out", tmp_path / "out"]
    refused(recipe.main, missing, capsys, "there is no file or folder")
    assert not (tmp_path / "out").exists()
