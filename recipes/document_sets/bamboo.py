"""BAMBOO: one question a line, of papers and meetings (options), of articles whose numbers were
changed, claims about papers, and code that calls functions which a text describes."""

import ast
import re

from cli import UserError
from support.stages import check_entries

from .documents import CHOICE, CODE, SHORT, Question, Text, beginning, quoted, spans_of

NUMBER = re.compile(
    r"[^\n]*\n\n(?:Document:\n(?P<text>.*)\n\nQuestion:\n(?P<question>.*)"
    r"|Question:\n(?P<first>.*?)\n\nDocument:\n(?P<after>.*))",
    re.DOTALL,
)
DESCRIBED = re.compile(r"# \[start\]\n(?P<text>.+)# \[end\]\n(?P<code>.+)", re.DOTALL)
ENDS_A_LINE = re.compile(r"\s*# # (?:# )?|\s*\n\n")


def choice(entry: dict, where: str) -> Text:
    """A question with options, `A. …` each, and the letter that is right."""
    names = ("question", "evidence", "answer", "content")
    check_entries(entry, {**dict.fromkeys(names, str), "options": str | list}, where)
    options = entry["options"]
    try:
        options = ast.literal_eval(options) if isinstance(options, str) else options
        options = [re.sub(r"^\s*[A-H]\s*[.:)]\s*", "", option).strip() for option in options]
        right = options["ABCDEFGH".index(entry["answer"].strip())]
    except (ValueError, SyntaxError, TypeError, IndexError):
        said = repr(options) if len(repr(options)) <= 100 else f"{options!r:.100} …"
        raise UserError(
            f"{where} has the options {said} and the answer {entry['answer']!r}, and "
            "needs a list of texts and the letter of one of them"
        ) from None
    text = entry["content"].strip()
    evidence = quoted(text, entry["evidence"])
    return _text(text, Question(entry["question"], CHOICE, [right], options, evidence))


def number(entry: dict, where: str) -> Text:
    """`content` is an instruction, a document and a question, in one of two orders."""
    check_entries(entry, {"content": str, "answer": str}, where)
    found = NUMBER.fullmatch(entry["content"].strip())
    if found is None:
        raise UserError(f"{where} has a content without the lines Document: and Question:")
    text, asked = found["text"] or found["after"], found["question"] or found["first"]
    return _text(text.strip(), Question(asked.strip(), SHORT, [entry["answer"].strip()]))


def claim(entry: dict, where: str) -> Text:
    """A claim about a paper, which is right or not."""
    check_entries(entry, {"content": str, "hypothesis": str, "answer": bool}, where)
    asked = f"Does the text say this? “{entry['hypothesis'].strip()}”"
    right = "Yes" if entry["answer"] else "No"
    return _text(entry["content"].strip(), Question(asked, CHOICE, [right], ["Yes", "No"]))


def code(entry: dict, where: str) -> Text:
    """`prompt` describes functions, and is code up to where a line is missing. The evidence is what
    it says of the functions that the missing code calls. Nothing is run."""
    check_entries(entry, {"prompt": str, "canonical_solution": list}, where)
    found, solutions = DESCRIBED.fullmatch(entry["prompt"]), entry["canonical_solution"]
    if found is None:
        raise UserError(f"{where} has a prompt without the lines # [start] and # [end]")
    if not all(isinstance(each, str) for each in solutions):
        raise UserError(f"{where} has the solutions {solutions!r:.100}, and needs a list of texts")
    lines = [each.strip() for each in ENDS_A_LINE.split(found["text"].strip())]
    called = set(re.findall(r"\w+", solutions[0])) if solutions else set()
    evidence = [
        span
        for line, span in zip(lines, spans_of(lines), strict=True)
        if line.partition("(")[0] in called
    ]
    answers = [each.strip() for each in solutions]
    return _text("\n".join(lines), Question(found["code"].strip(), CODE, answers, [], evidence))


def _text(text: str, question: Question) -> Text:
    return Text(text, [question], beginning(text))
