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

from cli import UserError, exit_on_user_error, parse_options

COLUMNS = ("run", "attention", "parameters", "tokens", "cross-entropy", "perplexity", "tokens/s", "peak MiB")


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
    if len(fingerprints) > 1:
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
    of_scratch = result["options"].get("model") == "causal_mha"
    return [
        folder.name,
        describe_causal_mha(folder / "config.json") if of_scratch else describe_attention(result["options"]),
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


def describe_causal_mha(file: Path) -> str:
    """The attention of a causal_mha run in a few words, from its config.json: the options may leave out what it is."""
    config = json.loads(file.read_text(encoding="utf-8"))
    words = {
        "global": ["global"],
        "local": [f"local, window of {config['sliding_window']}"],
        "infini": [f"infini, segments of {config['segment_length']}"],
        "none": ["no attention"],
    }[config["attention"]]
    if config["attention"] == "infini":
        defaults = {"update_rule": "linear", "local_segments": 0}
        words += [f"{name.replace('_', ' ')} {config[name]}" for name in defaults if config[name] != defaults[name]]
    words += [] if config["attention"] == "none" else [f"score {config['score']}"]
    encoding = config["position_encoding"]
    return ", ".join([*words, "no positions" if encoding == "none" else f"{encoding} positions"])


def describe_attention(options: dict) -> str:
    """The attention of a GPT-2 run in a few words, from the options in its result.json."""
    if options["attention"] == "self":
        return "self-attention"
    if options["n_segments"]:
        words = [f"infini, {options['n_segments']} segments"]
    else:
        words = [f"infini, segments of {options['segment_length']}" if options["segment_length"] else "infini, 8 segments"]
    defaults = {"update_rule": "linear", "feature_map": "elu", "denominator": "separate", "local_segments": 0}
    defaults |= {"memory_conv": 0, "memory_write": "equal", "memory_init": "zeros", "layers": None}
    for name, default in defaults.items():
        if options.get(name) not in (None, default):
            words.append(f"{name.replace('_', ' ')} {options[name]}")
    if options["position_encoding"] not in (None, "learned"):
        words.append(f"{options['position_encoding']} positions")
    return ", ".join(words)


if __name__ == "__main__":
    main()
