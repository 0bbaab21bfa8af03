"""The numbers of a study's report, from the files that its runs and their evaluations left."""

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path

import numpy as np

from evaluation.bootstrap import RESAMPLES, Interval, difference_interval, mean_interval
from hf_infini.metrics import perplexity
from training.run_folder import read_jsonl

from .planning import BASE, BASELINE, Plan, Run
from .sweeps import FINISHED


def read_json(file: Path) -> dict | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def collect(plan: Plan, fingerprints: dict[str, str], seed: int) -> dict:
    """All that the report says about data and variants, JSON-safe.

    Args:
        plan: with the status of its runs.
        fingerprints: of the prepared data, by name.
        seed: of the resampling.

    Returns `{"data": {name: …}, "variants": [what `variant_numbers` returns], "documents": how many the numbers per
    character are of, "resamples": …}`.
    """
    data = {name: _data_numbers(plan, name, fingerprint) for name, fingerprint in fingerprints.items()}
    groups: dict[str, list[Run]] = {}
    for run in plan.runs:
        groups.setdefault(run.variant, []).append(run)
    losses = {name: _Losses([run for run in runs if run.status == FINISHED]) for name, runs in groups.items()}
    losses = {name: found for name, found in losses.items() if found.runs}
    common = set.intersection(*(set(found.documents) for found in losses.values()))
    baseline = losses.get(BASELINE)
    variants = [_variant_numbers(runs, losses.get(name), baseline, common, seed) for name, runs in groups.items()]
    return {"data": data, "variants": variants, "documents": len(common), "resamples": RESAMPLES}


class _Losses:
    """The losses of a variant, their mean over its seeds: `rows` [blocks, 3] and `documents` {id: [3]} hold loss sum,
    tokens and characters; rows without any token are left out."""

    def __init__(self, runs: list[Run]):
        self.runs = runs
        files = [read_json(run.folder / "row_losses.json") for run in runs]
        self.rows = np.mean([file["rows"] for file in files], axis=0) if files else np.empty((0, 3))
        self.rows = self.rows[self.rows[:, 1] > 0]
        documents: dict[str, list] = {}
        for file in files:
            for name, *numbers in file["documents"]:
                documents.setdefault(name, []).append(numbers)
        self.documents = {name: np.mean(numbers, axis=0) for name, numbers in documents.items()}

    def of(self, names: list[str]) -> np.ndarray:
        return np.stack([self.documents[name] for name in names])


def _data_numbers(plan: Plan, name: str, fingerprint: str) -> dict:
    manifest = read_json(plan.data_folder(name) / "manifest.json")
    return {
        "fingerprint": fingerprint,
        "vocabulary": manifest["tokenizer"]["vocabulary"],
        "splits": {split: manifest["splits"][split] for split in ("train", "validation")},
        "settings": plan.data.get(name) or manifest["options"],
    }


def _variant_numbers(runs: list[Run], losses: _Losses | None, baseline: _Losses | None, common: set, seed: int) -> dict:
    """What the report says of a variant; without a finished run, its status and the reason."""
    first = losses.runs[0] if losses else runs[0]
    numbers = {
        "name": first.variant,
        "data": first.data,
        "options": first.options,
        "folders": {str(run.seed): run.name for run in runs},
        "status": first.status,
        "reasons": {run.name: f"{run.status}: {run.reason}" for run in runs if run.status != FINISHED},
    }
    if losses is None:
        return numbers
    results = {run.name: read_json(run.trained / "result.json") for run in losses.runs}
    result = results[first.name]
    entropy = mean_interval(losses.rows[:, 0], losses.rows[:, 1], seed=seed)
    numbers |= {
        "cross_entropy": asdict(entropy),
        "perplexity": asdict(entropy.map(perplexity)),
        "tokens_evaluated": int(losses.rows[:, 1].sum()),
        "by_seed": {run.seed: read_json(run.folder / "row_losses.json")["cross_entropy"] for run in losses.runs},
        "difference": _difference(losses, baseline, seed),
        "per_character": _per_character(losses, baseline, sorted(common), seed),
        "tokens": result["tokens"],
        "steps": result["steps"],
        "rows_per_step": math.prod(
            result["options"][name] for name in ("batch_size", "gradient_accumulation", "num_processes")
        ),
        "parameters": result["parameters"],
        "tokens_per_second": statistics.fmean(found["tokens_per_second"] for found in results.values()),
        "peak_mib": max(found.get("peak_cuda_mib", found["peak_rss_mib"]) for found in results.values()),
        "seconds": statistics.fmean(found["seconds"] for found in results.values()),
        "hardware": result["hardware"],
        "gates": {name: found["gates"] for name, found in results.items() if found["gates"]},
        "curve": curve([read_jsonl(run.trained / "metrics.jsonl") for run in losses.runs]),
    }
    for name in ("state_bytes", "largest_batch", "sample", "positions"):
        numbers[name] = read_json(first.folder / f"{name}.json")
    if baseline is not None and losses is not baseline and first.data == baseline.runs[0].data:
        other = dict(curve([read_jsonl(run.trained / "metrics.jsonl") for run in baseline.runs]))
        numbers["curve_difference"] = [(at, loss - other[at]) for at, loss in numbers["curve"] if at in other]
    return numbers


def _difference(losses: _Losses, baseline: _Losses | None, seed: int) -> dict | None:
    """Cross-entropy minus the baseline's, paired by row; None for the baseline itself and for other rows than its own."""
    if baseline is None or losses is baseline or losses.runs[0].data != baseline.runs[0].data:
        return None
    return asdict(difference_interval(*losses.rows.T[:2], *baseline.rows.T[:2], seed=seed))


def _per_character(losses: _Losses, baseline: _Losses | None, common: list[str], seed: int) -> dict | None:
    """Nats and bits per character of the documents in `common`, and the difference to the baseline, paired by document."""
    if not common:
        return None
    own = losses.of(common)
    nats = mean_interval(own[:, 0], own[:, 2], seed=seed)
    found = {"nats": asdict(nats), "bits": asdict(nats.map(_bits)), "characters": int(own[:, 2].sum()), "difference": None}
    if baseline is not None and losses is not baseline:
        other = baseline.of(common)
        difference = difference_interval(own[:, 0], own[:, 2], other[:, 0], other[:, 2], seed=seed)
        found["difference"] = asdict(difference.map(_bits))
    return found


def _bits(nats: float) -> float:
    return nats / math.log(2)


def curve(runs: list[list[dict]]) -> list[tuple[int, float]]:
    """(tokens, validation loss) at the points that all runs of a variant have, the mean over them.

    Args:
        runs: the lines of each run's `metrics.jsonl`.
    """
    points = [{line["tokens"]: line["eval_loss"] for line in lines if "eval_loss" in line} for lines in runs]
    shared = sorted(set.intersection(*map(set, points)))
    return [(tokens, statistics.fmean(found[tokens] for found in points)) for tokens in shared]


def turning_points(difference: list[tuple[int, float]]) -> list[int]:
    """The tokens at which a difference of losses has another sign than at the point before."""
    signs = [(tokens, loss < 0) for tokens, loss in difference]
    return [tokens for (_, before), (tokens, now) in zip(signs, signs[1:], strict=False) if before != now]


def same_training(variants: list[dict]) -> bool:
    """Whether these finished variants read the same tokens in the same order: one data, one length, rows per step, seeds."""
    return len({(v["data"], v["tokens"], v["rows_per_step"], tuple(v["folders"])) for v in variants}) <= 1


def interval_of(numbers: dict | None) -> Interval | None:
    return None if numbers is None else Interval(**numbers)


def groups_of(variants: list[dict]) -> dict[str, list[dict]]:
    """The finished variants by their data, the scale's own first, each ranked by cross-entropy."""
    finished = [variant for variant in variants if "cross_entropy" in variant]
    names = sorted({variant["data"] for variant in finished}, key=lambda name: (name != BASE, name))
    return {
        name: sorted((v for v in finished if v["data"] == name), key=lambda v: v["cross_entropy"]["value"]) for name in names
    }
