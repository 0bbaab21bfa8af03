"""Generated biographies in Portuguese whose facts come back thousands of characters later, as
training and test text.

Each biography states twelve facts about an invented person, goes on for several kilobytes about
other people, places and years, and then states every fact again: only a model that still knows the
beginning can predict the end. The sentences are in `biography_sentences.yaml`; names come from
Faker's `pt_BR` provider.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from .documents import Document

SENTENCES = yaml.safe_load(
    Path(__file__).with_name("biography_sentences.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Person:
    """An invented person: `answers` by the fact's name, and what fills the slots of sentences,
    `words` that agree with the person and years by the `birth_year`."""

    name: str
    answers: dict[str, str]
    words: dict[str, str]
    birth_year: int


@dataclass(frozen=True)
class Sentence:
    """A sentence about the fact `name`, in three pieces: what comes before its answer, the answer,
    and what comes after."""

    name: str
    before: str
    answer: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.answer}{self.after}"


def biography_documents(count: int, seed: int = 0, distance: int = 6000) -> Iterator[Document]:
    """Yields `count` biographies, each about 3,000 characters longer than `distance`, the
    characters, at least, between a fact's statement and its return. Number i depends on `seed`, i
    and `distance` only (and on Faker's list of names)."""
    names = portuguese_names()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        names.seed_instance(rng.getrandbits(64))
        person = invent_person(rng, names)
        yield Document(
            _write(rng, names, person, distance), f"biography-{seed}-{number}", person.name
        )


def portuguese_names():
    """Faker's Brazilian names; `names.seed_instance(seed)` starts them anew."""
    from faker import Faker

    return Faker("pt_BR")


def invent_person(rng: random.Random, names) -> Person:
    """A person by chance, with an answer to every fact; `names` is [`portuguese_names`]."""
    gender = rng.choice("mf")
    first, last = _first_name(names, gender), f"{_surname(names)} {_surname(names)}"
    profession = rng.choice(SENTENCES["professions"])
    spouse_gender = "f" if gender == "m" else "m"
    of_spouse = SENTENCES["gender"][spouse_gender]
    words = {**SENTENCES["gender"][gender], "first": first, "name": f"{first} {last}"}
    words |= {"made": profession["made"], "spouse": of_spouse["spouse"], "so": of_spouse["o"]}
    birth_year = rng.randint(1870, 1950)
    answers = {
        "birth_year": str(birth_year),
        "birth_city": rng.choice(SENTENCES["cities"]),
        "profession": profession[gender],
        "mother": _person(names, "f"),
        "mentor": _person(names, rng.choice("mf")),
        "spouse": _person(names, spouse_gender),
        "street": f"Rua {rng.choice(SENTENCES['street_titles'])} {_surname(names)}",
        "work": f"{rng.choice(SENTENCES['title_heads'])} {rng.choice(SENTENCES['title_tails'])}",
        "work_year": str(birth_year + rng.randint(24, 48)),
        "prize": f"Prêmio {_surname(names)} {_surname(names)}",
        "children": rng.choice(SENTENCES["numbers"]),
        "collection": rng.choice(SENTENCES["collections"]),
    }
    return Person(words["name"], answers, words, birth_year)


def write_opening(rng: random.Random, person: Person) -> list[list[Sentence]]:
    """The paragraphs that state all facts of a person for the first time, a list of sentences
    each."""
    opening = []
    for group in SENTENCES["opening"]:
        facts = group["facts"]
        names = facts if group["fixed"] else rng.sample(facts, len(facts))
        opening.append([_state(rng, person, name, "statements") for name in names])
    return opening


def fact_prompt(person: Person, name: str) -> str:
    """The beginning of a sentence that asks for a fact wherever it stands; a space and the answer
    follow it."""
    return SENTENCES["facts"][name]["prompt"].format_map(person.words)


def forbid_answers(person: Person) -> re.Pattern:
    """Finds any answer of a person, as whole words, in capitals or not."""
    answers = (rf"\b{re.escape(answer)}\b" for answer in person.answers.values())
    return re.compile("|".join(answers), re.IGNORECASE)


def write_paragraphs(
    rng: random.Random, names, person: Person, forbidden: re.Pattern
) -> Iterator[str]:
    """Yields paragraphs about everything else in a person's life, without end, in which `forbidden`
    is not found."""
    topics = SENTENCES["topics"]
    turns: list[str] = []
    unused: dict[str, list[str]] = {}
    while True:
        turns = turns or rng.sample(list(topics), len(topics))
        topic = turns.pop()
        # a sentence comes back only after most others of its topic
        if len(unused.get(topic, ())) < 3:
            unused[topic] = rng.sample(topics[topic], len(topics[topic]))
        paragraph = []
        for _ in range(min(rng.randint(3, 5), len(unused[topic]))):
            sentence = unused[topic].pop().format_map(_Slots(rng, names, person))
            # by chance another person can have the same year or city: leave it out
            if not forbidden.search(sentence):
                paragraph.append(sentence)
        if paragraph:
            yield " ".join(paragraph)


def _write(rng: random.Random, names, person: Person, distance: int) -> str:
    paragraphs = [" ".join(map(str, sentences)) for sentences in write_opening(rng, person)]
    # From the end of the opening on, so that the distance holds for the fact that was stated last,
    # too.
    length, middle = 0, write_paragraphs(rng, names, person, forbid_answers(person))
    while length < distance:
        paragraphs.append(next(middle))
        length += len(paragraphs[-1]) + 1
    closing, facts = rng.choice(SENTENCES["closings"]), list(person.answers)
    order = rng.sample(facts, len(facts))
    returns = [str(_state(rng, person, name, "returns")) for name in order]
    paragraphs.append(" ".join([closing.format_map(person.words), *returns[:4]]))
    paragraphs += [" ".join(returns[start : start + 4]) for start in range(4, len(returns), 4)]
    return "\n".join([f"{person.name}\n", *paragraphs])


def _state(rng: random.Random, person: Person, name: str, kind: str) -> Sentence:
    """A sentence about a fact, of its "statements" or "returns", drawn at random."""
    template = rng.choice(SENTENCES["facts"][name][kind])
    before, after = (piece.format_map(person.words) for piece in template.split("{answer}"))
    return Sentence(name, before, person.answers[name], after)


class _Slots(dict):
    """Fills a sentence's slots: the person's own words first, then names and numbers by chance
    (`{year}`, `{man2}`)."""

    def __init__(self, rng: random.Random, names, person: Person):
        super().__init__(person.words)
        self.rng, self.names, self.birth_year = rng, names, person.birth_year

    def __missing__(self, slot: str) -> str:
        rng, born = self.rng, self.birth_year
        make = {
            "year": lambda: str(born + rng.randint(16, 68)),
            "later": lambda: str(min(2020, born + rng.randint(75, 120))),
            "born": lambda: str(born + rng.randint(-25, 30)),
            "count": lambda: str(rng.randint(11, 97)),
            "city": lambda: rng.choice(SENTENCES["cities"]),
            "month": lambda: rng.choice(SENTENCES["months"]),
            "man": lambda: _person(self.names, "m"),
            "woman": lambda: _person(self.names, "f"),
            "family": lambda: _surname(self.names),
            "district": self.names.bairro,
        }
        self[slot] = make[slot.rstrip("23")]()
        return self[slot]


def _first_name(names, gender: str) -> str:
    return names.first_name_male() if gender == "m" else names.first_name_female()


def _surname(names) -> str:
    # "da Cruz" does not follow "de"
    return next(name for name in iter(names.last_name, None) if " " not in name)


def _person(names, gender: str) -> str:
    return f"{_first_name(names, gender)} {names.last_name()}"
