"""Speed and memory of this package beside what else one could use, on this machine, by one command.

    python recipes/benchmark.py --out runs/benchmark
    python recipes/benchmark.py --parts attention --shapes 4096x256 16384x64 --dtypes bfloat16 --out runs/attention
    python recipes/benchmark.py --parts decoding --contexts 1024 8192 --update_rule delta --out runs/decoding

Parts:
    attention  one layer, forward and backward, beside full causal attention, loops over segments, sliding windows and
               packages from PyPI (pip install ".[benchmark]"); recipes/benchmarks/contestants.py says what each is
    scaling    the layer over lengths that double, and its memory over the segment length
    model      training steps beside stock GPT-2; memory while a long prompt is read; new tokens of a padded batch
    decoding   cache bytes and seconds of a new token after long contexts, beside stock GPT-2's growing cache
    options    a training step with one option of the memory changed at a time
    compiled   a training step and new tokens as they are and under torch.compile
Always measured are the machine's own peaks, products of matrices and a copy. The attention's tables give the share of them
that is reached, in the operations and bytes that the work needs (recipes/benchmarks/work.py), not those that are spent.

Contestants take turns in one process, in a new random order every round; figures are medians of the rounds with the
extremes, and ratios are taken within the rounds. Memory is the real peak: of a fresh process's resident set on a CPU, of
torch.cuda.max_memory_allocated on a GPU. What takes too long or too much memory is skipped, and the table says why. Models
have random weights. For figures of record let nothing else run, and pin the processors (taskset -c 0).

Prints tables and writes OUT.json and OUT_PART.png. Killed and started again, it measures only what OUT.json does not hold.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli import UserError, exit_on_user_error, option, parse_options

PARTS = ["attention", "scaling", "model", "decoding", "options", "compiled"]


@dataclass
class Options:
    out: str = field(metadata={"help": "Files to write, without suffix.", "group": "output"})
    parts: list[str] = option(PARTS, "What to measure.", choices=PARTS, group="measurement")
    device: str = option("cpu", "cpu, cuda, …", group="machine")
    threads: int | None = option(None, "CPU threads; default: torch's own choice.")
    rounds: int = option(5, "Rounds, each timing every contestant once.", group="measurement")
    once_above: float = option(10.0, "Seconds; a contestant of the layer that takes more is timed once, not in every round.")
    skip_above: float = option(60.0, "Seconds; one that takes more in a process of its own is not timed (CPU).")
    again: bool = option(False, "Measure anew what OUT.json holds.")
    seed: int = option(0, "Of weights, inputs and the order of contestants.")
    machine_size: int | None = option(None, "Rows of the peak's matrices; default: 2048 (fewer if slow), on a GPU 8192.")


@dataclass
class LayerOptions:
    shapes: list[str] = option(
        ["1024x64", "1024x256", "4096x256", "16384x256", "16384x64", "16384x16"],
        "attention: TOKENSxSEGMENT, the number of tokens and of tokens in a segment (or a window).",
        group="one layer",
    )
    dtypes: list[str] = option(["float32", "bfloat16"], "Of the layer's inputs.", choices=["float32", "bfloat16"])
    heads: int = option(12, "Heads of the layer.")
    head_dim: int = option(64, "Width of a head.")
    batch: int = option(1, "Rows of the layer.")
    contestants: list[str] | None = option(None, "attention: names of contestants; default: all.")
    scaling_tokens: list[int] = option(
        [8192, 16384, 32768, 65536, 131072], "scaling: lengths, each twice the one before.", group="scaling"
    )
    scaling_segment: int = option(256, "scaling: tokens in a segment while the length grows.")
    memory_segments: list[int] = option([16, 32, 64, 128, 256, 512, 1024, 2048], "scaling: segment lengths for the memory.")
    memory_tokens: int = option(16384, "scaling: tokens while the segment length grows.")


@dataclass
class ModelOptions:
    n_layer: int = option(12, "Layers.", group="models")
    n_embd: int = option(768, "Width.")
    n_head: int = option(12, "Heads of the models.")
    vocab_size: int = option(50257, "Vocabulary.")
    segment_length: int = option(256, "Tokens per segment.")
    local_segments: int = option(0, "Earlier segments in the local window.")
    update_rule: Literal["linear", "delta"] = option("linear", "How the models' memory is written.")
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of weights and caches where nothing is trained.")
    training_contexts: list[int] = option(
        [1024, 8192], "model, options, compiled: tokens in a row of a training step.", group="training and prompts"
    )
    training_rows: int = option(1, "model, options, compiled: rows of a training step.")
    precisions: list[str] = option(
        ["float32", "bf16"], "model, options, compiled: float32, bf16 autocast.", choices=["float32", "bf16"]
    )
    prompts: list[int] = option([4096, 16384, 65536], "model: tokens of a prompt that is read.")
    stock_prompt_limit: int = option(16384, "model: longest prompt for stock GPT-2, which takes quadratic time.")
    padded_batch: int = option(16, "model: rows of the padded batch.")
    padded_context: int = option(512, "model: longest prompt of the padded batch.")
    contexts: list[int] = option([1024, 8192, 65536], "decoding: tokens read before the timed steps.", group="decoding")
    stock_limit: int = option(65536, "decoding: longest context for stock GPT-2; its cache grows with it.")
    chunk: int = option(4096, "Tokens per call while a text is read.")
    steps: int = option(8, "New tokens timed together.")


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    options, layers, models = parse_options(Options, LayerOptions, ModelOptions, description=__doc__, argv=argv)
    check(options, layers, models)

    import torch

    from benchmarks import machine, parts, report
    from benchmarks.layer import How
    from benchmarks.store import Results
    from support import measurement

    parts.check_contestants(layers.contestants)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {options.device}: torch finds no GPU here; leave the option out for the CPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cpu":
        measurement.keep_freed_memory()
    out = Path(options.out)
    setting = {**measurement.environment(), "device": options.device, "threads": torch.get_num_threads()}
    everything = {**vars(options), **vars(layers), **vars(models)}
    results = Results(out.with_name(out.name + ".json"), setting, everything, options.again)
    how = How(
        device=options.device,
        rounds=options.rounds,
        once_above=options.once_above,
        skip_above=options.skip_above,
        threads=options.threads,
        seed=options.seed,
    )

    rows = parts.machine_rows(results, how, options.machine_size)
    print(report.machine_table(rows), flush=True)
    for part in options.parts:
        picture = out.with_name(f"{out.name}_{part}.png")
        if part == "attention":
            text = parts.attention(results, how, layers, shapes_of(layers), machine.peaks(rows), picture)
        elif part == "scaling":
            text = parts.scaling(results, how, layers, picture)
        elif part == "model":
            text = parts.model(results, how, models, picture)
        elif part == "decoding":
            text = parts.decoding(results, how, models, picture)
        elif part == "compiled":
            text = parts.compiled(results, how, models, picture)
        else:
            text = parts.options(results, how, models, picture)
        print(f"\n{text}\n\n{picture}", flush=True)
    print(results.file)


def check(options: Options, layers: LayerOptions, models: ModelOptions) -> None:
    """Refuses sizes below 1, and shapes of another form, before the libraries are loaded."""
    shapes_of(layers)
    for name, value in [item for group in (options, layers, models) for item in vars(group).items()]:
        for number in value if isinstance(value, list) else [value]:
            if name not in ("seed", "local_segments", "again") and isinstance(number, int | float) and number <= 0:
                raise UserError(f"--{name} must be greater than 0, got {number}")


def shapes_of(layers: LayerOptions) -> list[tuple[int, int]]:
    """--shapes as pairs of tokens and segment length."""
    shapes = []
    for shape in layers.shapes:
        tokens, cross, segment = shape.partition("x")
        if not (tokens.isdecimal() and cross and segment.isdecimal() and int(tokens) and int(segment)):
            raise UserError(f"--shapes {shape}: give TOKENSxSEGMENT, such as 4096x256")
        shapes.append((int(tokens), int(segment)))
    return shapes


if __name__ == "__main__":
    main()
