"""What `recipes/train.py` needs around the Trainer: its data, the length of a run, its
processes."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from cli import UserError
from hf_infini.tools.parallel import check_shards
from support import measurement
from support.prepared import open_rows

from .run_folder import lines_of, write_lines


def data_fingerprint(manifest: dict) -> str:
    """16 hexadecimal digits that change with the tokens of a prepared folder's rows; its name and
    place do not count."""
    splits = manifest["splits"].items()
    found = {name: [split[key] for key in ("sha256", "blocks", "tokens")] for name, split in splits}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def load_rows(data: Path, rows_per_step: int) -> tuple:
    """The training and validation rows of a prepared folder, of which training gets as many as make
    whole steps; UserError when there are too few."""
    splits = ("train", "validation")
    train, validation = (open_rows(data, split).with_format("torch") for split in splits)
    if len(train) < rows_per_step or len(validation) == 0:
        raise UserError(
            f"{data} has {len(train)} training and {len(validation)} validation rows, but one "
            f"step takes {rows_per_step} and an evaluation at least 1: lower --batch_size, or "
            "prepare more text"
        )
    return train.select(range(len(train) // rows_per_step * rows_per_step)), validation


def training_arguments(out: Path | str, options: dict, **more) -> TrainingArguments:
    """The Trainer's arguments of a run that can be resumed. Building them joins the process group.

    Args:
        out: the folder of its checkpoints.
        options: of a recipe: `use_cpu`, `precision`, `seed`, `batch_size`, `gradient_accumulation`
            and `save_steps`.
        more: others of the Trainer's.
    """
    use_cpu = options["use_cpu"] or not torch.accelerator.is_available()
    native, precision = measurement.supports_bfloat16(use_cpu), options["precision"]
    return TrainingArguments(
        output_dir=str(out),
        use_cpu=use_cpu,
        seed=options["seed"],
        per_device_train_batch_size=options["batch_size"],
        gradient_accumulation_steps=options["gradient_accumulation"],
        bf16=precision == "bf16" or precision == "auto" and native,
        remove_unused_columns=False,
        save_steps=options["save_steps"],
        # the newest is incomplete while it is being written: the one before must still be there
        save_total_limit=2,
        logging_nan_inf_filter=False,  # it hides divergence, and costs a synchronisation per step
        **more,
    )


def train_to_end(trainer: Trainer, checkpoint: Path | None) -> tuple:
    """Trains from the start or from a complete checkpoint. Returns the model of the last step, in
    float32, and the lines of `metrics.jsonl`.

    Both are read from the last checkpoint: the Trainer's model keeps its autocast wrapper, and a
    run that was killed after its last step has nothing left to train.
    """
    last = Path(trainer.args.output_dir) / f"checkpoint-{trainer.args.max_steps}"
    model_class = type(trainer.model)  # sharding makes another of it
    if checkpoint != last:  # otherwise the Trainer would take one step more
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    lines = lines_of(TrainerState.load_from_json(last / TRAINER_STATE_NAME))
    if trainer.args.should_save:
        write_lines(last.parent, lines)
    return model_class.from_pretrained(last, dtype=torch.float32).to(trainer.args.device), lines


def leave_process_group(trainer: Trainer) -> None:
    """Ends the trainer's process group, when there is one; nothing is trained or exchanged
    afterwards.

    The distributed wrapper of the model goes first. As the group's last owner it would end the
    group while it holds Python's lock, for which the group's own thread waits if it is still
    putting away the last exchange: both for ever.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


def gate_rate(given: float | None, config) -> float | None:
    """The learning rate of the gates, 0.01 by default; UserError where it was given and the model
    has no gates."""
    if getattr(config, "infini_layers", ()):
        return 0.01 if given is None else given
    if given is not None:
        what = "--gate_learning_rate is for the gates of a memory"
        raise UserError(f"{what}, and this model has none: leave it out")
    return None


def number_of_steps(run, steps_per_epoch: int, tokens_per_step: int) -> int:
    """Optimiser steps until the first of the ends that were set, `epochs`, `max_tokens` and
    `max_steps`, each a positive number or None; one epoch when none was."""
    ends = [run.max_steps, run.max_tokens and math.ceil(run.max_tokens / tokens_per_step)]
    ends.append(run.epochs and math.ceil(run.epochs * steps_per_epoch))
    return min(filter(None, ends), default=steps_per_epoch)


def check_processes(arguments: TrainingArguments, sharing: int | None = None) -> None:
    """UserError when processes were started of which so many cannot share rows, or one process sees
    several GPUs."""
    if sharing is not None and arguments.world_size % sharing:
        raise UserError(
            f"--context_parallel_size {sharing}, but {arguments.world_size} processes started: as "
            f"many must start as {sharing} divides, such as `torchrun --nproc_per_node {sharing}`"
        )
    if arguments.n_gpu > 1:
        raise UserError(
            f"one process sees {arguments.n_gpu} GPUs: start with `torchrun --nproc_per_node "
            f"{arguments.n_gpu}`, or choose one with CUDA_VISIBLE_DEVICES=0"
        )


def check_sharing(run, optimizer, config, context: int) -> None:
    """UserError or ValueError when processes cannot share rows of so many tokens as
    `--context_parallel_size` asks them to; of the options of recipes/train.py, and the model's
    configuration."""
    if run.context_parallel_size in (None, 1):
        return
    refused = {"--dilute_with": run.dilute_with, "--torch_compile": optimizer.torch_compile}
    refused["DeepSpeed"] = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if given := [name for name, value in refused.items() if value]:
        raise UserError(
            f"--context_parallel_size does not go with {given[0]}: leave one of the two out"
        )
    check_shards(config, context, run.context_parallel_size)


def checkpointing_name() -> str:
    """TrainingArguments' name for gradient checkpointing, which changed between the supported
    versions."""
    names = {entry.name for entry in dataclasses.fields(TrainingArguments)}
    return f"{'activation' if 'activation_checkpointing' in names else 'gradient'}_checkpointing"
