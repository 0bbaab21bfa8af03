"""What `recipes/train.py` is made of: the data, how long a run is, the optimiser's groups, the Trainer."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_infini_cli import UserError

from .dilution import Dilution
from .gate import gates_of
from .metrics import evaluate_rows
from .rows import RowReader

# The trackers that a run can report to, and what pip calls their packages.
TRACKERS = {
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet_ml": "comet-ml",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}

# --- data, ends and processes -----------------------------------------------------------------------------------------

ROWS_OF_THE_HEAD = 256  # logits of few places are made of a multiple of so many


def data_fingerprint(manifest: dict) -> str:
    """16 hexadecimal digits that change with the tokens of a prepared folder's rows; its name and place do not count."""
    splits = {name: [split["sha256"], split["blocks"], split["tokens"]] for name, split in manifest["splits"].items()}
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()[:16]


def load_rows(data: Path, rows_per_step: int) -> tuple:
    """The training and validation rows of a prepared folder, of which training gets as many as make whole steps.

    Raises UserError when there are too few.
    """
    from datasets import load_from_disk

    train, validation = (load_from_disk(str(data / split)).with_format("torch") for split in ("train", "validation"))
    if len(train) < rows_per_step or len(validation) == 0:
        raise UserError(
            f"{data} has {len(train)} training and {len(validation)} validation rows, but one step takes {rows_per_step} "
            "and an evaluation at least 1: lower --batch_size, or prepare more text"
        )
    return train.select(range(len(train) // rows_per_step * rows_per_step)), validation


def train_to_end(trainer: Trainer, checkpoint: Path | None):
    """Trains from the start or from a complete checkpoint, and returns the model of the last step, in float32.

    That model is read from the last checkpoint: the one in the Trainer keeps its autocast wrapper, and a run that was
    killed after its last step has nothing left to train.
    """
    last = Path(trainer.args.output_dir) / f"checkpoint-{trainer.args.max_steps}"
    model_class = type(trainer.model)  # sharding makes another of it
    _teach_torch_cpu_zero()
    if checkpoint != last:  # otherwise the Trainer would take one step more
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return model_class.from_pretrained(last, dtype=torch.float32).to(trainer.args.device)


@functools.cache  # torch cannot take the same registration twice
def _teach_torch_cpu_zero() -> None:
    """Of several CPU processes, transformers 5.17 reads the optimiser's state to "cpu:0", which torch.load does not know."""
    torch.serialization.register_package(
        priority=99, tagger=lambda storage: None, deserializer=lambda storage, place: storage if place == "cpu:0" else None
    )


def leave_process_group(trainer: Trainer) -> None:
    """Ends the trainer's process group, when there is one; nothing is trained or exchanged afterwards.

    The distributed wrapper of the model goes first. As the group's last owner it would end the group while it holds
    Python's lock, for which the group's own thread waits if it is still putting away the last exchange: both for ever.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


def check_positive(options, *names: str) -> None:
    """UserError when one of the named options is set and not greater than 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} must be greater than 0, got {value}")


def number_of_steps(run, steps_per_epoch: int, tokens_per_step: int) -> int:
    """Optimiser steps until the first of the ends that were set; one epoch when none was.

    Args:
        run: an object with `epochs`, `max_tokens` and `max_steps`, each a positive number or None.
    """
    ends = []
    if run.max_steps is not None:
        ends.append(run.max_steps)
    if run.max_tokens is not None:
        ends.append(math.ceil(run.max_tokens / tokens_per_step))
    if run.epochs is not None or not ends:
        ends.append(math.ceil((1.0 if run.epochs is None else run.epochs) * steps_per_epoch))
    return min(ends)


def check_processes(arguments: TrainingArguments, expected: int | None) -> None:
    """UserError when other than the expected number of processes was started, or one process sees several GPUs."""
    if expected not in (None, arguments.world_size):
        raise UserError(
            f"--num_processes {expected}, but {arguments.world_size} started. `accelerate launch --cpu` starts "
            f"one whatever it is told: use `torchrun --nproc_per_node {expected}` or `accelerate launch "
            f"--multi_gpu --num_processes {expected}` (which starts CPU processes where there is no GPU)"
        )
    if arguments.n_gpu > 1:
        raise UserError(
            f"one process sees {arguments.n_gpu} GPUs: start with `torchrun --nproc_per_node {arguments.n_gpu}`, or "
            "choose one with CUDA_VISIBLE_DEVICES=0"
        )


def check_sharding(trainer: Trainer) -> None:
    """UserError when `accelerate launch` was told to shard the model and does not."""
    for name, variable, on in (
        ("FSDP", "ACCELERATE_USE_FSDP", trainer.is_fsdp_enabled),
        ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED", trainer.is_deepspeed_enabled),
    ):
        if os.environ.get(variable, "").lower() == "true" and not on:
            raise UserError(
                f"accelerate's configuration asks for {name}, which accelerate has for GPUs alone, and this process is on "
                f"{trainer.args.device}: start it without that configuration, or on GPUs and without --use_cpu"
            )


def check_trackers(names: list[str]) -> list[str]:
    """The names that TrainingArguments' `report_to` takes; "none" stands for no tracker at all.

    Raises UserError when one of them is unknown or its package is not installed.
    """
    if names == ["none"]:
        return []
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report_to {name}: choose none, or any of {', '.join(TRACKERS)}")
        if name not in installed:
            raise UserError(f"--report_to {name} needs a package that is not installed: pip install {TRACKERS[name]}")
    return names


def checkpointing_name() -> str:
    """TrainingArguments' name for gradient checkpointing, which changed between the supported versions."""
    names = {entry.name for entry in dataclasses.fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def say(text: str) -> None:
    """A note on standard error, from the first process only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, file=sys.stderr, flush=True)


# --- optimisation -----------------------------------------------------------------------------------------------------


def parameter_groups(model, learning_rate: float, gate_learning_rate: float, weight_decay: float) -> list[dict]:
    """The optimiser's groups: matrices; vectors, and what an attention layer owns beside its projections (scores, tables of
    distances, learned memory starts), without decay; gates with their own rate.

    At a usual learning rate the gates hardly leave their start, and weight decay pulls them back to sigmoid = 0.5;
    a memory start has no reason to be small either.
    """
    groups = {
        "matrices": {"params": [], "lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"params": [], "lr": learning_rate, "weight_decay": 0.0},
        "gates": {"params": [], "lr": gate_learning_rate, "weight_decay": 0.0},
    }
    gates = {parameter for gate in gates_of(model).values() for parameter in gate.parameters()}
    for name, parameter in model.named_parameters():
        if parameter in gates:
            kind = "gates"
        elif parameter.ndim < 2 or ".attn." in name and not name.endswith(".weight"):
            kind = "vectors"  # biases, layer norms, and what an attention layer owns beside its projections
        else:
            kind = "matrices"
        groups[kind]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def gate_values(model) -> dict[str, list[float]]:
    """sigmoid(gate) of each head, by layer: the share of the memory in that head's output; empty without gates."""
    logits = {name.split(".h.")[1].split(".")[0]: gate().detach() for name, gate in gates_of(model).items()}
    for layer, shard in logits.items():
        if isinstance(shard, DTensor):
            logits[layer] = shard.full_tensor()  # from all processes, which all come here
    return {layer: [round(value, 5) for value in torch.sigmoid(gate.float()).tolist()] for layer, gate in logits.items()}


class PerplexityTrainer(Trainer):
    """A Trainer whose evaluation is token-weighted and keeps one batch of logits at a time.

    Args:
        *args, **kwargs: the Trainer's own.
        eval_rows: how many of the validation rows `evaluate()` reads; None reads all.
        eval_reader: makes the inputs of an evaluation from these rows.
        optimizer_of: makes the optimiser of a model; None leaves it to the Trainer. Where a model is to be sharded, none can
            be given ready-made (`optimizers`).
        dilution: makes the past that training rows begin with; None: they begin with nothing.
    """

    def __init__(
        self,
        *args,
        eval_rows: int | None = None,
        eval_reader: RowReader | None = None,
        optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
        dilution: Dilution | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.dilution = dilution
        self.eval_rows = eval_rows
        self.eval_reader = eval_reader
        self.optimizer_of = optimizer_of
        # Each call of a model whose weights lie in pieces in all processes is one of all processes
        self.is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.optimizer_of is not None:
            self.optimizer = self.optimizer_of(self.model if model is None else model)
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As the Trainer's. Where most labels are −100, logits are made of the other places alone: the head over a whole
        vocabulary is much of a small model's work."""
        context = {"use_cache": False}
        if self.dilution is not None:
            ids = inputs["input_ids"]
            context = {"use_cache": True, "past_key_values": self.dilution.past(model, len(ids), ids.device)}
        learned = inputs["labels"][:, 1:] != -100
        one_process = model is self.model and not self.is_sharded  # a distributed wrapper must see the whole call
        if return_outputs or not one_process or bool(learned.float().mean() > 0.5):
            return super().compute_loss(model, inputs | context, return_outputs, num_items_in_batch)
        context |= {name: inputs[name] for name in ("position_ids",) if name in inputs}
        with self.accelerator.autocast():
            hidden = model.base_model(inputs["input_ids"], **context).last_hidden_state
            places, targets = hidden[:, :-1][learned], inputs["labels"][:, 1:][learned]
            count = len(targets)
            # In half precision torch keeps what it has prepared for every number of rows that a product ever had on a CPU:
            # gigabytes after some hundred steps, unless there are few such numbers
            places = F.pad(places, (0, 0, 0, -count % ROWS_OF_THE_HEAD))
            targets = F.pad(targets, (0, -count % ROWS_OF_THE_HEAD), value=-100)
            logits = model.get_output_embeddings()(places)
        total = F.cross_entropy(logits.float(), targets, reduction="sum")
        return total / (count if num_items_in_batch is None else num_items_in_batch)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Cross-entropy of the validation rows, in the precision of training; every process reads its share.

        Trackers (`report_to`) also get each head's sigmoid(gate).
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = rows if self.eval_rows is None else rows.select(range(min(self.eval_rows, len(rows))))
        with self.accelerator.autocast():
            size, reader = self.args.per_device_eval_batch_size, self.eval_reader
            total = evaluate_rows(self.model, rows, size, reader, together=self.is_sharded)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in total.items()}
        metrics[f"{metric_key_prefix}_loss"] = total["cross_entropy"]
        if self.args.report_to:  # otherwise they are in metrics.jsonl alone, and not among what is printed
            for layer, heads in gate_values(self.model).items():
                for head, value in enumerate(heads):
                    metrics[f"{metric_key_prefix}_gates/layer_{layer}_head_{head}"] = value
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def create_model_card(self, *args, **kwargs) -> None:
        """The Trainer's draft of a card, which `push_to_hub` asks for; a card of recipes/write_card.py stays as it is."""
        from huggingface_hub import ModelCard

        file = Path(self.args.output_dir) / "README.md"
        if not file.is_file() or "generated_from_trainer" in (ModelCard.load(file).data.tags or []):
            super().create_model_card(*args, **kwargs)
