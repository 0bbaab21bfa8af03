"""What one more token costs after a long context: cache bytes and seconds, with Infini-attention and with GPT-2's cache.

    python recipes/benchmark.py --out runs/benchmark
    python recipes/benchmark.py --contexts 1024 8192 --segment_length 128 --update_rule delta --out runs/benchmark_delta

Both models have the same random weights (by default of GPT-2 small's size). The model with Infini-attention really reads
the context, in chunks. Stock GPT-2 gets as many positions as it needs and a dynamic cache filled with random keys and
values: what a step costs does not depend on them, and reading 65,536 tokens with full attention takes hours on a CPU.
Steps of the two are timed alternately; the figures are medians over the rounds, with the fastest and slowest beside them.
Writes OUT.json and OUT.png, and prints a table.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_infini_cli import UserError, exit_on_user_error, parse_options


@dataclass
class Options:
    out: str = field(metadata={"help": "Files to write, without suffix."})
    contexts: list[int] = field(
        default_factory=lambda: [1024, 8192, 65536], metadata={"help": "Tokens read before the timed steps."}
    )
    segment_length: int = field(default=256, metadata={"help": "Tokens per segment."})
    local_segments: int = field(default=0, metadata={"help": "Earlier segments in the local window."})
    update_rule: Literal["linear", "delta"] = field(default="linear", metadata={"help": "How memory is written."})
    n_layer: int = field(default=12, metadata={"help": "Layers."})
    n_embd: int = field(default=768, metadata={"help": "Width."})
    n_head: int = field(default=12, metadata={"help": "Heads."})
    chunk: int = field(default=4096, metadata={"help": "Tokens per call while the context is read."})
    steps: int = field(default=8, metadata={"help": "New tokens timed together."})
    rounds: int = field(default=7, metadata={"help": "Rounds, each timing both models once."})
    stock_limit: int = field(default=65536, metadata={"help": "Longest context for stock GPT-2; its cache grows with it."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, …"})
    dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata={"help": "Of weights and caches."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; default: torch's own choice."})
    seed: int = field(default=0, metadata={"help": "Of the weights and tokens."})


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    smallest = min(options.segment_length, options.steps, options.rounds, options.chunk, *options.contexts)
    if smallest < 1:
        raise UserError(f"lengths, steps and rounds must be at least 1, got {smallest}")

    import torch
    from tqdm import tqdm

    from hf_infini import measurement, plots, run_folder

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    infini, stock = build_models(options)
    if options.device == "cpu":
        measurement.keep_freed_memory()
    rows = []
    for context in tqdm(options.contexts, desc="contexts"):
        caches = {"infini": read_context(infini, context, options)}
        if context <= options.stock_limit:
            caches["gpt2"] = random_cache(stock, context, options)
        models = {"infini": infini, "gpt2": stock}
        seconds = {name: [] for name in caches}
        for number in range(options.rounds + 1):
            for name, cache in caches.items():
                elapsed = time_steps(models[name], cache, options)
                if number:  # the first round warms up
                    seconds[name].append(elapsed / options.steps)
        for name, cache in caches.items():
            times = seconds[name]
            rows.append(
                {
                    "context": context,
                    "model": name,
                    "cache_bytes": cache_bytes(cache),
                    "seconds_per_token": statistics.median(times),
                    "fastest": min(times),
                    "slowest": max(times),
                }
            )
        del caches
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(out.with_suffix(".json"), {"options": vars(options), "rows": rows, **measurement.environment()})
    plots.plot_decoding(rows, out.with_suffix(".png"))
    print_table(rows)
    print(f"{out.with_suffix('.json')}, {out.with_suffix('.png')}")


def build_models(options: Options):
    """A model with Infini-attention and segment positions, and stock GPT-2 with the same weights and more positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from hf_infini import patch_model

    sizes = {name: getattr(options, name) for name in ("n_layer", "n_embd", "n_head")}
    longest = max([context for context in options.contexts if context <= options.stock_limit] or [1])
    new_tokens = options.steps * (options.rounds + 1)
    stock = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=longest + new_tokens)).eval()
    infini = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=max(1024, options.segment_length))).eval()
    weights = {name: tensor for name, tensor in stock.state_dict().items() if "wpe" not in name}
    infini.load_state_dict(weights, strict=False)
    kept = {name: getattr(options, name) for name in ("segment_length", "local_segments", "update_rule")}
    patch_model(infini, positions="segment", **kept)
    return (model.to(options.device, getattr(torch, options.dtype)) for model in (infini, stock))


def read_context(model, context: int, options: Options):
    """The cache after `context` random tokens, read in chunks."""
    import torch

    from hf_infini import InfiniCache

    cache = InfiniCache(model.config)
    with torch.inference_mode():
        for begin in range(0, context, options.chunk):
            ids = torch.randint(model.config.vocab_size, (1, min(options.chunk, context - begin)), device=options.device)
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def random_cache(model, context: int, options: Options):
    """A dynamic cache that holds `context` tokens of random keys and values."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    shape = (1, options.n_head, context, options.n_embd // options.n_head)
    for layer in range(options.n_layer):
        keys, values = (torch.randn(shape, device=options.device, dtype=model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def time_steps(model, cache, options: Options) -> float:
    """Seconds for `steps` new tokens, one call each; the cache goes on."""
    import torch

    ids = torch.zeros(1, 1, dtype=torch.long, device=options.device)
    with torch.inference_mode():
        begin = time.perf_counter()
        for _ in range(options.steps):
            token = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
        token.item()  # waits for the device
        return time.perf_counter() - begin


def cache_bytes(cache) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def print_table(rows: list[dict]) -> None:
    print("| context | model | cache, MiB | ms per new token (fastest – slowest) |\n| ---: | --- | ---: | ---: |")
    for row in rows:
        times = " – ".join(f"{row[name] * 1e3:.1f}" for name in ("fastest", "slowest"))
        print(
            f"| {row['context']:,} | {row['model']} | {row['cache_bytes'] / 2**20:.1f} "
            f"| {row['seconds_per_token'] * 1e3:.1f} ({times}) |"
        )


if __name__ == "__main__":
    main()
