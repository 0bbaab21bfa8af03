"""LoCoMo: long chats of two people, with the turns that answer each question."""

import re
from collections import Counter

from support.stages import check_entries

from .documents import SHORT, Question, Text, spans_of

UNANSWERABLE = 5  # the category of questions that the chat does not answer


def read(entry: dict, where: str) -> Text:
    """A chat: a line for each session, with its date, and each turn with its speaker."""
    check_entries(entry, {"conversation": dict, "qa": list, "sample_id": str}, where)
    chat, lines, names = entry["conversation"], [], []
    sessions = [name for name in chat if re.fullmatch(r"session_\d+", name)]
    for name in sorted(sessions, key=lambda name: int(name.removeprefix("session_"))):
        check_entries(chat, {name: list, f"{name}_date_time": str}, f"{where}, conversation")
        lines.append("\n" * bool(lines) + chat[f"{name}_date_time"])
        names.append("")
        for turn in chat[name]:
            check_entries(turn, {"speaker": str, "dia_id": str, "text": str}, f"{where}, {name}")
            photo = f" [photo: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            lines.append(f"{turn['speaker']}: {turn['text']}{photo}")
            names.append(turn["dia_id"])
    places = dict(zip(names, spans_of(lines), strict=True))
    found = Text("\n".join(lines), [], entry["sample_id"])
    for number, asked in enumerate(entry["qa"], start=1):
        place = f"{where}, question {number}"
        check_entries(asked, {"question": str, "category": int, "evidence": list}, place)
        if asked["category"] == UNANSWERABLE:
            found.left_out += Counter(["not answered by the text"])
            continue
        check_entries(asked, {"answer": str | int}, place)
        # the published file has some lists in one string, and zeros before numbers
        turns = re.findall(r"D:?(\d+):0*(\d+)", " ".join(map(str, asked["evidence"])))
        named = [f"D{session}:{turn}" for session, turn in turns]
        evidence = [places[turn] for turn in named if turn in places]
        found.questions.append(
            Question(asked["question"], SHORT, [str(asked["answer"])], evidence=evidence)
        )
    return found
