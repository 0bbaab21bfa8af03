"""The report of a study as Markdown, from the content of its report.json alone."""


from evaluation.bootstrap import Interval
from support.markdown import fence, markdown_table

from .planning import BASE, BASELINE
from .results import groups_of, interval_of, same_training, turning_points

MISSING = "–"
GATES_ARE = (
    "the memory's share of a head's output or, where window and memory share a normaliser, the share that a token of the "
    "memory has beside one of the window that fits as well"
)
MAIN_COLUMNS = (
    "variant",
    "perplexity",
    "cross-entropy (95 %)",
    f"difference to {BASELINE} (95 %)",
    "tokens",
    "parameters",
    "tokens/s",
    "peak MiB",
)


def write_report(content: dict) -> str:
    """The Markdown of a report.json (see [`results.collect`] and recipes/study.py)."""
    parts = [f"# Self-attention and Infini-attention: the {content['scale']} study", *_warnings(content), _setting(content)]
    parts += _ranking(content) + _characters(content) + _curves(content) + _memory(content) + _gates(content)
    parts += _long_texts(content) + _samples(content) + _not_run(content) + _origin(content)
    return "\n\n".join(parts) + "\n"


def _warnings(content: dict) -> list[str]:
    if content["max_steps"] is None:
        return []
    return [
        f"> **CUT SHORT: every run was stopped after at most {content['max_steps']:,} optimiser steps (`--max_steps`). This "
        "report shows that the scale starts and runs. Its losses, rankings, gates and samples are those of untrained models "
        "and say nothing about the variants.**"
    ]


def _setting(content: dict) -> str:
    base = content["data"][BASE]
    train, validation, settings = base["splits"]["train"], base["splits"]["validation"], base["settings"]
    fraction = settings.get("fraction", 1.0)
    lines = [
        f"Data: {content['corpus']}" + (f", {fraction:g} of the documents" if fraction != 1 else "") + ". "
        f"{train['documents']:,} documents ({train['tokens']:,} tokens in rows of {content['context']:,}) to train on, "
        f"{validation['documents']:,} ({validation['tokens']:,} tokens) held out for validation; vocabulary "
        f"{base['vocabulary']:,}; fingerprint `{base['fingerprint']}`. Its settings are in `data/{BASE}.yaml`."
    ]
    finished = groups_of(content["variants"]).get(BASE, [])
    if len(finished) > 1 and same_training(finished):
        lines.append(f"{_and(v['name'] for v in finished)} were trained on the same tokens in the same order.")
    elif len(finished) > 1:
        lines.append("The variants below did **not** all read the same tokens in the same order: see their options.")
    for variant in content["variants"]:
        if variant["data"] != BASE:
            lines.append(f"{variant['name']} has data of its own: {variant['data']}.")
    return " ".join(lines)


# --- losses -----------------------------------------------------------------------------------------------------------


def _ranking(content: dict) -> list[str]:
    parts = ["## Perplexity"]
    groups = groups_of(content["variants"])
    for name, variants in groups.items():
        if name != BASE:
            parts.append(
                f"On data of their own ({name}), with other tokens: these perplexities are **not** in one ranking with "
                "those above, because they count other pieces of text. The table per character compares them."
            )
        rows = [[*_losses(v), *_sizes(v)] for v in variants]
        parts.append(markdown_table(MAIN_COLUMNS, rows, left=1))
    seeded = [variant for variants in groups.values() for variant in variants if len(variant["by_seed"]) > 1]
    if seeded:
        rows = [[v["name"], ", ".join(f"{seed}: {loss:.4f}" for seed, loss in v["by_seed"].items())] for v in seeded]
        parts.append(markdown_table(("variant", "cross-entropy by seed"), rows, left=2))
    tokens = [f"{group[0]['tokens_evaluated']:,} for {_and(v['name'] for v in group)}" for group in groups.values()]
    parts.append(
        "Cross-entropy in nats per token of the validation rows, in float32, whatever precision the training had. Every "
        "variant is judged on the same predicted tokens, special tokens never among them "
        f"({'; '.join(tokens)}). Intervals: percentile bootstrap over the rows, {content['resamples']:,} resamples, seed "
        f"{content['seed']}; the difference is paired, row by row. They tell how far the choice of validation text moves "
        "the numbers, not what another seed of training would."
        + (" With several seeds, a row's loss is the mean over them." if seeded else "")
    )
    return parts


def _losses(variant: dict) -> list[str]:
    entropy, difference = interval_of(variant["cross_entropy"]), interval_of(variant["difference"])
    perplexity = interval_of(variant["perplexity"])
    return [
        variant["name"],
        f"{perplexity.value:,.2f} ({perplexity.low:,.2f} to {perplexity.high:,.2f})",
        with_interval(entropy),
        MISSING if difference is None else with_interval(difference, sign="+"),
    ]


def _sizes(variant: dict) -> list[str]:
    numbers = (variant["tokens"], variant["parameters"], variant["tokens_per_second"], variant["peak_mib"])
    return [f"{number:,.0f}" for number in numbers]


def _characters(content: dict) -> list[str]:
    variants = [variant for variant in content["variants"] if variant.get("per_character")]
    if not variants:
        return []
    rows = []
    for variant in sorted(variants, key=lambda v: v["per_character"]["nats"]["value"]):
        found = variant["per_character"]
        difference = interval_of(found["difference"])
        rows.append(
            [
                variant["name"],
                f"{found['nats']['value']:.4f}",
                with_interval(interval_of(found["bits"])),
                MISSING if difference is None else with_interval(difference, sign="+"),
                f"{found['characters']:,}",
            ]
        )
    header = ("variant", "nats per character", "bits per character (95 %)", f"difference to {BASELINE}, bits (95 %)")
    return [
        "## Per character",
        "A perplexity per token depends on how a tokenizer cuts the text. Nats and bits per character of one text do not: "
        "they can be compared across tokenizers, and this table ranks all variants.",
        markdown_table((*header, "characters"), rows, left=1),
        f"Of the {content['documents']:,} validation documents on which no variant was trained and all were judged; the "
        "characters are those of the predicted tokens: the first token of each row is not, and rows begin elsewhere with "
        "another tokenizer. Intervals: bootstrap over documents; the difference is paired, document by document.",
    ]


def _curves(content: dict) -> list[str]:
    parts = ["## Loss over the tokens trained on"]
    parts += [f"![{title}](figures/{name})" for name, title in _LOSS_FIGURES.items() if name in content["figures"]]
    lines = [f"- {variant['name']}: {_turns(variant['curve_difference'])}" for variant in content["variants"]
             if variant.get("curve_difference")]  # fmt: skip
    if lines:
        parts.append("\n".join([f"Against {BASELINE} on the same rows:", "", *lines]))
    rows = content["eval_rows"]
    read = "all validation rows" if rows is None else f"the first {rows} validation rows"
    parts.append(f"The curves are of {read} in the precision of training; the tables above are of all rows in float32.")
    return parts


_LOSS_FIGURES = {"loss.png": "Validation loss", "loss_difference.png": f"Validation loss minus {BASELINE}'s"}


def _turns(difference: list) -> str:
    turns, last = turning_points(difference), difference[-1][1]
    where = "ahead" if last < 0 else "behind"
    if not turns:
        return f"{where} at all evaluations ({len(difference)}); at the end {last:+.4f} nats per token"
    more = f", after {len(turns)} turns" if len(turns) > 1 else ""
    return f"{where} from {turns[-1]:,} tokens on{more}; at the end {last:+.4f} nats per token"


# --- memory, gates ----------------------------------------------------------------------------------------------------


def _memory(content: dict) -> list[str]:
    variants = [variant for variant in content["variants"] if variant.get("state_bytes")]
    if not variants:
        return []
    lengths = list(variants[0]["state_bytes"]["bytes"])
    header = ["variant", *(f"state after {int(length):,} tokens" for length in lengths), "largest batch", "its peak MiB"]
    rows = []
    for variant in variants:
        states = [variant["state_bytes"]["bytes"][length] for length in lengths]
        batch = variant["largest_batch"] or {"settings": {"budget_gib": None}}
        batch = batch if batch["settings"]["budget_gib"] == content["memory_budget_gib"] else {}  # of an earlier start
        cells = [batch.get("rows"), (batch.get("peak_bytes") or 0) / 2**20 or None]
        rows.append([variant["name"], *("beyond its positions" if state is None else f"{state:,} B" for state in states)])
        rows[-1] += [MISSING if cell is None else f"{cell:,.0f}" for cell in cells]
    notes = "State: the bytes of one row's cache in float32 after really reading so many tokens. "
    if content["memory_budget_gib"] is None:
        notes += "The largest batch was not measured."
    else:
        notes += (
            f"Largest batch: rows of {content['context']:,} tokens of which a training step (forward, backward, optimiser) "
            f"fits into {content['memory_budget_gib']:g} GiB of {content['memory_kind']}, by the real peak of new processes "
            "(from 100 rows on to 2 %)."
        )
    return ["## Memory", markdown_table(header, rows, left=1), notes]


def _gates(content: dict) -> list[str]:
    rows, figures = [], []
    for variant in content["variants"]:
        for run, layers in variant.get("gates", {}).items():
            for layer, values in layers.items():
                spread = (min(values), sum(values) / len(values), max(values))
                rows.append([run, layer, *(f"{value:.4f}" for value in spread)])
        name = f"gates_{variant['name']}.png"
        figures += [f"![Gates of {variant['name']}](figures/{name})"] if name in content["figures"] else []
    if not rows:
        return []
    text = f"sigmoid(gate) at the end of training: {GATES_ARE}."
    return ["## Gates", text, markdown_table(("run", "layer", "lowest", "mean", "highest"), rows, left=2), *figures]


# --- long texts and samples -------------------------------------------------------------------------------------------


def _long_texts(content: dict) -> list[str]:
    parts, long = ["## Beyond the trained context"], content["long_text"]
    if long["documents"] == 0:
        parts.append(f"Not measured: no validation document has {long['characters']:,} characters.")
        return parts
    for name, variants in groups_of(content["variants"]).items():
        buckets = sorted({(row["first"], row["last"]) for v in variants for row in _by_position(v)})
        rows = []
        for first, last in buckets:
            found = [next((row for row in _by_position(v) if row["first"] == first), None) for v in variants]
            tokens = next(row["tokens"] for row in found if row is not None)
            rows.append([f"{first:,}–{last:,}", f"{tokens:,}", *(_perplexity(row) for row in found)])
        for kind in ("long", "context"):
            length = long["length"] if kind == "long" else content["context"]
            found = [v["positions"][kind] for v in variants]
            tokens = next((f"{one['tokens']:,}" for one in found if one), MISSING)
            rows.append([f"all, in rows of {length:,}", tokens, *map(_perplexity, found)])
        if name != BASE:
            parts.append(f"With the tokens of {name}:")
        parts.append(markdown_table(("position", "tokens", *(v["name"] for v in variants)), rows, left=1))
    parts += ["![Perplexity by position](figures/positions.png)"] if "positions.png" in content["figures"] else []
    parts.append(
        f"Perplexity by position in rows of {long['length']:,} tokens from the {long['documents']:,} validation documents of"
        f" {long['characters']:,} characters and more, one after the other, and of the same text in rows of "
        f"{content['context']:,}. {MISSING}: the model's positions end before. Different positions hold different text: "
        "compare along a line, or the last two lines."
    )
    return parts


def _by_position(variant: dict) -> list[dict]:
    return (variant["positions"]["long"] or {"by_position": []})["by_position"]


def _perplexity(row: dict | None) -> str:
    return MISSING if row is None else f"{row['perplexity']:,.2f}"


def _samples(content: dict) -> list[str]:
    prompt, settings = content["prompt"], content["sampling"]
    source = f" ({prompt['source']})" if prompt["source"] else ""
    parts = [
        "## Samples",
        f"The same prompt for all: the beginning of “{prompt['title']}”{source}, a validation document. Top-p "
        f"{settings['top_p']:g}, temperature {settings['temperature']:g}, seed {settings['seed']}, up to "
        f"{settings['new_tokens']} new tokens.",
        fence(prompt["prompt"], "text"),
        "How it really goes on:",
        fence(prompt["continuation"].strip(), "text"),
    ]
    for variant in content["variants"]:
        found = variant.get("sample")
        if found:
            text = f"No sample: {found['reason']}." if found["text"] is None else fence(found["text"].strip(), "text")
            parts += [f"**{variant['name']}**", text]
    return parts


# --- what else there is to know ---------------------------------------------------------------------------------------


def _not_run(content: dict) -> list[str]:
    lines = [f"- {name}: {reason}" for v in content["variants"] for name, reason in v["reasons"].items()]
    lines += [f"- {problem}" for problem in content["problems"]]
    lines += [f"- {name}: not asked for" for name in content["not_asked_for"]]
    seeds = {len(v["by_seed"]) for v in content["variants"] if "by_seed" in v}
    if seeds == {1}:
        lines.append("- one seed per variant: how much the losses vary with it was not measured")
    if content["memory_budget_gib"] is None:
        lines.append("- largest batch: `--largest_batch false`")
    return ["## Not run", "\n".join(lines) if lines else "Nothing was left out."]


def _origin(content: dict) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    hardware = sorted({variant["hardware"] for variant in content["variants"] if "hardware" in variant})
    facts = [
        f"Trained on {_and(hardware)}, {content['jobs']} run{'s' * (content['jobs'] != 1)} at a time with "
        f"{content['threads']} CPU thread{'s' * (content['threads'] != 1)} each; measured on {content['hardware']}. "
        f"{versions}. {content['date']}. The options of each run are in its `train.yaml`.",
        "```bash\n" + "\n".join(content["commands"]) + "\n```",
    ]
    return ["## How it was made", *facts]


def with_interval(interval: Interval, sign: str = "") -> str:
    value, low, high = (format(number, f"{sign}.4f") for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"


def _and(words) -> str:
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
