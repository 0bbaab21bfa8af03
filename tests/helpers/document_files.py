"""Small files of public sets of documents with questions, each in its repository's form."""

import json
from pathlib import Path

from document_sets.sets import SETS

COUNT = 8  # documents of a set: of so many, both halves have some
WORDS = ("amber", "basalt", "cedar", "drift", "ember", "fjord", "garnet", "heron")


def fact(number: int) -> tuple[str, str]:
    """A sentence of document `number`, and what it says."""
    word = WORDS[number % len(WORDS)]
    return f"The {word} gate was painted in {1900 + number} by order of the council.", word


def prose(number: int) -> str:
    """The text of document `number`, with its fact in the middle."""
    around = [
        f"{word.capitalize()} {number} has {place} rooms and old trees."
        for place, word in enumerate(WORDS)
    ]
    return "\n".join([*around[number % 5 :], fact(number)[0], *around[: number % 5]])


def locomo() -> list[dict]:
    return [
        {
            "sample_id": f"conv-{number}",
            "conversation": {
                "speaker_a": "Ana",
                "speaker_b": "Rui",
                "session_2_date_time": "2 May, 2024",
                "session_2": [{"speaker": "Rui", "dia_id": "D2:1", "text": f"Bye {number}!"}],
                "session_1_date_time": "1 May, 2024",
                "session_1": [
                    {"speaker": "Ana", "dia_id": "D1:1", "text": "Hi!", "blip_caption": "a dog"},
                    {"speaker": "Rui", "dia_id": "D1:2", "text": fact(number)[0]},
                ],
            },
            "qa": [
                {
                    "question": "When was the gate painted?",
                    "answer": 1900 + number,
                    "evidence": ["D1:02; D2:1"],
                    "category": 2,
                },
                {
                    "question": "Who sold the gate?",
                    "adversarial_answer": "Ana",
                    "evidence": [],
                    "category": 5,
                },
            ],
        }
        for number in range(COUNT)
    ]


def faquad() -> dict:
    articles = []
    for number in range(COUNT):
        text, word = prose(number), fact(number)[1]
        answers = [
            {"text": word, "answer_start": text.index(f"The {word} gate") + 4 + off}
            for off in (0, 1)  # the second place is off by one
        ]
        asked = {"id": "x", "question": "Que portão foi pintado?", "answers": answers}
        paragraphs = [{"context": "Um começo.", "qas": []}, {"context": text, "qas": [asked]}]
        articles.append({"title": f"ARTIGO_{number}", "paragraphs": paragraphs})
    return {"version": 1.0, "data": articles}


def qmsum() -> list[dict]:
    found = []
    for number in range(COUNT):
        turns = [{"speaker": WORDS[number], "content": line} for line in prose(number).split("\n")]
        place = next(at for at, turn in enumerate(turns) if turn["content"] == fact(number)[0])
        asked = {
            "query": "What was said of the gate?",
            "answer": "It was painted.",
            "relevant_text_span": [[str(place), str(place)]],
        }
        general = {"query": "Summarise the whole meeting.", "answer": "They spoke of rooms."}
        found.append(
            {
                "topic_list": [],
                "meeting_transcripts": turns,
                "general_query_list": [general],
                "specific_query_list": [asked],
            }
        )
    return found


def leval(name: str) -> list[dict]:
    found = []
    for number in range(COUNT):
        sentence, word = fact(number)
        asked, answers = ["Which gate was painted?", "What was ordered?"], [word, sentence]
        if name in ("quality", "tpo", "coursera"):
            right, wrong = f"the {word} gate", "no gate at all"
            asked = [f"Which gate was it?\nA. {wrong}\nB. {right}\nC. every gate"]
            answers = ["B"]
        if name == "quality":
            asked = [f"Which gate was it?\n\n (A) {wrong} \n (B) {right} "]
            answers = [f"(B) {right}"]
        if name == "coursera":
            asked += [asked[0]]
            answers += ["AB"]
        found.append({"input": prose(number), "instructions": asked, "outputs": answers})
    return [*found, found[0]]  # the published files have some texts twice


def bamboo(name: str) -> list[dict]:
    found = []
    for number in range(COUNT):
        sentence, word = fact(number)
        entry = {"content": f"{prose(number)}\nEnd of {name}."}
        if name.startswith(("paperqa", "meetingqa")):
            options = ["A. none", f"B. the {word} gate"]
            entry |= {"question": "Which?", "evidence": f"  {sentence}", "answer": "B"}
            # published in both forms
            entry["options"] = str(options) if number % 2 else options
        elif name.startswith("altqa"):
            parts = [f"Document:\n{entry['content']}", f"Question:\nwhen was the {word} painted"]
            parts = parts[:: 1 if number % 2 else -1]
            entry = {"content": "Answer.\n\n" + "\n\n".join(parts), "answer": str(1900 + number)}
        elif name.startswith("private_eval"):
            lines = [*prose(number).splitlines(), f"{word}(x): {sentence}", "other(x): Adds one."]
            text = ":# # ".join(lines[:1]) + "".join(f"# # {each}\n" for each in lines[1:])
            code = f"import lib\n\n# {number}\ndef f(x):\n    a = {number}\n"
            entry = {
                "task_id": f"Eval/{number}",
                "prompt": f"# [start]\n{text}\n# [end]\n{code}",
                "canonical_solution": [f"    return {word}(a)", "    return a"],
            }
        else:
            entry |= {"title": "T", "hypothesis": sentence, "answer": number % 2 == 0}
        found.append(entry)
    return found


def own() -> list[dict]:
    found = []
    for number in range(COUNT):
        text, (sentence, word) = prose(number), fact(number)
        place = text.index(sentence)
        asked = {"question": "Which gate?", "answers": [word, f"the {word} gate"]}
        asked["evidence"] = [[place, place + len(sentence)]]
        other = {"question": "Was it?", "answers": ["Yes"], "options": ["Yes", "No"]}
        found.append({"text": text, "questions": [asked, other]})
    return found


def content_of(name: str, pattern: str) -> object:
    """What a file of a set holds."""
    made = {"locomo": locomo, "faquad": faquad, "qmsum": qmsum, "own": own}
    if name in made:
        return made[name]()
    return (bamboo if name.startswith("bamboo") else leval)(
        name if name in ("quality", "tpo", "coursera") else Path(pattern).stem
    )


def write(file: Path, content: object) -> None:
    """A file of a set, in lines where its name says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dump = [json.dumps(entry, ensure_ascii=False) for entry in content]
    text = "\n".join(dump) + "\n" if file.suffix == ".jsonl" else json.dumps(content)
    file.write_text(text, encoding="utf-8")


def download(folder: Path) -> Path:
    """A folder with the files of all sets, as they lie in their repositories."""
    for name, each in SETS.items():
        for pattern in each.files:
            path = folder / each.repository.replace("/", "_") / pattern.replace("*", "test")
            write(path, content_of(name, pattern))
    return folder
