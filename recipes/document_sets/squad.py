"""Articles in the form of SQuAD 1.1, such as FaQuAD: paragraphs, with answers that are quoted from
them."""

from support.stages import check_entries

from .documents import SHORT, Question, Text


def read(entry: dict, where: str) -> Text:
    """An article: its title and its paragraphs."""
    check_entries(entry, {"title": str, "paragraphs": list}, where)
    found = Text(entry["title"].replace("_", " "), [], entry["title"])
    for number, paragraph in enumerate(entry["paragraphs"], start=1):
        place = f"{where}, paragraph {number}"
        check_entries(paragraph, {"context": str, "qas": list}, place)
        found.text += "\n\n"
        first = len(found.text)
        found.text += paragraph["context"]
        for asked in paragraph["qas"]:
            check_entries(asked, {"question": str, "answers": list}, place)
            spans = []
            for answer in asked["answers"]:
                check_entries(answer, {"text": str, "answer_start": int}, place)
                start = nearest(paragraph["context"], answer["text"], answer["answer_start"])
                if start is not None:
                    spans.append((first + start, first + start + len(answer["text"])))
            answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
            found.questions.append(
                Question(asked["question"], SHORT, answers, evidence=sorted(set(spans)))
            )
    return found


def nearest(text: str, passage: str, place: int) -> int | None:
    """Where a text has a passage, nearest to a place, as some published places are off by a few
    characters; `None` where it has not."""
    found = text.find(passage)
    places = []
    while found >= 0 and passage:
        places.append(found)
        found = text.find(passage, found + 1)
    return min(places, key=lambda start: abs(start - place), default=None)
