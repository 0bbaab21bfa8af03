"""QMSum: transcripts of meetings, with the turns that each summary is about."""

from cli import UserError
from support.stages import check_entries

from .documents import SUMMARY, Question, Text, beginning, spans_of


def read(entry: dict, where: str) -> Text:
    """A meeting: a line for each turn, with its speaker."""
    lists = ("meeting_transcripts", "general_query_list", "specific_query_list")
    check_entries(entry, dict.fromkeys(lists, list), where)
    lines = []
    for turn in entry["meeting_transcripts"]:
        check_entries(turn, {"speaker": str, "content": str}, f"{where}, meeting_transcripts")
        lines.append(f"{turn['speaker']}: {turn['content']}")
    text, places, questions = "\n".join(lines), spans_of(lines), []
    for name in lists[1:]:
        for asked in entry[name]:
            check_entries(asked, {"query": str, "answer": str}, f"{where}, {name}")
            spans = asked.get("relevant_text_span", [])
            try:
                turns = [(int(first), int(last)) for first, last in spans]
                evidence = [(places[first][0], places[last][1]) for first, last in turns]
            except (TypeError, ValueError, IndexError):
                raise UserError(
                    f"{where}, {name} has a relevant_text_span {spans!r}, and needs pairs of "
                    f"numbers of turns, 0 to {len(lines) - 1}"
                ) from None
            questions.append(Question(asked["query"], SUMMARY, [asked["answer"]], [], evidence))
    return Text(text, questions, beginning(text))
