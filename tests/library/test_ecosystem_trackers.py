"""`recipes/train.py --report_to`: what tensorboard and trackio hold after a run, and clear refusals."""

import json
import os
import sqlite3
import sys
from unittest import mock

import pytest

from cli import UserError
from running import SIZES, prepared_data, run
from support import stages
from training import setup

pytest.importorskip("tensorboard", reason="pip install tensorboard")
pytest.importorskip("trackio", reason="pip install trackio")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402


@pytest.mark.slow
def test_losses_and_gates_without_a_network(base, tmp_path):
    """The values of the run's own metrics.jsonl, by tag and step."""
    out = tmp_path / "tracked"
    options = ["--attention", "infini", "--segment_length", 16, "--max_steps", 4, "--eval_steps", 2, "--logging_steps", 1]
    command = [sys.executable, "recipes/train.py", "--data", prepared_data(base), "--out", out, *SIZES, *options]
    # A process of its own: trackio reads its folder's name when it is imported
    with mock.patch.dict(os.environ, TRACKIO_DIR=str(tmp_path / "trackio")):
        run(*command, "--eval_rows", 8, "--report_to", "tensorboard", "trackio")
    wanted = {"train/loss": {}, "eval/loss": {}}
    for line in stages.read_jsonl(out / "metrics.jsonl"):
        for name in ("train", "eval"):
            if f"{name}_loss" in line:
                wanted[f"{name}/loss"][line["step"]] = line[f"{name}_loss"]
        for layer, heads in line.get("gates", {}).items():
            for head, value in enumerate(heads):
                wanted.setdefault(f"eval/gates/layer_{layer}_head_{head}", {})[line["step"]] = value
    assert len(wanted) == 2 + 2 * 2 and len(wanted["train/loss"]) == 4 and len(wanted["eval/loss"]) == 2

    [events] = (out / "runs").rglob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    [database] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(text) for [text] in connection.execute("SELECT metrics FROM metrics ORDER BY id")]
        assert {name for [name] in connection.execute("SELECT DISTINCT run_name FROM metrics")} == {"tracked"}
    for tag, values in wanted.items():
        assert {event.step: event.value for event in scalars.Scalars(tag)} == pytest.approx(values, rel=1e-5), tag
        assert {row["train/global_step"]: row[tag] for row in rows if tag in row} == pytest.approx(values, rel=1e-5), tag


def test_an_unknown_tracker_is_refused_with_the_list():
    with pytest.raises(UserError, match="--report_to tensorbord: choose none, or any of tensorboard, trackio, wandb"):
        setup.check_trackers(["trackio", "tensorbord"])
    with pytest.raises(UserError, match="--report_to none"):
        setup.check_trackers(["none", "trackio"])
