"""The report of a study: numbers with intervals from its finished runs, as JSON and as Markdown
tables."""

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cli import UserError
from evaluation.bootstrap import RESAMPLES, difference_interval, mean_interval
from support.markdown import fence, markdown_table

TEMPLATE = Path(__file__).with_name("template.md")
MISSING = "–"
SEED = 0  # of the resampling


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its out folder, the content of its result.json and metrics.jsonl, what
    [`measure.measure_run`] found, and by name the results of evaluate_model.py."""

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


def collect(runs: list[FinishedRun]) -> list[dict]:
    """The numbers of each variant, in the order of the runs; those on the same data are compared
    with the first."""
    variants: dict[str, list[FinishedRun]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    differing = differing_options([members[0] for members in variants.values()])
    first = next(iter(variants.values()))
    return [
        {"name": name, "options": differing[name], **_numbers(members, first)}
        for name, members in variants.items()
    ]


def differing_options(runs: list[FinishedRun]) -> dict[str, dict]:
    """Variant → those options of train.py that are set and not the same in all runs."""
    options = [run.result["options"] for run in runs]
    names = dict.fromkeys(name for one in options for name in one if name != "data")
    different = [
        name for name in names if any(one.get(name) != options[0].get(name) for one in options)
    ]
    return {
        run.variant: {name: own[name] for name in different if own.get(name) is not None}
        for run, own in zip(runs, options, strict=True)
    }


def _numbers(runs: list[FinishedRun], first: list[FinishedRun]) -> dict:
    """Of the runs of a variant, one for each seed."""
    if len({run.data for run in runs}) > 1:
        raise UserError(
            f"the seeds of {runs[0].variant} were trained on different data: use another --out"
        )
    losses, counts = _mean_rows(runs)
    entropy = mean_interval(losses, counts, seed=SEED)
    by_seed = {run.name: sum(r[0] for r in run.measured["rows"]) / counts.sum() for run in runs}
    difference = None
    if runs is not first and runs[0].data == first[0].data:
        difference = asdict(difference_interval(losses, counts, *_mean_rows(first), seed=SEED))
    results = [run.result for run in runs]
    means = ("tokens_per_second", "seconds")
    return {
        "data": runs[0].data,
        "cross_entropy": asdict(entropy),
        "perplexity": asdict(entropy.map(np.exp)),
        "difference": difference,
        "rows": len(losses),
        "tokens_evaluated": int(counts.sum()),
        "by_seed": by_seed,
        "deviation": statistics.stdev(by_seed.values()) if len(runs) > 1 else None,
        "bits_per_character": _bits_per_character(runs, first),
        **{name: results[0][name] for name in ("parameters", "tokens", "hardware")},
        **{name: statistics.fmean(result[name] for result in results) for name in means},
        "peak_mib": max(result.get("peak_cuda_mib", result["peak_rss_mib"]) for result in results),
        "cache_bytes": runs[0].measured["cache_bytes"],
        "evaluations": runs[0].evaluations,
    }


def _mean_rows(runs: list[FinishedRun]) -> tuple[np.ndarray, np.ndarray]:
    """Loss sums and tokens of each validation row, the mean over the seeds; rows without any token
    are left out."""
    rows = np.mean([run.measured["rows"] for run in runs], axis=0)
    return tuple(rows[rows[:, 1] > 0].T)


def _bits_per_character(runs: list[FinishedRun], first: list[FinishedRun]) -> dict | None:
    """Over the documents that all runs have read, with the difference to the first variant, paired
    by document."""
    read = [run.measured["documents"] for run in (*runs, *first)]
    names = sorted(set.intersection(*map(set, read)))
    if not names:
        return None
    own, other = (
        np.mean([[run.measured["documents"][name] for name in names] for run in group], axis=0).T
        for group in (runs, first)
    )
    found = {"value": mean_interval(*own, seed=SEED)}
    if runs is not first:
        found["difference"] = difference_interval(*own, *other, seed=SEED)
    bits = {name: asdict(nats.map(lambda nat: nat / math.log(2))) for name, nats in found.items()}
    return {"difference": None, "documents": len(names), "characters": int(own[1].sum())} | bits


# --- Markdown -------------------------------------------------------------------------------------


def write_report(content: dict) -> str:
    """The Markdown of a report.json (see recipes/study.py)."""
    from jinja2 import StrictUndefined, Template

    how = {"undefined": StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
    variants = content["variants"]
    return Template(TEMPLATE.read_text(encoding="utf-8"), **how).render(
        content,
        groups=groups_of(variants),
        losses_table=lambda group: losses_table(variants, group),
        resamples=RESAMPLES,
        shown=shown,
        fence=fence,
    )


def groups_of(variants: list[dict]) -> list[list[dict]]:
    """The variants by their data, the first one's first, each group ranked by cross-entropy."""
    ranked = sorted(variants, key=lambda variant: variant["cross_entropy"]["value"])
    names = dict.fromkeys(variant["data"] for variant in variants)
    return [[variant for variant in ranked if variant["data"] == name] for name in names]


def losses_table(variants: list[dict], group: list[dict]) -> str:
    """The losses of a group of all variants, which are on the same data."""
    seeded = any(variant["deviation"] is not None for variant in variants)
    header = ["variant", "differs in", "perplexity (95 %)", "cross-entropy (95 %)"]
    header += [f"minus {variants[0]['name']}'s (95 %)", *["over seeds"] * seeded]
    rows = []
    for place, variant in enumerate(group):
        spread, seeds = variant["deviation"], len(variant["by_seed"])
        row = [
            variant["name"] if place else f"**{variant['name']}**",
            ", ".join(f"{name} {value}" for name, value in variant["options"].items()),
            shown(variant["perplexity"], 2),
            shown(variant["cross_entropy"]),
            shown(variant["difference"], sign="+"),
            MISSING if spread is None else f"± {spread:.4f} ({seeds})",
        ]
        rows.append(row[: len(header)])
    return markdown_table(header, rows, left=2)


def shown(interval: dict | None, digits: int = 4, sign: str = "") -> str:
    """`2.1520 (2.1000 to 2.2000)`."""
    if interval is None:
        return MISSING
    value, low, high = (f"{interval[name]:{sign},.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
