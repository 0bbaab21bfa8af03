"""What recipes/benchmark.py measures. Each part is a function of its options that yields rows of
what is measured together: `work` (the table that a row belongs to), `name`, the settings in words,
and `skipped` (why there is nothing else) or measurements: `seconds`, `graph` and `ratio` with their
extremes, `peak_bytes`, `cache_bytes`, `archive_bytes`, `tokens_per_second`.
"""

import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hf_infini import InfiniCache
from hf_infini.ops.recall import BLOCK_TOKENS
from support.measurement import cache_bytes

from . import contestants, measuring, models
from .contestants import BASE, Problem, Shape
from .models import KINDS

# By device: of a layer; rows of tokens in training; tokens before a new one
LENGTHS = (2048, 4096, 8192, 16384, 65536, 131072)
SHAPES = {"cpu": ((1024, 256), (4096, 256), (16384, 256), (16384, 64))}
SHAPES["cuda"] = tuple(itertools.product(LENGTHS, (64, 256, 1024)))
NAMES = {
    "cpu": (BASE, "infini-delta", "infini-gated-delta", "causal-sdpa", "loop-split"),
    "cuda": (BASE, "infini-window", "infini-plain", "causal-sdpa"),
}
TRAINED = {"cpu": (1024, 8192), "cuda": (8192, 32768)}
NEW_TOKENS = {"cpu": 8, "cuda": 64}  # timed together
ANSWER = 32  # tokens of a short one
ARCHIVED = {"cpu": (32768, 1048576), "cuda": (32768, 131072, 1048576)}
READINGS = {"without an archive": False, "with an archive": True}
READINGS |= {"with an archive in 8 bits": "int8"}
BEFORE = {"cpu": (1024, 8192, 65536), "cuda": (1024, 4096, 32768, 131072)}


def _usual(table: Mapping, how):
    """What a table has for the kind of the device."""
    return table[how.device.partition(":")[0]]


def _times(how, runs: Mapping, sample_seconds: float = 0.0) -> dict[str, list[float]]:
    """Seconds of runs that take turns."""
    return measuring.alternate(runs, how.rounds, how.device, how.seed, sample_seconds)


def compared(rows: dict, times: Mapping, base: str, steps: int = 1, tokens: int = 0) -> list[dict]:
    """The rows with their times and the ratios to those of the base.

    Args:
        rows, times: by any key; a row that is skipped has no times.
        base: key of the row that the ratios are to.
        steps: of one run, of which one is the unit of time.
        tokens: of one step, where tokens per second say something.
    """
    for key, seconds in times.items():
        samples = [value / steps for value in seconds]
        rows[key] |= measuring.spread(samples, "seconds") | {"samples": samples}
        if tokens:
            rows[key]["tokens_per_second"] = tokens / rows[key]["seconds"]
        if base in times:
            ratios = [value / other for value, other in zip(seconds, times[base], strict=True)]
            rows[key] |= measuring.spread(ratios, "ratio")
    return list(rows.values())


def attention(how) -> Iterator[list[dict]]:
    """Seconds of each contestant, and of its CUDA graph."""
    heads, width = models.heads_of(how.model)
    usual = [(64, 8)] if how.model == "tiny" else _usual(SHAPES, how)
    for dtype in how.dtypes:
        for tokens, segment in how.shapes or usual:
            yield _layers(how, Shape(tokens, segment, heads, width, dtype=dtype))


def _layers(how, shape: Shape) -> list[dict]:
    """`peak_bytes` has `extra` with it, what is held beyond query, key, value, output and their
    gradients in units of those."""
    problem, bytes_of_one = Problem.random(shape, how.device, how.seed), shape.tensor_bytes()
    same = {name: getattr(shape, name) for name in ("tokens", "segment", "dtype")}
    same["work"] = "one layer, forward and backward"
    rows, runs = {}, {}
    for name in how.contestants or _usual(NAMES, how):
        run = contestants.run_of(name, problem)
        measuring.tried(run, how.device)  # what is compiled is compiled now
        row = rows[name] = {**same, "name": name, **measuring.tried(run, how.device)}
        if "peak_bytes" in row:
            row["extra"] = (row["peak_bytes"] - 4 * bytes_of_one) / (8 * bytes_of_one)
        if "skipped" not in row:
            runs[name] = run
    found = compared(rows, _times(how, runs, sample_seconds=0.05), BASE)
    if how.device.startswith("cuda"):
        graphs = {name: measuring.in_graph(run) for name, run in runs.items()}
        for name, seconds in _times(how, graphs, sample_seconds=0.05).items():
            rows[name] |= measuring.spread(seconds, "graph")
    return found


def model(how) -> Iterator[list[dict]]:
    """Training steps of one row, and their peak memory: gradients, the optimiser's state and what a
    step computes."""
    for dtype in how.dtypes:
        for context in how.contexts or _usual(TRAINED, how):
            same = {"work": f"training step, {how.model}", "tokens": context, "dtype": dtype}
            rows, times = {}, {}
            for kind in KINDS:  # one after the other: both at once need twice the memory
                built = models.build(kind, how.model, context, how.device, how.seed)
                ids = models.random_ids(built, 1, context, how.seed)
                step = models.training_step(built, ids, dtype)
                rows[kind] = {**same, "name": kind, **measuring.tried(step, how.device)}
                if "skipped" not in rows[kind]:
                    times |= _times(how, {kind: step})
                del built, step
            yield compared(rows, times, BASE, tokens=context)


def decoding(how) -> Iterator[list[dict]]:
    """Bytes of the cache and seconds of a new token of each row after long contexts."""
    for dtype in how.dtypes:
        contexts = how.contexts or _usual(BEFORE, how)
        longest = max(contexts) + _usual(NEW_TOKENS, how) * (how.rounds + 3)
        same = how.model, longest, how.device, how.seed, getattr(torch, dtype)
        both = {kind: models.build(kind, *same) for kind in KINDS}
        for batch, context in itertools.product(how.batches, contexts):
            yield _after(how, both, dtype, batch, context)


def _after(how, both: Mapping, dtype: str, batch: int, context: int) -> list[dict]:
    same = {"work": f"new token of each row, {how.model}", "tokens": context, "rows": batch}
    rows, runs, caches, steps = {}, {}, {}, _usual(NEW_TOKENS, how)
    for way in _usual(models.WAYS, how):

        def begin(way=way) -> None:
            built, room = both[way.partition("-")[0]], steps * (how.rounds + 3)
            cache = models.cache_after(built, way, batch, context, how.seed, room)
            compiled = way in _usual(models.COMPILED, how)
            run = models.new_tokens(built, cache, batch, steps, compiled)
            run()
            runs[way], caches[way] = run, cache

        tried = measuring.tried(begin, how.device)
        tried.pop("peak_bytes", None)
        rows[way] = {**same, "dtype": dtype, "name": way, **tried}
    found = compared(rows, _times(how, runs), BASE, steps, tokens=batch)
    for row in found:
        if row["name"] in caches:
            row["cache_bytes"] = cache_bytes(caches[row["name"]])
    return found


def recall(how) -> Iterator[list[dict]]:
    """Seconds of reading with an archive, in 8 bits or not, and without; and of a recall from
    archives of several lengths, in host memory and in a file, beside those of a short answer."""
    for dtype in how.dtypes:
        yield from _archived(how, dtype)


def _archived(how, dtype: str) -> Iterator[list[dict]]:
    contexts = how.contexts or _usual(ARCHIVED, how)
    length = min(models.READ, *contexts)
    built = models.build("recall", how.model, length, how.device, how.seed, getattr(torch, dtype))
    ids = models.random_ids(built, 1, length, how.seed)
    same = {"work": f"reading, {how.model}", "tokens": length, "dtype": dtype}
    runs = {
        name: functools.partial(models.read_once, built, ids, archive=archive)
        for name, archive in READINGS.items()
    }
    rows = {name: {**same, "name": name} for name in runs}
    yield compared(rows, _times(how, runs), "without an archive", tokens=length)
    cache, question = runs["with an archive"](), ids[0, : models.QUESTION].cpu()
    with tempfile.TemporaryDirectory() as folder:
        cache.save_pretrained(file := Path(folder, "text.safetensors"), built)
        held = {"in memory": cache, "in a file": InfiniCache.from_pretrained(file, built)}
        held["in memory, in 8 bits"] = runs["with an archive in 8 bits"]()
        for context in contexts:
            yield _recalled(how, built, held, question, context // length, dtype)


def _recalled(how, built, held: Mapping, question, times: int, dtype: str) -> list[dict]:
    caches = {f"recall, {where}": models.repeated(cache, times) for where, cache in held.items()}
    of_caches = {name: cache.archive.rows()[0] for name, cache in caches.items()}
    context = sum(each.tokens for each in next(iter(of_caches.values())).documents)
    work = f"recall, {how.model}; its ratio is to an answer of {ANSWER} tokens"
    same = {"work": work, "tokens": context, "dtype": dtype}
    runs = {name: lambda cache=cache: cache.recall(question) for name, cache in caches.items()}
    first = next(iter(runs.values()))()
    runs["answer"] = models.new_tokens(built, first, 1, ANSWER)
    rows = {name: {**same, "name": name} for name in runs}
    for name, row in of_caches.items():
        size = context * (row.block_bytes // BLOCK_TOKENS)
        rows[name] |= {"cache_bytes": cache_bytes(first), "archive_bytes": size}
    return compared(rows, _times(how, runs), "answer")


PARTS = {function.__name__: function for function in (attention, model, decoding, recall)}
