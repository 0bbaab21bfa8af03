"""The report of a study: numbers with intervals from its finished runs, as JSON and as Markdown tables."""

import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cli import UserError
from evaluation.bootstrap import RESAMPLES, difference_interval, mean_interval
from hf_infini.metrics import perplexity
from support.markdown import fence, markdown_table

MISSING = "–"
SEED = 0  # of the resampling


@dataclass(frozen=True)
class Finished:
    """A finished run: its out folder, the content of its result.json and metrics.jsonl, what [`measure.measure_run`] found,
    and by name the results of evaluate_model.py."""

    name: str
    variant: str
    folder: Path
    result: dict
    lines: list[dict]
    measured: dict
    evaluations: dict[str, dict]

    @property
    def data(self) -> str:
        return self.result["data_fingerprint"]


def collect(runs: list[Finished], out: Path) -> list[dict]:
    """The numbers of each variant, in the order of the runs; the first is what those on the same data are compared with.
    Paths are as seen from `out`."""
    variants: dict[str, list[Finished]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    differing = differing_options([members[0] for members in variants.values()])
    first = next(iter(variants.values()))
    numbers = [_numbers(name, members, first) for name, members in variants.items()]
    for found, members in zip(numbers, variants.values(), strict=True):
        found["options"] = differing[found["name"]]
        found["folders"] = {run.name: os.path.relpath(run.folder, out) for run in members}
    return numbers


def differing_options(runs: list[Finished]) -> dict[str, dict]:
    """Variant → those options of train.py that are set and not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.result["options"] if name != "data")
    values = {name: [run.result["options"].get(name) for run in runs] for name in names}
    different = [name for name in names if any(value != values[name][0] for value in values[name])]
    return {run.variant: {n: v for n in different if (v := run.result["options"].get(n)) is not None} for run in runs}


def _numbers(name: str, runs: list[Finished], first: list[Finished]) -> dict:
    if len({run.data for run in runs}) > 1:
        raise UserError(f"the seeds of {name} were trained on different data: use another --out")
    losses, counts = _mean_rows(runs)
    entropy = mean_interval(losses, counts, seed=SEED)
    by_seed = {run.name: sum(r[0] for r in run.measured["rows"]) / counts.sum() for run in runs}
    results = [run.result for run in runs]
    found = {
        "name": name,
        "data": runs[0].data,
        "cross_entropy": asdict(entropy),
        "perplexity": asdict(entropy.map(perplexity)),
        "rows": len(losses),
        "tokens_evaluated": int(counts.sum()),
        "by_seed": by_seed,
        "deviation": statistics.stdev(by_seed.values()) if len(runs) > 1 else None,
        "difference": None,
        "bits_per_character": _bits_per_character(runs, first),
        "parameters": results[0]["parameters"],
        "tokens": results[0]["tokens"],
        "tokens_per_second": statistics.fmean(result["tokens_per_second"] for result in results),
        "seconds": statistics.fmean(result["seconds"] for result in results),
        "peak_mib": max(result.get("peak_cuda_mib", result["peak_rss_mib"]) for result in results),
        "cache_bytes": runs[0].measured["cache_bytes"],
        "evaluations": runs[0].evaluations,
        "gates": {run.name: run.result["gates"] for run in runs if run.result["gates"]},
        "hardware": results[0]["hardware"],
    }
    if runs is not first and runs[0].data == first[0].data:
        found["difference"] = asdict(difference_interval(losses, counts, *_mean_rows(first), seed=SEED))
    return found


def _mean_rows(runs: list[Finished]) -> tuple[np.ndarray, np.ndarray]:
    """Loss sums and tokens of each validation row, the mean over the seeds; rows without any token are left out."""
    rows = np.mean([run.measured["rows"] for run in runs], axis=0)
    return tuple(rows[rows[:, 1] > 0].T)


def _bits_per_character(runs: list[Finished], first: list[Finished]) -> dict | None:
    """Over the documents that all runs have read, with the difference to the first variant, paired by document."""
    names = sorted(set.intersection(*(set(run.measured["documents"]) for run in (*runs, *first))))
    if not names:
        return None
    own, other = (
        np.mean([[run.measured["documents"][name] for name in names] for run in group], axis=0).T for group in (runs, first)
    )
    found = {"value": mean_interval(*own, seed=SEED)}
    if runs is not first:
        found["difference"] = difference_interval(*own, *other, seed=SEED)
    bits = {name: asdict(nats.map(lambda value: value / math.log(2))) for name, nats in found.items()}
    return {"difference": None, "documents": len(names), "characters": int(own[1].sum())} | bits


# --- Markdown ---------------------------------------------------------------------------------------------------------


def write_report(content: dict) -> str:
    """The Markdown of a report.json (see recipes/study.py)."""
    variants = content["variants"]
    parts = ["# Study", *_losses(content), *_grid(content), *_characters(variants), *_costs(variants)]
    parts += _evaluations(content) + _figures(content) + _not_finished(content)
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    hardware = ", ".join(dict.fromkeys(variant["hardware"] for variant in variants))
    parts += ["## Origin", f"Trained on {hardware}; measured on {content['hardware']}. {versions}. {content['date']}."]
    parts += [fence("\n".join(content["commands"]), "bash")]
    return "\n\n".join(parts) + "\n"


def groups_of(variants: list[dict]) -> list[list[dict]]:
    """The variants by their data, the first one's first, each group ranked by cross-entropy."""
    names = dict.fromkeys(variant["data"] for variant in variants)
    return [sorted((v for v in variants if v["data"] == name), key=lambda v: v["cross_entropy"]["value"]) for name in names]


def summary(content: dict) -> str:
    """What a terminal shows: losses, evaluations, and what they cost."""
    tables = [losses_table(content), *_evaluations(content)[2:], _costs(content["variants"])[1]]
    return "\n\n".join(tables)


def losses_table(content: dict, group: list[dict] | None = None) -> str:
    """The losses of variants on the same data: by default those of the first variant's, with the n-grams below."""
    variants = content["variants"]
    seeded = any(variant["deviation"] is not None for variant in variants)
    header = ["variant", "differs in", "perplexity (95 %)", "cross-entropy (95 %)", f"minus {variants[0]['name']}'s (95 %)"]
    ranked, rows = groups_of(variants)[0] if group is None else group, []
    for variant in ranked:
        options = ", ".join(f"{name} {value}" for name, value in variant["options"].items())
        rows.append([_bold_if(variant is ranked[0], variant["name"]), options, shown(variant["perplexity"], 2)])
        rows[-1] += [shown(variant["cross_entropy"]), shown(variant["difference"], sign="+")]
        if seeded:
            spread = variant["deviation"]
            rows[-1].append(MISSING if spread is None else f"± {spread:.4f} ({len(variant['by_seed'])})")
    if group is None:
        for ngram in content["baselines"]:
            rows.append(
                [ngram["name"], "", f"{ngram['perplexity']:,.2f}", f"{ngram['cross_entropy']:.4f}", ""] + [""] * seeded
            )
    return markdown_table(header + ["over seeds"] * seeded, rows, left=2)


def _losses(content: dict) -> list[str]:
    parts, groups = ["## Losses"], groups_of(content["variants"])
    for group in groups:
        if group is not groups[0]:
            parts.append(
                "On other data, with other tokens: these perplexities are **not** in one ranking with those above. Bits per "
                "character compare them."
            )
        parts.append(losses_table(content, None if group is groups[0] else group))
        rows, tokens = group[0]["rows"], group[0]["tokens_evaluated"]
        parts.append(f"{rows:,} validation rows, {tokens:,} predicted tokens, data `{group[0]['data']}`.")
    parts.append(
        "Nats per token in float32, whatever precision the training had; special tokens are never counted. Intervals: "
        f"percentile bootstrap over the rows, {RESAMPLES:,} resamples; the difference is paired, row by row. They tell how "
        "far the choice of validation text moves the numbers, not what another seed of training would: that is the sample's "
        "standard deviation over the seeds, where there are several (a row's loss is then their mean)."
    )
    return parts


def _grid(content: dict) -> list[str]:
    """The cross-entropies of a grid of two options as a table, the first one's values downwards."""
    grid = content["study"]["grid"]
    if len(grid) != 2 or len(content["study"]["variants"]) > 1:
        return []
    (down, down_values), (across, across_values) = grid.items()
    cells = {tuple(run["options"][name] for name in grid): run["variant"] for run in content["runs"]}
    losses = {variant["name"]: variant["cross_entropy"]["value"] for variant in content["variants"]}
    best = min(losses, key=losses.get)
    rows = []
    for value in down_values:
        names = [cells[value, other] for other in across_values]
        rows.append(
            [value, *(_bold_if(name == best, f"{losses[name]:.4f}" if name in losses else MISSING) for name in names)]
        )
    return ["## Grid", markdown_table([f"{down} \\ {across}", *across_values], rows, left=1)]


def _characters(variants: list[dict]) -> list[str]:
    judged = [variant for variant in variants if variant["bits_per_character"]]
    if not judged:
        return []
    judged.sort(key=lambda variant: variant["bits_per_character"]["value"]["value"])
    rows = []
    for variant in judged:
        found = variant["bits_per_character"]
        rows.append([variant["name"], shown(found["value"]), shown(found["difference"], sign="+")])
        rows[-1] += [f"{found['characters']:,}", f"{found['documents']:,}"]
    header = ("variant", "bits per character (95 %)", f"minus {variants[0]['name']}'s (95 %)", "characters", "documents")
    return [
        "## Per character",
        markdown_table(header, rows, left=1),
        "Of validation documents that no variant or tokenizer has learned from. Only characters of predicted tokens count: "
        "the first token of a row is not, and rows begin elsewhere with another tokenizer. Intervals by document, paired.",
    ]


def _costs(variants: list[dict]) -> list[str]:
    lengths = list(variants[0]["cache_bytes"])
    header = ["variant", "parameters", "tokens", "tokens/s", "seconds", "peak MiB"]
    header += [f"cache after {int(length):,} tokens, bytes" for length in lengths]
    rows = []
    for variant in variants:
        names = ("parameters", "tokens", "tokens_per_second", "seconds", "peak_mib")
        caches = [variant["cache_bytes"].get(length) for length in lengths]
        rows.append([variant["name"], *(f"{variant[name]:,.0f}" for name in names)])
        rows[-1] += [MISSING if size is None else f"{size:,}" for size in caches]
    notes = (
        f"Cache: of one row, in float32, after really reading so many tokens; {MISSING}: the model's positions end before."
    )
    return ["## Costs", markdown_table(header, rows, left=1), notes]


def _evaluations(content: dict) -> list[str]:
    names = list(content["study"]["evaluate"])
    if not names:
        return []
    rows = []
    for variant in content["variants"]:
        found = [variant["evaluations"].get(name) for name in names]
        rows.append([variant["name"], *(MISSING if one is None else f"{one['perplexity']:,.2f}" for one in found)])
    return ["## Other evaluations", "Perplexities by evaluate_model.py.", markdown_table(["variant", *names], rows, left=1)]


def _figures(content: dict) -> list[str]:
    figures = [f"![{title}]({file})" for file, title in content["figures"].items()]
    gates = [f"- [{name}]({variant['folders'][name]}/gates.png): "
             + ", ".join(f"layer {layer} {statistics.fmean(values):.3f}" for layer, values in layers.items())
             for variant in content["variants"] for name, layers in variant["gates"].items()]  # fmt: skip
    parts = ["## Figures", *figures]
    return parts + (
        ["Gates over the training, and the mean of sigmoid(gate) at its end:", "\n".join(gates)] if gates else []
    )


def _not_finished(content: dict) -> list[str]:
    lines = [f"- {run['name']}: {run['status']}: {run['reason']}" for run in content["runs"] if run["reason"]]
    lines += [f"- {problem}" for problem in content["problems"]]
    return ["## Not finished", "\n".join(dict.fromkeys(lines))] if lines else []


def shown(interval: dict | None, digits: int = 4, sign: str = "") -> str:
    """`2.1520 (2.1000 to 2.2000)`."""
    if interval is None:
        return MISSING
    value, low, high = (f"{interval[name]:{sign},.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _bold_if(condition: bool, text: str) -> str:
    return f"**{text}**" if condition else text
