"""The stages of a conversion: each begins with the model that the one before left, and goes on after a stop."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset
from transformers import TrainingArguments, set_seed

from cli import UserError
from cli.names import check_name
from hf_infini import patch_model
from hf_infini.layers.memory_layer import PARAMETERS
from hf_infini.models.adapter import merged, restore_adapter
from hf_infini.models.loading import fingerprint, load_causal_lm, load_tokenizer
from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.options import context_limit
from support import measurement
from support.prepared import read_tokenizer
from support.stages import read_json, read_manifest, write_json
from training import console, run_folder, setup
from training.dilution import Dilution, set_defaults
from training.repetition import Repetition

from . import trainers
from .defaults import DEFAULTS, LORA_RANK, NARROW_TO
from .layers import gap_by_layer
from .rows import ConversionRows
from .start import CLOSED, FREE, fingerprint_of, learned_parameters, load_start, lora_of, open_layers, options_of
from .trainers import Together
from .transfer import Transfer, calibrated_scales

FEW_ROWS = 1  # of each folder, which choose layers and calibrate
EVALUATED_ROWS = 2  # of each folder, after each stage


@dataclass(frozen=True)
class Stage:
    """A training: its Trainer, its steps, and its peak learning rate."""

    name: str
    trainer: type
    steps: int
    learning_rate: float
    options: dict


class Conversion:
    """A conversion's model, rows and stages.

    Args:
        options: of recipes/convert.py; memory: those of [`patch_model`] that were given.

    Attributes:
        fingerprints: of the data, by folder; context: tokens of a row; trained: numbers of the layers with a memory.
    """

    def __init__(self, options, memory: dict):
        self.options, self.out = options, Path(options.out)
        set_defaults(options)
        self.memory = DEFAULTS | memory | self._options_of_start(memory)
        if options.lora_rank is None and not options.start:
            options.lora_rank = LORA_RANK
        if options.narrow_to is None:
            options.narrow_to = [length for length in NARROW_TO if length < self.memory["segment_length"]]
        self.fingerprints = {folder: setup.data_fingerprint(read_manifest(folder)) for folder in options.data}
        self.identity = {**vars(options), "memory": self.memory, "data": [*self.fingerprints.values()]}
        for name in ("out", "save_merged", "evaluation_data", "evaluation_rows", "evaluation_from"):
            del self.identity[name]
        if options.start:
            self.identity["start"] = [fingerprint_of(path) for path in options.start]
        if options.dilute_with:
            fingerprints = [setup.data_fingerprint(read_manifest(folder)) for folder in options.dilute_with]
            self.identity["dilute_with"] = fingerprints
        self.rows = ConversionRows(options)
        self.context = self.rows.context

    @property
    def window(self) -> int:
        """Tokens that the softmax sees at most."""
        return self.memory["sink_tokens"] + (self.memory["local_segments"] + 1) * self.memory["segment_length"]

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

    def plain_model(self):
        """The plain model with memories, calibrated, of which only these are trained.

        Raises UserError when it cannot have them, or the data are of another tokenizer.
        """
        check_name("--model", self.options.model)
        try:
            model = load_causal_lm(self.options.model, dtype=torch.float32)
            self.tokenizer = load_tokenizer(self.options.model, model)
            for folder in (*self.options.data, *(self.options.evaluation_data or ())):
                if fingerprint(read_tokenizer(folder)) != fingerprint(self.tokenizer):
                    raise UserError(f"{folder} was prepared with another tokenizer than that of {self.options.model}")
            if not self.options.start:
                patch_model(model, **self.memory)
        except ValueError as error:
            raise UserError(f"--model: {error}") from error
        model = self._with_start(model) if self.options.start else model
        self.past_of = self._past_of(model)
        model.to(self.device).eval()
        self.trained = self._choose_layers(model)
        for number, layer in self._layers(model).items():
            if number not in self.trained:
                torch.nn.init.constant_(layer.gate.weight, CLOSED)
        self._choose_parameters(model)
        if not self.options.start:
            self._calibrate(model)
        return model

    def stages(self) -> list[Stage]:
        """Those that have steps, in their order."""
        options = self.options
        narrow = {"narrow": tuple(options.narrow), "lengths": tuple(options.narrow_to)}
        transfer = narrow | {"layers": self.trained}
        together = narrow | {"text": options.text_weight, "past_of": self.past_of}
        stages = [
            Stage("transfer", Transfer, options.transfer_steps, options.transfer_learning_rate, transfer),
            Stage("together", Together, options.together_steps, options.together_learning_rate, together),
        ]
        return [stage for stage in stages if stage.steps and not (stage.trainer is Transfer and self.options.start)]

    def run(self, stage: Stage, model) -> tuple:
        """The model after a stage, and what is to be said of it."""
        arguments = self._arguments(stage.name, stage.steps, stage.learning_rate)
        setup.check_processes(arguments, None)
        if stage.trainer is Together and self.options.lora_rank and not hasattr(model, "peft_config"):
            model = self._with_lora(model)
        folder, rows_per_step = self.out / stage.name, arguments.train_batch_size * arguments.gradient_accumulation_steps
        tokens_per_step = rows_per_step * arguments.world_size * self.context
        rows = [*self.rows.parts["train"].values()]
        if stage.trainer is Transfer:
            rows = [part.select(range(min(len(part), -(-self.options.transfer_rows // len(rows))))) for part in rows]
        with run_folder.open_run(folder, self.identity | {"stage": stage.name}) as (_, checkpoint):
            set_seed(self.options.seed)
            callbacks = [run_folder.RunRecorder(folder, tokens_per_step)]
            if stage.trainer is Together and self.options.repeat_up_to > 1:
                callbacks.append(Repetition(self.options.repeat_up_to))
            trainer = stage.trainer(
                model,
                arguments,
                train_dataset=ConcatDataset(rows),
                callbacks=callbacks,
                **stage.options,
            )
            if arguments.should_save:
                run_folder.begin_run(folder, self.identity | {"stage": stage.name}, checkpoint)
            last = folder / f"checkpoint-{stage.steps}"
            if checkpoint != last:
                note = f"from step {run_folder.checkpoint_step(checkpoint)}" if checkpoint else "from the start"
                run_folder.say(f"{stage.name}: {stage.steps:,} steps of {tokens_per_step:,} tokens, {note}")
                console.speak_in_lines(trainer).train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            restore_adapter(model, last)
        unexplained = self.unexplained(model, stage.name)
        return model, {"steps": stage.steps, "tokens": stage.steps * tokens_per_step, "unexplained": unexplained}

    @torch.no_grad()
    def round_adapter(self, model) -> None:
        """Rounds what was learned to bfloat16."""
        for parameter in learned_parameters(model):
            parameter.copy_(parameter.bfloat16())

    def save_merged(self, model) -> Path:
        """The folder of the whole model, which has the adapter in its weights now, and its tokenizer."""
        whole = merged(model)
        whole.save_pretrained(self.out / "model")
        self.tokenizer.save_pretrained(self.out / "model")
        return self.out / "model"

    def unexplained(self, model, stage: str) -> dict[int, float]:
        """[`trainers.unexplained`] after a stage, of a few validation rows of each folder; empty beside the main process."""
        if not self.is_main_process:
            return {}
        rows = torch.cat([*self.rows.of("validation", EVALUATED_ROWS, self.device).values()])
        return self._measured(f"unexplained_after_{stage}.json", lambda: trainers.unexplained(model.eval(), rows))

    def evaluated_rows(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Those of the evaluation, as [`ConversionRows.of`] has them."""
        return self.rows.of("evaluation", self.options.evaluation_rows, device or self.device)

    def _past_of(self, model) -> Callable | None:
        """Of --dilute_with, what rows begin with; a UserError where they would be too long so."""
        options, limit = self.options, context_limit(model.config)
        past_of, tokens, before = None, self.context, ""
        if options.dilute_with is not None:
            dilution = Dilution.from_options(options, options.dilute_with, self.tokenizer, f"--model {options.model}")
            past_of, tokens = dilution.past, tokens + dilution.length
            before = f" and {dilution.length:,} of --dilute_with before them"
        if limit is not None and tokens > limit:
            raise UserError(
                f"--data has rows of {self.context:,} tokens{before}, but {options.model} has {limit:,} learned positions: "
                "prepare shorter rows"
            )
        return past_of

    def _few_rows(self) -> Tensor:
        return torch.cat([*self.rows.of("train", FEW_ROWS, self.device).values()])

    def _layers(self, model) -> dict:
        """The attention layers with a memory, by number."""
        layers = attention_layers(decoder_of(model))
        return {number: layers[number] for number in model.config.infini_layers}

    def _options_of_start(self, memory: dict) -> dict:
        """Those of the adapter of --start, but for what may differ."""
        options = self.options
        if not options.start:
            return {}
        given = [name for name in memory if name != FREE]
        given += [name for name in ("memory_in", "memory_layers") if getattr(options, name) is not None]
        if given:
            raise UserError(f"--{given[0]} is as the adapter of --start has it: leave it out")
        return options_of(options.start) | memory

    def _with_start(self, model):
        """The plain model with the adapter of --start, or with the mean of several; UserError when they do not fit."""
        start, wanted = self.options.start, self.options.lora_rank
        rank = lora_of(start[0]).get("r", 0)
        if wanted is not None and rank != wanted:
            raise UserError(f"--lora_rank {wanted}: the LoRA of {start[0]} has rank {rank}; leave it out")
        self.options.lora_rank = rank
        model = load_start(model, start)
        decoder_of(model).config.segment_length = self.memory[FREE]
        return model

    def _choose_layers(self, model) -> list[int]:
        """Numbers of the layers whose memory is trained: of --start, given, or where full attention brings most."""
        options, layers = self.options, model.config.infini_layers
        if options.start:
            return open_layers(model)
        if options.memory_in is not None:
            if not set(options.memory_in) <= set(layers):
                raise UserError(f"--memory_in {' '.join(map(str, options.memory_in))}: its layers are {layers}")
            return sorted(set(options.memory_in))
        if options.memory_layers is None:
            return layers
        if options.memory_layers > len(layers):
            raise UserError(f"--memory_layers {options.memory_layers}: the model has {len(layers)}")

        def measure() -> dict[int, float]:
            return gap_by_layer(model, self._few_rows(), self.window)

        gaps = self._measured("layers.json", measure)
        return sorted(sorted(gaps, key=gaps.get, reverse=True)[: options.memory_layers])

    def _measured(self, name: str, measure: Callable[[], dict]) -> dict:
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

    def _choose_parameters(self, model) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        for number in self.trained:
            for name, parameter in self._layers(model)[number].named_parameters():
                if name.partition(".")[0] in PARAMETERS:
                    parameter.requires_grad_(True)

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

    @torch.no_grad()
    def _calibrate(self, model) -> None:
        """Begins learned feature maps as a multiple of the identity: [`calibrated_scales`]."""
        if self.memory["feature_map"] != "learned":
            return
        scales = self._measured("calibration.json", lambda: calibrated_scales(model, self._few_rows(), self.trained))
        for number, of_layer in scales.items():
            layer = self._layers(model)[number]
            for weight, scale in zip((layer.query_map, layer.key_map), of_layer, strict=True):
                weight.mul_(torch.tensor(scale, device=weight.device)[:, None, None])

    def _arguments(self, stage: str, steps: int, learning_rate: float) -> TrainingArguments:
        use_cpu = self.options.use_cpu or not torch.accelerator.is_available()
        precision = self.options.precision
        return TrainingArguments(
            output_dir=str(self.out / stage),
            use_cpu=use_cpu,
            seed=self.options.seed,
            max_steps=steps,
            learning_rate=learning_rate,
            per_device_train_batch_size=self.options.batch_size,
            gradient_accumulation_steps=self.options.gradient_accumulation,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            weight_decay=0.0,
            bf16=precision == "bf16" or precision == "auto" and measurement.supports_bfloat16(use_cpu),
            save_steps=self.options.save_steps,
            save_total_limit=2,
            logging_steps=1,
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            report_to=[],
        )
