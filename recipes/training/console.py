"""What a training says in a terminal or a log: a line for each step that it logs, and at the end
what was reached."""

import datetime
import shlex
import time
from pathlib import Path

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from .run_folder import say

LOSSES = {"train_loss": "loss", "eval_loss": "validation"}


class StepLines(TrainerCallback):
    """The main process says each line of `metrics.jsonl` on standard error;
    [`run_folder.RunRecorder`] must come first."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.first_step = time.perf_counter(), state.global_step

    def on_log(self, args, state, control, **kwargs):
        line = state.log_history[-1].get("line")
        if line is None or not state.is_world_process_zero:
            return
        words = [f"step {line['step']:>6,}"]
        words += [f"{label} {line[name]:.4f}" for name, label in LOSSES.items() if name in line]
        if "tokens_per_second" in line:
            words.append(f"{line['tokens_per_second']:,.0f} tokens/s")
        if "gate_min" in line:
            words.append(f"gates {line['gate_min']:.2f} to {line['gate_max']:.2f}")
        seconds = (time.perf_counter() - self.began) / (line["step"] - self.first_step)
        say("   ".join([*words, f"{duration(seconds * (state.max_steps - line['step']))} left"]))


def speak_in_lines(trainer: Trainer) -> Trainer:
    """The trainer, with [`StepLines`] in the place of its bars and printed dictionaries."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepLines)
    return trainer


def duration(seconds: float) -> str:
    """`0:05:12`, or `1 day, 2:03:04`."""
    return str(datetime.timedelta(seconds=round(seconds)))


def ending(out: Path, data: Path, result: dict) -> str:
    """What a run has reached, by its result.json, and the commands that come next; names and texts
    in columns."""
    model, speed = shlex.quote(str(out)), f"{result['tokens_per_second']:,.0f} tokens/s"
    return f"""\
reached  cross-entropy {result["cross_entropy"]:.4f} nats per token, perplexity \
{result["perplexity"]:.2f}, on {result["validation_tokens"]:,} validation tokens
trained  {result["tokens"]:,} tokens in {duration(result["seconds"])}, {speed}
model    {out}
next     python recipes/evaluate_model.py --model {model} --data {shlex.quote(str(data))}
         python recipes/generate.py --model {model} --prompt A"""
