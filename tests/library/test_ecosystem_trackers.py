"""`recipes/train.py --report_to`: what tensorboard and trackio hold after a run, and clear refusals."""

import json
import os
import sqlite3
import sys
from pathlib import Path
from unittest import mock

import pytest

from running import SIZES, load_recipe, prepared_data, run

pytestmark = pytest.mark.slow  # they share trained runs


train = load_recipe("train")

pytest.importorskip("tensorboard", reason="pip install tensorboard")
pytest.importorskip("trackio", reason="pip install trackio")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run that reports to both, trackio's files beside it."""
    out = tmp_path_factory.mktemp("trackers") / "tracked"
    options = ["--attention", "infini", "--segment_length", 16, "--max_steps", 4, "--eval_steps", 2, "--logging_steps", 1]
    data = prepared_data(tmp_path_factory.getbasetemp())
    command = [sys.executable, "recipes/train.py", "--data", data, "--out", out, *SIZES, *options, "--eval_rows", 8]
    # A process of its own: trackio reads its folder's name when it is imported
    with mock.patch.dict(os.environ, TRACKIO_DIR=str(out.parent / "trackio")):
        run(*command, "--report_to", "tensorboard", "trackio")
    return out


def logged(folder: Path, *names: str) -> dict[int, list]:
    """The run's own record: the values of the lines of metrics.jsonl that have all these names, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: [line[name] for name in names] for line in lines if all(name in line for name in names)}


def expected_values(folder: Path) -> dict[str, dict[int, float]]:
    """By tag and step, what a tracker must hold."""
    expected = {"train/loss": {step: loss for step, [loss] in logged(folder, "train_loss").items()}}
    expected["eval/loss"] = {step: loss for step, [loss] in logged(folder, "eval_loss").items()}
    for step, [layers] in logged(folder, "gates").items():
        for layer, heads in layers.items():
            for head, value in enumerate(heads):
                expected.setdefault(f"eval/gates/layer_{layer}_head_{head}", {})[step] = value
    assert len(expected) == 2 + 2 * 2 and len(expected["train/loss"]) == 4 and len(expected["eval/loss"]) == 2
    return expected


def test_tensorboards_files_hold_losses_and_gates(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (folder / "runs").rglob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    for tag, values in expected_values(folder).items():
        assert {event.step: event.value for event in scalars.Scalars(tag)} == pytest.approx(values, rel=1e-5), tag


def test_trackio_holds_losses_and_gates_without_a_network(folder):
    [database] = (folder.parent / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(text) for [text] in connection.execute("SELECT metrics FROM metrics ORDER BY id")]
        assert {name for [name] in connection.execute("SELECT DISTINCT run_name FROM metrics")} == {"tracked"}
    for tag, values in expected_values(folder).items():
        found = {row["train/global_step"]: row[tag] for row in rows if tag in row}
        assert found == pytest.approx(values, rel=1e-5), tag
