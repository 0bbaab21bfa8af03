"""What was measured, in a model card: losses beside n-grams, perplexity by position, passkeys and facts with intervals."""

import math
from itertools import groupby
from pathlib import PurePath
from typing import Any

from studies.report import MISSING
from support.markdown import markdown_table

from .data import is_recall
from .run import Run
from .study import study_section
from .text import measured_on, percent, plain, position_cells

EVALUATION_DEFAULTS = {"join": True, "min_characters": 0, "max_tokens": None, "precision": "float32"}


def results_section(run: Run) -> str:
    parts = [losses(run), *map(by_position, long_evaluations(run))]
    parts += [recall_section(run, task) for task in ("passkey", "facts") if run.of_task(task)]
    return "\n\n".join(parts + ([study_section(run)] if run.study is not None else []))


# --- losses -----------------------------------------------------------------------------------------------------------


def losses(run: Run) -> str:
    rows = [("this model" if row["memory"] == "on" else "its memory off", row) for row in measurements(run)]
    rows += [(f"{row['name']}s", row) for row in ngram_rows(run)]
    places = [(row["data"], row["split"]) for _, row in rows]
    rows = sorted(rows, key=lambda pair: places.index((pair[1]["data"], pair[1]["split"])))  # rivals side by side
    cells = []
    for who, row in rows:
        text = ", ".join(filter(None, (row["data"], row["split"], row["how"])))
        cells.append((who, text, f"{row['tokens']:,}", f"{row['cross_entropy']:.4f}", f"{row['perplexity']:.2f}"))
    header = ["", "text", "tokens", "cross-entropy", "perplexity"]
    text = f"## Results\n\n{markdown_table(header, cells, left=2)}\n\n"
    text += "Cross-entropy in nats per token over all predicted tokens, perplexity its exponential."
    entropies = {row["order"]: f"{row['name']} {row['entropy']:.4f}" for row in ngram_rows(run)}
    if entropies:
        listed = ", ".join(entropies[order] for order in sorted(entropies))
        counted = f"{run.baselines[0]['training_tokens']:,} training tokens"
        text += f" The n-grams predict from the last tokens alone, smoothed, and counted on all {counted}. Entropy of these "
        text += f"counts, below which no prediction from as many tokens gets on the training rows: {listed}."
    own = {(row["data"], row["split"]): row["tokens"] for _, row in rows if "order" not in row and not row["how"]}
    if any(row["tokens"] != own.get((row["data"], row["split"]), row["tokens"]) for row in ngram_rows(run)):
        text += " The n-grams are judged on special tokens too, which the model's losses leave out: compare them with care."
    text += " In rows of recall, the tokens that are learned alone are counted." if is_recall(run.manifest) else ""
    measured = [run.result, *run.of_task("perplexity"), *run.baselines]
    text += f" One model, trained with seed {run.result['options']['seed']}; measured on {measured_on(measured)}."
    return text + run.show("perplexity")


def measurements(run: Run) -> list[dict[str, Any]]:
    """The losses of the model: `data`, `split`, `how` (what differs from train.py's evaluation), `memory`, and the numbers.

    The validation of result.json comes first; an evaluation that only repeats it is left out.
    """
    first = {"data": run.data, "split": "validation", "how": "", "memory": "on", "tokens": run.result["validation_tokens"]}
    rows = [first | {name: run.result[name] for name in ("cross_entropy", "perplexity")}]
    usual = EVALUATION_DEFAULTS | {"separate_documents": bool(run.result["options"].get("separate_documents"))}
    for evaluation in run.of_task("perplexity"):
        options = evaluation["options"]
        length = options.get("length") or (evaluation["length"] if options.get("data") is None else None)
        how = [f"rows of {length:,} tokens"] if length else []
        how += [f"{name} {plain(options[name])}" for name, value in usual.items() if options.get(name, value) != value]
        row = {**_text_of(run, evaluation), "how": ", ".join(how), "memory": evaluation.get("memory", "on")}
        row |= {name: evaluation[name] for name in ("tokens", "cross_entropy", "perplexity")}
        # The same float32 sums in batches of another size agree to about six digits
        repeated = math.isclose(row["cross_entropy"], rows[0]["cross_entropy"], rel_tol=1e-5)
        if not (repeated and all(row[name] == rows[0][name] for name in ("data", "split", "how", "memory", "tokens"))):
            rows.append(row)
    return rows


def _text_of(run: Run, evaluation: dict) -> dict:
    """The `data` and `split` that an evaluation read."""
    split = None if evaluation["options"].get("data") is None else evaluation.get("split") or "validation"
    same_data = evaluation.get("data_fingerprint") == run.result["data_fingerprint"]
    return {"data": run.data if same_data else PurePath(evaluation["source"]).name, "split": split}


def _text_named(run: Run, evaluation: dict) -> str:
    """The same in words: `plays, validation`."""
    return ", ".join(filter(None, _text_of(run, evaluation).values()))


def ngram_rows(run: Run) -> list[dict[str, Any]]:
    """The baselines in the form of [`measurements`], with `order` and `entropy`; they are of the run's data."""
    common = {"data": run.data, "how": ""}
    return [row | common | {"split": baseline["split"]} for baseline in run.baselines for row in baseline["orders"]]


def long_evaluations(run: Run) -> list[tuple[str, list[dict]]]:
    """A title and the rows by position of each evaluation of the whole model in rows of a length that was asked for."""
    found = []
    for evaluation in run.of_task("perplexity"):
        if evaluation["options"].get("length") and evaluation.get("memory", "on") == "on":
            text = _text_named(run, evaluation)
            title = f"By position in rows of {evaluation['options']['length']:,} tokens ({text})"
            found.append((title, evaluation["by_position"]))
    return found


def by_position(found: tuple[str, list[dict]]) -> str:
    title, rows = found
    return f"### {title}\n\n{markdown_table(['position', 'tokens', 'perplexity'], position_cells(rows), left=1)}"


# --- recall -----------------------------------------------------------------------------------------------------------


def recall_section(run: Run, task: str) -> str:
    """The tables of a task. What was asked of the same model with its memory off stands beside it."""
    found = run.of_task(task)
    off = [evaluation for evaluation in found if evaluation["memory"] == "off"]
    parts = [f"### {task.capitalize()}\n\n{_TASKS[task]}"]
    for evaluation in found:
        if evaluation["memory"] == "on":
            beside = next((other for other in off if _asked(other) == _asked(evaluation)), None)
            off = [other for other in off if other is not beside]
            parts += _recall_table(run, task, evaluation, beside)
    for evaluation in off:
        parts += ["With the memory switched off:", *_recall_table(run, task, evaluation, None)]
    return "\n\n".join(parts) + run.show(task)


_INTERVALS = "Counted are the answers that greedy decoding gives exactly, with 95 % Wilson intervals."
_TASKS = {
    "passkey": f"Five digits stand somewhere in real text and are asked for at its end. {_INTERVALS}",
    "facts": "A generated biography states facts, and asks for one of them so many segments of other text later. "
    f"{_INTERVALS} The most frequent answers are what a model that recalls nothing can know by heart.",
}


def recall_shares(run: Run) -> list[dict[str, Any]]:
    """The share of right answers at each length, all depths together, or distance of the recall tasks, of the model as it
    is: `data`, `split`, `how` (what was asked), `name` and `accuracy`."""
    shares = []
    for evaluation in run.of_task("passkey"):
        for length, of_length in groupby(_answered(evaluation), key=lambda cell: cell["length"]):
            cells = list(of_length)
            depths = ", ".join(f"{cell['depth']:g}" for cell in cells)
            how = f"{length:,} tokens, depth{'s' if len(cells) > 1 else ''} {depths}"
            accuracy = sum(cell["correct"] for cell in cells) / sum(cell["samples"] for cell in cells)
            shares.append(_text_of(run, evaluation) | {"how": how, "name": "Passkeys found", "accuracy": accuracy})
    for evaluation in run.of_task("facts"):
        between = f"segments of {_lines_of(run, evaluation)}" if evaluation.get("source") else "segments between"
        for cell in _answered(evaluation):
            found = {"how": f"{cell['distance']} {between}", "name": "Facts recalled", "accuracy": cell["accuracy"]}
            shares.append({"data": "generated biographies", "split": None} | found)
    return shares


def _lines_of(run: Run, evaluation: dict) -> str:
    """What stands between facts and questions that were asked among the lines of real text."""
    return f"lines of text between ({_text_named(run, evaluation)})"


def _answered(evaluation: dict) -> list[dict]:
    """The cells of an evaluation with the memory on that were possible."""
    return [cell for cell in evaluation["cells"] if "accuracy" in cell] if evaluation["memory"] == "on" else []


def _asked(evaluation: dict) -> tuple:
    """What two evaluations must share for their cells to ask the same."""
    options = evaluation["options"]
    same = [options.get(name) for name in ("split", "min_characters", "samples", "seed", "precision")]
    return (*same, evaluation.get("source"), evaluation.get("data_fingerprint"), evaluation.get("segment_length"))


def _recall_table(run: Run, task: str, evaluation: dict, off: dict | None) -> list[str]:
    """The table or tables of an evaluation, and what they were measured on."""
    table = passkey_tables if task == "passkey" else facts_tables
    parts, options = table(evaluation["cells"], None if off is None else off["cells"]), evaluation["options"]
    words = [f"Seed {options['seed']}, {options['samples']:,} examples for each cell"]
    if task == "passkey":
        words.append(f"text: {_text_named(run, evaluation)}")
    else:
        words.append(f"segments of {evaluation['segment_length']:,} tokens")
        words += [_lines_of(run, evaluation)] if evaluation.get("source") else []
    words += [] if options["precision"] == "float32" else [options["precision"]]
    reasons = dict.fromkeys(cell["not_possible"] for cell in evaluation["cells"] if "not_possible" in cell)
    notes = f"{'; '.join(words)}; {measured_on([evaluation] + [off] * (off is not None))}."
    return [*parts, notes + "".join(f" Not possible: {reason}." for reason in reasons)]


def passkey_tables(cells: list[dict], off: list[dict] | None) -> list[str]:
    """By length and depth, with a second table of the memory off; of a single depth one table of all numbers."""
    depths, lengths = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("depth", "length"))
    if len(depths) == 1:
        place = f"tokens (depth {depths[0]:g})"
        return [_counts_table(place, [f"{length:,}" for length in lengths], cells, _beside(cells, off, "length", "depth"))]
    header = ["tokens", *(f"depth {depth:g}" for depth in depths)]
    parts = []
    for found in (cells, _beside(cells, off, "length", "depth")):
        if found is not None:
            of = {(cell["length"], cell["depth"]): cell for cell in found if cell is not None}
            rows = [[f"{length:,}", *(_count(of.get((length, depth))) for depth in depths)] for length in lengths]
            parts.append(markdown_table(header, rows, left=0))
    return parts[:1] + [text for table in parts[1:] for text in ("The same with the memory switched off:", table)]


def facts_tables(cells: list[dict], off: list[dict] | None) -> list[str]:
    beside = _beside(cells, off, "distance")
    return [_counts_table("segments between", [str(cell["distance"]) for cell in cells], cells, beside)]


def _beside(cells: list[dict], off: list[dict] | None, *names: str) -> list[dict | None] | None:
    """The cell of `off` that asks the same as each of `cells`."""
    if off is None:
        return None
    found = {tuple(cell[name] for name in names): cell for cell in off}
    return [found.get(tuple(cell[name] for name in names)) for cell in cells]


def _counts_table(first: str, labels: list[str], cells: list[dict], off: list[dict | None] | None) -> str:
    """A line for each cell: its count, share, interval and loss, the most frequent answers, and what the memory does."""
    header = [first, "right", "share", "95 % interval", "nats per token"]
    chance = any("chance" in cell for cell in cells)
    header += ["most frequent answers"] if chance else []
    header += ["memory off"] if off is not None else []
    rows = []
    for number, (label, cell) in enumerate(zip(labels, cells, strict=True)):
        if "accuracy" in cell:
            count = f"{cell['correct']:,} of {cell['samples']:,}"
            row = [label, count, percent(cell["accuracy"]), _interval(cell), f"{cell['cross_entropy']:.4f}"]
            row += [percent(cell["chance"])] if chance else []
        else:
            row = [label, "not possible", *[MISSING] * (3 + chance)]
        rows.append(row + ([_count(off[number])] if off is not None else []))
    return markdown_table(header, rows, left=0)


def _count(cell: dict | None) -> str:
    """`45/48 (83.2–97.9 %)`."""
    if cell is None:
        return MISSING
    return f"{cell['correct']}/{cell['samples']} ({_interval(cell)})" if "accuracy" in cell else "not possible"


def _interval(cell: dict) -> str:
    return f"{100 * cell['low']:.1f}–{percent(cell['high'])}"
