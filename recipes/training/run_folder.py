"""A run's folder, made to survive a kill at any point, and the callback that writes into it while the run trains.

It holds `run.json` (the options it was started with), `checkpoint-N/` (complete once they hold `complete.json`),
`metrics.jsonl`, and, when it is finished, the model and `result.json`.
"""

import json
import math
import shutil
import statistics
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from cli import UserError
from hf_infini.training import gate_values
from support.stages import write_json

COMPLETE = "complete.json"


def check_same_run(folder: Path, options: dict) -> bool:
    """Whether `folder` already holds this run. Another run's folder is a UserError that names what differs.

    Args:
        folder: the run's folder; need not exist.
        options: what decides the run's outcome, JSON-safe.

    Returns True when the folder's `run.json` equals `options`, False when the folder is new or empty. An option that one
    of the two does not have counts as None.
    """
    file = Path(folder) / "run.json"
    if not file.is_file():
        if Path(folder).is_dir() and any(Path(folder).iterdir()):
            raise UserError(f"{folder} is not empty and holds no run of this recipe: choose another --out")
        return False
    started_with = json.loads(file.read_text(encoding="utf-8"))
    different = [
        f"{name} was {started_with.get(name)!r} and is now {options.get(name)!r}"
        for name in sorted(started_with.keys() | options.keys())
        if started_with.get(name) != options.get(name)
    ]
    if different:
        raise UserError(
            f"{folder} holds a run with other options: {'; '.join(different)}. Continue it with its own options, or "
            "choose another --out"
        )
    return True


def mark_complete(checkpoint: Path, **notes) -> None:
    """Writes the list of a checkpoint's files and their sizes: the last thing that happens to a checkpoint."""
    files = {str(file.relative_to(checkpoint)): file.stat().st_size for file in _files_of(checkpoint)}
    write_json(checkpoint / COMPLETE, {"files": files, **notes})


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N` whose every file is there in full, or None. A process killed while it was saving, or
    while it was deleting an old checkpoint, leaves others behind; they are passed over."""
    complete = [path for path in _checkpoints(folder) if _is_complete(path)]
    return max(complete, key=checkpoint_step, default=None)


def drop_other_checkpoints(folder: Path, keep: Path | None) -> None:
    """Deletes the checkpoints that a resumed run will not use, half-written ones among them.

    They would count towards the limit by which the Trainer deletes old checkpoints, and could push out the good one.
    """
    for path in _checkpoints(folder):
        if path != keep:
            shutil.rmtree(path)


def checkpoint_step(path: Path) -> int:
    """The optimiser step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]


def _files_of(checkpoint: Path) -> list[Path]:
    return [file for file in checkpoint.rglob("*") if file.is_file() and not file.name.startswith(COMPLETE)]


def _is_complete(checkpoint: Path) -> bool:
    marker = checkpoint / COMPLETE
    if not marker.is_file():
        return False
    files = json.loads(marker.read_text(encoding="utf-8"))["files"]
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == files[name] for name in files)


class RunRecorder(TrainerCallback):
    """Writes `metrics.jsonl`, marks complete checkpoints, and times the training without evaluation and saving.

    Args:
        folder: the run's folder.
        tokens_per_step: tokens that one optimiser step reads, over all processes.
        resumed_from: the checkpoint that training continues from, or None.
    """

    def __init__(self, folder: Path, tokens_per_step: int, resumed_from: Path | None):
        self.file = Path(folder) / "metrics.jsonl"
        self.tokens_per_step = tokens_per_step
        self.seconds = 0.0  # spent in training steps, earlier starts of the same run counted in
        self.lines: list[dict] = []
        if resumed_from is not None:
            self.seconds = json.loads((resumed_from / COMPLETE).read_text(encoding="utf-8"))["training_seconds"]
            step = checkpoint_step(resumed_from)
            if self.file.is_file():  # what a killed process logged after its last checkpoint is logged again
                self.lines = [line for line in read_jsonl(self.file) if line["step"] <= step]
        self._clock = self._last_logged = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.file.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        self._clock = time.perf_counter()
        self._last_logged = (state.global_step, self.seconds)

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now
        if control.should_save:  # a resumed run starts a new average there, so this one does too
            control.should_log = True

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise UserError(
                    f"the training loss is {logs['loss']} at step {state.global_step}: training has diverged. Lower "
                    "--learning_rate, or train with --precision float32"
                )
            steps = state.global_step - self._last_logged[0]
            seconds = self.seconds - self._last_logged[1]
            self._last_logged = (state.global_step, self.seconds)
            line |= {"train_loss": logs["loss"], "learning_rate": logs["learning_rate"]}
            line |= {"grad_norm": logs.get("grad_norm"), "tokens_per_second": steps * self.tokens_per_step / seconds}
        elif "eval_loss" in logs:
            line |= {"eval_loss": logs["eval_loss"], "eval_perplexity": logs["eval_perplexity"]}
            gates = gate_values(model)
            if gates:
                line["gates"] = gates
        else:
            return
        gates = [value for layer in gate_values(model).values() for value in layer]
        if gates:
            line |= {"gate_min": min(gates), "gate_mean": statistics.fmean(gates), "gate_max": max(gates)}
        line["seconds"] = round(self.seconds, 3)
        self.lines.append(line)
        if state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def on_evaluate(self, args, state, control, **kwargs):
        self._clock = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        # Every process writes its own random state into the checkpoint: it is complete when the slowest is done
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", training_seconds=self.seconds)
        self._clock = time.perf_counter()


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; a last line that a killed process left unfinished is dropped."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
