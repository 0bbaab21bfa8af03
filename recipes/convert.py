r"""Gives a pretrained model memories that it can use, and trains nothing but an adapter of a few megabytes.

    python recipes/prepare.py --source texts.jsonl --tokenizer CHECKPOINT --context 2048 --out data/long
    python recipes/prepare_recall.py --data data/long --context 2048 --rows 1000 --out data/asking
    python recipes/convert.py --model CHECKPOINT --data data/long data/asking --out runs/converted
    torchrun --nproc_per_node 2 recipes/convert.py --model CHECKPOINT --data data/long data/asking --out runs/converted

CHECKPOINT is a plain model: a folder or a name on the Hub. Its own attention is the teacher; no second model is loaded.

    calibrate  the scale of the feature maps, by the size of each head's queries and keys
    keep_score with --kept_tokens and --keep_score half or learned: which tokens are kept, in closed form, in one pass over
               a few rows; with --transfer_steps 0 --together_steps 0 it is all that is learned, and takes minutes
    transfer   each layer learns to give with its memory what its own attention gives, on the plain model's input, which is
               computed once for some rows
    together   all layers and a LoRA learn rows of text, and what the plain model predicts there; and the answers in rows of
               prepare_recall.py, without which no memory learns to keep what is asked for later

With --start, together goes on from the adapter of an earlier conversion, for instance with longer rows; with
--together_steps 0 that is evaluated as it is. Stopped at any point and started again with the same command, it
goes on. Writes OUT/adapter, which `hf_infini.load_adapter` puts on the plain model, and OUT/result.json with the
cross-entropy of validation rows beyond the window: of the plain model, of its window and sinks untrained, and of the trained
model with its memory switched off and on.
"""

from dataclasses import dataclass, field
from pathlib import Path

from cli import SEED, UserError, exit_on_error, option, parse_options
from cli.model_options import given_options, memory_choices
from conversion.defaults import DEFAULTS, LORA_RANK, NARROW_TO


@dataclass
class Options:
    model: str = field(metadata={"help": "Plain model: a folder or a name on the Hub.", "group": "model"})
    data: list[str] = field(metadata={"help": "Folders of prepare.py or prepare_recall.py, made with the model's tokenizer, "
                            "rows of one length; all are trained on, and each is evaluated.", "group": "data"})  # fmt: skip
    out: str = field(metadata={"help": "Folder of the conversion; continued when it holds this one.", "group": "output"})
    start: str | None = option(None, "Adapter of an earlier conversion of the same model, to go on from with other rows: a "
                               "folder or a name on the Hub. Memory, layers and LoRA are kept (only --segment_length may "
                               "differ); no calibrate and no transfer.", group="model")  # fmt: skip
    memory_in: list[int] | None = option(
        None, "Layers, counted from 0, whose memory is trained and read; the others have their window only. Default: all.",
        at_least=0, group="model",
    )  # fmt: skip
    fit_rows: int = option(24, "keep_score: training rows, of all folders in equal parts; those of prepare_recall.py teach "
                           "most.", at_least=1, group="training")  # fmt: skip
    transfer_rows: int = option(64, "transfer: training rows, of all folders in equal parts. What layers give in the plain "
                                "model is kept for them: tokens * width * layers * 4 bytes a row, 8 in float32.", at_least=1,
                                group="training")  # fmt: skip
    transfer_steps: int = option(400, "Optimiser steps of this stage; 0: leave it out.", at_least=0)
    together_steps: int = option(400, "Optimiser steps of this stage; 0: leave it out.", at_least=0)
    transfer_learning_rate: float = option(1e-2, "Peak learning rate of this stage.", greater_than=0)
    together_learning_rate: float = option(3e-4, "Peak learning rate of the LoRA; the memory has ten times as much.",
                                           greater_than=0)  # fmt: skip
    lora_rank: int | None = option(None, f"together: rank of the LoRA of all projections of attention; 0: none. Default: "
                                   f"{LORA_RANK}, with --start what the adapter has.", at_least=0)  # fmt: skip
    text_weight: float = option(0.5, "together: weight of the text against that of the plain model's predictions; rows "
                                "that ask are learned from their answers only.",
                                at_least=0, at_most=1)  # fmt: skip
    narrow: list[float] = option([0.9, 0.5], "Share of the steps with a narrower window, first and last; linear between.",
                                 at_least=0, at_most=1)  # fmt: skip
    narrow_to: list[int] | None = option(
        None, f"Tokens of a segment in these steps, one drawn for each. Default: those of {', '.join(map(str, NARROW_TO))} "
        "that are shorter than --segment_length.", at_least=1,
    )  # fmt: skip
    dilute_with: list[str] | None = option(None, "together, linear rule: folders of plain text made by recipes/prepare.py "
                                           "with the model's tokenizer, rows of one length; a row then begins with the "
                                           "memory of one of theirs, up to --dilute_up_to times as heavy, so that short "
                                           "rows train what long texts need. Each step reads that row as well.")  # fmt: skip
    dilute_up_to: float = option(32.0, "--dilute_with: the largest factor; each row's is drawn log-uniformly from 1 on.",
                                 at_least=1)  # fmt: skip
    dilute_share: float = option(1.0, "--dilute_with: share of the forward passes whose rows begin so; in the others they "
                                 "begin a text.", at_least=0, at_most=1)  # fmt: skip
    batch_size: int = option(1, "Rows per device and forward pass.", at_least=1)
    gradient_accumulation: int = option(1, "Forward passes per optimiser step.", at_least=1)
    save_steps: int = option(10, "Steps between checkpoints; the last two are kept.", at_least=1)
    evaluation_data: list[str] | None = option(
        None, "Folders that the evaluation at the end reads instead of --data, with rows of another length: prepare.py "
        "gives the same source the same validation documents, whatever its --context.", group="data",
    )  # fmt: skip
    evaluation_rows: int = option(32, "Validation rows of each folder that are evaluated.", at_least=1)
    evaluation_from: int | None = option(None, "First position of a row that the evaluation counts; default: the first "
                                         "beyond the window.", at_least=1)  # fmt: skip
    precision: str = option("auto", "bf16 autocast; auto: where it is native.", choices=["auto", "bf16", "float32"],
                            group="machine")  # fmt: skip
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.")
    seed: int = option(0, "Seed of the order of rows, narrower windows and LoRA.", **SEED, group="training")


MemoryChoices = memory_choices(DEFAULTS)


@exit_on_error(when_stopped="the same command goes on from the last checkpoint")
def main(argv: list[str] | None = None) -> None:
    options, memory = parse_options(Options, MemoryChoices, description=__doc__, argv=argv)
    if len(options.narrow) != 2:
        raise UserError(f"--narrow takes two shares, of the first and of the last step; got {len(options.narrow)}")

    import torch

    from conversion import evaluation, stages
    from conversion.checks import check
    from hf_infini import save_adapter
    from support import measurement
    from support.stages import write_json
    from training import run_folder

    out = Path(options.out)
    conversion = stages.Conversion(options, given_options(memory))
    check(conversion)
    if conversion.device.type == "cpu":
        measurement.keep_freed_memory()
    model = conversion.load_model()
    conversion.claim_folder()
    found = {}
    for stage in conversion.stages():
        model, found[stage.name] = stage.run(model)
    if not conversion.is_main_process:
        return
    conversion.round_adapter(model)  # what is evaluated is what the file has
    save_adapter(model, out / "adapter", torch.bfloat16)
    first, validation = options.evaluation_from or conversion.window, {}
    for folder, rows in conversion.first_rows("evaluation", options.evaluation_rows).items():
        run_folder.say(f"evaluation of {len(rows):,} rows of {rows.shape[2]:,} tokens, {folder}")
        with conversion.autocast():
            validation[folder] = evaluation.evaluate(model, rows, first, conversion.trained)
    found["validation"] = validation
    result = {**found, "options": vars(conversion.options), "memory": given_options(memory)}
    result |= {"data_fingerprints": conversion.fingerprints, "layers": conversion.trained}
    result |= {**measurement.peak_memory(), **measurement.environment()}
    write_json(out / "result.json", result)
    files = [out / "adapter", out / "result.json"]
    for folder, measured in validation.items():
        print(f"{folder}: {measured['tokens']:,} tokens from position {first:,} on; the window has {conversion.window}\n")
        print(evaluation.table(measured["cross_entropy"]))
    run_folder.say(f"files    {', '.join(map(str, files))}")
    run_folder.say(f"next     python recipes/evaluate_model.py --model {options.model} --adapter {files[0]} --task passkey")


if __name__ == "__main__":
    main()
