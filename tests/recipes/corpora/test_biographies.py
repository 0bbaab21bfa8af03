"""Generated biographies: facts are where they are said to be, come back far off, and nothing else
gives them away."""

import itertools
import random
import re
import string

import pytest

from corpora.biographies import (
    SENTENCES,
    biography_documents,
    fact_prompt,
    forbid_answers,
    invent_person,
    portuguese_names,
    write_opening,
    write_paragraphs,
)

BIOGRAPHIES = list(biography_documents(60, seed=1))
NAMES = portuguese_names()


def person_of(number: int, seed: int = 1):
    """The person of a biography, and the source of chance behind it."""
    rng = random.Random(f"{seed}/{number}")
    NAMES.seed_instance(rng.getrandbits(64))
    return invent_person(rng, NAMES), rng


def places(answer: str, text: str) -> list[int]:
    return [match.start() for match in re.finditer(rf"\b{re.escape(answer)}\b", text)]


def test_an_answer_occurs_twice_and_the_prompt_asks_without_it():
    for number, biography in enumerate(BIOGRAPHIES):
        person, _ = person_of(number)
        assert person.name == biography.title and person.answers.keys() == SENTENCES["facts"].keys()
        for name, answer in person.answers.items():
            assert len(places(answer, biography.text)) == 2, (biography.title, answer)
            prompt = fact_prompt(person, name)
            assert person.name in prompt and answer not in prompt


@pytest.mark.parametrize("distance", [0, 3000, 20_000])
def test_facts_return_after_the_distance(distance):
    for number, biography in enumerate(biography_documents(5, seed=1, distance=distance)):
        for answer in person_of(number)[0].answers.values():
            stated, recalled = places(answer, biography.text)
            assert recalled - stated - len(answer) >= distance
        # the opening, the return and the last paragraph of the middle
        assert len(biography.text) < distance + 5000


def test_every_template_can_be_filled():
    """Slots are spelled as the generator knows them: a rare template must not fail in the middle of
    a long run."""
    gender, used = SENTENCES["gender"], set()
    person = {*gender["m"], "first", "name", "made", "spouse", "so"}
    chance = {
        "man",
        "woman",
        "family",
        "city",
        "district",
        "year",
        "later",
        "born",
        "month",
        "count",
    }
    assert gender["m"].keys() == gender["f"].keys()

    def slots(template):
        found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        used.update(found)
        return found

    for topic in itertools.chain(*SENTENCES["topics"].values()):
        assert {slot.rstrip("23") for slot in slots(topic)} <= person | chance, topic
    for fact in SENTENCES["facts"].values():
        for template in (*fact["statements"], *fact["returns"]):
            assert template.count("{answer}") == 1 and slots(template) <= person | {"answer"}, (
                template
            )
        assert slots(fact["prompt"]) == {"name"}
    assert all(slots(closing) <= person for closing in SENTENCES["closings"])
    assert gender["m"].keys() <= used  # no word that agrees with nothing
    assert {name for paragraph in SENTENCES["opening"] for name in paragraph["facts"]} == set(
        SENTENCES["facts"]
    )


def test_the_pieces_are_those_of_a_biography():
    for number, biography in enumerate(BIOGRAPHIES[:5]):
        person, rng = person_of(number)
        opening = write_opening(rng, person)
        texts = [" ".join(map(str, paragraph)) for paragraph in opening]
        texts += itertools.islice(write_paragraphs(rng, NAMES, person, forbid_answers(person)), 5)
        assert biography.text.startswith("\n".join([f"{person.name}\n", *texts, ""]))
        assert {s.name: s.answer for paragraph in opening for s in paragraph} == person.answers


def test_paragraphs_leave_out_what_is_forbidden():
    rng, names = random.Random(0), portuguese_names()
    person = invent_person(rng, names)
    text = "\n".join(
        itertools.islice(write_paragraphs(rng, names, person, re.compile("cartas|Salvador")), 200)
    )
    assert "cartas" not in text and "Salvador" not in text and text.count("Fortaleza") > 0
