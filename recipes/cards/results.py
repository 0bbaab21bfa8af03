"""What was measured on a run: pieces of its card."""

import math

from support.markdown import markdown_table

from .run import Run, last_part

# Options of an evaluation of perplexity that a card names where they are others than these
USUAL = {"length": None, "min_characters": 0, "max_tokens": None, "precision": "float32", "memory": "on"}


def measurements(run: Run) -> list[dict]:
    """The losses of the model: `data`, `split`, `how` (the options that are not the usual ones), and the numbers.

    The validation of result.json comes first; an evaluation that only repeats it is left out.
    """
    names = ("tokens", "cross_entropy", "perplexity")
    first = {"data": run.data, "split": "validation", "how": "", "tokens": run.result["validation_tokens"]}
    rows = [first | {name: run.result[name] for name in names[1:]}]
    usual = USUAL | {"separate_documents": bool(run.result["options"].get("separate_documents"))}
    for found in run.of_task("perplexity"):
        how = [f"{name} {found['options'][name]}" for name in usual if found["options"][name] != usual[name]]
        own = found["data_fingerprint"] == run.result["data_fingerprint"]
        row = {"data": run.data if own else last_part(found["source"]), "split": found["split"], "how": ", ".join(how)}
        row |= {name: found[name] for name in names}
        same = all(row[name] == rows[0][name] for name in ("data", "split", "how", "tokens"))
        # The same float32 sums in batches of another size agree to about six digits
        if not (same and math.isclose(row["cross_entropy"], rows[0]["cross_entropy"], rel_tol=1e-5)):
            rows.append(row)
    return rows


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
