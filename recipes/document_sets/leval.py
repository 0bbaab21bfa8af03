"""LEval: a text with its questions (`instructions`) and answers (`outputs`)."""

import re
from collections import Counter

from cli import UserError
from support.stages import check_entries

from .documents import CHOICE, SHORT, SUMMARY, Question, Text, beginning, quoted

OPTION = re.compile(r"(?:^|\n)[ \t]*\(?([A-H])[.)][ \t]*")


def short(entry: dict, where: str) -> Text:
    return _read(entry, where, lambda text, asked, answer: _plain(SHORT, text, asked, answer))


def summary(entry: dict, where: str) -> Text:
    return _read(entry, where, lambda text, asked, answer: _plain(SUMMARY, text, asked, answer))


def choice(entry: dict, where: str) -> Text:
    return _read(entry, where, _choice)


def _read(entry: dict, where: str, question_of) -> Text:
    """The entry's text, and each question that `question_of` makes of a text, what is asked and
    the answer, or why it is left out."""
    check_entries(entry, {"input": str, "instructions": list, "outputs": list}, where)
    asked, answers = entry["instructions"], entry["outputs"]
    if len(asked) != len(answers) or not all(isinstance(one, str) for one in asked + answers):
        raise UserError(
            f"{where} has {len(asked)} instructions and {len(answers)} outputs, and needs as many "
            "of both, all texts"
        )
    found = Text(entry["input"], [], beginning(entry["input"]))
    for number, pair in enumerate(zip(asked, answers, strict=True), start=1):
        try:
            made = question_of(entry["input"], *map(str.strip, pair))
        except ValueError as error:
            raise UserError(f"{where}, instruction {number}: {error}") from None
        if isinstance(made, Question):
            found.questions.append(made)
        else:
            found.left_out += Counter([made])
    return found


def _plain(kind: str, text: str, asked: str, answer: str) -> Question:
    return Question(asked, kind, [answer], [], quoted(text, answer))


def _choice(text: str, asked: str, answer: str) -> Question | str:
    letters, ends = [], []
    for match in OPTION.finditer(asked):
        if match[1] == "ABCDEFGH"[len(letters)]:
            letters.append(match[1])
            ends.append(match.span())
    borders = [start for start, _ in ends[1:]] + [len(asked)]
    options = [asked[end:border].strip() for (_, end), border in zip(ends, borders, strict=True)]
    right = re.match(r"\(?([A-H]+)\b", answer)
    if right is None or not set(right[1]) <= set(letters):
        raise ValueError(f"the output {answer[:60]!r} must begin with one of the options {letters}")
    if len(right[1]) > 1:
        return "several right options"
    stem = re.sub(r"^Question \d+\. ", "", asked[: ends[0][0]].strip())
    return Question(stem, CHOICE, [options[letters.index(right[1])]], options)
