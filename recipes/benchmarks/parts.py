"""What recipes/benchmark.py measures: one layer beside others and over its length, whole models beside stock GPT-2.

A cell is measured together, by a function of [`How`] and the cell's settings. It returns rows: `work` (the table that a row
belongs to), `name`, the settings in words, and `skipped` (why there is nothing else) or measurements: `seconds` and `ratio`
with their extremes (see [`timing.summary`]), `peak_bytes`, `cache_bytes`, `tokens_per_second`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import psutil
import torch

from support.measurement import cache_bytes

from . import contestants, models, probe, timing
from .contestants import BASE, Problem, Shape
from .models import KINDS, ModelSpec

RULES = ("infini", "infini-delta")  # what is measured where this package is measured against itself
ONCE_ABOVE = 10.0  # seconds; a contestant of the layer that takes more is timed once, not in every round
SKIP_ABOVE = 60.0  # seconds; one that takes more in a process of its own is not timed (CPU)
NEW_TOKENS = 8  # timed together
UNCHANGED = "none"
CHANGES = {
    UNCHANGED: {},
    "update_rule=delta": {"update_rule": "delta"},
    "feature_map=exp": {"feature_map": "exp"},
    "denominator=shared": {"denominator": "shared"},
    "local_segments=1": {"local_segments": 1},
    "memory_conv=3": {"memory_conv": 3},
    "memory_write=learned": {"feature_map": "exp", "memory_write": "learned"},
    "memory_init=learned": {"memory_init": "learned"},
    "position_encoding=learned": {"position_encoding": "learned"},
    "position_encoding=rope": {"position_encoding": "rope"},
}


@dataclass(frozen=True)
class Size:
    """What is measured at one size; the layer has the heads of the model.

    Attributes:
        shapes: (tokens, segment length) of one layer; lengths: tokens that double, in segments of the model's length;
            segments: segment lengths at `lengths[1]` tokens.
        contexts, rows: of a training step; prompts: tokens that are read; stock_prompt: the longest for stock GPT-2, which
            takes quadratic time; padded: rows and longest prompt of a padded batch; after: contexts of new tokens.
    """

    model: dict
    shapes: tuple = ((1024, 64), (1024, 256), (4096, 256), (16384, 256), (16384, 64), (16384, 16))
    lengths: tuple = (8192, 16384, 32768, 65536, 131072)
    segments: tuple = (16, 32, 64, 128, 256, 512, 1024, 2048)
    contexts: tuple = (1024, 8192)
    rows: int = 1
    prompts: tuple = (4096, 16384, 65536)
    stock_prompt: int = 16384
    padded: tuple = (16, 512)
    after: tuple = (1024, 8192, 65536)
    chunk: int = 4096


MINI = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8000, "segment_length": 64}
TINY = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 97, "segment_length": 16}
SIZES = {
    "small": Size({}),  # GPT-2 small
    "mini": Size(MINI, contexts=(1024,), rows=4),  # the study's
    "tiny": Size(TINY, ((64, 8),), (64, 128), (8,), (40,), 1, (90, 200), 100, (3, 20), (50, 400), 70),
}


@dataclass(frozen=True)
class How:
    """How things are measured, the same for all parts.

    Attributes:
        rounds: values of each contestant; see [`timing.alternate`].
        threads: on the CPU; `None`: torch's choice.
        say: is told what is being measured.
    """

    spec: ModelSpec
    rounds: int = 5
    threads: int | None = None
    say: Callable[[str], object] = field(default=lambda text: None, compare=False)

    def alternate(self, runs: dict, **options) -> dict[str, list[float]]:
        how = {"rounds": self.rounds, "device": self.spec.device, "seed": self.spec.seed, "say": self.say}
        return timing.alternate(runs, **how, **options)

    def probe(self, kind: str, limit_seconds: float = SKIP_ABOVE, **spec) -> dict:
        return probe.measure({"kind": kind, **spec}, self.spec.device, self.threads, limit_seconds)


def cells_of(part: str, size: Size, dtypes: list[str], names: list[str]) -> list[tuple[Callable, dict]]:
    """The cells of a part: the function that measures each, and its settings."""
    steps = [{"context": n, "rows": size.rows, "dtype": dtype} for dtype in dtypes for n in size.contexts]
    if part == "attention":
        return [(attention, {"tokens": n, "segment": s, "dtype": d, "names": names}) for d in dtypes for n, s in size.shapes]
    if part == "scaling":
        both = [{"name": name, "dtype": dtype} for dtype in dtypes for name in RULES]
        over_segments = {"tokens": size.lengths[1], "segments": size.segments}
        return [(scaling, {"lengths": size.lengths, **same}) for same in both] + [
            (segment_memory, over_segments | same) for same in both
        ]
    if part == "model":
        prompts = [{"kind": kind, "context": n, "chunk": size.chunk} for kind in KINDS for n in size.prompts]
        prompts = [prompt for prompt in prompts if prompt["kind"] != "gpt2" or prompt["context"] <= size.stock_prompt]
        cells = [(training, step) for step in steps] + [(prefill, prompt) for prompt in prompts]
        return [*cells, (padded_batch, dict(zip(("batch", "context"), size.padded, strict=True)))]
    if part == "decoding":
        return [(decoding, {"context": context, "chunk": size.chunk}) for context in size.after]
    if part == "options":
        return [(options, {**step, "changes": list(CHANGES)}) for step in steps]
    tokens = [{"context": context} for context in size.contexts]
    return [(compiled_training, step) for step in steps] + [(compiled_decoding, setting) for setting in tokens]


# --- one layer --------------------------------------------------------------------------------------------------------


def attention(how: How, tokens: int, segment: int, dtype: str, names: list[str]) -> list[dict]:
    """Seconds and memory of each contestant on one shape, with their ratios to `infini`. One that takes long runs once."""
    shape = _shape(how, tokens, segment, dtype)
    memory = {name: _memory_of(how, name, shape) for name in names}
    timing.give_back_memory()
    problem = Problem.random(shape, how.spec.device, how.spec.seed)
    runs = {name: contestants.run_of(name, problem) for name in names if "skipped" not in memory[name]}
    timed = timing.summary(how.alternate(runs, once_above=ONCE_ABOVE, sample_seconds=0.05), BASE)
    same = {"work": "one layer, forward and backward", "tokens": tokens, "segment": segment, "dtype": dtype}
    rows = [{**same, "name": name, **memory[name], **timed.get(name, {})} for name in names]
    for row in rows:
        row |= _memory_ratio(row, memory.get(BASE, {}))
    return rows


def scaling(how: How, name: str, lengths: list[int], dtype: str) -> list[dict]:
    """Seconds and memory of one contestant on lengths that double; ratios are to the row before. The lengths are timed in
    turn, so that a ratio's two values come from the same round."""
    shapes = {tokens: _shape(how, tokens, how.spec.segment_length, dtype) for tokens in lengths}
    memory = {tokens: _memory_of(how, name, shape) for tokens, shape in shapes.items()}
    timing.give_back_memory()
    runs = {
        tokens: contestants.run_of(name, Problem.random(shape, how.spec.device, how.spec.seed))
        for tokens, shape in shapes.items()
        if "skipped" not in memory[tokens]
    }
    times = how.alternate(runs, once_above=ONCE_ABOVE, sample_seconds=0.05)
    rows, before = [], None
    for tokens, shape in shapes.items():
        row = {"work": "one layer over its length, ratios to half of it", "name": name, "tokens": tokens}
        row |= {"segment": shape.segment, "dtype": dtype, **memory[tokens]}
        if tokens in times:
            row |= timing.spread(times[tokens]) | {"samples": times[tokens]}
        if tokens in times and before in times:
            row |= timing.spread(timing.ratios(times[tokens], times[before]), "ratio") | _memory_ratio(row, memory[before])
        rows.append(row)
        before = tokens
    return rows


def segment_memory(how: How, name: str, tokens: int, segments: list[int], dtype: str) -> list[dict]:
    """The memory of one contestant over the segment length."""
    same = {"work": "memory of one layer over the segment length", "name": name, "tokens": tokens, "dtype": dtype}
    shapes = [_shape(how, tokens, segment, dtype) for segment in segments]
    return [{**same, "segment": shape.segment, **_memory_of(how, name, shape)} for shape in shapes]


def _shape(how: How, tokens: int, segment: int, dtype: str) -> Shape:
    return Shape(tokens, segment, how.spec.n_head, how.spec.n_embd // how.spec.n_head, 1, dtype)


def _memory_of(how: How, name: str, shape: Shape) -> dict:
    """`peak_bytes` and `extra`, what it holds beyond query, key, value, output and their gradients in units of those; or
    `skipped` where the contestant cannot run or takes too long."""
    how.say(f"{name}, {shape.tokens:,} tokens, memory")
    reason, device = contestants.missing(name), how.spec.device
    needed, free = contestants.bytes_needed(name, shape, device), _free_bytes(device)
    if reason is None and needed > free:
        reason = f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    if reason:
        return {"skipped": reason}
    found = how.probe("layer", contestant=name, shape=asdict(shape), device=device)
    if "failed" in found:
        return {"skipped": found["failed"]}
    return {"peak_bytes": found["peak_bytes"], "extra": found["peak_bytes"] / (8 * shape.tensor_bytes()) - 1}


def _memory_ratio(row: dict, base: dict) -> dict[str, float]:
    """`memory_ratio` of two peaks; nothing where one is missing, or too small to be seen."""
    return {"memory_ratio": row["peak_bytes"] / base["peak_bytes"]} if "peak_bytes" in row and base.get("peak_bytes") else {}


def _free_bytes(device: str) -> int:
    """Memory that is free for more tensors."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


# --- whole models -----------------------------------------------------------------------------------------------------


def training(how: How, context: int, rows: int, dtype: str) -> list[dict]:
    """A training step of both models in turn, and its peak memory, of a process each. Where there is no memory for both at
    once, nothing is timed."""
    spec, same = how.spec, {"work": "training step", "tokens": context, "rows": rows, "dtype": dtype}
    found = {}
    for kind in KINDS:
        how.say(f"{kind}, memory")
        work = {"model": kind, "sizes": vars(spec), "context": context, "rows": rows, "dtype": dtype}
        peak = how.probe("training", 20 * SKIP_ABOVE, **work)
        found[kind] = {"skipped": peak["failed"]} if "failed" in peak else {"peak_bytes": peak["peak_bytes"]}
    timing.give_back_memory()
    peaks = {kind: result["peak_bytes"] for kind, result in found.items() if "peak_bytes" in result}
    built = {kind: models.build(kind, spec, context) for kind in peaks}
    # The larger of the two at its peak, and what stays of the other: weights and two moments
    stays = sum(12 * model.num_parameters() for model in list(built.values())[1:])
    if max(peaks.values(), default=0) + stays > _free_bytes(spec.device):
        found = {kind: {"skipped": "not enough free memory for both at once", **result} for kind, result in found.items()}
        built = {}
    ids = models.random_ids(spec, rows, context)
    runs = {kind: models.training_step(model, ids, dtype) for kind, model in built.items()}
    return _rows(same, how.alternate(runs), BASE, rows * context, found)


def options(how: How, context: int, rows: int, dtype: str, changes: list[str]) -> list[dict]:
    """A training step with one option of the memory changed, and of stock GPT-2; ratios are to no change."""
    spec, ids = how.spec, models.random_ids(how.spec, rows, context)
    built = {name: models.build("infini", spec, context, changes=CHANGES[name]) for name in changes}
    built["gpt2"] = models.build("gpt2", spec, context)
    times = how.alternate({name: models.training_step(model, ids, dtype) for name, model in built.items()})
    same = {"work": "training step, one option changed", "tokens": context, "rows": rows, "dtype": dtype}
    return _rows(same, times, UNCHANGED, rows * context)


def compiled_training(how: How, context: int, rows: int, dtype: str) -> list[dict]:
    """A training step as it is and under torch.compile; compiling itself is not counted: the warm-up does it."""
    torch._dynamo.reset()  # or the sizes of the cell before would make this one's graphs dynamic
    ids = models.random_ids(how.spec, rows, context)
    runs = {
        name: models.training_step(models.build("infini", how.spec, context), ids, dtype, name == "compiled")
        for name in ("as it is", "compiled")
    }
    same = {"work": "training step and torch.compile", "tokens": context, "rows": rows, "dtype": dtype}
    return _rows(same, how.alternate(runs), "as it is", rows * context)


def compiled_decoding(how: How, context: int) -> list[dict]:
    """New tokens after a context, likewise."""
    torch._dynamo.reset()
    model = models.build("infini", how.spec, context)
    ids = models.random_ids(how.spec, 1, context)
    runs = {
        name: models.new_tokens(forward, models.read(model, ids, context), NEW_TOKENS)
        for name, forward in (("as it is", model), ("compiled", torch.compile(model)))
    }
    return _rows({"work": "new token and torch.compile", "tokens": context}, _each_token(how.alternate(runs)), "as it is")


def prefill(how: How, kind: str, context: int, chunk: int) -> list[dict]:
    """Peak memory beyond the weights while a prompt is read in chunks."""
    how.say(f"{kind}, {context:,} tokens")
    work = {"model": kind, "sizes": vars(how.spec), "context": context, "chunk": chunk}
    found = how.probe("prefill", 60 * SKIP_ABOVE, **work)
    result = {"skipped": found["failed"]} if "failed" in found else {"peak_bytes": found["peak_bytes"]}
    return [{"work": f"prompt in chunks of {chunk:,}, memory over the weights", "name": kind, "tokens": context, **result}]


def padded_batch(how: How, batch: int, context: int) -> list[dict]:
    """New tokens of a left-padded batch, prompts of a quarter of `context` to all of it."""
    spec = how.spec
    both = models.build_both(spec, context + NEW_TOKENS * (how.rounds + 1))
    ids = models.random_ids(spec, batch, context)
    lengths = torch.linspace(context / 4, context, batch).ceil().long().to(spec.device)
    mask = (torch.arange(context, device=spec.device) >= context - lengths[:, None]).long()
    caches = {kind: models.read(model, ids, context, mask) for kind, model in both.items()}
    times = how.alternate({kind: models.new_tokens(both[kind], caches[kind], NEW_TOKENS, mask) for kind in KINDS})
    sizes = {kind: {"cache_bytes": cache_bytes(cache)} for kind, cache in caches.items()}
    same = {"work": "new token of each row of a padded batch", "tokens": context, "rows": batch}
    return _rows(same, _each_token(times), BASE, batch, sizes)


def decoding(how: How, context: int, chunk: int) -> list[dict]:
    """Bytes of the cache and seconds of a new token after `context` tokens.

    The model with Infini-attention really reads them, in chunks. Stock GPT-2's cache is filled with random keys and values:
    what a step costs does not depend on them, and reading 65,536 tokens with full attention takes hours on a CPU.
    """
    how.say(f"{context:,} tokens")
    both = models.build_both(how.spec, context + NEW_TOKENS * (how.rounds + 1))
    caches = {"infini": models.read(both["infini"], models.random_ids(how.spec, 1, context), chunk)}
    caches["gpt2"] = models.random_cache(both["gpt2"], context)
    times = how.alternate({kind: models.new_tokens(both[kind], caches[kind], NEW_TOKENS) for kind in KINDS})
    sizes = {kind: {"cache_bytes": cache_bytes(cache)} for kind, cache in caches.items()}
    return _rows({"work": "new token", "tokens": context}, _each_token(times), BASE, found=sizes)


def _each_token(times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [seconds / NEW_TOKENS for seconds in values] for name, values in times.items()}


def _rows(same: dict, times: dict, base: str, tokens: int = 1, found: dict | None = None) -> list[dict]:
    """A row for each name among the `times` or in `found`; `tokens` are those of one run."""
    timed, found, rows = timing.summary(times, base), found or {}, []
    for name in found or timed:
        row = {**same, "name": name, **timed.get(name, {}), **found.get(name, {})}
        rows.append(row | ({"tokens_per_second": tokens / row["seconds"]} if name in timed else {}))
    return rows


def measure(part: str, cells: list[tuple[Callable, dict]], how: How, kept: Callable) -> list[dict]:
    """The rows of all cells of a part. `kept(key, measure)` returns a cell's rows that were measured before, or measures."""
    from tqdm import tqdm

    rows = []
    with tqdm(cells, desc=part) as bar:
        told = How(how.spec, how.rounds, how.threads, lambda text: bar.set_postfix_str(str(text)))
        for function, settings in bar:
            key = {"work": function.__name__, **settings, "rounds": how.rounds, "spec": asdict(how.spec)}
            rows += kept(key, partial(function, told, **settings))
            timing.give_back_memory()
    return rows
