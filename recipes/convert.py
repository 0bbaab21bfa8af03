r"""Gives a pretrained model a cache of constant size, and learns nothing but an adapter, without changing the model.

    python recipes/prepare.py --source texts.jsonl --tokenizer CHECKPOINT --context 2048 --out data/long
    python recipes/prepare_recall.py --data data/long --context 1700 --rows 64 --mix forms=1 --out data/asking
    python recipes/convert.py --model CHECKPOINT --data data/asking --kept_tokens 252 --keep_score half --out runs/kept
    torchrun --nproc_per_node 2 recipes/convert.py --model CHECKPOINT --data data/asking data/long --kept_tokens 252 \
        --keep_score half --steps 400 --out runs/adapted

CHECKPOINT is a plain model: a folder or a name on the Hub.

With --keep_score half or learned, which tokens are kept is fitted first: in closed form, by one pass over a few rows, in
minutes. Rows of prepare_recall.py, which ask for what was said long before, teach most (`hf-infini fit` makes them itself).
With --steps, a LoRA then makes up for what window and kept tokens leave out: by the KL divergence from the plain model's
predictions, at positions that no longer see everything. The plain model inside is the teacher, and no second one is loaded.
Of rows that ask, only the answers count. The memory stays closed: beside kept tokens it brought nothing (docs/limits.md).

Stopped at any point and started again with the same command, it goes on. Writes OUT/adapter, which `hf_infini.load_adapter`
puts on the plain model, and OUT/result.json. compare_caches.py says what it is worth on held-out text: --attribute for the
parts of one adapter, --ways beside the plain model.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from cli import SEED, UserError, exit_on_error, option, parse_options
from cli.model_options import given_options, window_choices

DEFAULTS = {"segment_length": 128, "local_segments": 1, "sink_tokens": 4}


@dataclass
class Options:
    model: str = field(metadata={"help": "Plain model: a folder or a name on the Hub.", "group": "model"})
    data: list[str] = field(metadata={"help": "Folders of prepare.py or prepare_recall.py, made with the model's tokenizer, "
                            "rows of one length, longer than window, sinks and kept tokens together.", "group": "data"},
                            )  # fmt: skip
    out: str = field(metadata={"help": "Folder of the conversion; continued when it holds this one.", "group": "output"})
    fit_rows: int = option(24, "Training rows to which the score of kept tokens is fitted, of all folders in equal parts.",
                           at_least=1, group="training")  # fmt: skip
    steps: int = option(0, "Optimiser steps of the LoRA; 0: there is none.", at_least=0)
    learning_rate: float = option(5e-4, "Peak learning rate.", greater_than=0)
    rank: int = option(4, "Rank of the LoRA, which all linear layers of the decoder get.", at_least=1)
    batch_size: int = option(1, "Rows per device and forward pass.", at_least=1)
    gradient_accumulation: int = option(1, "Forward passes per optimiser step.", at_least=1)
    save_steps: int = option(10, "Steps between checkpoints; the last two are kept.", at_least=1)
    precision: str = option("auto", "bf16 autocast; auto: where it is native.", choices=["auto", "bf16", "float32"],
                            group="machine")  # fmt: skip
    use_cpu: bool = option(False, "Use the CPU even where there is a GPU.")
    seed: int = option(0, "Seed of the LoRA and of the order of rows.", **SEED, group="training")


WindowChoices = window_choices(DEFAULTS)


@exit_on_error(when_stopped="the same command goes on from the last checkpoint")
def main(argv: list[str] | None = None) -> None:
    options, given = parse_options(Options, WindowChoices, description=__doc__, argv=argv)
    memory = DEFAULTS | {"gate_init": -1000.0} | given_options(given)  # a memory that is not trained is not read
    fits = memory.get("keep_score") in ("learned", "half")
    if not options.steps and not fits:
        raise UserError("nothing would be learned: give --kept_tokens with --keep_score learned or half, or --steps")

    import torch

    from conversion.run import Conversion
    from hf_infini import save_adapter
    from support import measurement
    from support.stages import write_json
    from training import run_folder

    out, conversion = Path(options.out), Conversion(options, memory)
    if conversion.arguments.device.type == "cpu":
        measurement.keep_freed_memory()
    model = conversion.load_model()
    conversion.claim_folder()
    found = {"keep_score": conversion.fit_score(model)} if fits else {}
    if options.steps:
        model, found["lora"] = conversion.train_lora(model)
    if not conversion.arguments.should_save:
        return
    save_adapter(model, out / "adapter", torch.bfloat16)
    result = {**found, "options": vars(options), "memory_options": memory, "data_fingerprints": conversion.fingerprints}
    write_json(out / "result.json", result | {**measurement.peak_memory(), **measurement.environment()})
    adapter = shlex.quote(str(out / "adapter"))
    run_folder.say(f"files    {adapter}, {out / 'result.json'}")
    run_folder.say(f"next     python recipes/compare_caches.py --model {shlex.quote(options.model)} --adapter {adapter} "
                   f"--attribute --data {shlex.quote(options.data[0])} --out {shlex.quote(str(out / 'parts'))}")  # fmt: skip


if __name__ == "__main__":
    main()
