r"""Hides invented facts in texts of your own, as a set of documents for
recipes/evaluate_documents.py: does a cache of constant size still find a single line?

    python recipes/prepare_facts.py --source held_out.txt --language pt --out data/facts
    python recipes/evaluate_documents.py --model qwen --adapter model_cards/qwen2.5_coder_1.5b \
        --data data/facts --ways plain window kept --tokens 2048 512 --generate 24 --out runs/facts

--source is what recipes/prepare.py reads: a file of text, or documents, such as the
validation_documents.jsonl of its folder. A document is --characters of it, with twenty facts, such
as "Queen Ilsabet feared spiders.", each a line at a place by chance. They are asked in the same
words, mostly. None has a form of those that `hf-infini fit` hides, though that of the captain is
close to one.

OUT gets the set facts_LANGUAGE, in the form that recipes/prepare_documents.py writes. A folder of
that recipe is refused, for no score may be fitted on these facts. Another call with the same --out
makes a set again, or adds that of the other language.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import SEED, UserError, exit_on_error, needed, option, parse_options
from document_sets.prepared import MANIFEST, write_set

FACTS = Path(__file__).parent / "document_sets" / "facts.yaml"


@dataclass
class Options:
    source: str = needed("Text: a file or a folder, as of recipes/prepare.py.", group="data")
    out: str = needed("Folder to write the prepared set to.", group="output")
    language: Literal["en", "pt"] = option("en", "Of the text, and of the facts.", group="facts")
    documents: int = option(1, "Documents, from as many parts of the text.", at_least=1)
    characters: int = option(
        100_000, "Of a document, without its facts: some 29,000 tokens.", at_least=1
    )
    half: Literal["development", "test"] = option("development", "Half that they belong to.")
    seed: int = option(0, "Seed of where the facts are.", **SEED)


@exit_on_error(when_stopped="the same command begins again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)

    from cli.corpus_options import CorpusOptions
    from corpora.sources import corpus_documents
    from document_sets.documents import record
    from support.stages import locked_folder

    texts = [document.text for document in corpus_documents(CorpusOptions(options.source))]
    whole = "\n\n".join(filter(str.strip, texts))
    needs = options.documents * options.characters
    if len(whole) < needs:
        raise UserError(
            f"--source {options.source} has {len(whole):,} characters, and --documents "
            f"{options.documents} of --characters {options.characters} need {needs:,}: give more "
            "text, or ask for less"
        )
    name, lines = f"facts_{options.language}", []
    for number in range(options.documents):
        first = len(whole) * number // options.documents
        text = whole[first : first + options.characters]
        rng = random.Random(f"{options.seed} {number}")
        try:
            found = hidden(text, facts_of(options.language), rng)
        except ValueError as error:
            raise UserError(f"--source {options.source}: {error}") from error
        lines.append(record(name, options.language, options.half, found))
    with locked_folder(Path(options.out), "prepare_facts.py") as folder:
        write_set(folder, name, lines, files=[options.source], invented=True)
        print(f"{folder / name}.jsonl, {folder / MANIFEST}", file=sys.stderr)


def facts_of(language: str) -> list[dict]:
    """The facts in a language, each with its question and the right answers."""
    import yaml

    return yaml.safe_load(FACTS.read_text(encoding="utf-8"))[language]


def hidden(text: str, facts: list[dict], rng: random.Random):
    """The text with each of the facts as a line of its own, in an order and at places by chance, at
    most one in front of each line but the first; ValueError where it has too few lines."""
    from document_sets.documents import SHORT, Question, Text, spans_of

    before = text.split("\n")
    if len(before) <= len(facts):
        raise ValueError(
            f"a part of its text has {len(before)} lines, and {len(facts)} facts, each between two "
            f"of them, need {len(facts) + 1}: give text with more lines, or more --characters"
        )
    places = sorted(rng.sample(range(1, len(before)), len(facts)))
    order = dict(zip(places, rng.sample(facts, len(facts)), strict=True))
    lines, at = [], []
    for place, line in enumerate(before):
        if place in order:
            at.append((len(lines), order[place]))
            lines.append(order[place]["fact"])
        lines.append(line)
    spans = spans_of(lines)
    questions = [
        Question(each["question"], SHORT, each["answers"], evidence=[spans[number]])
        for number, each in at
    ]
    return Text("\n".join(lines), questions, text)


if __name__ == "__main__":
    main()
