"""Speed and memory of this package beside what else one could use, on this machine, by one command.

    python recipes/benchmark.py --out runs/benchmark.json
    python recipes/benchmark.py --parts attention --shapes 4096x256 16384x64 --dtypes bfloat16 --out runs/attention.json
    python recipes/benchmark.py --parts options --size mini --dtypes bfloat16 --out runs/options.json
    python recipes/benchmark.py --parts soak --size micro --threads 1 --out runs/soak.json

Parts:
    attention  one layer, forward and backward, beside full causal attention, loops over segments, sliding windows and
               packages from PyPI (pip install ".[benchmark]"); recipes/benchmarks/contestants.py says what each is
    scaling    the layer over lengths that double, and its memory over the segment length
    model      training steps beside stock GPT-2; memory while a long prompt is read; new tokens of a padded batch
    decoding   cache bytes and seconds of a new token after long contexts, beside stock GPT-2's growing cache
    options    a training step with one option of the memory changed at a time
    compiled   a training step and new tokens as they are and under torch.compile
    pretrained prompts and new tokens of a checkpoint (--model) as it is and with Infini-attention
    soak       a million tokens through a cached model, by each update rule: what it holds and its time per token stay the
               same, its logits are those of a reference in float64 without cache and chunks, and its memory has drifted
               from that one's by less than 1e-3; ends with status 1 where memory or results do not hold

The last two are left out where --parts does not name them.

Contestants take turns in one process, in a new random order every round; figures are medians of the rounds with the
extremes, and ratios are taken within the rounds. Memory is the real peak: of a fresh process's resident set on a CPU, of
torch.cuda.max_memory_allocated on a GPU. What takes too long or too much memory is skipped, and the table says why. Models
have random weights. For figures of record let nothing else run, and pin the processors (taskset -c 0).

Prints tables and writes OUT, after every measurement.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cli import SEED, UserError, exit_on_error, option, parse_options
from cli.names import check_name

PARTS = ["attention", "scaling", "model", "decoding", "options", "compiled"]  # without being asked for


@dataclass
class Options:
    out: str = field(metadata={"help": "JSON file to write.", "group": "output"})
    parts: list[str] = option(PARTS, "What to measure.", choices=[*PARTS, "pretrained", "soak"], group="measurement")
    model: str | None = option(None, "pretrained: folder or name on the Hub of a plain language model.")
    size: Literal["small", "mini", "micro", "tiny"] = option("small", "GPT-2 small; the study's model; one for "
                                                             "a soak; one to see that all runs.")  # fmt: skip
    dtypes: list[str] = option(["float32", "bfloat16"], "Of the layer, of training (bfloat16: autocast), of a checkpoint's "
                               "weights (int8: by torchao, the rest bfloat16).",
                               choices=["float32", "bfloat16", "int8"])  # fmt: skip
    shapes: list[str] | None = option(None, "attention: TOKENSxSEGMENT, tokens and tokens in a segment (or a window).")
    contestants: list[str] | None = option(None, "attention: names of contestants; default: all.")
    contexts: list[int] | None = option(None, "model, options, compiled: tokens in a row of a training step. pretrained: "
                                        "tokens of a prompt. soak: tokens of a text.", at_least=1)
    rounds: int = option(5, "Rounds, each timing every contestant once.", at_least=1)
    device: str = option("cpu", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.", group="machine")
    threads: int | None = option(None, "CPU threads; default: torch's own choice.", at_least=1, at_most=1024)
    seed: int = option(0, "Of weights, inputs and the order of contestants.", **SEED)


@exit_on_error(when_stopped="the parts that are finished are in --out; the same command measures all of them again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    shapes = shapes_of(options.shapes)
    if ("pretrained" in options.parts) != (options.model is not None):
        raise UserError("--parts pretrained and --model NAME go together: give both or neither")
    if "int8" in options.dtypes and options.parts != ["pretrained"]:
        raise UserError("--dtypes int8 is for --parts pretrained only")

    import torch
    from tqdm import tqdm

    from benchmarks import contestants, measuring, models, parts, report
    from evaluation import inference
    from support import measurement
    from support.stages import check_place, write_json

    names = options.contestants or list(contestants.CONTESTANTS)
    unknown = [name for name in names if name not in contestants.CONTESTANTS]
    if unknown:
        raise UserError(f"--contestants: there is no {unknown[0]}; allowed are {', '.join(contestants.CONTESTANTS)}")
    device = inference.usable_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if device == "cpu":
        measurement.keep_freed_memory()
    size = parts.SIZES[options.size]
    size = replace(size, shapes=shapes or size.shapes, contexts=tuple(options.contexts or size.contexts))
    size = replace(size, read=tuple(options.contexts or size.read), soaked=tuple(options.contexts or size.soaked))
    least = 40 * size.chunk  # most of it after the warm-up
    if "soak" in options.parts and (short := [tokens for tokens in size.soaked if tokens < least]):
        raise UserError(f"--contexts {short[0]}: a soak of this size takes at least {least:,} tokens")
    if options.model is not None:
        check_name("--model", options.model)
    spec = models.ModelSpec(**size.model, checkpoint=options.model, device=device, seed=options.seed)
    how = parts.How(spec, size, options.dtypes, names, options.rounds, options.threads)
    out = Path(options.out)
    check_place(out, {"parts": dict, "threads": int})
    content = {**measurement.environment(), "options": vars(options), "threads": torch.get_num_threads(), "parts": {}}
    for part in options.parts:
        rows = content["parts"][part] = []
        for measured in tqdm(parts.PARTS[part](how), desc=part, unit="measurement"):
            rows += measured
            write_json(out, content)
            measuring.give_back_memory()
        print(f"{report.markdown(rows)}\n", flush=True)
    print(out)
    if broken := [words for rows in content["parts"].values() for row in rows for words in row.get("broken", ())]:
        raise UserError(f"the soak shows a defect: {'; '.join(broken)} ({out} has all figures)")


def shapes_of(shapes: list[str] | None) -> tuple[tuple[int, int], ...]:
    """--shapes as pairs of tokens and segment length."""
    pairs = []
    for shape in shapes or ():
        tokens, cross, segment = shape.partition("x")
        if not (tokens.isdecimal() and cross and segment.isdecimal() and int(tokens) and int(segment)):
            raise UserError(f"--shapes {shape}: give TOKENSxSEGMENT, such as 4096x256")
        pairs.append((int(tokens), int(segment)))
    return tuple(pairs)


if __name__ == "__main__":
    main()
