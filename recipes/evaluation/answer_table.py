"""The table of recipes/evaluate_documents.py: what each way is worth on each set, beside another
way on the same questions."""

from collections import defaultdict
from collections.abc import Sequence

from support.markdown import markdown_table

from .bootstrap import Interval, difference_interval, mean_interval

DOCUMENTS = 8  # with fewer of them, a resample draws questions: see [`blocks`]
QUESTIONS = 5  # with fewer of them, an interval says nothing
SHARES = {"right": "right option", "f1": "F1", "contained": "contained", "rouge": "ROUGE-L"}


def compared(records: Sequence[dict], ways: Sequence[str], against: str) -> list[dict]:
    """A row for each set and each way: `set`, `way`, `questions`, `documents`, `by` (what the
    resamples draw), `nats` and `nats_above` (those of `against` taken off), `seconds`, `bytes`,
    `reading`, `evidence`, and each of [`SHARES`] with `NAME_above` and `NAME_n`; `None` where
    nothing was measured.

    The rows of a set are of the questions that all ways were asked. Those of documents that are too
    long for some way are rows of their own, without it.
    """
    reading = {(r["way"], r["document"]): r for r in records if r["question"] is None}
    asked: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for record in records:
        if record["question"] is not None and record["way"] in ways:
            asked[record["set"], record["document"], record["question"]][record["way"]] = record
    groups: dict[tuple, list[dict[str, dict]]] = defaultdict(list)
    for (name, *_), own in asked.items():
        groups[name, tuple(way for way in ways if way in own)].append(own)
    if len({name for name, _ in groups}) > 1:
        for present in {present for _, present in groups}:
            parts = [own for key, own in groups.items() if key[1] == present]
            groups["all", present] = [one for own in parts for one in own]
    rows = []
    # sets in their order, and all of them in the end
    for (name, present), questions in sorted(groups.items(), key=lambda one: one[0][0] == "all"):
        missing = [way for way in ways if way not in present]
        label = f"{name}, too long for {', '.join(missing)}" if missing else name
        for way in present:
            pairs = [(own[way], own.get(against, own[way])) for own in questions]
            row = _row([own for own, _ in pairs], [other for _, other in pairs])
            read = [reading[way, document] for document in {own["document"] for own, _ in pairs}]
            row["reading"] = sum(one["seconds"] for one in read) / len(read)
            rows.append({"set": label, "way": way, "paired": against in present, **row})
    return rows


def _row(own: list[dict], other: list[dict]) -> dict:
    """What is measured of a way's questions, and the same of the other way's."""
    documents = {record["document"] for record in own}
    row = {
        "questions": len(own),
        "documents": len(documents),
        "by": "document" if len(documents) >= DOCUMENTS else "question",
        "seconds": _mean(own, "seconds"),
        "bytes": max(record["bytes"] for record in own),
        "evidence": _mean(own, "evidence"),
    }
    losses = [blocks(records, "nats", "tokens", row["by"]) for records in (own, other)]
    row["nats"], row["nats_above"] = (
        mean_interval(*losses[0]),
        difference_interval(*losses[0], *losses[1]),
    )
    for name in SHARES:
        pairs = [pair for pair in zip(own, other, strict=True) if pair[0].get(name) is not None]
        pairs = [pair for pair in pairs if pair[1].get(name) is not None]
        row[name] = row[f"{name}_above"] = None
        row[f"{name}_n"] = len(pairs)
        if pairs:
            sums = [blocks(records, name, None, row["by"]) for records in zip(*pairs, strict=True)]
            row[name] = mean_interval(*sums[0])
            row[f"{name}_above"] = difference_interval(*sums[0], *sums[1])
    return row


def blocks(records: Sequence[dict], name: str, count: str | None, by: str) -> tuple[list, list]:
    """The sums of a number, and of how much it counts (`None`: each record once), of each block
    that a resample draws as a whole: a document, whose questions are alike, or, where there are
    few documents, a question."""
    sums: dict = {}
    for record in records:
        key = record["document"] if by == "document" else (record["document"], record["question"])
        value, counted = sums.get(key, (0.0, 0.0))
        sums[key] = value + record[name], counted + (record[count] if count else 1)
    return [value for value, _ in sums.values()], [counted for _, counted in sums.values()]


def table(rows: Sequence[dict], against: str) -> str:
    """The rows in Markdown; a column that nothing was measured of is left out."""
    columns = {
        "set": lambda row: row["set"],
        "way": lambda row: row["way"],
        "documents": lambda row: f"{row['documents']:,}",
        "questions": lambda row: f"{row['questions']:,}",
        "nats": lambda row: f"{row['nats'].value:.3f}",
        f"above {against}": lambda row: _difference(row, "nats", against),
    }
    columns |= {
        title: lambda row, name=name: _share(row, name, against) for name, title in SHARES.items()
    }
    columns |= {
        "evidence": lambda row: "" if row["evidence"] is None else f"{row['evidence']:.0%}",
        "reading (s)": lambda row: f"{row['reading']:.1f}",
        "question (s)": lambda row: f"{row['seconds']:.2f}",
        "MiB": lambda row: f"{row['bytes'] / 2**20:.1f}",
    }
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    used = [place for place, column in enumerate(zip(*cells, strict=True)) if any(column)]
    header = list(columns)
    return markdown_table(
        [header[place] for place in used],
        [[line[place] for place in used] for line in cells],
        left=2,
    )


def _share(row: dict, name: str, against: str) -> str:
    if row[name] is None:
        return ""
    difference = _difference(row, name, against, 100, 0)
    return f"{row[name].value:.0%} of {row[f'{name}_n']:,}{difference and f', {difference}'}"


def _difference(row: dict, name: str, against: str, scale: int = 1, digits: int = 3) -> str:
    """With its interval; nothing beside the way that is taken off, or without it."""
    if row["way"] == against or not row["paired"]:
        return ""
    found: Interval = row[f"{name}_above"]
    value, low, high = (scale * end for end in (found.value, found.low, found.high))
    if row.get(f"{name}_n", row["questions"]) < QUESTIONS:
        return f"{value:+.{digits}f}"
    mark = "" if row["by"] == "document" else "*"
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}){mark}"


def _mean(records: Sequence[dict], name: str) -> float | None:
    values = [record[name] for record in records if record[name] is not None]
    return sum(values) / len(values) if values else None
