"""What a training says in a terminal or a log: a table that grows by one line a step, and at the end what was reached."""

import datetime
import json
import shlex
import time
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)

from .run_folder import say

# Name in the table → its width
COLUMNS = {"step": 9, "loss": 8, "validation": 11, "tokens/s": 10, "gates": 11, "time left": 11}
FILES = ("model*.safetensors", "tokenizer.json", "result.json", "metrics.jsonl", "*.png")
PROMPT_TOKENS, NEW_TOKENS = 16, 32  # of the sample at the end


class StepTable(TrainerCallback):
    """Says each line of `metrics.jsonl` ([`run_folder.RunRecorder`] comes first) as a line of a table, on standard error.

    An evaluation stands in the line of its step. Only the main process speaks.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.first_step = time.perf_counter(), state.global_step
        self.waiting: dict = {}  # what is known of a step that is still evaluated
        self.columns: list[str] = []

    def on_log(self, args, state, control, **kwargs):
        line = state.log_history[-1].get("line")
        if line is None or not state.is_world_process_zero:
            return
        line = self.waiting | line
        self.waiting = line if "eval_loss" not in line and control.should_evaluate else {}
        if self.waiting:
            return
        if not self.columns:
            self.columns = [name for name in COLUMNS if name != "gates" or "gate_min" in line]
            say("".join(f"{name:>{COLUMNS[name]}}" for name in self.columns))
        say("".join(f"{self.cell(name, line, state):>{COLUMNS[name]}}" for name in self.columns))

    def cell(self, name: str, line: dict, state) -> str:
        """The text of a column, empty where the step has no such number."""
        if name == "step":
            return f"{line['step']:,}"
        if name == "gates":
            return f"{line['gate_min']:.2f}–{line['gate_max']:.2f}"
        if name == "time left":
            seconds = (time.perf_counter() - self.began) / (line["step"] - self.first_step)
            return duration(seconds * (state.max_steps - line["step"]))
        entry, shape = {
            "loss": ("train_loss", ".4f"), "validation": ("eval_loss", ".4f"), "tokens/s": ("tokens_per_second", ",.0f"),
        }[name]  # fmt: skip
        return f"{line[entry]:{shape}}" if entry in line else ""


def speak_in_lines(trainer: Trainer) -> Trainer:
    """The trainer, with a [`StepTable`] in the place of its bars and printed dictionaries."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepTable)
    return trainer


def duration(seconds: float) -> str:
    """`0:05:12`, or `1 day, 2:03:04`."""
    return str(datetime.timedelta(seconds=round(seconds)))


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: torch.Tensor, seed: int) -> tuple[str, str]:
    """The beginning of a row `[tokens]`, and how the model continues it (drawn, top_p 0.9)."""
    prompt = row[: min(PROMPT_TOKENS, max(1, len(row) // 2))][None].to(model.device)
    room = min(NEW_TOKENS, len(row) - prompt.shape[1])  # positions may end with the row
    ends = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None]
    set_seed(seed)
    with torch.inference_mode():
        output = model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=room,
            do_sample=True,
            top_p=0.9,
            pad_token_id=ends[0],
        )
    begin, rest = output[0].split([prompt.shape[1], output.shape[1] - prompt.shape[1]])
    return tokenizer.decode(begin, skip_special_tokens=True), tokenizer.decode(rest, skip_special_tokens=True)


def ending(out: Path, data: Path, result: dict, shown: tuple[str, str]) -> str:
    """What a run has reached, a sample, its files, and the commands that come next; names and texts in columns.

    Args:
        result: the content of its result.json.
        shown: of [`sample`].
    """
    files = [file.name for pattern in FILES for file in sorted(out.glob(pattern))]
    speed = f"{result['tokens_per_second']:,.0f} tokens/s"
    prompt, continuation = (json.dumps(text, ensure_ascii=False) for text in shown)
    model = shlex.quote(str(out))
    rows = {
        "reached": f"cross-entropy {result['cross_entropy']:.4f} nats per token, perplexity {result['perplexity']:.2f}, "
        f"on {result['validation_tokens']:,} validation tokens",
        "trained": f"{result['tokens']:,} tokens in {duration(result['seconds'])}, {speed}",
        "sample": f"{prompt} goes on {continuation}",
        "files": f"{out}: {', '.join(files)}",
        "next": f"python recipes/evaluate_model.py --model {model} --data {shlex.quote(str(data))}\n"
        f"{'':9}python recipes/generate.py --model {model} --prompt {shlex.quote(' '.join(shown[0].split()) or 'A')}",
    }
    return "\n".join(f"{name:<9}{text}" for name, text in rows.items())
