r"""Trains a LoRA on long rows with TRL's SFTTrainer, beside a cache of constant size; with
--four_bits it is a QLoRA.

    python recipes/prepare.py --source shakespeare --tokenizer smollm2 --context 2048 \
        --validation 0.2 --out data/en
    python recipes/finetune_lora.py --model smollm2 --adapter model_cards/smollm2 \
        --data data/en --out runs/lora
    python recipes/finetune_lora.py --model smollm2 --adapter model_cards/smollm2 \
        --data data/en --learn plain --out runs/kl

The model gets the window, the kept tokens and their scores of --adapter. A LoRA of its attention
and the gates are trained on rows of --data. With --learn plain they make up for what the cache
leaves out: by the KL divergence from the plain model's predictions, at positions where the cache no
longer holds everything. The plain model inside is the teacher, and no second one is loaded. The
scores have no gradient and stay (`hf-infini fit` fits them); neither has a gate that is closed for
good. Trackers (--report_to) receive each head's gate beside the loss. It needs `pip install peft
trl`; --four_bits bitsandbytes.

Stopped at any point and started again with the same command, it goes on. Writes OUT, which
`hf_infini.load_adapter` puts on the plain model; OUT.json and, on standard output, the nats per
token of held-out rows beyond the cache, before and after: with the kept tokens, with a window of as
many tokens in their place, and with all tokens in the cache. Intervals are paired, against the
first line.
"""

import contextlib
import types
from dataclasses import dataclass
from pathlib import Path

from cli import SEED, UserError, exit_on_error, needed, option, parse_options
from cli.names import check_name

LEARN = ["text", "plain"]


@dataclass
class Options:
    model: str = needed("Plain model: a folder or a name on the Hub.", group="model")
    adapter: str = needed(
        "Adapter with the scores of the kept tokens, without a LoRA: a folder or a name on the Hub."
    )
    data: list[str] = needed(
        "Folders of prepare.py with the model's tokenizer and rows longer than the cache.",
        group="data",
    )
    out: str = needed("Folder to write, and the name of a file without .json.", group="output")
    four_bits: bool = option(
        False, "Weights of 4 bits (NF4 of bitsandbytes), read as bfloat16.", group="model"
    )
    learn: str = option(
        "text",
        "To predict: rows, or what the plain model predicts.",
        choices=LEARN,
        group="training",
    )
    steps: int = option(45, "Optimiser steps.", at_least=1)
    batch_size: int = option(1, "Rows per step.", at_least=1)
    learning_rate: float = option(
        5e-4, "Peak learning rate of the LoRA; the gates have 0.01.", greater_than=0
    )
    rank: int = option(16, "Rank of the LoRA.", at_least=1)
    save_steps: int = option(25, "Steps between checkpoints; the last two are kept.", at_least=1)
    report_to: list[str] = option(["none"], "Trackers: none, or any of tensorboard, wandb, …")
    seed: int = option(0, "Seed of the LoRA and of the order of rows.", **SEED)
    rows: int = option(16, "Held-out rows, from everywhere.", at_least=1, group="measurement")


@exit_on_error(when_stopped="the same command goes on from the last checkpoint")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    for name in ("model", "adapter"):
        check_name(f"--{name}", getattr(options, name))

    import torch
    import transformers
    from datasets import concatenate_datasets

    from evaluation import caches, inference, texts
    from hf_infini import load_adapter, unpatch_model
    from hf_infini.models.loading import load_tokenizer, with_finite_weights
    from hf_infini.models.structure import inside_of
    from support import measurement, prepared, stages
    from training import run_folder, setup

    stages.check_place(Path(f"{options.out}.json"), {"options": dict, "contestants": dict})
    identity = dict(vars(options))
    for name in ("out", "rows", "report_to"):
        del identity[name]
    manifests = [stages.read_manifest(folder) for folder in options.data]
    identity["data"] = [setup.data_fingerprint(manifest) for manifest in manifests]
    run_folder.check_same_run(Path(options.out), identity)
    rows = concatenate_datasets([*prepared.open_folders("--data", options.data, "train").values()])
    length, held_out = len(rows[0]["input_ids"]), {}
    for folder in options.data:
        where = types.SimpleNamespace(text=None, data=folder, split="validation", min_characters=0)
        held_out[folder] = texts.read_texts(where)
    quantization = {}
    if options.four_bits:
        how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, **how)
        quantization = {"quantization_config": config}
    inference.keep_freed_memory()
    model = inference.read_model("--model", options.model, dtype=torch.bfloat16, **quantization)
    try:
        tokenizer = load_tokenizer(options.model, model)
        with_finite_weights(load_adapter(model, options.adapter), options.adapter)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {options.model}, --adapter {options.adapter}: {error}") from error
    places = inference.tokens_held(model.config)
    if length <= max(places, inference.first_beyond(model.config)):
        raise UserError(
            f"--data has rows of {length:,} tokens, all of which a cache of "
            f"{places:,} holds: prepare it with a longer --context"
        )
    trained = train(options, identity, model, tokenizer, rows)

    settings = types.SimpleNamespace(
        length=length, rows=options.rows, count_from=places, chunk=length, batch_size=1
    )
    runner = types.SimpleNamespace(model=inside_of(trained), tokenizer=tokenizer, options=settings)
    found: dict[str, list[dict]] = {folder: [] for folder in held_out}
    for way, cache in (("kept", places), ("window", places), ("plain", None)):
        if way == "window":
            unpatch_model(runner.model)
        for when in ("before", "after"):
            off = trained.disable_adapter() if when == "before" else contextlib.nullcontext()
            with off, caches.bounded(runner.model, None, way, cache):
                for folder, documents in held_out.items():
                    # as it was trained
                    with torch.autocast(runner.model.device.type, torch.bfloat16):
                        nats = caches.nats(runner, documents)
                    found[folder].append({"way": f"{way}, {when}", "cache": cache, **nats})
    for folder, contestants in found.items():
        above = caches.summarize_nats([contestants[3], contestants[1]])[1]["above"]
        print(f"{folder}\n\n{caches.nats_table(contestants)}\n")
        spread = f"{above.value:+.3f} ({above.low:+.3f} to {above.high:+.3f})"
        print(f"after, kept tokens against the window: {spread}\n")
    result = {"contestants": found, "options": vars(options), **measurement.peak_memory()}
    stages.write_json(Path(f"{options.out}.json"), {**result, **measurement.environment()})


def train(options: Options, identity: dict, model, tokenizer, rows):
    """PEFT's wrapper around the model, in evaluation mode; what was trained is saved."""
    import torch
    from peft import get_peft_model
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    import hf_infini
    from hf_infini.tools.training import parameter_groups
    from training import run_folder
    from training.teacher import divergence_beyond
    from training.trainer import gates_by_head

    class Trainer(SFTTrainer):
        def compute_loss(self, model, inputs, **more):
            if options.learn == "text":
                return super().compute_loss(model, inputs, **more)
            model.eval()  # what is frozen drops nothing out
            return divergence_beyond(model, self.model, inputs["input_ids"], inputs["labels"])

        def log(self, logs, start_time=None):
            super().log(logs | gates_by_head(self) if self.args.report_to else logs, start_time)

    set_seed(options.seed)
    lora = hf_infini.lora_config(model, r=options.rank, lora_alpha=2 * options.rank)
    model = get_peft_model(model, lora)
    arguments = SFTConfig(
        options.out,
        max_length=None,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=options.report_to,
        seed=options.seed,
        save_steps=options.save_steps,
        save_total_limit=2,
        bf16=True,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    out, tokens_per_step = Path(options.out), options.batch_size * len(rows[0]["input_ids"])
    recorder = run_folder.RunRecorder(out, tokens_per_step)
    trainer = Trainer(
        model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[recorder]
    )
    # Now that SFTTrainer has made all that is trained beside weights of 4 bits bfloat16
    groups = parameter_groups(
        trainer.model, options.learning_rate, gate_learning_rate=0.01, weight_decay=0.0
    )
    trainer.optimizer = torch.optim.AdamW(groups)
    with run_folder.open_run(out, identity) as (_, checkpoint):
        run_folder.begin_run(out, identity, checkpoint)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.save_model()
    return trainer.model.eval()


if __name__ == "__main__":
    main()
