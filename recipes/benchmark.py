r"""Speed and memory of this package beside what else one could use, by one command.

    python recipes/benchmark.py --device cuda --out runs/gpu.json
    python recipes/benchmark.py --parts attention --shapes 4096x256 16384x64 --dtypes bfloat16 \
        --out runs/attention.json
    python recipes/benchmark.py --parts decoding --model smollm2-360m --batches 1 16 \
        --device cuda --out runs/decoding.json

Parts:
    attention  one layer, forward and backward, beside full causal attention and a loop over
               segments, on a GPU also in a CUDA graph; recipes/benchmarks/contestants.py says what
               each is
    model      training steps, beside the same model with its own attention
    decoding   cache bytes and seconds of a new token of each row after long contexts, likewise; on
               a GPU compiled and not
    recall     reading with an archive, in 8 bits or not, and without; and a recall from archives of
               several lengths (one text of 2,048 tokens, many times), beside a short answer

Contestants take turns in one process, in a new random order every round (models in training one
after the other, for the sake of memory); figures are medians of the rounds with the extremes, and
ratios are taken within the rounds. Peaks are of torch.cuda.max_memory_allocated, on a GPU only.
What needs too much memory is skipped, and the table says so. Models have random weights, unless
--model is a checkpoint. For figures of record let nothing else run. The first command takes less
than ten minutes on an H100.

Prints tables and writes OUT, after every measurement.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from cli import SEED, UserError, exit_on_error, needed, option, parse_options
from cli.names import check_name

PARTS, DTYPES = ["attention", "model", "decoding", "recall"], ["float32", "bfloat16"]


@dataclass
class Options:
    out: str = needed("JSON file to write.", group="output")
    parts: list[str] = option(PARTS, "What to measure.", choices=PARTS, group="measurement")
    model: str = option(
        "gpt2",
        "gpt2, smollm2-135m, smollm2-360m, smollm2-1.7b (sizes), tiny, or a plain model: "
        "folder or name on the Hub.",
    )
    dtypes: list[str] = option(
        ["bfloat16"], "Of the layer, of training, of weights when decoding.", choices=DTYPES
    )
    shapes: list[str] | None = option(
        None, "attention: TOKENSxSEGMENT, tokens and tokens in a segment."
    )
    contestants: list[str] | None = option(
        None, "attention: names of contestants; default: all that are usual here."
    )
    contexts: list[int] | None = option(
        None,
        "model: tokens in a row; decoding: tokens before the new one; recall: in the archive.",
        at_least=1,
    )
    batches: list[int] = option([1], "decoding: rows.", at_least=1)
    rounds: int = option(3, "Rounds, each timing every contestant once.", at_least=1)
    device: str = option(
        "cpu", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.", group="machine"
    )
    threads: int | None = option(
        None, "CPU threads; default: torch's own choice.", at_least=1, at_most=1024
    )
    seed: int = option(0, "Of weights, inputs and the order of contestants.", **SEED)


@exit_on_error("finished parts are in --out; the same command measures all of them again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    options.shapes = shapes_of(options.shapes)

    import torch
    from tqdm import tqdm

    from benchmarks import contestants, measuring, models, parts, report
    from evaluation import inference
    from support import measurement
    from support.stages import check_place, write_json

    if unknown := set(options.contestants or ()) - set(contestants.CONTESTANTS):
        allowed = ", ".join(contestants.CONTESTANTS)
        raise UserError(f"--contestants: there is no {min(unknown)}; allowed are {allowed}")
    options.device = inference.usable_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cpu":
        measurement.keep_freed_memory()
    if options.model not in models.SIZES:
        check_name("--model", options.model)
    out = Path(options.out)
    check_place(out, {"parts": dict, "threads": int})
    content = {**measurement.environment(), "options": vars(options), "parts": {}}
    content["threads"] = torch.get_num_threads()
    for part in options.parts:
        rows = content["parts"][part] = []
        for measured in tqdm(parts.PARTS[part](options), desc=part, unit="measurement"):
            rows += measured
            write_json(out, content)
            measuring.give_back_memory()
        print(f"{report.markdown(rows)}\n", flush=True)
    print(out)


def shapes_of(shapes: list[str] | None) -> list[tuple[int, int]]:
    """--shapes as pairs of tokens and segment length."""
    pairs = []
    for shape in shapes or ():
        if not re.fullmatch(r"0*[1-9]\d*x0*[1-9]\d*", shape):
            raise UserError(f"--shapes {shape}: give TOKENSxSEGMENT, such as 4096x256")
        pairs.append(tuple(map(int, shape.split("x"))))
    return pairs


if __name__ == "__main__":
    main()
