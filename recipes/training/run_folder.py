"""A run's folder, which survives a kill at any point, and the callback that writes into it while
the run trains.

It holds `run.json` (the options it was started with), `checkpoint-N/` (complete once they hold
`complete.json`), `metrics.jsonl`, and, when it is finished, the model and `result.json`.
`complete.json` and `result.json` have the checksums of the files that they are about: what is gone
or has changed since is neither gone on from nor taken for finished.
"""

import contextlib
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerState

from cli import UserError
from hf_infini.tools.training import gate_values
from support import stages
from support.stages import check_unchanged, checksums, read_json, sealed, to_json, write_json

RESULT = stages.RESULT
COMPLETE, OPTIONS, METRICS = "complete.json", "run.json", "metrics.jsonl"
# What readers of result.json use of it; recipes/train.py writes it
RESULT_ENTRIES = dict.fromkeys(
    ("cross_entropy", "perplexity", "seconds", "tokens_per_second", "peak_rss_mib"), float
)
RESULT_ENTRIES |= dict.fromkeys(("validation_tokens", "tokens", "steps", "parameters"), int)
RESULT_ENTRIES |= dict.fromkeys(("gates", "options", "versions"), dict)
RESULT_ENTRIES |= dict.fromkeys(("data_fingerprint", "command", "hardware", "date"), str)


@contextlib.contextmanager
def open_run(folder: Path, options: dict) -> Iterator[tuple[bool, Path | None]]:
    """Locks the folder for this run and yields how far the run is: whether it is finished, and its
    newest whole checkpoint. A finished run is not locked. All processes of a launch call this; the
    main process locks the folder and looks, and the others get what it found.

    Raises UserError, in all of them, when another process holds the folder, or where
    [`check_same_run`], [`read_result`] or [`last_complete_checkpoint`] does."""

    def is_finished() -> bool:
        check_same_run(folder, options)
        return (folder / RESULT).exists() and bool(read_result(folder))

    with contextlib.ExitStack() as stack:
        found = [None]
        if PartialState().is_main_process:
            try:
                # before the lock, which writes: a folder of something else stays as it is
                finished = is_finished()
                if not finished:
                    stack.enter_context(stages.locked_folder(folder))
                    finished = is_finished()  # as its last holder left it
                found = [(finished, None if finished else last_complete_checkpoint(folder))]
            except (UserError, OSError) as error:
                found = [error]
        broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        yield found[0]


def begin_run(folder: Path, options: dict, checkpoint: Path | None) -> None:
    """Writes `run.json`, and deletes the checkpoints that the run will not use, half-written ones
    among them: they would count towards the limit by which the Trainer deletes old ones, and could
    push out the good one."""
    write_json(folder / OPTIONS, options)
    for path in _checkpoints(folder):
        if path != checkpoint:
            shutil.rmtree(path)


def check_same_run(folder: Path, options: dict) -> None:
    """UserError, naming what differs, where `folder` holds something else than this run or nothing.

    Args:
        folder: the run's folder; need not exist.
        options: what decides the run's outcome, JSON-safe; `run.json` must equal it. An option that
            one of the two does not have counts as None.
    """
    entries = list(folder.iterdir()) if folder.is_dir() else []
    if all(entry.name == stages.LOCK_FOLDER or entry.match(stages.LEFTOVER) for entry in entries):
        return
    if not (folder / OPTIONS).exists():
        raise UserError(
            f"{folder} is not empty and holds no run of this recipe: choose another --out"
        )
    before = read_json(folder / OPTIONS, {}, "choose another --out, or delete the folder")
    names = sorted(before.keys() | options.keys())
    different = [name for name in names if before.get(name) != options.get(name)]
    if different:
        what = (
            f"{name} was {before.get(name)!r} and is now {options.get(name)!r}"
            for name in different
        )
        raise UserError(
            f"{folder} holds a run with other options: {'; '.join(what)}. Continue it with its own "
            "options, or choose another --out"
        )


def read_result(folder: Path) -> dict:
    """The result.json of a finished run; a UserError where the run is not finished, or this or
    another of its files is damaged."""
    if not (folder / RESULT).exists():
        raise UserError(
            f"{folder} has no {RESULT}: it is not a run of recipes/train.py, or finish it with its "
            "command"
        )
    remedy = "delete it, and the run's own command goes on from its last checkpoint"
    result = read_json(folder / RESULT, RESULT_ENTRIES, remedy)
    check_unchanged(folder)
    return result


def mark_complete(checkpoint: Path) -> None:
    """Writes `complete.json`, with the checksums of all files, when these are on the disk: the last
    thing that happens to a checkpoint."""
    stages.flush_all(checkpoint)
    write_json(checkpoint / COMPLETE, sealed({}, checksums(checkpoint)))


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N` that is as it was written, to its end, or None where none was
    written to its end; what is passed over is said.

    A process killed while it was saving, or while it was deleting an old checkpoint, leaves others
    behind.

    Raises UserError where some were written to the end, and all of them have lost files since: to
    begin again would delete what may be put right.
    """
    found, passed_over, damaged = None, [], False
    for checkpoint in sorted(_checkpoints(folder), key=checkpoint_step, reverse=True):
        if not (checkpoint / COMPLETE).is_file():
            passed_over.append(f"{checkpoint.name} was not written to the end")
        elif what := _damage_since(checkpoint):
            passed_over.append(what)
            damaged = True
        else:
            found = checkpoint
            break
    said = "; ".join(passed_over)
    if found is None and damaged:
        raise UserError(
            f"{said}: put the files back as they were saved, or delete the checkpoints in "
            f"{folder}, and the run begins again"
        )
    if passed_over:
        say(f"{said}: going on {f'from {found.name}' if found else 'from the start'}")
    return found


def _damage_since(checkpoint: Path) -> str:
    """What has become of a checkpoint since it was written to its end, in words; "" for nothing."""
    try:
        record = read_json(checkpoint / COMPLETE, {})
    except UserError as error:
        return str(error)
    if not record:
        say(f"{checkpoint.name} is of an earlier version, without checksums: it is not checked")
    return stages.damage(checkpoint / COMPLETE, record)


def checkpoint_step(path: Path) -> int:
    """The optimiser step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]


class RunRecorder(TrainerCallback):
    """Writes `metrics.jsonl`, marks complete checkpoints, and times the training without evaluation
    and saving. The lines are also in the Trainer's state, so that every checkpoint has those up to
    its step, see [`lines_of`].

    Args:
        tokens_per_step: tokens that one optimiser step reads, over all processes.
        reads_memory: whether any token reads a memory, so that gates mean anything."""

    def __init__(self, folder: Path, tokens_per_step: int, reads_memory: bool = True):
        self.reads_memory = reads_memory
        self.file = Path(folder) / METRICS
        self.tokens_per_step = tokens_per_step

    def on_train_begin(self, args, state, control, **kwargs):
        lines = lines_of(state)
        # what a killed process logged after its last checkpoint is logged again
        if state.is_world_process_zero:
            write_lines(self.file.parent, lines)
        # in training steps, earlier starts of the run counted in
        self.seconds = lines[-1]["seconds"] if lines else 0.0
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
                    f"the training loss is {logs['loss']} at step {state.global_step}: training "
                    "has diverged. Lower the learning rate, or train with --precision float32"
                )
            steps, seconds = self._last_logged
            steps, seconds = state.global_step - steps, self.seconds - seconds
            self._last_logged = (state.global_step, self.seconds)
            line |= {"train_loss": logs["loss"], "learning_rate": logs["learning_rate"]}
            line |= {"grad_norm": logs.get("grad_norm")}
            line |= {"tokens_per_second": steps * self.tokens_per_step / seconds}
        elif "eval_loss" in logs:
            line |= {name: logs[name] for name in ("eval_loss", "eval_perplexity")}
        else:
            return
        if gates := gate_values(model) if self.reads_memory else {}:
            line |= {"gates": gates} if "eval_loss" in logs else {}
            values = [value for layer in gates.values() for value in layer]
            line |= {"gate_min": min(values), "gate_mean": statistics.fmean(values)}
            line["gate_max"] = max(values)
        line["seconds"] = round(self.seconds, 3)
        state.log_history[-1]["line"] = line
        if state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(to_json(line, self.file) + "\n")

    def on_evaluate(self, args, state, control, **kwargs):
        self._clock = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        # Every process writes its own random state into the checkpoint: it is complete when the
        # slowest is done
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._clock = time.perf_counter()


def lines_of(state: TrainerState) -> list[dict]:
    """The lines of `metrics.jsonl` up to a state of the Trainer."""
    return [entry["line"] for entry in state.log_history if "line" in entry]


def write_lines(folder: Path, lines: list[dict]) -> None:
    """Writes `metrics.jsonl` as a whole."""
    file = folder / METRICS
    stages.write_text(file, "".join(to_json(line, file) + "\n" for line in lines))


def say(text: str) -> None:
    """A note on standard error, from the first process only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, file=sys.stderr, flush=True)
