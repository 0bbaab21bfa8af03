"""The sets: where each lies in its repository, and what reads it."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import bamboo, leval, locomo, own, qmsum, squad
from .documents import Text, entries_of_json, json_lines


@dataclass(frozen=True)
class DocumentSet:
    """A public set, or one's own.

    Args:
        repository: on GitHub, with the files; empty: of nobody.
        files: the paths there, which a download must end with; `*` stands for any characters.
        read: makes a [`Text`] of an entry and where it is.
        entries: the entries of a file, and where each is.
        language: of text and questions.
        short: whether the texts are so short that they are joined.
    """

    repository: str
    files: tuple[str, ...]
    read: Callable[[dict, str], Text]
    entries: Callable[[Path], Iterator] = json_lines
    language: str = "en"
    short: bool = False

    @property
    def described(self) -> str:
        """What a download of it has."""
        found = " or ".join(self.files)
        return f"{found} of github.com/{self.repository}" if self.repository else found


def _leval(kind: str, name: str, read) -> DocumentSet:
    return DocumentSet("OpenLMLab/LEval", (f"LEval-data/{kind}-ended-tasks/{name}.jsonl",), read)


def _bamboo(read, *names: str) -> DocumentSet:
    return DocumentSet("RUCAIBox/BAMBOO", tuple(f"datasets/{name}.jsonl" for name in names), read)


SETS = {
    "locomo": DocumentSet(
        "snap-research/LoCoMo", ("data/locomo10.json",), locomo.read, entries_of_json
    ),
    "faquad": DocumentSet(
        "liafacom/faquad",
        ("data/dataset.json",),
        squad.read,
        functools.partial(entries_of_json, name="data"),
        language="pt",
        short=True,
    ),
    "qmsum": DocumentSet("Yale-LILY/QMSum", ("data/ALL/jsonl/*.jsonl",), qmsum.read),
    "quality": _leval("Closed", "quality", leval.choice),
    "tpo": _leval("Closed", "tpo", leval.choice),
    "coursera": _leval("Closed", "coursera", leval.choice),
    "scientific": _leval("Open", "scientific_qa", leval.short),
    "financial": _leval("Open", "financial_qa", leval.short),
    "multidocument": _leval("Open", "multidoc_qa", leval.short),
    "natural_questions": _leval("Open", "natural_question", leval.short),
    "contracts": _leval("Open", "legal_contract_qa", leval.short),
    "meetings": _leval("Open", "meeting_summ", leval.summary),
    "bamboo_papers": _bamboo(bamboo.choice, "paperqa_4k", "paperqa_16k"),
    "bamboo_meetings": _bamboo(bamboo.choice, "meetingqa_4k", "meetingqa_16k"),
    "bamboo_numbers": _bamboo(bamboo.number, "altqa_4k", "altqa_16k"),
    "bamboo_claims": _bamboo(
        bamboo.claim, "abshallu_4k", "abshallu_16k", "senhallu_4k", "senhallu_16k"
    ),
    # Its 4k file has the same questions, each with a part of the text
    "bamboo_code": _bamboo(bamboo.code, "private_eval_16k"),
    "own": DocumentSet("", ("own*.jsonl",), own.read),
}
