"""The stages of a conversion: each begins with the model that the one before left, and goes on after a stop."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import TrainingArguments, set_seed

from cli import UserError
from hf_infini import patch_model
from hf_infini.families import attention_layers, decoder_of
from hf_infini.loading import load_causal_lm
from hf_infini.memory_adapter import restore_adapter
from hf_infini.memory_layer import PARAMETERS
from support import measurement
from support.prepared import open_rows, read_tokenizer
from support.stages import read_json, write_json
from training import run_folder, setup

from .trainers import SMALLEST, Together, Transfer, errors, unexplained

DEFAULTS = {"segment_length": 256, "local_segments": 1, "sink_tokens": 4, "feature_map": "learned", "denominator": "shared"}
SCALES, GATES = (0.03, 0.1, 0.3), (-8.0, -4.0, 0.0)  # of which calibration chooses
CLOSED = -1000.0  # the gate of a layer that has its window only: its sigmoid is 0


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
        data, out: the folders.
        fingerprint: of the data.
    """

    def __init__(self, options, memory: dict, data: Path, out: Path, fingerprint: str):
        self.options, self.data, self.out = options, data, out
        self.memory = DEFAULTS | memory
        self.identity = {**vars(options), "memory": self.memory, "data": fingerprint}
        for name in ("out", "data"):
            del self.identity[name]
        self.rows = {split: open_rows(data, split).with_format("torch") for split in ("train", "validation")}
        self.context = len(self.rows["train"][0]["input_ids"])

    @property
    def window(self) -> int:
        """Tokens that the softmax sees at most."""
        return self.memory["sink_tokens"] + (self.memory["local_segments"] + 1) * self.memory["segment_length"]

    @property
    def is_main_process(self) -> bool:
        return self._arguments("transfer", 1, 1.0).should_save

    def check(self) -> None:
        """UserError unless rows reach beyond the window, and there are enough of them."""
        if self.context < 2 * self.window:
            raise UserError(
                f"{self.data} has rows of {self.context} tokens, and the window sees {self.window}: rows must have twice as "
                "many, so that there is something beyond it. Prepare longer rows, or give a smaller --segment_length"
            )
        too_long = [length for length in self.options.narrow_to if length >= self.memory["segment_length"]]
        if too_long or min(self.options.narrow_to) <= self.memory["sink_tokens"]:
            raise UserError(
                f"--narrow_to {' '.join(map(str, self.options.narrow_to))}: give lengths below --segment_length "
                f"{self.memory['segment_length']} and above --sink_tokens {self.memory['sink_tokens']}"
            )

    def plain_model(self):
        """The plain model with memories, calibrated, of which only these are trained.

        Raises UserError when it cannot have them, or the data are of another tokenizer.
        """
        try:
            model = load_causal_lm(self.options.model, dtype=torch.float32)
            size = model.get_input_embeddings().weight.shape[0]
            if len(read_tokenizer(self.data)) > size:
                raise UserError(f"{self.data} was prepared with another tokenizer than that of {self.options.model}")
            patch_model(model, **self.memory)
        except ValueError as error:
            raise UserError(f"--model: {error}") from error
        layers = model.config.infini_layers
        self.trained = layers if self.options.memory_in is None else sorted(set(self.options.memory_in))
        if not set(self.trained) <= set(layers):
            raise UserError(f"--memory_in {' '.join(map(str, self.options.memory_in))}: its layers are {layers}")
        for number, layer in enumerate(attention_layers(decoder_of(model))):
            if number in layers and number not in self.trained:
                torch.nn.init.constant_(layer.gate.weight, CLOSED)
        model.to(self._arguments("transfer", 1, 1.0).device).eval()
        self._choose_parameters(model)
        self._calibrate(model)
        return model

    def stages(self) -> list[Stage]:
        """Those that have steps, in their order."""
        options = self.options
        narrow = {"narrow": tuple(options.narrow), "lengths": tuple(options.narrow_to)}
        together = narrow | {"text": options.text_weight}
        stages = [
            Stage("transfer", Transfer, options.transfer_steps, options.transfer_learning_rate, narrow),
            Stage("together", Together, options.together_steps, options.together_learning_rate, together),
        ]
        return [stage for stage in stages if stage.steps]

    def run(self, stage: Stage, model) -> tuple:
        """The model after a stage, and what is to be said of it."""
        arguments = self._arguments(stage.name, stage.steps, stage.learning_rate)
        setup.check_processes(arguments, None)
        if stage.trainer is Together and self.options.lora_rank:
            model = self._with_lora(model)
        folder, rows_per_step = self.out / stage.name, arguments.train_batch_size * arguments.gradient_accumulation_steps
        tokens_per_step = rows_per_step * arguments.world_size * self.context
        with run_folder.open_run(folder, self.identity | {"stage": stage.name}) as (_, checkpoint):
            set_seed(self.options.seed)
            trainer = stage.trainer(
                model,
                arguments,
                train_dataset=self.rows["train"],
                callbacks=[run_folder.RunRecorder(folder, tokens_per_step)],
                **stage.options,
            )
            if arguments.should_save:
                run_folder.begin_run(folder, self.identity | {"stage": stage.name}, checkpoint)
            last = folder / f"checkpoint-{stage.steps}"
            if checkpoint != last:
                note = f"from step {run_folder.checkpoint_step(checkpoint)}" if checkpoint else "from the start"
                run_folder.say(f"{stage.name}: {stage.steps:,} steps of {tokens_per_step:,} tokens, {note}")
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            restore_adapter(model, last)
        found = {"steps": stage.steps, "tokens": stage.steps * tokens_per_step}
        if arguments.should_save:
            found["unexplained"] = unexplained(model.eval(), self.evaluation_rows()[:4])
        return model, found

    def evaluation_rows(self) -> Tensor:
        """`[rows, tokens]`, on the model's device."""
        rows = self.rows["validation"][: self.options.evaluation_rows]["input_ids"]
        return rows.to(self._arguments("transfer", 1, 1.0).device)

    def _choose_parameters(self, model) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for number in self.trained:
            for name, parameter in attention_layers(decoder_of(model))[number].named_parameters():
                parameter.requires_grad_(name.partition(".")[0] in PARAMETERS)

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
        """Gives every layer the scale of its feature maps and the gate, of [`SCALES`] and [`GATES`], with which its memory
        leaves least unexplained; layers do not depend on each other, so that all are tried at once."""
        if not self.options.calibration_rows:
            return
        file = self.out / "calibration.json"
        layers = {number: attention_layers(decoder_of(model))[number] for number in self.trained}
        scales = SCALES if self.memory["feature_map"] == "learned" else (1.0,)

        def choose(number: int, scale: float, gate: float) -> None:
            layers[number].gate.weight.fill_(gate)
            for weight in (layers[number].query_map, layers[number].key_map) if len(scales) > 1 else ():
                weight.copy_(scale * torch.eye(weight.shape[-1], device=weight.device))

        if file.is_file():
            chosen = {int(number): values for number, values in read_json(file).items()}
        else:
            rows = self.rows["train"][: self.options.calibration_rows]["input_ids"].to(model.device)
            tried = {number: {} for number in layers}
            for scale, gate in [(scale, gate) for scale in scales for gate in GATES]:
                for number in layers:
                    choose(number, scale, gate)
                for number, error in errors(model, rows).items():
                    if number in tried:
                        tried[number][max(error, SMALLEST)] = [scale, gate]
            chosen = {number: values[min(values)] for number, values in tried.items()}
        for number, (scale, gate) in chosen.items():
            choose(number, scale, gate)
        if not file.is_file() and self.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(file, chosen)

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
