"""A model's place in its study, in a model card: intervals, the difference to the baseline, characters, long texts."""

from studies.planning import BASE, BASELINE
from studies.report import MISSING, with_interval
from studies.results import interval_of
from support.markdown import markdown_table

from .run import Run
from .text import measured_on, position_cells


def study_section(run: Run) -> str:
    """What the study of recipes/study.py found of the model's variant, beside its baseline."""
    content, own = run.study, run.variant
    parts = [f"### In the {content['scale']} study", *_warning(content), _setting(content, own)]
    baseline = next((v for v in content["variants"] if v["name"] == BASELINE and "cross_entropy" in v), None)
    variants = [own] + ([baseline] if baseline is not None and own["name"] != BASELINE else [])
    rows = [[v["name"], *_losses(v), *_characters(v)] for v in variants]
    header = ["variant", "perplexity (95 %)", "cross-entropy (95 %)", f"difference to {BASELINE} (95 %)"]
    header += ["bits per character (95 %)", f"difference to {BASELINE}, bits (95 %)"]
    parts += [markdown_table(header, rows, left=1), _notes(content, own, curves="study" in run.figures) + run.show("study")]
    return "\n\n".join(parts + _memory(content, own) + _long_texts(content, own))


def _warning(content: dict) -> list[str]:
    steps = content["max_steps"]
    if steps is None:
        return []
    return [
        f"> **Cut short: every run of this study was stopped after at most {steps:,} steps. These are numbers of untrained "
        "models.**"
    ]


def _setting(content: dict, own: dict) -> str:
    others = [v["name"] for v in content["variants"] if v["name"] != own["name"] and "cross_entropy" in v]
    text = f"This model is the variant {own['name']}" + (f", beside {', '.join(others)}" if others else "")
    if len(own["by_seed"]) > 1:
        each = ", ".join(f"seed {seed} {loss:.4f}" for seed, loss in own["by_seed"].items())
        text += f". Its numbers here are means over {len(own['by_seed'])} seeds (cross-entropy: {each}), of which this "
        text += f"model is seed {next(iter(own['by_seed']))}"
    if own["data"] != BASE:
        text += f". It has data of its own ({own['data']}): its perplexity counts other tokens than the others' and cannot "
        text += "be compared with theirs, its bits per character can"
    return text + "."


def _losses(variant: dict) -> list[str]:
    perplexity, difference = interval_of(variant["perplexity"]), interval_of(variant["difference"])
    return [
        f"{perplexity.value:,.2f} ({perplexity.low:,.2f} to {perplexity.high:,.2f})",
        with_interval(interval_of(variant["cross_entropy"])),
        MISSING if difference is None else with_interval(difference, sign="+"),
    ]


def _characters(variant: dict) -> list[str]:
    found = variant["per_character"]
    if found is None:
        return [MISSING, MISSING]
    difference = interval_of(found["difference"])
    bits = with_interval(interval_of(found["bits"]))
    return [bits, MISSING if difference is None else with_interval(difference, sign="+")]


def _notes(content: dict, own: dict, curves: bool) -> str:
    text = (
        f"Over all {own['tokens_evaluated']:,} predicted tokens of the validation rows, in float32. Intervals: bootstrap "
        f"over the rows, {content['resamples']:,} resamples, seed {content['seed']}; differences are paired, row by row. "
        "They tell how far the choice of text moves the numbers, not another seed of training."
    )
    if own["per_character"] is not None:
        text += f" Bits per character: of {content['documents']:,} validation documents that no variant was trained on"
        text += f" ({own['per_character']['characters']:,} characters), intervals over the documents."
    if content["eval_rows"] is not None and curves:
        text += f" The curves are of the first {content['eval_rows']} validation rows, in the precision of training."
    return f"{text} Measured on {measured_on([content])}."


def _memory(content: dict, own: dict) -> list[str]:
    """The bytes of the cache, and the largest batch, where they were measured."""
    rows = [
        [f"cache after {int(tokens):,} tokens", "beyond its positions" if count is None else f"{count:,} bytes"]
        for tokens, count in (own["state_bytes"] or {"bytes": {}})["bytes"].items()
    ]
    batch = own["largest_batch"]
    if batch is not None and batch.get("rows") is not None:
        within = f"in {content['memory_budget_gib']:g} GiB of {content['memory_kind']}"
        rows.append([f"largest batch of rows of {content['context']:,} tokens in training, {within}", f"{batch['rows']:,}"])
    return [markdown_table(["memory", ""], rows, left=1)] if rows else []


def _long_texts(content: dict, own: dict) -> list[str]:
    long, found = content["long_text"], own["positions"]
    if found is None or found["context"] is None:
        return []
    rows = position_cells([] if found["long"] is None else found["long"]["by_position"])
    for kind, length in (("long", long["length"]), ("context", content["context"])):
        numbers = found[kind]
        cells = [MISSING] * 2 if numbers is None else [f"{numbers['tokens']:,}", f"{numbers['perplexity']:,.2f}"]
        rows.append([f"all, in rows of {length:,}", *cells])
    text = f"Beyond the trained context: {long['documents']:,} validation documents of {long['characters']:,} characters "
    text += f"and more, one after the other, in rows of {long['length']:,} tokens, and the same text in rows of "
    text += f"{content['context']:,}. Different positions hold different text."
    text += "" if found["long"] is not None else " The model's positions end before such rows."
    return [text, markdown_table(["position", "tokens", "perplexity"], rows, left=1)]
