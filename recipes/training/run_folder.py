"""A run's folder, which survives a kill at any point, and the callback that writes into it while the run trains.

It holds `run.json` (the options it was started with), `checkpoint-N/` (complete once they hold `complete.json`),
`metrics.jsonl`, and, when it is finished, the model and `result.json`.
"""

import contextlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerState

from cli import UserError
from hf_infini.training import gate_values
from support.stages import LEFTOVER, LOCK_FOLDER, locked_folder, write_json

COMPLETE = "complete.json"


@contextlib.contextmanager
def open_run(folder: Path, options: dict) -> Iterator[tuple[bool, Path | None]]:
    """Locks the folder for this run and yields how far the run is: whether it is finished, and its newest complete
    checkpoint. A finished run is not locked.

    All processes of a launch call this. The main process locks the folder and looks, and the others get what it found.

    Raises UserError, in all of them, when another process holds the folder, or where [`check_same_run`] does.
    """

    def look() -> tuple[bool, Path | None]:
        check_same_run(folder, options)
        return (folder / "result.json").is_file(), last_complete_checkpoint(folder)

    with contextlib.ExitStack() as stack:
        found = [None]
        if PartialState().is_main_process:
            try:
                found = [look()]  # before the lock, which writes: a folder of something else stays as it is
                if not found[0][0]:
                    stack.enter_context(locked_folder(folder))
                    found = [look()]  # as its last holder left it
            except UserError as error:
                found = [error]
        broadcast_object_list(found)
        if isinstance(found[0], UserError):
            raise found[0]
        yield found[0]


def begin_run(folder: Path, options: dict, checkpoint: Path | None) -> None:
    """Writes `run.json`, and deletes the checkpoints that the run will not use, half-written ones among them.

    They would count towards the limit by which the Trainer deletes old checkpoints, and could push out the good one.
    """
    write_json(folder / "run.json", options)
    for path in _checkpoints(folder):
        if path != checkpoint:
            shutil.rmtree(path)


def check_same_run(folder: Path, options: dict) -> None:
    """UserError, naming what differs, where `folder` holds something else than this run or nothing.

    Args:
        folder: the run's folder; need not exist.
        options: what decides the run's outcome, JSON-safe; `run.json` must equal it. An option that one of the two does not
            have counts as None.
    """
    file = folder / "run.json"
    if not file.is_file():
        entries = folder.iterdir() if folder.is_dir() else ()
        if not all(entry.name == LOCK_FOLDER or entry.match(LEFTOVER) for entry in entries):
            raise UserError(f"{folder} is not empty and holds no run of this recipe: choose another --out")
        return
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


def mark_complete(checkpoint: Path) -> None:
    """Writes the list of a checkpoint's files and their sizes: the last thing that happens to a checkpoint."""
    files = {str(file.relative_to(checkpoint)): file.stat().st_size for file in _files_of(checkpoint)}
    write_json(checkpoint / COMPLETE, {"files": files})


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N` whose every file is there in full, or None. A process killed while it was saving, or
    while it was deleting an old checkpoint, leaves others behind; they are passed over."""
    complete = [path for path in _checkpoints(folder) if _is_complete(path)]
    return max(complete, key=checkpoint_step, default=None)


def checkpoint_step(path: Path) -> int:
    """The optimiser step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]


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

    The lines are also kept in the Trainer's state, so that every checkpoint has those up to its step, see [`lines_of`].

    Args:
        folder: the run's folder.
        tokens_per_step: tokens that one optimiser step reads, over all processes.
    """

    def __init__(self, folder: Path, tokens_per_step: int):
        self.file = Path(folder) / "metrics.jsonl"
        self.tokens_per_step = tokens_per_step

    def on_train_begin(self, args, state, control, **kwargs):
        lines = lines_of(state)
        if state.is_world_process_zero:  # what a killed process logged after its last checkpoint is logged again
            self.file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self.seconds = lines[-1]["seconds"] if lines else 0.0  # in training steps, earlier starts of the run counted in
        self._last_logged = (state.global_step, self.seconds)
        self._clock = time.perf_counter()

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
        else:
            return
        if gates := gate_values(model):
            line |= {"gates": gates} if "eval_loss" in logs else {}
            values = [value for layer in gates.values() for value in layer]
            line |= {"gate_min": min(values), "gate_mean": statistics.fmean(values), "gate_max": max(values)}
        line["seconds"] = round(self.seconds, 3)
        state.log_history[-1]["line"] = line
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
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._clock = time.perf_counter()


def lines_of(state: TrainerState) -> list[dict]:
    """The lines of `metrics.jsonl` up to a state of the Trainer."""
    return [entry["line"] for entry in state.log_history if "line" in entry]


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
