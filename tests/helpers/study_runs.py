"""A study at toy size: its file, the command line that runs it, and its commands without the time that processes need."""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

from cli import FAILURE_FILE
from running import load_recipe, sample_text

STEPS = 12
STUDY = """
data: {vocab_size: 300, context: 64, validation: 0.2}
train: {n_layer: 2, n_embd: 32, n_head: 2, batch_size: 4, gradient_accumulation: 1, max_steps: 12, eval_steps: 4,
        save_steps: 4, use_cpu: true, precision: float32}
variants:
  s1: {attention: self}
  best: {attention: infini, segment_length: 16, position_encoding: rope}
  letters: {attention: self, data: {fraction: 0.6, tokenizer: characters}}
  nowhere: {attention: self, data: {tokenizer: no/such_tokenizer}}
  odd: {n_head: 3}
evaluate: {long: {length: 512, min_characters: 500, device: cpu}}
"""


def write_study(base) -> None:
    """The file of the study and its corpus."""
    lines = sample_text().splitlines()
    texts = ["\n".join(lines[start : start + 30]) for start in range(0, len(lines), 30)]
    rows = [json.dumps({"id": f"{number:03}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (base / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    (base / "toy.yaml").write_text(STUDY, encoding="utf-8")


def arguments(base, *options) -> list[str]:
    words = ["--study", base / "toy.yaml", "--source", base / "text.jsonl", "--out", base / "out", *options]
    return [*map(str, words)]


def run_here(tasks, title, jobs=1, threads=1) -> None:
    """Stands in for `studies.processes.run_tasks`: every command in this process, one after the other."""
    for task in tasks:
        task.log.parent.mkdir(parents=True, exist_ok=True)
        name, status = Path(task.command[1]).stem, 0
        with (
            open(task.log, "w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            mock.patch.object(sys, "argv", task.command[1:]),
            mock.patch.dict(os.environ, {FAILURE_FILE: str(task.failure)}),
        ):
            try:
                load_recipe(name).main()
            except SystemExit as stopped:
                status = stopped.code
            except Exception:
                traceback.print_exc()
                status = 1
        task.finish(status)
