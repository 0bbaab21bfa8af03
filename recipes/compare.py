"""Puts finished runs of recipes/train.py side by side: a table, and their validation losses on one plot.

    python recipes/compare.py --runs runs/self runs/infini --out runs/comparison

Writes OUT.md (the table) and OUT.png, and prints the table. Runs on different data are refused: their perplexities would
say nothing about the models.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from hf_infini.cli import UserError, exit_on_user_error, parse_options

COLUMNS = ("run", "attention", "parameters", "tokens", "cross-entropy", "perplexity", "tokens/s", "peak MiB")


@dataclass
class Options:
    runs: list[str] = field(metadata={"help": "Out folders of finished runs, two or more."})
    out: str = field(metadata={"help": "Files to write, without suffix."})


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    results = {folder: read_result(Path(folder)) for folder in options.runs}
    fingerprints = {json.dumps(result["data_fingerprint"], sort_keys=True) for result in results.values()}
    if len(fingerprints) > 1:
        raise UserError(f"--runs: {', '.join(results)} were trained on different data; compare runs on the same")

    from hf_infini import plots

    table = markdown([row(Path(folder).name, result) for folder, result in results.items()])
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    lines = {Path(folder).name: read_lines(Path(folder) / "metrics.jsonl") for folder in results}
    plots.plot_comparison(lines, out.with_suffix(".png"))
    print(table)
    print(f"plot: {out.with_suffix('.png')}")


def read_result(folder: Path) -> dict:
    """A run's result.json, or a UserError that says what is missing."""
    path = folder / "result.json"
    if not path.is_file():
        raise UserError(f"--runs: {folder} has no result.json: it is no run of recipes/train.py, or not finished")
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row(name: str, result: dict) -> list[str]:
    return [
        name,
        describe_attention(result["options"]),
        f"{result['parameters']:,}",
        f"{result['tokens']:,}",
        f"{result['cross_entropy']:.4f}",
        f"{result['perplexity']:.2f}",
        f"{result['tokens_per_second']:,.0f}",
        f"{result.get('peak_cuda_mib', result['peak_rss_mib']):,.0f}",
    ]


def describe_attention(options: dict) -> str:
    """The attention of a run in a few words, from the options in its result.json."""
    if options["attention"] == "self":
        return "self-attention"
    if options["n_segments"]:
        words = [f"infini, {options['n_segments']} segments"]
    else:
        words = [f"infini, segments of {options['segment_length']}" if options["segment_length"] else "infini, 8 segments"]
    for name, default in (("update_rule", "linear"), ("local_segments", 0), ("memory_init", "zeros"), ("layers", None)):
        if options[name] not in (None, default):
            words.append(f"{name.replace('_', ' ')} {options[name]}")
    return ", ".join(words + (["segment positions"] if options["positions"] == "segment" else []))


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table with its columns aligned, so that it reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    aligned = [[cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))]
               for r in [list(COLUMNS), *rows]]  # fmt: skip
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [aligned[0], rule, *aligned[1:]])


if __name__ == "__main__":
    main()
