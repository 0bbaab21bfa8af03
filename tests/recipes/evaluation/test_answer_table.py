"""What a table of answers says, by its definitions, and the lines that it is made of."""

import pytest

from evaluation import answer_table, answers, bootstrap
from plots import documents
from support.lines import Lines


@pytest.mark.parametrize(
    "answer, right, kind, wanted",
    [
        ("The Beagle, in 1831.", ["beagle"], "short", {"f1": 0.5, "contained": True}),
        ("beagles", ["the beagle"], "short", {"f1": 0.0, "contained": False}),
        ("", ["beagle"], "short", {"f1": 0.0, "contained": False}),
        ("red fox", ["fox red", "a dog"], "short", {"f1": 1.0, "contained": False}),
        ("```\nreturn a.B(1)\n```", ["return a.B(1)"], "code", {"f1": 1.0, "contained": True}),
        ("return a.b(1)", ["return a.B(2)"], "code", {"f1": 0.5, "contained": False}),
        ("They met.", ["They met", "x"], "summary", {"rouge": 1.0}),
        ("a b", ["a c"], "summary", {"rouge": 0.5}),
    ],
)
def test_how_an_answer_is_compared(answer, right, kind, wanted):
    found = answers.compare(answer, right, kind, "en")
    assert found == {"answer": answer} | {
        name: pytest.approx(value) for name, value in wanted.items()
    }


def records(nats: dict[str, list[float]], documents: int) -> list[dict]:
    found = []
    for way, values in nats.items():
        for number, value in enumerate(values):
            line = {"way": way, "set": "s", "document": f"d{number % documents}"}
            own = {"nats": value, "tokens": 2, "right": value < 2, "evidence": None, "bytes": 2**20}
            found.append({**line, "question": number, "seconds": 1.0, **own})
        reading = {"way": way, "set": "s", "question": None, "seconds": 3.0, "tokens": 9}
        found += [{**reading, "document": f"d{number}"} for number in range(documents)]
    return found


@pytest.mark.parametrize("documents", (1, 3, 8))
def test_rows_are_paired_and_say_what_they_draw(documents):
    nats = {"plain": [1.0, 3.0, 2.0, 6.0] * 6, "kept": [2.0, 2.0, 4.0, 7.0] * 6}
    plain, kept = answer_table.compared(records(nats, documents), ["plain", "kept"], "plain")
    assert (plain["nats"].value, kept["nats"].value) == (1.5, pytest.approx(15 / 8))
    assert kept["by"] == ("document" if documents >= 8 else "question")
    groups = documents if documents >= 8 else 24
    sums = [
        [sum(values[at::groups]) for at in range(groups)]
        for values in (nats["kept"], nats["plain"])
    ]
    counts = [2 * len(nats["kept"][at::groups]) for at in range(groups)]
    assert kept["nats_above"] == bootstrap.difference_interval(sums[0], counts, sums[1], counts)
    assert (kept["right"].value, kept["right_n"], plain["right"].value) == (0, 24, 0.25)
    shown = answer_table.table([plain, kept], "plain")
    assert ("*" in shown) == (documents < 8) and "0% of 24, -25 (" in shown


@pytest.mark.parametrize("questions", (4, 5))
def test_an_interval_of_a_few_questions_is_not_shown(questions):
    nats = {"plain": [1.0] * questions, "kept": [2.0, *[1.0] * (questions - 1)]}
    shown = answer_table.table(
        answer_table.compared(records(nats, 1), ["plain", "kept"], "plain"), "plain"
    )
    assert f"+{0.5 / questions:.3f}" in shown and (" to " in shown) == (questions == 5)


def test_shares_of_a_few_questions_have_no_interval():
    own = records({"plain": [1.0] * 12, "kept": [2.0, *[1.0] * 11]}, 1)
    for record in own:
        if record["question"]:  # all but the first
            record["right"] = None
    shown = answer_table.table(answer_table.compared(own, ["plain", "kept"], "plain"), "plain")
    assert "+0.042 (" in shown and "0% of 1, -100 |" in shown


def test_a_picture_of_one_way_has_its_nats(monkeypatch):
    drawn = []
    monkeypatch.setattr(documents.style, "save", lambda figure, file: drawn.append(figure))
    both = records({"kept": [2.0, 3.0] * 6}, 3)
    both += [
        {**record, "set": "t", "document": f"t{record['document']}"}
        for record in records({"kept": [2.0] * 12}, 2)
    ]
    rows = answer_table.compared(both, ["kept"], "kept")
    assert [(row["set"], row["documents"]) for row in rows] == [("s", 3), ("t", 2), ("all", 5)]
    documents.plot_ways(rows, "kept", None, "a model")
    [axes] = drawn[0].axes
    points = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() != "none"]
    assert [1.25, 1.0, 1.125] in points
    assert axes.get_xlabel() == "nats per token of the right answer"
    assert "up to 3 documents per set" in axes.get_title("left")


def test_documents_that_are_too_long_for_a_way_are_rows_of_their_own():
    both = records({"plain": [1.0, 2.0], "kept": [3.0, 4.0]}, 2)
    short = [r for r in both if (r["way"], r["document"]) != ("plain", "d1")]
    rows = answer_table.compared(short, ["plain", "kept"], "plain")
    assert [(row["set"], row["way"], row["questions"]) for row in rows] == [
        ("s", "plain", 1),
        ("s", "kept", 1),
        ("s, too long for plain", "kept", 1),
    ]
    assert rows[0]["nats"].value == 0.5 and rows[2]["nats"].value == 2


def test_lines_are_what_was_added(tmp_path):
    lines = Lines(tmp_path / "x.jsonl", {"a": (1, 2)})
    for number in range(3):
        lines.add({"number": number, "text": "é\u2028"})
    assert Lines(tmp_path / "x.jsonl", {"a": [1, 2]}).records == lines.records
