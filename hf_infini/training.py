"""What `recipes/train.py` is made of: run folders that survive a kill, parameter groups, evaluation, measurements.

A run's folder holds `run.json` (the options it was started with), `checkpoint-N/` (complete once they hold
`complete.json`), `metrics.jsonl`, and, when it is finished, the model and `result.json`.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from .cli import UserError
from .configuration_infini_gpt2 import OPTIONS as INFINI_OPTIONS
from .configuration_infini_gpt2 import InfiniGPT2Config
from .metrics import evaluate_rows
from .modeling_infini_gpt2 import InfiniGPT2LMHeadModel

COMPLETE = "complete.json"


def write_json(path: Path, content) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never half of it."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


# --- the run's folder -------------------------------------------------------------------------------------------------


def check_same_run(folder: Path, options: dict) -> bool:
    """Whether `folder` already holds this run. Another run's folder is a UserError that names what differs.

    Args:
        folder: the run's folder; need not exist.
        options: what decides the run's outcome, JSON-safe.

    Returns True when the folder's `run.json` equals `options`, False when the folder is new or empty.
    """
    file = Path(folder) / "run.json"
    if not file.is_file():
        if Path(folder).is_dir() and any(Path(folder).iterdir()):
            raise UserError(f"{folder} is not empty and holds no run of this recipe: choose another --out")
        return False
    started_with = json.loads(file.read_text(encoding="utf-8"))
    names = sorted(started_with.keys() | options.keys())
    different = [
        f"{name} was {started_with.get(name)!r} and is now {options.get(name)!r}"
        for name in names
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


# --- model and data ---------------------------------------------------------------------------------------------------


def build_model(attention: str, init_from: str | None, shape, tokenizer, context: int):
    """A GPT-2 with the asked-for attention, with random weights or those of a model folder.

    Args:
        attention: `"self"` or `"infini"`.
        init_from: folder of a GPT-2 or infini model, or None. Options left at None stay as that model has them.
        shape: an object with n_layer, n_embd, n_head, dropout and the `INFINI_OPTIONS` (read for `"infini"` only).
        context: tokens per row.

    Raises UserError when the options and the model's folder do not go together.
    """
    sizes = {name: getattr(shape, name) for name in ("n_layer", "n_embd", "n_head")}
    infini = {name: getattr(shape, name) for name in INFINI_OPTIONS if getattr(shape, name) is not None}
    if attention == "infini":
        config_class, model_class = InfiniGPT2Config, InfiniGPT2LMHeadModel
    else:
        config_class, model_class, infini = GPT2Config, GPT2LMHeadModel, {}
    if init_from is None:
        base = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": len(tokenizer), "n_positions": context}
        base |= {name: value for name, value in sizes.items() if value is not None}
        if attention == "infini" and not {"segment_length", "n_segments"} & infini.keys():
            infini["segment_length"] = max(1, context // 8)
    else:
        if not (Path(init_from) / "config.json").is_file():
            raise UserError(f"--init_from: {init_from} holds no config.json; give the folder of a saved model")
        given = AutoConfig.from_pretrained(init_from)
        if given.model_type not in ("gpt2", config_class.model_type):
            raise UserError(
                f"--init_from: {init_from} is a {given.model_type} model, --attention {attention} starts from "
                f"{' or '.join(sorted({'gpt2', config_class.model_type}))}"
            )
        for name, value in sizes.items():
            if value not in (None, getattr(given, name)):
                raise UserError(f"--{name} {value}, but {init_from} has {getattr(given, name)}: leave --{name} out")
        if given.vocab_size < len(tokenizer):
            raise UserError(f"--init_from: {init_from} knows {given.vocab_size} tokens, the data has {len(tokenizer)}")
        base = {name: value for name, value in given.to_dict().items() if name not in ("model_type", "architectures")}
        if {"segment_length", "n_segments"} & infini.keys():  # exactly one of the two: a new one replaces the old
            base |= {"segment_length": None, "n_segments": None}
        if base["n_positions"] < context and (infini.get("positions") or base.get("positions")) != "segment":
            raise UserError(
                f"--init_from: {init_from} has {base['n_positions']} positions, the data's rows {context} tokens: "
                "prepare shorter rows, or use --attention infini --positions segment"
            )
    base |= {name: shape.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    base |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        config = config_class(**base | infini | {"use_cache": False})
    except Exception as error:  # strict dataclasses wrap their ValueErrors in classes of their own
        raise UserError(f"these model options do not go together: {error}") from error
    if init_from is None:
        model = model_class(config)
    else:
        model = model_class.from_pretrained(init_from, config=config, dtype=torch.float32)
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def data_fingerprint(manifest: dict) -> str:
    """16 hexadecimal digits that change with the tokens of a prepared folder's rows; its name and place do not count."""
    splits = {name: [split["sha256"], split["blocks"], split["tokens"]] for name, split in manifest["splits"].items()}
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()[:16]


def collate_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
    """[B, T] input_ids of rows of one length; the labels are the same tensor, which the model shifts itself."""
    input_ids = torch.stack([torch.as_tensor(row["input_ids"]) for row in rows])
    return {"input_ids": input_ids, "labels": input_ids}


def train_to_end(trainer: Trainer, checkpoint: Path | None):
    """Trains from the start or from a complete checkpoint, and returns the model of the last step, in float32.

    That model is read from the last checkpoint: the one in the Trainer keeps its autocast wrapper, and a run that was
    killed after its last step has nothing left to train.
    """
    last = Path(trainer.args.output_dir) / f"checkpoint-{trainer.args.max_steps}"
    if checkpoint != last:  # otherwise the Trainer would take one step more
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return type(trainer.model).from_pretrained(last, dtype=torch.float32).to(trainer.args.device)


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
    """The optimiser's groups: matrices; vectors and learned memory starts without decay; gates with their own rate.

    At a usual learning rate the gates hardly leave their start, and weight decay pulls them back to sigmoid = 0.5;
    a memory start has no reason to be small either.
    """
    groups = {
        "matrices": {"params": [], "lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"params": [], "lr": learning_rate, "weight_decay": 0.0},
        "gates": {"params": [], "lr": gate_learning_rate, "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if name.endswith(".attn.gate"):
            kind = "gates"
        elif parameter.ndim < 2 or ".attn." in name and not name.endswith(".weight"):
            kind = "vectors"  # biases, layer norms, and what an attention layer owns beside its projections
        else:
            kind = "matrices"
        groups[kind]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def gate_values(model) -> dict[str, list[float]]:
    """sigmoid(gate) of each head, by layer: the share of the memory in that head's output; empty without gates."""
    return {
        name.split(".h.")[1].split(".")[0]: [round(value, 5) for value in torch.sigmoid(gate.detach().float()).tolist()]
        for name, gate in model.named_parameters()
        if name.endswith(".attn.gate")
    }


class PerplexityTrainer(Trainer):
    """A Trainer whose evaluation is token-weighted and keeps one batch of logits at a time.

    Args, beside Trainer's:
        eval_rows: how many of the validation rows `evaluate()` reads; None reads all.
    """

    def __init__(self, *args, eval_rows: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_rows = eval_rows

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Cross-entropy of the validation rows, in the precision of training; every process reads its share."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = rows if self.eval_rows is None else rows.select(range(min(self.eval_rows, len(rows))))
        with self.accelerator.autocast():
            total = evaluate_rows(self.model, rows, self.args.per_device_eval_batch_size)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in total.items()}
        metrics[f"{metric_key_prefix}_loss"] = total["cross_entropy"]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


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
