"""Generated biographies: facts are where they are said to be, come back far off, and nothing else gives them away."""

import itertools
import json
import random
import re
import string

import pytest

from corpora.biographies import (
    SENTENCES,
    biography_documents,
    fact_prompt,
    forbid_answers,
    generate_biographies,
    invent_person,
    portuguese_names,
    write_opening,
    write_paragraphs,
)

BIOGRAPHIES = list(generate_biographies(60, seed=1))


def test_positions_and_prefixes():
    for biography in BIOGRAPHIES:
        assert sorted(fact.name for fact in biography.facts) == sorted(SENTENCES["facts"])
        for fact in biography.facts:
            for position in (fact.stated_at, fact.recalled_at):
                assert biography.text[position : position + len(fact.answer)] == fact.answer
            assert biography.text[: fact.recalled_at].endswith(fact.prefix) and len(fact.prefix) > 20
            assert biography.name in fact.prompt
        assert [fact.recalled_at for fact in biography.facts] == sorted(fact.recalled_at for fact in biography.facts)


def test_an_answer_occurs_at_its_two_places_only():
    for biography in BIOGRAPHIES:
        for fact in biography.facts:
            found = [match.start() for match in re.finditer(rf"\b{re.escape(fact.answer)}\b", biography.text)]
            assert found == [fact.stated_at, fact.recalled_at], (biography.name, fact)
            assert fact.answer not in fact.prompt


@pytest.mark.parametrize("distance", [0, 3000, 20_000])
def test_facts_return_after_the_distance(distance):
    for biography in generate_biographies(5, distance=distance):
        gaps = [fact.recalled_at - fact.stated_at - len(fact.answer) for fact in biography.facts]
        assert min(gaps) >= distance
        assert len(biography.text) < distance + 5000  # the opening, the return and the last paragraph of the middle


def test_a_seed_gives_the_same_people_whatever_the_count():
    again = list(generate_biographies(60, seed=1))
    assert again == BIOGRAPHIES
    assert list(generate_biographies(3, seed=1)) == BIOGRAPHIES[:3]
    assert not {b.text for b in generate_biographies(60, seed=2)} & {b.text for b in BIOGRAPHIES}
    assert len({biography.name for biography in BIOGRAPHIES}) > 50


def test_answers_vary():
    """A model that has learned the most frequent answer by heart stays far from knowing it."""
    for name in SENTENCES["facts"]:
        answers = [fact.answer for biography in BIOGRAPHIES for fact in biography.facts if fact.name == name]
        most = max(map(answers.count, answers))
        # The fewest choices are the nine numbers of children: 60 draws give one 6.7 times, and 15 times hardly ever.
        assert most <= 15, (name, most)


def test_gender_agrees():
    masculine = [b for b in BIOGRAPHIES if re.search(r"\ba esposa\b|\bfoi pai de\b", b.text, re.IGNORECASE)]
    feminine = [b for b in BIOGRAPHIES if re.search(r"\bo marido\b|\bfoi mãe de\b", b.text, re.IGNORECASE)]
    assert len(masculine) > 5 and len(feminine) > 5
    # Words that only ever stand for the person in the templates.
    only = {"m": r"\b(Nascido|conhecido como|sozinho|Questionado|ocupado|fantasiado|dele|interrompido)\b",
            "f": r"\b(Nascida|conhecida como|sozinha|Questionada|ocupada|fantasiada|dela|interrompida)\b"}  # fmt: skip
    for people, own, other in ((masculine, "m", "f"), (feminine, "f", "m")):
        assert sum(bool(re.search(only[own], biography.text)) for biography in people) > 0
        for biography in people:
            assert not re.search(only[other], biography.text), biography.text


def test_the_text_is_tidy():
    for biography in BIOGRAPHIES:
        assert not re.search(r"[{}]|  | \n|\n$| $|\ba o\b|\bde o\b|\bde a\b", biography.text), biography.text
        assert biography.text.startswith(f"{biography.name}\n\n")


def test_every_template_can_be_filled():
    """Slots are spelled as the generator knows them: a rare template must not fail in the middle of a long run."""
    gender, used = SENTENCES["gender"], set()
    person = {*gender["m"], "first", "name", "made", "spouse", "so"}
    chance = {"man", "woman", "family", "city", "district", "year", "later", "born", "month", "count"}
    assert gender["m"].keys() == gender["f"].keys()

    def slots(template):
        found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        used.update(found)
        return found

    for topic in itertools.chain(*SENTENCES["topics"].values()):
        assert {slot.rstrip("23") for slot in slots(topic)} <= person | chance, topic
    for fact in SENTENCES["facts"].values():
        for template in (*fact["statements"], *fact["returns"]):
            assert template.count("{answer}") == 1 and slots(template) <= person | {"answer"}, template
        assert slots(fact["prompt"]) == {"name"}
    assert all(slots(closing) <= person for closing in SENTENCES["closings"])
    assert gender["m"].keys() <= used  # no word that agrees with nothing
    assert {name for paragraph in SENTENCES["opening"] for name in paragraph["facts"]} == set(SENTENCES["facts"])


def test_the_data_file_is_read_as_text():
    """YAML makes a number or a truth value of an unquoted word such as `1900` or `on`."""

    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]

    assert len(leaves({**SENTENCES, "opening": []})) > 400  # what is no text has no children to look at: an error
    assert all(isinstance(paragraph["fixed"], bool) and leaves(paragraph["facts"]) for paragraph in SENTENCES["opening"])
    assert all(profession.keys() == {"m", "f", "made"} for profession in SENTENCES["professions"])


def test_documents_carry_their_facts():
    (document,) = itertools.islice(biography_documents(1, seed=1), 1)
    facts = json.loads(json.dumps(document.extra))["facts"]
    assert document.text == BIOGRAPHIES[0].text and document.title == BIOGRAPHIES[0].name
    assert [fact["answer"] for fact in facts] == [fact.answer for fact in BIOGRAPHIES[0].facts]


def test_the_pieces_are_those_of_a_biography():
    names = portuguese_names()
    for number, biography in enumerate(BIOGRAPHIES[:5]):
        rng = random.Random(f"1/{number}")
        names.seed_instance(rng.getrandbits(64))
        person = invent_person(rng, names)
        opening = write_opening(rng, person)
        texts = [" ".join(f"{s.before}{s.answer}{s.after}" for s in paragraph) for paragraph in opening]
        middle = write_paragraphs(rng, names, person, forbid_answers(person))
        texts += itertools.islice(middle, 5)
        assert biography.text.startswith("\n".join([f"{person.name}\n", *texts, ""]))
        assert {s.name: s.answer for paragraph in opening for s in paragraph} == person.answers
        assert {fact.name: fact.prompt for fact in biography.facts} == {n: fact_prompt(person, n) for n in person.answers}


def test_paragraphs_leave_out_what_is_forbidden():
    rng, names = random.Random(0), portuguese_names()
    person = invent_person(rng, names)
    text = "\n".join(itertools.islice(write_paragraphs(rng, names, person, re.compile("cartas|Salvador")), 200))
    assert "cartas" not in text and "Salvador" not in text and text.count("Fortaleza") > 0
