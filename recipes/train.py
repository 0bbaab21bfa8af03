r"""Trains a GPT-2 (self- or Infini-attention) or a causal_mha model on a folder that
recipes/prepare.py made.

    python recipes/train.py --config recipes/configs/quickstart_infini.yaml \
        --data data/quickstart --out runs/infini
    python recipes/train.py --config recipes/configs/quickstart_self.yaml \
        --data data/quickstart --out runs/self
    python recipes/train.py --config recipes/configs/shakespeare_published.yaml \
        --data data/shakespeare --out runs/rope --position_encoding rope
    torchrun --nproc_per_node 2 recipes/train.py --config … --data … --out …
    accelerate launch --multi_gpu --num_processes 8 recipes/train.py --config … --data … --out …

Stopped at any point and started again with the same command, it continues from its last complete
checkpoint, and ends as if it had never been stopped; one command at a time may train in a folder.
The out folder receives the model and tokenizer (`AutoModelForCausalLM.from_pretrained` loads them),
metrics.jsonl, loss_curve.png and result.json, with the gates of the memory, where rows are longer
than the window, so that some token reads one.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cli import SEED, exit_on_error, needed, option, parse_options
from cli.model_options import ModelOptions, attention_of, build_config, build_model


@dataclass
class RunOptions:
    data: str = needed("Folder made by recipes/prepare.py; its rows set the context.", group="data")
    out: str = needed(
        "Folder for the checkpoints and results; continued when it holds this run.", group="output"
    )
    epochs: float | None = option(
        None, "Passes over the rows; default: 1.", greater_than=0, group="length of training"
    )
    max_tokens: int | None = option(
        None, "Tokens to train on; rows repeat. The first end reached counts.", greater_than=0
    )
    max_steps: int | None = option(
        None, "Optimiser steps. The first end reached counts.", greater_than=0
    )
    separate_documents: bool = option(
        False, "Neither attention nor memory goes beyond an end-of-text token.", group="data"
    )
    dilute_with: str | None = option(
        None,
        "infini, linear rule: a prepared folder of plain text with the same tokenizer. Rows begin "
        "with the memory of one of its rows, made heavier: short rows then train for long texts.",
    )
    dilute_up_to: float = option(
        32.0, "--dilute_with: the largest factor; they are log-uniform.", at_least=1, rare=True
    )
    dilute_share: float = option(
        1.0, "--dilute_with: share of the steps with it.", at_least=0, at_most=1, rare=True
    )
    context_parallel_size: int | None = option(
        None,
        "infini: processes that share each row, for rows too long for one device; default: 1.",
        greater_than=0,
        rare=True,
        group="machine",
    )
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.")
    seed: int = option(
        0, "Seed of weights, order of rows and dropout.", **SEED, group="optimisation"
    )
    report_to: list[str] = option(
        ["none"],
        "Trackers: tensorboard (files in OUT/runs), trackio, wandb, mlflow, …",
        group="output",
    )


@dataclass
class OptimizerOptions:
    batch_size: int = option(
        4, "Rows per device and forward pass.", greater_than=0, group="optimisation"
    )
    gradient_accumulation: int = option(4, "Forward passes per optimiser step.", greater_than=0)
    learning_rate: float = option(
        1e-3, "Peak learning rate (AdamW, betas 0.9 and 0.95).", greater_than=0
    )
    gate_learning_rate: float | None = option(
        None, "infini: that of the gates, without decay; default: 0.01.", at_least=0, rare=True
    )
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = option(
        "cosine", "Learning rates after warm-up."
    )
    warmup: float = option(
        0.05, "Linear warm-up: below 1 a share of the steps, from 1 on their number.", at_least=0
    )
    weight_decay: float = option(0.1, "Weight decay of the matrices.", at_least=0, rare=True)
    max_grad_norm: float = option(
        1.0, "Gradients are scaled down to this norm.", greater_than=0, rare=True
    )
    precision: Literal["auto", "bf16", "float32"] = option(
        "auto", "bf16 autocast; auto: where it is native.", group="machine"
    )
    gradient_checkpointing: bool = option(
        False, "Compute activations twice to save memory.", rare=True
    )
    torch_compile: bool = option(False, "Compile the model with torch.compile.", rare=True)
    eval_steps: int = option(100, "Steps between evaluations.", greater_than=0, group="evaluation")
    eval_rows: int | None = option(
        None, "Rows of all but the last evaluation; default: all.", greater_than=0, rare=True
    )
    save_steps: int = option(
        100, "Steps between checkpoints; the last two are kept.", greater_than=0, group="output"
    )
    logging_steps: int = option(
        10, "Steps between lines of training loss.", greater_than=0, rare=True
    )


@exit_on_error(when_stopped="the same command goes on from the last checkpoint")
def main(argv: list[str] | None = None) -> None:
    run, shape, optimizer = parse_options(
        RunOptions, ModelOptions, OptimizerOptions, description=__doc__, argv=argv
    )

    import torch
    from transformers import set_seed

    from evaluation import inference, perplexity
    from hf_infini.tools.training import gate_values, parameter_groups
    from plots.run import plot_loss_curve
    from support import measurement
    from support.prepared import read_tokenizer
    from support.rows import RowReader
    from support.stages import checksums, new_files, read_manifest, sealed, write_json
    from training import console, dilution, run_folder, setup
    from training.trainer import PerplexityTrainer

    data, out = Path(run.data), Path(run.out)
    manifest = read_manifest(data)
    arguments = training_arguments(run, optimizer)
    fingerprint = setup.data_fingerprint(manifest)
    sharing = run.context_parallel_size or 1
    rows_per_step = (
        optimizer.batch_size * optimizer.gradient_accumulation * (arguments.world_size // sharing)
    )
    train, validation = setup.load_rows(data, rows_per_step)
    context = len(train[0]["input_ids"])
    tokens_per_step = rows_per_step * context
    arguments.max_steps = setup.number_of_steps(run, len(train) // rows_per_step, tokens_per_step)

    tokenizer = read_tokenizer(data)
    config = build_config(shape, tokenizer, context)
    dilution.check_options(run, optimizer, config)
    setup.check_sharing(run, optimizer, config, context)
    optimizer = replace(
        optimizer, gate_learning_rate=setup.gate_rate(optimizer.gate_learning_rate, config)
    )
    options = {**vars(shape), "attention": attention_of(config), **vars(optimizer), **vars(run)}
    options |= {"data": fingerprint, "precision": "bf16" if arguments.bf16 else "float32"}
    options["num_processes"] = arguments.world_size
    if run.dilute_with is not None:
        options["dilute_with"] = setup.data_fingerprint(read_manifest(Path(run.dilute_with)))
    for name in ("out", "report_to"):  # these may change between two starts of a run
        del options[name]
    with run_folder.open_run(out, options) as (finished, checkpoint):
        if finished:
            print(f"{out} holds this run, finished: see {out / 'result.json'}")
            return
        masked = getattr(config, "mask_special_tokens", shape.mask_special_tokens is not False)
        end_of_text = tokenizer.eos_token_id if run.separate_documents else None
        # Evaluations never count special tokens, so that all runs are judged on the same
        learned, judged = (
            RowReader(tokenizer.all_special_ids if on else (), end_of_text) for on in (masked, True)
        )
        set_seed(run.seed)
        model = build_model(config, shape.init_from)
        rates = (optimizer.learning_rate, optimizer.gate_learning_rate, optimizer.weight_decay)
        reads_memory = run.dilute_with is not None or inference.reads_memory(config, context)
        diluted = run.dilute_with and dilution.Dilution.from_options(
            run, [run.dilute_with], tokenizer, f"--data {data}"
        )
        judged_rows = validation.select(range(len(validation))[: optimizer.eval_rows])
        trainer = PerplexityTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=judged_rows.with_transform(judged),
            data_collator=learned.collate,
            processing_class=tokenizer,
            callbacks=[run_folder.RunRecorder(out, tokens_per_step, reads_memory)],
            optimizer_of=lambda model: torch.optim.AdamW(
                parameter_groups(model, *rates), betas=(0.9, 0.95), fused=True
            ),
            past_of=diluted and diluted.past,
            context_parallel_size=sharing,
        )
        console.speak_in_lines(trainer)
        # not before: options that make no model or Trainer may be corrected
        if arguments.should_save:
            run_folder.begin_run(out, options, checkpoint)
        step = run_folder.checkpoint_step(checkpoint) if checkpoint else 0
        note = f"from step {step}" if checkpoint else "from the start"
        length = f"{arguments.max_steps:,} steps of {tokens_per_step:,} tokens"
        run_folder.say(f"{model.num_parameters():,} parameters, {length}, {note}")
        model, lines = setup.train_to_end(trainer, checkpoint)

        setup.leave_process_group(trainer)
        if not arguments.should_save:
            return
        # Always in float32, so that recipes/evaluate_model.py finds the same number
        rows, chunk = perplexity.prepared_rows(data, "validation"), -(-context // sharing)
        validated = perplexity.measure_perplexity(model, rows, judged, chunk, optimizer.batch_size)
        # the Trainer switched it off for training
        model.config.use_cache = model.generation_config.use_cache = True
        gates = gate_values(model) if reads_memory else {}
        with new_files(out) as part:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            plot_loss_curve(lines, part / "loss_curve.png")
            files = checksums(part)
        tokens, seconds = arguments.max_steps * tokens_per_step, lines[-1]["seconds"]
        files |= checksums(out, [out / run_folder.OPTIONS, out / run_folder.METRICS])
        result = {name: validated[name] for name in ("cross_entropy", "perplexity")}
        result |= {"validation_tokens": validated["tokens"], "tokens": tokens}
        result |= {"steps": arguments.max_steps, "parameters": model.num_parameters()}
        result |= {"seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds, 1)}
        result |= {**measurement.peak_memory(), "seed": run.seed, "gates": gates}
        result |= {"data_fingerprint": fingerprint, "options": options}
        result |= measurement.environment()
        # the last file: it says that the run is finished
        write_json(out / "result.json", sealed(result, files))
    print(console.ending(out, data, result))


def training_arguments(run: RunOptions, optimizer: OptimizerOptions):
    """The Trainer's arguments. Building them joins the process group, whose size is then
    checked."""
    from support import measurement
    from training import run_folder, setup

    same = ("max_grad_norm", "torch_compile", "eval_steps", "logging_steps")
    arguments = setup.training_arguments(
        run.out,
        {**vars(run), **vars(optimizer)},
        per_device_eval_batch_size=optimizer.batch_size,
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=optimizer.warmup,
        eval_strategy="steps",
        report_to=run.report_to,
        run_name=Path(run.out).resolve().name,
        **{name: getattr(optimizer, name) for name in same},
        **{setup.checkpointing_name(): optimizer.gradient_checkpointing},
    )
    precision = "bf16" if arguments.bf16 else "float32"
    run_folder.say(f"{arguments.world_size} process(es) on {arguments.device}, {precision}")
    if arguments.use_cpu:
        measurement.keep_freed_memory()
    setup.check_processes(arguments, run.context_parallel_size)
    return arguments


if __name__ == "__main__":
    main()
