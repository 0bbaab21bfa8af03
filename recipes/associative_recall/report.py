"""What all finished runs of a folder reached: the best learning rate of each model."""

from pathlib import Path

from support.markdown import markdown_table
from support.stages import read_json, write_text
from training.console import duration

ENTRIES = {"model": str, "mixer": str, "setting": dict, "tests": list}
ENTRIES |= dict.fromkeys(("state_bytes", "parameters", "epochs"), int)
ENTRIES |= dict.fromkeys(("accuracy", "low", "high", "seconds", "learning_rate"), float)
REMEDY = "delete it, and its command goes on from the last state"


def finished_runs(out: Path, setting: dict) -> list[dict]:
    """The results below `out` of runs with the same data and length, of each model that of its best
    learning rate; models with less state first."""
    results = [read_json(file, ENTRIES, REMEDY) for file in sorted(out.glob("*/result.json"))]
    same = [result for result in results if result["setting"] == setting]
    same.sort(key=lambda result: result["accuracy"], reverse=True)
    best = {result["model"]: result for result in reversed(same)}
    return sorted(best.values(), key=lambda result: (result["state_bytes"], result["model"]))


def write_report(out: Path, setting: dict) -> str:
    """Writes `table.md` into `out`, and returns the table."""
    runs = finished_runs(out, setting)
    header = ["model", "state (bytes)", "accuracy", "95 % interval"]
    header += [f"{test['length']}, {test['pairs']}" for test in runs[0]["tests"]]
    header += ["learning rate", "epochs", "time", "parameters"]
    table = markdown_table(header, [_cells(run) for run in runs], left=1)
    write_text(out / "table.md", table + "\n")
    return table


def _cells(run: dict) -> list[str]:
    cells = [run["model"], f"{run['state_bytes']:,}", f"{run['accuracy']:.3f}"]
    cells.append(f"{run['low']:.3f}–{run['high']:.3f}")
    cells += [f"{test['accuracy']:.3f}" for test in run["tests"]]
    cells += [f"{run['learning_rate']:g}", str(run["epochs"]), duration(run["seconds"])]
    return [*cells, f"{run['parameters']:,}"]
