"""Documents and questions of one's own, a line of JSON each: {"text": "…", "questions":
[{"question": "…", "answers": ["…"]}]}."""

from cli import UserError
from support.stages import check_entries

from .documents import CHOICE, KINDS, SHORT, Question, Text

LANGUAGES = "en", "pt"


def read(entry: dict, where: str) -> Text:
    """A document. It may have a "language", "en" or "pt"; a question "options", a "kind" of
    [`KINDS`] and "evidence", from and to a character each."""
    check_entries(entry, {"text": str, "questions": list}, where)
    _check_names(entry, ("text", "questions", "language"), where)
    language = entry.get("language", LANGUAGES[0])
    if language not in LANGUAGES:
        raise UserError(f"{where} has the language {language!r}, and needs one of {LANGUAGES}")
    questions = [
        _question(asked, entry["text"], f"{where}: question {number}")
        for number, asked in enumerate(entry["questions"], start=1)
    ]
    # one's own may all begin alike
    return Text(entry["text"], questions, entry["text"], language=language)


def _question(asked: dict, text: str, where: str) -> Question:
    check_entries(asked, {"question": str, "answers": list}, where)
    _check_names(asked, ("question", "answers", "kind", "options", "evidence"), where)
    given = {"options": [], "evidence": [], "kind": CHOICE if asked.get("options") else SHORT}
    given |= asked
    check_entries(given, {"options": list, "evidence": list}, where)
    if given["kind"] not in KINDS:
        raise UserError(f"{where} has the kind {given['kind']!r}, and needs one of {KINDS}")
    if (given["kind"] == CHOICE) != bool(given["options"]):
        raise UserError(
            f"{where} has the kind {given['kind']!r} and {len(given['options'])} options: options "
            f"go with {CHOICE!r}, and {CHOICE!r} needs them"
        )
    if not all(isinstance(each, str) for each in given["answers"] + given["options"]):
        raise UserError(f"{where} has answers or options that are no texts, and needs texts")
    spans = [tuple(span) if isinstance(span, list) else () for span in given["evidence"]]
    for number, span in enumerate(spans):
        if [*map(type, span)] != [int, int] or not 0 <= span[0] < span[1] <= len(text):
            raise UserError(
                f"{where} has the evidence {given['evidence'][number]!r}, and needs a start and an "
                f"end within the text's {len(text):,} characters, such as [0, 9]"
            )
    names = "question", "kind", "answers", "options"
    return Question(*(given[name] for name in names), evidence=spans)


def _check_names(entry: dict, known: tuple[str, ...], where: str) -> None:
    if unknown := [name for name in entry if name not in known]:
        raise UserError(f"{where} has {', '.join(unknown)}, and takes {', '.join(known)}")
