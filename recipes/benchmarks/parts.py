"""What recipes/benchmark.py measures: one layer beside others and over its length, whole models beside stock GPT-2.

Each part is a function of [`How`] that yields the rows of what is measured together: `work` (the table that a row belongs
to), `name`, the settings in words, and `skipped` (why there is nothing else) or measurements: `seconds` and `ratio` with
their extremes, `peak_bytes`, `memory_ratio`, `cache_bytes`, `tokens_per_second`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from evaluation.inference import read_in_chunks
from hf_infini.options import UPDATE_RULES
from support.measurement import cache_bytes

from . import contestants, measuring, models
from .contestants import BASE, Problem, Shape
from .models import KINDS, ModelSpec
from .pretrained import pretrained
from .soak import soak

RULES = ("infini", "infini-delta")  # what is measured where this package is measured against itself
SKIP_ABOVE = 60.0  # seconds; a layer that takes more in a process of its own is not timed (CPU)
NEW_TOKENS = 8  # timed together
UNCHANGED, UNCOMPILED = "none", "as it is"  # what the others are compared with
CHANGES = {
    UNCHANGED: {},
    **{f"update_rule={rule}": {"update_rule": rule} for rule in UPDATE_RULES[1:]},
    "feature_map=exp": {"feature_map": "exp"},
    "feature_map=learned": {"feature_map": "learned"},
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
            takes quadratic time; padded: rows and longest prompt of a padded batch; after: contexts of new tokens; read:
            prompts of a pretrained checkpoint; soaked: tokens of a soak.
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
    read: tuple = (2048, 8192, 32768, 65536)
    chunk: int = 4096
    soaked: tuple = (1_000_000,)


MINI = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8000, "segment_length": 64}
MICRO = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000, "segment_length": 64}
TINY = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 97, "segment_length": 16}
SIZES = {
    "small": Size({}),  # GPT-2 small
    "mini": Size(MINI, contexts=(1024,), rows=4),  # the study's
    "micro": Size(MICRO),
    "tiny": Size(TINY, ((64, 8),), (64, 128), (8,), (40,), 1, (90, 200), 100, (3, 20), (50, 400), (50, 150), 70, (9000,)),
}


@dataclass(frozen=True)
class How:
    """What is measured, and how, the same for all parts.

    Attributes:
        dtypes: of the layer and of training steps.
        names: of the contestants of the layer.
        rounds: values of each contestant; see [`measuring.alternate`].
        threads: on the CPU; `None`: torch's choice.
    """

    spec: ModelSpec
    size: Size
    dtypes: list[str]
    names: list[str]
    rounds: int = 5
    threads: int | None = None

    def steps(self) -> list[tuple[str, int]]:
        """dtype and context of every training step."""
        return [(dtype, context) for dtype in self.dtypes for context in self.size.contexts]

    def peak(self, prepare: Callable, *settings, limit_seconds: float = 60 * SKIP_ABOVE) -> dict:
        where = {"device": self.spec.device, "threads": self.threads, "limit_seconds": limit_seconds}
        return measuring.peak_of(prepare, *settings, **where)

    def compare(
        self, rows: dict, runs: Mapping, bases: Mapping, steps: int = 1, tokens: int = 0, sample_seconds: float = 0.0
    ) -> list[dict]:
        """The rows with the times of their runs, which take turns, and the ratios between them.

        Args:
            rows, runs: by any key; a row that is skipped has no run.
            bases: key → the key of the row that its ratios are to.
            steps: of one run, of which one is the unit of time.
            tokens: of one step, where tokens per second say something.
            sample_seconds: see [`measuring.alternate`].
        """
        where = {"rounds": self.rounds, "device": self.spec.device, "seed": self.spec.seed}
        times = measuring.alternate(runs, **where, sample_seconds=sample_seconds)
        for key, seconds in times.items():
            samples = [value / steps for value in seconds]
            rows[key] |= measuring.spread(samples, "seconds") | {"samples": samples}
            if tokens:
                rows[key]["tokens_per_second"] = tokens / rows[key]["seconds"]
        for key, base in bases.items():
            if key in times and base in times:
                ratios = [value / other for value, other in zip(times[key], times[base], strict=True)]
                rows[key] |= measuring.spread(ratios, "ratio")
            if "peak_bytes" in rows[key] and rows.get(base, {}).get("peak_bytes"):
                rows[key]["memory_ratio"] = rows[key]["peak_bytes"] / rows[base]["peak_bytes"]
        return list(rows.values())


# --- one layer --------------------------------------------------------------------------------------------------------


def attention(how: How) -> Iterator[list[dict]]:
    """Seconds and memory of each contestant, with their ratios to `infini`."""
    for dtype in how.dtypes:
        for tokens, segment in how.size.shapes:
            cases = {name: (name, tokens, segment) for name in how.names}
            yield _layers(how, "one layer, forward and backward", dtype, cases, dict.fromkeys(cases, BASE))


def scaling(how: How) -> Iterator[list[dict]]:
    """Seconds and memory on lengths that double, ratios to the row before; memory over the segment length."""
    lengths, segment = how.size.lengths, how.spec.segment_length
    halves = dict(zip(lengths[1:], lengths, strict=False))
    for dtype in how.dtypes:
        for name in RULES:
            cases = {tokens: (name, tokens, segment) for tokens in lengths}
            yield _layers(how, "one layer over its length, ratios to half of it", dtype, cases, halves)
            cases = {size: (name, lengths[1], size) for size in how.size.segments}
            yield _layers(how, "memory of one layer over the segment length", dtype, cases)


def _layers(how: How, work: str, dtype: str, cases: Mapping, bases: Mapping | None = None) -> list[dict]:
    """Rows of cases, by any key: name, tokens and segment length. `peak_bytes` has `extra` with it, what is held beyond
    query, key, value, output and their gradients in units of those. Without bases nothing is timed."""
    device, shapes, rows = how.spec.device, {}, {}
    for key, (name, tokens, segment) in cases.items():
        shape = Shape(tokens, segment, how.spec.n_head, how.spec.n_embd // how.spec.n_head, 1, dtype)
        peak = how.peak(contestants.prepare_layer, name, shape, device, limit_seconds=SKIP_ABOVE)
        if "peak_bytes" in peak:
            peak["extra"] = peak["peak_bytes"] / (8 * shape.tensor_bytes()) - 1
        rows[key] = {"work": work, "name": name, "tokens": tokens, "segment": segment, "dtype": dtype, **peak}
        shapes[key] = shape
    if bases is None:
        return list(rows.values())
    problems = {shape: Problem.random(shape, device, how.spec.seed) for shape in shapes.values()}
    timed = [key for key, row in rows.items() if "skipped" not in row]
    runs = {key: contestants.run_of(rows[key]["name"], problems[shapes[key]]) for key in timed}
    return how.compare(rows, runs, bases, sample_seconds=0.05)


# --- whole models -----------------------------------------------------------------------------------------------------


def model(how: How) -> Iterator[list[dict]]:
    """Training steps, prompts and a padded batch."""
    for dtype, context in how.steps():
        yield _training(how, context, dtype)
    chunk, work = how.size.chunk, f"prompt in chunks of {how.size.chunk:,}, memory over the weights"
    for kind in KINDS:
        for context in how.size.prompts:
            if kind != "gpt2" or context <= how.size.stock_prompt:
                peak = how.peak(models.prepare_prompt, kind, how.spec, context, chunk)
                yield [{"work": work, "name": kind, "tokens": context, **peak}]
    yield _padded_batch(how, *how.size.padded)


def _training(how: How, context: int, dtype: str) -> list[dict]:
    """A training step of both models in turn, and its peak memory, of a process each."""
    spec, rows = how.spec, how.size.rows
    same = {"work": "training step", "tokens": context, "rows": rows, "dtype": dtype}
    peaks = {kind: how.peak(models.prepare_training, kind, spec, context, rows, dtype) for kind in KINDS}
    found = {kind: {**same, "name": kind, **peak} for kind, peak in peaks.items()}
    built = {kind: models.build(kind, spec, context) for kind, peak in peaks.items() if "skipped" not in peak}
    ids = models.random_ids(spec, rows, context)
    runs = {kind: models.training_step(model, ids, dtype) for kind, model in built.items()}
    return how.compare(found, runs, dict.fromkeys(KINDS, BASE), tokens=rows * context)


def _padded_batch(how: How, batch: int, context: int) -> list[dict]:
    """New tokens of a left-padded batch, prompts of a quarter of `context` to all of it."""
    spec = how.spec
    both = {kind: models.build(kind, spec, context + NEW_TOKENS * (how.rounds + 1)) for kind in KINDS}
    ids = models.random_ids(spec, batch, context)
    lengths = torch.linspace(context / 4, context, batch).ceil().long().to(spec.device)
    mask = (torch.arange(context, device=spec.device) >= context - lengths[:, None]).long()
    caches = {kind: models.padded_cache(model, ids, mask) for kind, model in both.items()}
    same = {"work": "new token of each row of a padded batch", "tokens": context, "rows": batch}
    return _new_tokens(how, same, both, caches, batch, mask)


def decoding(how: How) -> Iterator[list[dict]]:
    """Bytes of the cache and seconds of a new token after long contexts.

    The model with Infini-attention really reads them, in chunks. Stock GPT-2's cache is filled with random keys and values:
    what a step costs does not depend on them, and reading 65,536 tokens with full attention takes hours on a CPU.
    """
    for context in how.size.after:
        both = {kind: models.build(kind, how.spec, context + NEW_TOKENS * (how.rounds + 1)) for kind in KINDS}
        caches = {"infini": read_in_chunks(both["infini"], models.random_ids(how.spec, 1, context), how.size.chunk)}
        caches["gpt2"] = models.random_cache(both["gpt2"], context)
        yield _new_tokens(how, {"work": "new token", "tokens": context}, both, caches)


def options(how: How) -> Iterator[list[dict]]:
    """A training step with one option of the memory changed, and of stock GPT-2; ratios are to no change."""
    for dtype, context in how.steps():
        built = {name: models.build("infini", how.spec, context, changes=changes) for name, changes in CHANGES.items()}
        built["gpt2"] = models.build("gpt2", how.spec, context)
        ids = models.random_ids(how.spec, how.size.rows, context)
        same = {"work": "training step, one option changed", "tokens": context, "rows": how.size.rows, "dtype": dtype}
        runs = {name: models.training_step(model, ids, dtype) for name, model in built.items()}
        yield how.compare(_rows(same, runs), runs, dict.fromkeys(runs, UNCHANGED), tokens=ids.numel())


def compiled(how: How) -> Iterator[list[dict]]:
    """Training steps and new tokens as they are and under torch.compile; compiling itself is not counted: the warm-up does
    it."""
    names = (UNCOMPILED, "compiled")
    for dtype, context in how.steps():
        torch._dynamo.reset()  # or the sizes of the step before would make this one's graphs dynamic
        ids = models.random_ids(how.spec, how.size.rows, context)
        built = {name: models.build("infini", how.spec, context) for name in names}
        runs = {name: models.training_step(model, ids, dtype, name == "compiled") for name, model in built.items()}
        same = {"work": "training step and torch.compile", "tokens": context, "rows": how.size.rows, "dtype": dtype}
        yield how.compare(_rows(same, runs), runs, dict.fromkeys(names, UNCOMPILED), tokens=ids.numel())
    for context in how.size.contexts:
        torch._dynamo.reset()
        model = models.build("infini", how.spec, context)
        ids = models.random_ids(how.spec, 1, context)
        forwards = dict(zip(names, (model, torch.compile(model)), strict=True))
        runs = {
            name: models.new_tokens(forward, read_in_chunks(model, ids, context), NEW_TOKENS)
            for name, forward in forwards.items()
        }
        same = {"work": "new token and torch.compile", "tokens": context}
        yield how.compare(_rows(same, runs), runs, dict.fromkeys(names, UNCOMPILED), NEW_TOKENS, tokens=1)


def _new_tokens(how: How, same: dict, both: dict, caches: dict, batch: int = 1, mask=None) -> list[dict]:
    """Seconds of a new token of both models in turn; the caches' bytes are those after the last one."""
    runs = {kind: models.new_tokens(both[kind], caches[kind], NEW_TOKENS, mask) for kind in KINDS}
    rows = how.compare(_rows(same, runs), runs, dict.fromkeys(KINDS, BASE), NEW_TOKENS, tokens=batch)
    return [row | {"cache_bytes": cache_bytes(caches[row["name"]])} for row in rows]


def _rows(same: dict, names) -> dict[str, dict]:
    return {name: {**same, "name": name} for name in names}


PARTS = (attention, scaling, model, decoding, options, compiled, soak, pretrained)
PARTS = {function.__name__: function for function in PARTS}
