"""A conversion: its options, rows and folder, and the stages through which its model goes."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset
from transformers import TrainingArguments, set_seed

from cli import UserError, one_line
from cli.names import check_name
from hf_infini import fit_keep_score, patch_model
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.models.adapter import restore_adapter
from hf_infini.models.loading import fingerprint, load_causal_lm, load_tokenizer
from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.options import context_limit
from support.prepared import open_folders, open_rows, read_tokenizer
from support.stages import read_json, read_manifest, write_json
from training import console, dilution, run_folder, setup

from .defaults import DEFAULTS, LORA_RANK, NARROW_TO, UNTRAINED
from .start import CLOSED, FREE, fingerprint_of, learned_parameters, load_start, lora_of, open_layers, options_of
from .trainers import Together
from .transfer import Transfer, calibrated_scales

# Options that may change between two starts of a conversion
CHANGEABLE = ("out", "evaluation_data", "evaluation_rows", "evaluation_from")


@dataclass(frozen=True)
class Stage:
    """A part of a conversion.

    Args:
        name: its name in `result.json`.
        run: takes the model that the stage before left, and returns the model and what `result.json` says of the stage.
            What it has trained ([`Conversion.train`]) or measured ([`Conversion.measured`]) is in the conversion's folder,
            so that a conversion that was stopped goes on from there.
    """

    name: str
    run: Callable[..., tuple]


class Conversion:
    """A conversion's model, rows and stages.

    Args:
        options: of recipes/convert.py; memory: those of [`patch_model`] that were given. Neither is changed.

    Attributes:
        options: with what was left out filled in; memory: all options of the memory.
        identity: what decides the outcome, JSON-safe.
        fingerprints: of the data, by folder.
        rows: of each folder, by "train", "validation" and "evaluation": the validation rows of --evaluation_data, or else of
            --data.
        context: tokens of a row; trains: whether a memory is trained; trained: numbers of the layers with a memory.

    Raises UserError where options do not go together, or a folder lacks rows or has rows of several lengths.
    """

    def __init__(self, options, memory: dict):
        self.out = Path(options.out)
        self.trains = bool(options.together_steps or options.transfer_steps and not options.start)
        defaults = DEFAULTS if self.trains or options.start else UNTRAINED
        self.memory = defaults | memory | _options_of_start(options, memory)
        self.options = _resolved(options, self.memory["segment_length"])
        self.fingerprints = {folder: setup.data_fingerprint(read_manifest(folder)) for folder in options.data}
        self.identity = {**vars(self.options), "memory": self.memory, "data": [*self.fingerprints.values()]}
        for name in CHANGEABLE:
            del self.identity[name]
        if options.start:
            self.identity |= {"start": fingerprint_of(options.start), "lora_rank": options.lora_rank}
        if options.dilute_with:
            fingerprints = [setup.data_fingerprint(read_manifest(folder)) for folder in options.dilute_with]
            self.identity["dilute_with"] = fingerprints
        evaluated = options.evaluation_data or options.data
        parts = {part: open_folders("--data", options.data, part) for part in ("train", "validation")}
        parts["evaluation"] = {folder: open_rows(folder, "validation") for folder in evaluated}
        self.context = len(next(iter(parts["train"].values()))[0]["input_ids"])
        self.rows = {
            part: {folder: rows.with_transform(with_labels) for folder, rows in folders.items()}
            for part, folders in parts.items()
        }

    @property
    def window(self) -> int:
        """Tokens that the softmax sees at most."""
        return self.memory["sink_tokens"] + self.memory.get("kept_tokens", 0) + self._segments

    @property
    def _segments(self) -> int:
        """Tokens of its segments."""
        return (self.memory["local_segments"] + 1) * self.memory["segment_length"]

    @property
    def fits_score(self) -> bool:
        """Whether which tokens are kept is learned, and not yet."""
        return not self.options.start and self.memory.get("keep_score") in ("learned", "half")

    @functools.cached_property
    def machine(self) -> TrainingArguments:
        """Where and with what precision everything is computed; its other options belong to no stage."""
        return self._arguments("transfer", 1, 1.0)

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def is_main_process(self) -> bool:
        return self.machine.should_save

    def autocast(self) -> torch.autocast:
        """The training's precision, for what is measured outside of it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.machine.bf16)

    def claim_folder(self) -> None:
        """Says in the folder which conversion it is of; a UserError where it is of another."""
        run_folder.check_same_run(self.out, self.identity)
        if self.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / run_folder.OPTIONS, self.identity)

    def first_rows(self, part: str, count: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """The first `count` rows of each folder, `[rows, 2, tokens]`, ids and labels."""
        rows = {folder: torch.stack([*rows[:count].values()], 1) for folder, rows in self.rows[part].items()}
        return {folder: tensor.to(device or self.device) for folder, tensor in rows.items()}

    # --- the model ------------------------------------------------------------------------------------------------------

    def load_model(self):
        """The plain model with memories, calibrated, of which only these are trained.

        Raises UserError when it cannot have them, or the data are of another tokenizer.
        """
        options = self.options
        check_name("--model", options.model)
        try:
            model = load_causal_lm(options.model, dtype=torch.float32)
            self.tokenizer = load_tokenizer(options.model, model)
            for folder in (*options.data, *(options.evaluation_data or ())):
                if fingerprint(read_tokenizer(folder)) != fingerprint(self.tokenizer):
                    raise UserError(f"{folder} was prepared with another tokenizer than that of {options.model}")
            if not options.start:
                patch_model(model, **self.memory)
        except (OSError, ValueError) as error:
            raise UserError(f"--model: {one_line(error)}") from error
        if options.start:
            model = load_start(model, options.start)
            decoder_of(model).config.segment_length = self.memory[FREE]
        self.past_of = self._past_of(model)
        model.to(self.device).eval()
        self.trained = self._choose_layers(model)
        for number, layer in self._layers(model).items():
            if number not in self.trained:
                torch.nn.init.constant_(layer.gate.weight, CLOSED)
        self._choose_parameters(model)
        if not options.start and self.memory.get("feature_map") == "learned":
            self._calibrate(model)
        return model

    def _past_of(self, model) -> Callable | None:
        """Of --dilute_with, what rows begin with; a UserError where they would be too long so."""
        options, limit = self.options, context_limit(model.config)
        past_of, tokens, before = None, self.context, ""
        if options.dilute_with is not None:
            source = dilution.Dilution.from_options(options, options.dilute_with, self.tokenizer, f"--model {options.model}")
            past_of, tokens = source.past, tokens + source.length
            before = f" and {source.length:,} of --dilute_with before them"
        if limit is not None and tokens > limit:
            raise UserError(
                f"--data has rows of {self.context:,} tokens{before}, but {options.model} has {limit:,} learned positions: "
                "prepare shorter rows"
            )
        return past_of

    def _layers(self, model) -> dict:
        """The attention layers with a memory, by number."""
        layers = attention_layers(decoder_of(model))
        return {number: layers[number] for number in model.config.infini_layers}

    def _choose_layers(self, model) -> list[int]:
        """Numbers of the layers whose memory is trained: of --start, given, or all."""
        options, layers = self.options, model.config.infini_layers
        if options.start:
            return open_layers(model)
        if not self.trains:
            return []
        if not set(options.memory_in or ()) <= set(layers):
            raise UserError(f"--memory_in {' '.join(map(str, options.memory_in))}: its layers are {layers}")
        return sorted(set(options.memory_in or layers))

    def _choose_parameters(self, model) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        for number in self.trained:
            for name, parameter in self._layers(model)[number].named_parameters():
                if name.partition(".")[0] in PARAMETERS and name != "keep_weight":  # which has no gradient
                    parameter.requires_grad_(True)

    @torch.no_grad()
    def _calibrate(self, model) -> None:
        """Begins learned feature maps as a multiple of the identity: [`calibrated_scales`]."""
        rows = torch.cat([*self.first_rows("train", 1).values()])
        scales = self.measured("calibration.json", lambda: calibrated_scales(model, rows, self.trained))
        for number, of_layer in scales.items():
            layer = self._layers(model)[number]
            for weight, scale in zip((layer.query_map, layer.key_map), of_layer, strict=True):
                weight.mul_(torch.tensor(scale, device=weight.device)[:, None, None])

    def measured(self, name: str, measure: Callable[[], dict]) -> dict:
        """What `measure` finds for each layer, in the training's precision; from the file, if it was found before."""
        file = self.out / name
        if file.is_file():
            content = read_json(file, {"options": dict, "by_layer": dict})
            if content["options"] != self.identity:
                raise UserError(f"{file} is of a conversion with other options: choose another --out")
            return {int(number): value for number, value in content["by_layer"].items()}
        with self.autocast():
            found = measure()
        self.claim_folder()
        if self.is_main_process:
            write_json(file, {"options": self.identity, "by_layer": found})
        return found

    # --- the stages -----------------------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        """Those that have something to do, in their order."""
        options = self.options
        found = []
        if self.fits_score:
            found.append(Stage("keep_score", self._fit))
        if options.transfer_steps and not options.start:
            found.append(Stage("transfer", self._transfer))
        if options.together_steps:
            found.append(Stage("together", self._together))
        return found

    def _equal_parts(self, count: int) -> list:
        """So many training rows, of all folders in equal parts, as datasets."""
        parts = [*self.rows["train"].values()]
        share = -(-count // len(parts))
        return [part.select(range(min(len(part), share))) for part in parts]

    @torch.no_grad()
    def _fit(self, model) -> tuple:
        layers = self._layers(model)
        rows = [row["input_ids"] for part in self._equal_parts(self.options.fit_rows) for row in part]

        def fit() -> dict[int, list]:
            fit_keep_score(model, rows, distance=self._segments)
            return {number: layer.keep_weight.tolist() for number, layer in layers.items()}

        for number, weight in self.measured("keep_score.json", fit).items():
            layers[number].keep_weight.copy_(torch.tensor(weight))
        return model, {"rows": len(rows), "tokens": sum(map(len, rows))}

    def _transfer(self, model) -> tuple:
        rows = self._equal_parts(self.options.transfer_rows)
        return self.train(
            "transfer", model, Transfer, rows, self.options.transfer_steps, self.options.transfer_learning_rate,
            layers=self.trained,
        )  # fmt: skip

    def _together(self, model) -> tuple:
        options = self.options
        if options.lora_rank and not hasattr(model, "peft_config"):
            model = self._with_lora(model)
        return self.train(
            "together", model, Together, [*self.rows["train"].values()], options.together_steps,
            options.together_learning_rate, text=options.text_weight, past_of=self.past_of,
        )  # fmt: skip

    def train(self, name: str, model, kind: type, rows: list, steps: int, rate: float, **more) -> tuple:
        """Trains a model with a [`ConversionTrainer`], or goes on with what is in the folder of this name.

        Args:
            kind: the class; more: its own arguments.
            rows: datasets; steps: optimiser steps; rate: the peak learning rate.

        Returns the model and the entries of a training in `result.json`.
        """
        options, folder = self.options, self.out / name
        arguments = self._arguments(name, steps, rate)
        setup.check_processes(arguments)
        rows_per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps
        tokens_per_step = rows_per_step * arguments.world_size * self.context
        identity = self.identity | {"stage": name}
        with run_folder.open_run(folder, identity) as (_, checkpoint):
            set_seed(options.seed)
            trainer = kind(
                model, arguments, train_dataset=ConcatDataset(rows),
                callbacks=[run_folder.RunRecorder(folder, tokens_per_step)],
                narrow=tuple(options.narrow), lengths=tuple(options.narrow_to), **more,
            )  # fmt: skip
            if arguments.should_save:
                run_folder.begin_run(folder, identity, checkpoint)
            last = folder / f"checkpoint-{steps}"
            if checkpoint != last:
                note = f"from step {run_folder.checkpoint_step(checkpoint)}" if checkpoint else "from the start"
                run_folder.say(f"{name}: {steps:,} steps of {tokens_per_step:,} tokens, {note}")
                console.speak_in_lines(trainer).train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            restore_adapter(model, last)
        return model, {"steps": steps, "tokens": steps * tokens_per_step}

    def _with_lora(self, model):
        from peft import LoraConfig, get_peft_model

        attentions = [attention_layers(decoder_of(model))[number] for number in self.trained]
        inside = {module for attention in attentions for module in attention.children() if hasattr(module, "weight")}
        inside = {module for module in inside if module.weight is not None and module.weight.dim() == 2}
        names = [name for name, module in model.named_modules() if module in inside]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        set_seed(self.options.seed)
        rank = self.options.lora_rank
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM"))
        for parameter in trained:
            parameter.requires_grad_(True)
        return model

    def _arguments(self, stage: str, steps: int, learning_rate: float) -> TrainingArguments:
        return setup.training_arguments(
            self.out / stage, vars(self.options), max_steps=steps, learning_rate=learning_rate, lr_scheduler_type="cosine",
            warmup_steps=0.05, weight_decay=0.0, logging_steps=1, report_to=[],
        )  # fmt: skip

    # --- the end --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def round_adapter(self, model) -> None:
        """Rounds what was learned to bfloat16."""
        for parameter in learned_parameters(model):
            parameter.copy_(parameter.bfloat16())


def with_labels(batch: dict) -> dict[str, Tensor]:
    """Rows of `datasets` as tensors, `input_ids` and `labels`: those that were prepared, or every token."""
    ids = torch.tensor(batch["input_ids"])
    return {"input_ids": ids, "labels": torch.tensor(batch["labels"]).long() if "labels" in batch else ids}


def _options_of_start(options, memory: dict) -> dict:
    """The memory's options of the adapter of --start, but for what may differ."""
    if not options.start:
        return {}
    given = [name for name in memory if name != FREE]
    given += ["memory_in"] if options.memory_in is not None else []
    if given:
        raise UserError(f"--{given[0]} is as the adapter of --start has it: leave it out")
    return options_of(options.start) | memory


def _resolved(options, segment_length: int):
    """The options with what was left out filled in."""
    rank, wanted = LORA_RANK, options.lora_rank
    if options.start:
        rank = lora_of(options.start).get("r", 0)
        if wanted not in (None, rank):
            raise UserError(f"--lora_rank {wanted}: the LoRA of {options.start} has rank {rank}; leave it out")
    lengths = options.narrow_to
    if lengths is None:
        lengths = [length for length in NARROW_TO if length < segment_length]
    rank = rank if wanted is None else wanted
    return dataclasses.replace(options, lora_rank=rank, narrow_to=lengths)
