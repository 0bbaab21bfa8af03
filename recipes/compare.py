"""Puts finished runs of recipes/train.py side by side: a table, and their validation losses on one plot.

    python recipes/compare.py --runs runs/self runs/infini --out runs/comparison
    python recipes/compare.py --runs runs/published runs/no_attention --baselines runs/ngrams.json --out runs/comparison

Writes OUT.md (the table) and OUT.png, and prints the table. --baselines adds what recipes/ngram_baseline.py wrote: rows
below the runs, and horizontal lines in the plot. Runs and baselines of different data are refused: their perplexities
would say nothing about the models.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from cli import UserError, exit_on_user_error, parse_options

COLUMNS = ("run", "attention", "parameters", "tokens", "cross-entropy", "perplexity", "tokens/s", "peak MiB")
UNTOLD = ("segment_length", "n_segments", "gate_init", "mask_special_tokens")  # the first two in other words


@dataclass
class Options:
    runs: list[str] = field(metadata={"help": "Out folders of finished runs.", "group": "runs"})
    out: str = field(metadata={"help": "Files to write, without suffix.", "group": "output"})
    baselines: list[str] | None = field(
        default=None,
        metadata={"help": "Files by ngram_baseline.py, of the runs' data and its validation rows.", "group": "runs"},
    )


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    results = {folder: read_result(Path(folder)) for folder in options.runs}
    fingerprints = {result["data_fingerprint"] for result in results.values()}
    streams = {result["options"].get("streaming") for result in results.values()}
    if len(fingerprints) > 1 or len(streams) > 1:
        raise UserError(f"--runs: {', '.join(results)} were trained on different data; compare runs on the same")
    ngrams = [ngram for file in options.baselines or () for ngram in read_baseline(Path(file), *fingerprints)]

    from plots.run import plot_comparison
    from support.markdown import markdown_table

    rows = [row(Path(folder), result) for folder, result in results.items()] + [ngram_row(ngram) for ngram in ngrams]
    table = markdown_table(list(COLUMNS), rows, left=2)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    lines = {Path(folder).name: read_lines(Path(folder) / "metrics.jsonl") for folder in results}
    levels = {ngram["name"]: ngram["cross_entropy"] for ngram in ngrams}
    plot_comparison(lines, out.with_suffix(".png"), levels)
    print(table)
    print(f"plot: {out.with_suffix('.png')}")


def read_result(folder: Path) -> dict:
    """A run's result.json, or a UserError that says what is missing."""
    path = folder / "result.json"
    if not path.is_file():
        raise UserError(f"--runs: {folder} has no result.json: it is no run of recipes/train.py, or not finished")
    return json.loads(path.read_text(encoding="utf-8"))


def read_baseline(file: Path, fingerprint: str) -> list[dict]:
    """The n-grams in a file of recipes/ngram_baseline.py; UserError unless they are of the data with this fingerprint and
    of the validation rows."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        made_of, split, ngrams = content["data_fingerprint"], content["split"], content["orders"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--baselines: {file} was not written by recipes/ngram_baseline.py ({error!r})") from error
    if made_of != fingerprint:
        raise UserError(f"--baselines: {file} is of other data than the runs; count the n-grams of theirs")
    if split != "validation":
        raise UserError(f"--baselines: {file} is of the {split} rows, the runs' losses are of the validation rows")
    return [ngram | {"training_tokens": content["training_tokens"]} for ngram in ngrams]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row(folder: Path, result: dict) -> list[str]:
    return [
        folder.name,
        describe(json.loads((folder / "config.json").read_text(encoding="utf-8"))),
        f"{result['parameters']:,}",
        f"{result['tokens']:,}",
        f"{result['cross_entropy']:.4f}",
        f"{result['perplexity']:.2f}",
        f"{result['tokens_per_second']:,.0f}",
        f"{result.get('peak_cuda_mib', result['peak_rss_mib']):,.0f}",
    ]


def ngram_row(ngram: dict) -> list[str]:
    before = f"counts after {ngram['order']} token{'s' * (ngram['order'] != 1)}"
    tokens = f"{ngram['training_tokens']:,}"
    return [ngram["name"], before, "", tokens, f"{ngram['cross_entropy']:.4f}", f"{ngram['perplexity']:.2f}", "", ""]


def describe(config: dict) -> str:
    """The attention of a run in a few words, from its config.json."""
    from hf_infini.configurations import attention_of
    from hf_infini.options import MEMORY_OPTIONS, MemoryOptions

    kind = attention_of(SimpleNamespace(**config))
    words = [{"self": "self-attention", "none": "no attention"}.get(kind, kind)]
    if kind == "local":
        words.append(f"window of {config['sliding_window']}")
    if kind == "infini":
        number, length = config.get("n_segments"), config["segment_length"]
        words.append(f"{number} segments" if number else f"segments of {length}")
        told = [name for name in MEMORY_OPTIONS if name not in UNTOLD]
        given = {name: config.get(name, getattr(MemoryOptions, name)) for name in told}
        changed = {name: value for name, value in given.items() if value != getattr(MemoryOptions, name)}
        words += [f"{name.replace('_', ' ')} {value}" for name, value in changed.items()]
    of_scratch, encoding = config["model_type"] == "causal_mha", config.get("position_encoding", "learned")
    if of_scratch and kind != "none":
        words.append(f"score {config['score']}")
    if of_scratch or encoding != "learned":
        words.append("no positions" if encoding == "none" else f"{encoding} positions")
    return ", ".join(words)


if __name__ == "__main__":
    main()
