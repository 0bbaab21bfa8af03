"""What was measured on a run: pieces of its card, and the same numbers as entries of the Hub's metadata."""

import math
from itertools import groupby

from huggingface_hub import EvalResult

from support.markdown import markdown_table

from .run import Run
from .text import last_part

# Options of an evaluation of perplexity that a card names where they are others than these
USUAL = {"length": None, "min_characters": 0, "max_tokens": None, "precision": "float32", "memory": "on"}


def measurements(run: Run) -> list[dict]:
    """The losses of the model: `data`, `split`, `how` (the options that are not the usual ones), and the numbers.

    The validation of result.json comes first; an evaluation that only repeats it is left out.
    """
    names = ("tokens", "cross_entropy", "perplexity")
    first = {"data": run.data, "own": True, "split": "validation", "how": "", "tokens": run.result["validation_tokens"]}
    rows = [first | {name: run.result[name] for name in names[1:]}]
    usual = USUAL | {"separate_documents": bool(run.result["options"].get("separate_documents"))}
    for found in run.of_task("perplexity"):
        how = [f"{name} {found['options'][name]}" for name in usual if found["options"][name] != usual[name]]
        row = {**source_of(run, found), "how": ", ".join(how)} | {name: found[name] for name in names}
        same = all(row[name] == rows[0][name] for name in ("data", "split", "how", "tokens"))
        # The same float32 sums in batches of another size agree to about six digits
        if not (same and math.isclose(row["cross_entropy"], rows[0]["cross_entropy"], rel_tol=1e-5)):
            rows.append(row)
    return rows


def source_of(run: Run, found: dict) -> dict:
    """`data` and `split` that an evaluation read, and whether it is the text of the run's `own` data."""
    same = found["data_fingerprint"] == run.result["data_fingerprint"]
    name = run.data if same else last_part(found["source"] or "generated biographies")
    made_from = last_part((run.manifest or {"options": {}})["options"].get("prepared_from", ""))
    return {"data": name, "split": found["split"], "own": same or name == made_from}


def losses(run: Run) -> str:
    """Cross-entropy and perplexity of the model, with the n-grams of a split below the model's rows of it."""
    rows = [("this model", row) for row in measurements(run)]
    for baseline in run.baselines:
        place = {"data": run.data, "split": baseline["split"], "how": ""}
        rows += [(f"{row['name']}s", row | place) for row in baseline["orders"]]
    places = [(row["data"], row["split"]) for _, row in rows]
    rows.sort(key=lambda pair: places.index((pair[1]["data"], pair[1]["split"])))
    cells = [
        [who, ", ".join(filter(None, (row["data"], row["split"], row["how"]))), f"{row['tokens']:,}"]
        + [f"{row['cross_entropy']:.4f}", f"{row['perplexity']:.2f}"]
        for who, row in rows
    ]
    table = markdown_table(["", "text", "tokens", "cross-entropy", "perplexity"], cells, left=2)
    text = "Cross-entropy in nats per token over all predicted tokens, perplexity its exponential."
    if rows := exercises(run):
        text += f" The rows of {run.data} are exercises of recall ({rows}): their numbers say nothing of running text."
    if run.baselines:
        text += f" The n-grams are smoothed counts of {run.baselines[0]['training_tokens']:,} training tokens."
    return f"{table}\n\n{text} Measured on {measured_on(run.result, *run.of_task('perplexity'), *run.baselines)}."


def format_answers(cell: dict) -> str:
    """`45/48 (83.2–97.9 %)`."""
    if "accuracy" not in cell:
        return "not possible"
    return f"{cell['correct']}/{cell['samples']} ({100 * cell['low']:.1f}–{100 * cell['high']:.1f} %)"


def counting_note(found: dict) -> str:
    text = "Counted are the answers that greedy decoding gives exactly, with 95 % Wilson intervals"
    return f"{text}; {found['options']['precision']}, seed {found['options']['seed']}; {measured_on(found)}."


def describe_source(found: dict) -> str:
    """`plays, validation, memory off`: what was read, and whether with the memory."""
    source = None if found["source"] is None else last_part(found["source"])
    off = "memory off" if found["memory"] == "off" else None
    return ", ".join(filter(None, (source or "invented text", found["split"], off)))


def measured_on(*files: dict) -> str:
    """Machine and day of JSONs, each pair once: `2 CPU cores, AMD EPYC, 2026-11-21`."""
    return "; ".join(dict.fromkeys(f"{file['hardware']}, {file['date'][:10]}" for file in files))


def exercises(run: Run) -> str | None:
    """What the rows of the run's data ask for where they are no running text but exercises of recall: `codes, echo`."""
    if run.manifest is None or "prepared_from" not in run.manifest["options"]:
        return None
    kinds = dict.fromkeys(kind for split in run.manifest["splits"].values() for kind in split.get("rows_by_kind", {}))
    return ", ".join(kind for kind in kinds if kind != "text")


def eval_results(run: Run, dataset: str | None) -> list[EvalResult] | None:
    """The losses, and the share of right answers at each length (over all depths) or distance, for the Hub's metadata; None
    without any.

    The Hub links what it is told to be a dataset: only what was measured on the run's own data, or the text that they were
    made from, is there, under their name on the Hub, and nothing where they have none. With its memory off, a model is
    another one.
    """
    found, rows = [], exercises(run)
    of_rows = "" if rows is None else f" of exercises ({rows}), not of running text"
    for row in measurements(run):
        if row["own"] and "memory off" not in row["how"]:
            # With a length, or of what the exercises were made of, running text was read
            what = of_rows if row["data"] == run.data and "length" not in row["how"] else ""
            for metric, name in (("perplexity", "Perplexity"), ("cross_entropy", "Loss (cross-entropy, nats per token)")):
                found.append(_entry(dataset, row["split"], metric, name + what, row["how"] or None, row[metric]))
    on = [evaluation for evaluation in run.evaluations if evaluation["memory"] == "on"]
    for evaluation in (evaluation for evaluation in on if evaluation["options"]["task"] != "perplexity"):
        if not source_of(run, evaluation)["own"]:
            continue
        by_length = evaluation["options"]["task"] == "passkey"
        place, unit = ("length", "tokens") if by_length else ("distance", "segments between")
        cells = [cell for cell in evaluation["cells"] if "accuracy" in cell]
        for value, group in groupby(cells, key=lambda cell: cell[place]):
            of_place = list(group)
            right, asked = (sum(cell[name] for cell in of_place) for name in ("correct", "samples"))
            name = f"{'Passkeys found' if by_length else 'Facts recalled'} ({right} of {asked})"
            found.append(_entry(dataset, evaluation["split"], "accuracy", name, f"{value:,} {unit}", right / asked))
    return found if found and dataset is not None else None


def _entry(dataset: str | None, split: str, metric: str, name: str, how: str | None, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=dataset,
        dataset_name=dataset,
        dataset_split=split,
        dataset_config=how,
        metric_type=metric,
        metric_name=name,
        metric_value=value,
    )
