"""Grids of runs: the combinations of option values, what became of each, and the tables of their losses."""

import itertools
import math
import re
import statistics
from dataclasses import dataclass, field

from cli import NotPossible, UserError
from support.markdown import markdown_table

RESERVED = ("data", "out", "config", "seed")  # the sweep's own options
FINISHED, IMPOSSIBLE, FAILED = "finished", NotPossible.status, UserError.status


@dataclass
class Run:
    """One combination with one seed: `values` by option, and, when it has ended, what became of it."""

    values: dict[str, str]
    seed: int | None = None
    status: str = ""
    reason: str = ""  # why it did not finish, in a line
    result: dict = field(default_factory=dict)  # its result.json

    @property
    def name(self) -> str:
        """The name of the run's folder: `score=dot,position_encoding=rope,seed=0`."""
        return re.sub(r"[^\w.,=+-]", "_", ",".join(f"{name}={value}" for name, value in self.options.items()))

    @property
    def options(self) -> dict[str, str]:
        """The options of recipes/train.py that this run sets, the seed among them if the sweep has seeds."""
        return self.values | ({} if self.seed is None else {"seed": str(self.seed)})


@dataclass(frozen=True)
class Row:
    """A combination over its seeds. `mean` and `deviation` (of the sample; None of a single run) are of the validation
    cross-entropy of the runs that finished, `parameters` the same in all, `tokens_per_second` and `seconds` their means."""

    values: dict[str, str]
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == FINISHED]

    @property
    def status(self) -> str:
        """That of its runs: finished if one is, failed if one is and none finished."""
        return next(status for status in (FINISHED, FAILED, IMPOSSIBLE) if any(run.status == status for run in self.runs))

    @property
    def mean(self) -> float:
        return self.mean_of("cross_entropy")

    @property
    def deviation(self) -> float | None:
        losses = [run.result["cross_entropy"] for run in self.finished]
        return statistics.stdev(losses) if len(losses) > 1 else None

    def mean_of(self, name: str) -> float:
        """The mean of a number in the results of the finished runs; infinite when there is none."""
        return statistics.fmean(run.result[name] for run in self.finished) if self.finished else math.inf


# --- what is run ------------------------------------------------------------------------------------------------------


def parse_grid(entries: list[str]) -> dict[str, list[str]]:
    """`["score=dot,general"]` → `{"score": ["dot", "general"]}`; UserError for what has another form."""
    grid = {}
    for entry in entries:
        name, _, values = entry.removeprefix("--").partition("=")
        values = values.split(",")
        if not name or not all(values):
            raise UserError(f"--grid {entry}: give OPTION=VALUE,VALUE, without spaces")
        if name in RESERVED:
            raise UserError(f"--grid {entry}: give --{'seeds' if name == 'seed' else name} to the sweep itself")
        if name in grid or len(set(values)) < len(values):
            raise UserError(f"--grid {entry}: {name if name in grid else 'a value'} is named twice")
        grid[name] = values
    return grid


def combinations(grid: dict[str, list[str]], seeds: list[int] | None) -> list[Run]:
    """A run for each combination of values and each seed; the seeds change fastest."""
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: a seed is named twice")
    products = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    runs = [Run(values, seed) for values in products for seed in (seeds or [None])]
    if len({run.name for run in runs}) < len(runs):
        raise UserError("--grid: two combinations would share a folder, as their values differ in punctuation alone")
    return runs


def outcome(status: int, failure: dict | None, log: str) -> tuple[str, str]:
    """What became of a run, and why it did not finish.

    A model that its options cannot make is not possible, whatever else goes wrong is a failure.

    Args:
        status: the exit status.
        failure: what it wrote into its [`cli.FAILURE_FILE`], None where it wrote nothing.
        log: what it printed, whose last line is shown where nothing better is known.
    """
    if status == 0:
        return FINISHED, ""
    if failure is not None:
        return failure["status"], failure["reason"]
    lines = [line.strip() for line in log.replace("\r", "\n").splitlines() if line.strip()]
    return FAILED, f"exit status {status}: {lines[-1] if lines else 'no output'}"


# --- tables -----------------------------------------------------------------------------------------------------------


def rows_of(runs: list[Run]) -> list[Row]:
    """One row per combination, in the order of the runs. Runs on different data are a UserError."""
    fingerprints = {run.result["data_fingerprint"] for run in runs if run.status == FINISHED}
    if len(fingerprints) > 1:
        raise UserError("the finished runs were trained on different data, which no table can compare: use another --out")
    groups = itertools.groupby(runs, key=lambda run: run.values)
    return [Row(values, list(members)) for values, members in groups]


def best_of(rows: list[Row]) -> Row | None:
    """The row of the lowest mean cross-entropy; None when nothing finished."""
    return min((row for row in rows if row.finished), key=lambda row: row.mean, default=None)


def loss_text(row: Row) -> str:
    """`1.9755`, over several seeds `1.9755 ± 0.0101`; the status of a combination without a finished run."""
    if not row.finished:
        return row.status
    text = f"{row.mean:.4f}" + ("" if row.deviation is None else f" ± {row.deviation:.4f}")
    return text + ("" if len(row.finished) == len(row.runs) else f" ({len(row.finished)} of {len(row.runs)} seeds)")


def pivot_table(rows: list[Row], grid: dict[str, list[str]]) -> str:
    """Cross-entropies of a grid of two options, the first one's values downwards; the best is bold."""
    (down, down_values), (across, across_values) = grid.items()
    best, texts = best_of(rows), {}
    for row in rows:
        text = loss_text(row)
        texts[row.values[down], row.values[across]] = f"**{text}**" if row is best else text
    lines = [[value, *(texts[value, other] for other in across_values)] for value in down_values]
    return markdown_table([f"{down} \\ {across}", *across_values], lines, left=1)


def ranking_table(rows: list[Row], grid: dict[str, list[str]]) -> str:
    """Every combination with its numbers, the best first and bold, those that did not finish last."""
    header = [*grid, "cross-entropy", "perplexity", "parameters", "tokens/s", "seconds"]
    best, lines = best_of(rows), []
    for row in sorted(rows, key=lambda row: (row.mean, row.status)):
        numbers = [""] * 4
        if row.finished:
            numbers = [f"{math.exp(row.mean):.2f}", f"{row.finished[0].result['parameters']:,}"]
            numbers += [f"{row.mean_of('tokens_per_second'):,.0f}", f"{row.mean_of('seconds'):,.1f}"]
        text = loss_text(row)
        lines.append([*row.values.values(), f"**{text}**" if row is best else text, *numbers])
    return markdown_table(header, lines, left=len(grid))
