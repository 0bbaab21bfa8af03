"""The prepared form of a document with its questions, and what all forms of files share."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cli import UserError, one_line
from support.stages import check_entries, read_json

SHORT, CHOICE, SUMMARY, CODE = "short", "choice", "summary", "code"
KINDS = SHORT, CHOICE, SUMMARY, CODE
HALVES = "development", "test"
BEGINNING = 200  # letters by which a text is told from others; altered texts differ in digits
VERBATIM = 40  # an answer of so many characters that the text has is quoted, and no accident


@dataclass
class Question:
    """A question about a document.

    Args:
        question: as it is asked; of "code" the code before the answer.
        kind: "short", "choice", "summary" or "code".
        answers: the right ones, at least one, the best first; of a choice the one right option.
        options: of a choice, two or more.
        evidence: where in the text the answer is, from and to a character; empty where the set
            does not say.
    """

    question: str
    kind: str
    answers: list[str]
    options: list[str] = field(default_factory=list)
    evidence: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Text:
    """What a set's entry is read to: a text and its questions.

    Args:
        key: what decides the half, so that it never moves.
        language: of both; empty: that of the set.
        left_out: how many of the entry's questions were left out, by the reason.
    """

    text: str
    questions: list[Question]
    key: str
    left_out: Counter = field(default_factory=Counter)
    language: str = ""

    def check(self, where: str) -> "Text":
        """The text itself; UserError where it, or a question, has nothing in it."""
        if not self.text.strip():
            raise UserError(f"{where} has an empty text, and needs one with characters")
        if not self.questions and not self.left_out:
            raise UserError(f"{where} has no questions, and needs at least one")
        for number, asked in enumerate(self.questions, start=1):
            if (
                not asked.question.strip()
                or not asked.answers
                or not all(map(str.strip, asked.answers))
            ):
                raise UserError(
                    f"{where}: question {number} ({asked.question[:60]!r}) has no question or no "
                    "answer in it, and needs both"
                )
            if asked.kind == CHOICE and not (
                len(asked.options) > 1 and asked.answers[0] in asked.options
            ):
                raise UserError(
                    f"{where}: question {number} ({asked.question[:60]!r}) has the options "
                    f"{asked.options}, and needs two or more, with the answer "
                    f"{asked.answers[0]!r} among them"
                )
        return self


def beginning(text: str) -> str:
    """What tells a text from others, whatever file it is in: its first letters."""
    return "".join(filter(str.isalpha, text.casefold()))[:BEGINNING]


def half_of(key: str) -> str:
    """The half of a key: by its hash, so that it depends on nothing else."""
    return HALVES[hashlib.sha256(key.encode()).digest()[0] % 2]


def spans_of(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Where each line begins and ends, in the text that they are when joined by "\\n"."""
    found, start = [], 0
    for line in lines:
        found.append((start, start + len(line)))
        start += len(line) + 1
    return found


def quoted(text: str, passage: str) -> list[tuple[int, int]]:
    """Where a text has a passage, once or first; nothing where it has not, or the passage is too
    short to tell."""
    passage = passage.strip()
    place = text.find(passage) if len(passage) >= VERBATIM else -1
    return [] if place < 0 else [(place, place + len(passage))]


def json_lines(file: Path) -> Iterator[tuple[str, dict | UserError]]:
    """Where each line is, and its object or what is wrong with it."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}; download it again") from error
    for number, line in enumerate(lines, start=1):
        where = f"{file}: line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, UserError(f"{where} is not JSON ({one_line(error)})")


def entries_of_json(file: Path, name: str | None = None) -> Iterator[tuple[str, dict]]:
    """As [`json_lines`], of a file that is one list, or an object with one by this name."""
    remedy = "this is no file of the set, or of another version of it"
    content = read_json(file, None, remedy)
    if name is not None:
        check_entries(content, {name: list}, file, remedy)
        content = content[name]
    if not isinstance(content, list):
        raise UserError(
            f"{file} must hold a list of JSON, got a {type(content).__name__}; {remedy}"
        )
    for number, entry in enumerate(content, start=1):
        yield f"{file}: entry {number}", entry


def merged(texts: Iterable[Text]) -> list[Text]:
    """Equal texts as one, with the questions of all."""
    found: dict[str, Text] = {}
    for text in texts:
        known = found.setdefault(text.text, text)
        if known is not text:
            known.questions += [asked for asked in text.questions if asked not in known.questions]
            known.left_out |= text.left_out
    return list(found.values())


def joined(texts: Sequence[Text], characters: int) -> Iterator[tuple[str, Text]]:
    """Texts of one half after each other, up to so many characters or a little more, and the half
    of each."""
    for half in HALVES:
        parts: list[Text] = []
        own = [text for text in texts if half_of(text.key) == half]
        for text in own:
            parts.append(text)
            if text is own[-1] or sum(len(part.text) for part in parts) >= characters:
                yield half, _join(parts)
                parts = []


def _join(parts: Sequence[Text]) -> Text:
    whole = Text("", [], parts[0].key)
    for part in parts:
        before = f"{whole.text}\n\n" if whole.text else ""
        for asked in part.questions:
            asked.evidence = [tuple(len(before) + end for end in span) for span in asked.evidence]
            whole.questions.append(asked)
        whole.text = before + part.text
        whole.left_out += part.left_out
    return whole


def record(name: str, language: str, half: str, text: Text) -> dict:
    """The line of a document in a prepared file."""
    own = hashlib.sha256(text.text.encode()).hexdigest()[:10]
    return {
        "id": f"{name}-{own}",
        "set": name,
        "language": text.language or language,
        "half": half,
        "text": text.text,
        "questions": [asdict(asked) for asked in text.questions],
    }
