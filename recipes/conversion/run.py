"""A conversion: its rows, its model, and what is fitted and trained for it."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import ConcatDataset
from transformers import TrainingArguments, set_seed

from cli import UserError, one_line
from cli.names import check_name
from hf_infini import fit_keep_score, patch_model
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.adapter import restore_adapter
from hf_infini.models.loading import fingerprint, load_causal_lm, load_tokenizer
from hf_infini.options import context_limit
from support.prepared import open_folders, read_tokenizer
from support.stages import read_json, read_manifest, write_json
from training import console, run_folder, setup

from .trainer import DistillationTrainer, first_beyond

SCORES = "keep_score.json"


class Conversion:
    """What a conversion reads, and the model that it makes.

    Args:
        options: of recipes/convert.py; memory: those of [`patch_model`].

    Attributes:
        identity: what decides the outcome, JSON-safe; fingerprints: of the data, by folder.
        rows: datasets of ids and labels, by folder; context: tokens of each of their rows.
        arguments: the Trainer's, which also say where and with what precision everything is computed.

    Raises UserError where a folder lacks rows or has rows of several lengths, or the output folder is another's.
    """

    def __init__(self, options, memory: dict):
        self.options, self.memory, self.out = options, memory, Path(options.out)
        self.fingerprints = {folder: setup.data_fingerprint(read_manifest(folder)) for folder in options.data}
        self.identity = {**vars(options), "memory": memory, "data": [*self.fingerprints.values()]}
        del self.identity["out"]
        run_folder.check_same_run(self.out, self.identity)
        folders = open_folders("--data", options.data, "train")
        self.context = len(next(iter(folders.values()))[0]["input_ids"])
        self.rows = {folder: rows.with_transform(with_labels) for folder, rows in folders.items()}
        self.arguments: TrainingArguments = setup.training_arguments(
            self.out / "lora", vars(options), max_steps=options.steps or 1, learning_rate=options.learning_rate,
            lr_scheduler_type="cosine", warmup_steps=0.05, weight_decay=0.0, logging_steps=1, report_to=[],
        )  # fmt: skip
        setup.check_processes(self.arguments)

    def load_model(self):
        """The plain model with its window, of which nothing is trained.

        Raises UserError when it cannot have them, or the data are of another tokenizer, or their rows too long or too short.
        """
        name = self.options.model
        check_name("--model", name)
        try:
            model = load_causal_lm(name, dtype=torch.float32)
            tokenizer = load_tokenizer(name, model)
            for folder in self.options.data:
                if fingerprint(read_tokenizer(folder)) != fingerprint(tokenizer):
                    raise UserError(f"{folder} was prepared with another tokenizer than that of {name}")
            limit = context_limit(model.config)
            patch_model(model, **self.memory)
        except (OSError, ValueError) as error:
            raise UserError(f"--model: {one_line(error)}") from error
        if limit is not None and self.context > limit:
            raise UserError(f"--data has rows of {self.context:,} tokens, but {name} has {limit:,} learned positions")
        if self.context <= (seen := first_beyond(model.config.get_text_config(decoder=True))) + 1:
            raise UserError(
                f"--data has rows of {self.context:,} tokens, and window, sinks and kept tokens hold all of the first "
                f"{seen:,}: prepare longer rows, or give a smaller --segment_length or --kept_tokens"
            )
        return model.requires_grad_(False).to(self.arguments.device).eval()

    @torch.no_grad()
    def fit_score(self, model) -> dict:
        """Fits the score of kept tokens, or takes what was fitted before; entries of `result.json`."""
        share = -(-self.options.fit_rows // len(self.rows))  # of all folders in equal parts
        rows = [row["input_ids"] for part in self.rows.values() for row in part.select(range(min(len(part), share)))]
        layers, file = memory_layers(model), self.out / SCORES
        if file.is_file():
            found = read_json(file, {"by_layer": dict})["by_layer"]
        else:
            config = model.config.get_text_config(decoder=True)
            with torch.autocast(self.arguments.device.type, torch.bfloat16, enabled=self.arguments.bf16):
                fit_keep_score(model, rows, distance=(config.window[1] + 1) * config.window[0])
            found = {name: layer.keep_weight.tolist() for name, layer in layers.items()}
            if self.arguments.should_save:
                write_json(file, {"by_layer": found})
        for name, weight in found.items():
            layers[name].keep_weight.copy_(torch.tensor(weight))
        return {"rows": len(rows), "tokens": sum(map(len, rows))}

    def train_lora(self, model) -> tuple:
        """Trains a LoRA, or goes on with the one in the folder; PEFT's wrapper, and entries of `result.json`."""
        arguments, steps, folder = self.arguments, self.options.steps, self.out / "lora"
        rows_per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        tokens_per_step = rows_per_step * self.context
        with run_folder.open_run(folder, self.identity) as (_, checkpoint):
            set_seed(self.options.seed)
            rank = self.options.rank
            how = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}  # alike in every family
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, **how))
            trainer = DistillationTrainer(
                model, arguments, train_dataset=ConcatDataset(self.rows.values()),
                callbacks=[run_folder.RunRecorder(folder, tokens_per_step)],
            )  # fmt: skip
            if arguments.should_save:
                run_folder.begin_run(folder, self.identity, checkpoint)
            last = folder / f"checkpoint-{steps}"
            if checkpoint != last:
                note = f"from step {run_folder.checkpoint_step(checkpoint)}" if checkpoint else "from the start"
                run_folder.say(f"LoRA: {steps:,} steps of {tokens_per_step:,} tokens, {note}")
                console.speak_in_lines(trainer).train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            restore_adapter(model, last)
        return model, {"steps": steps, "tokens": steps * tokens_per_step}

    def claim_folder(self) -> None:
        """Says in the folder which conversion it is of."""
        if self.arguments.should_save:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / run_folder.OPTIONS, self.identity)


def with_labels(batch: dict) -> dict[str, Tensor]:
    """Rows of `datasets` as tensors, `input_ids` and `labels`: those that were prepared, or every token."""
    ids = torch.tensor(batch["input_ids"])
    return {"input_ids": ids, "labels": torch.tensor(batch["labels"]).long() if "labels" in batch else ids}
