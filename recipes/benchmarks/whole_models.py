"""Training steps, prompts and new tokens of whole models, beside stock GPT-2, with other options, and compiled.

Cells and rows as in [`layer`].
"""

import torch

from support.measurement import cache_bytes

from . import models, timing
from .layer import How, free_bytes
from .models import KINDS, ModelSpec

BASE = "infini"
COMPILED = ("no", "yes")
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


def training_rows(how: How, spec: ModelSpec, context: int, rows: int, precision: str) -> list[dict]:
    """Tokens a second of a training step of `rows` × `context` tokens, and its peak memory, for both models.

    `ratio` is seconds over those of `infini`. Timed are both in one process, where there is memory for two.
    """
    found = {}
    for kind in KINDS:
        how.say(f"{kind}, memory")
        probe = {"kind": "training", "model": kind, "sizes": vars(spec), "context": context, "rows": rows}
        found[kind] = how.probe(probe | {"precision": precision}, 20 * how.skip_above)
    timing.give_back_memory()
    fits = {kind: result for kind, result in found.items() if "failed" not in result}
    steps, times = {}, {}
    parameters = 4 * spec.n_embd * spec.n_embd * 3 * spec.n_layer + spec.vocab_size * spec.n_embd
    # The larger of the two at its peak, and what stays of the other: weights and two moments
    needed = max((result["peak_bytes"] for result in fits.values()), default=0) + (len(fits) - 1) * 12 * parameters
    if needed > free_bytes(how.device):
        message = f"both at once need {needed / 2**30:.1f} GiB, {free_bytes(how.device) / 2**30:.1f} GiB are free"
    else:
        message = None
        ids = models.random_ids(spec, rows, context)
        steps = {kind: models.training_step(models.build(kind, spec, context), ids, precision) for kind in fits}
        times = how.alternate(steps)
    timed = timing.summary(times, BASE)
    results = []
    for kind in KINDS:
        row = {"model": kind, "context": context, "rows": rows, "precision": precision}
        if "failed" in found[kind]:
            results.append(row | {"skipped": found[kind]["failed"]})
            continue
        row["peak_bytes"] = found[kind]["peak_bytes"]
        if kind in timed:
            row |= timed[kind]
            row |= timing.spread([rows * context / seconds for seconds in times[kind]], "tokens_per_second")
        else:
            row["skipped"] = message
        results.append(row)
    return results


def option_rows(how: How, spec: ModelSpec, context: int, rows: int, precision: str) -> list[dict]:
    """Seconds of a training step with one option of the memory changed, for each of [`CHANGES`], and of stock GPT-2.

    `ratio` is to the model in which none is.
    """
    ids = models.random_ids(spec, rows, context)
    steps = {}
    for name, changes in CHANGES.items():
        steps[name] = models.training_step(models.build("infini", spec, context, changes=changes), ids, precision)
    steps["gpt2"] = models.training_step(models.build("gpt2", spec, context), ids, precision)
    timed = timing.summary(how.alternate(steps), UNCHANGED)
    same = {"context": context, "rows": rows, "precision": precision}
    return [{"change": name, **same, **timed[name]} for name in steps]


def compiled_training_rows(how: How, spec: ModelSpec, context: int, rows: int, precision: str) -> list[dict]:
    """Seconds of a training step of the model with Infini-attention as it is and under torch.compile; `ratio` is to the
    first. Compiling is not counted: the warm-up does it.
    """
    torch._dynamo.reset()  # or the sizes of the cell before would make this one's graphs dynamic
    ids = models.random_ids(spec, rows, context)
    built = {compiled: models.build("infini", spec, context) for compiled in COMPILED}
    steps = {compiled: models.training_step(model, ids, precision, compiled == "yes") for compiled, model in built.items()}
    timed = timing.summary(how.alternate(steps), "no")
    same = {"work": "training step", "context": context, "rows": rows, "precision": precision}
    return [{"compiled": compiled, **same, **timed[compiled]} for compiled in COMPILED]


def compiled_decoding_rows(how: How, spec: ModelSpec, context: int, steps: int, dtype: str) -> list[dict]:
    """Seconds of a new token after `context` tokens, likewise."""
    torch._dynamo.reset()
    model = models.build("infini", spec, context, dtype)
    forward = {"no": model, "yes": torch.compile(model)}
    runs = {}
    for compiled in COMPILED:
        cache = models.read(model, models.random_ids(spec, 1, context), context)
        runs[compiled] = models.new_tokens(forward[compiled], cache, steps)
    times = {compiled: [seconds / steps for seconds in values] for compiled, values in how.alternate(runs).items()}
    timed = timing.summary(times, "no")
    same = {"work": "new token", "context": context, "rows": 1, "precision": dtype}
    return [{"compiled": compiled, **same, **timed[compiled]} for compiled in COMPILED]


def prefill_rows(how: How, spec: ModelSpec, kind: str, context: int, chunk: int, dtype: str) -> list[dict]:
    """Peak memory beyond the weights while a prompt of `context` tokens is read in chunks."""
    how.say(f"{kind}, {context:,} tokens")
    probe = {"kind": "prefill", "model": kind, "sizes": vars(spec), "context": context, "chunk": chunk, "dtype": dtype}
    found = how.probe(probe, 60 * how.skip_above)
    result = {"skipped": found["failed"]} if "failed" in found else {"peak_bytes": found["peak_bytes"]}
    return [{"model": kind, "context": context, "chunk": chunk, "dtype": dtype} | result]


def batch_rows(how: How, spec: ModelSpec, batch: int, context: int, steps: int, dtype: str) -> list[dict]:
    """New tokens a second of a left-padded batch, prompts of a quarter of `context` to all of it, for both models."""
    both = models.build_both(spec, context + steps * (how.rounds + 1), dtype)
    ids = models.random_ids(spec, batch, context)
    lengths = torch.linspace(context / 4, context, batch).ceil().long().to(spec.device)
    mask = (torch.arange(context, device=spec.device) >= context - lengths[:, None]).long()
    caches = {}
    for kind, model in both.items():
        how.say(f"{kind}, prompts")
        caches[kind] = models.read(model, ids, context, mask)
    times = how.alternate({kind: models.new_tokens(both[kind], caches[kind], steps, mask) for kind in KINDS})
    timed, results = timing.summary(times, BASE), []
    for kind in KINDS:
        row = {"model": kind, "batch": batch, "context": context, "dtype": dtype, **timed[kind]}
        row["cache_bytes"] = cache_bytes(caches[kind])
        row |= timing.spread([batch * steps / seconds for seconds in times[kind]], "tokens_per_second")
        results.append(row)
    return results


def decoding_rows(
    how: How, spec: ModelSpec, context: int, chunk: int, steps: int, stock_limit: int, dtype: str
) -> list[dict]:
    """Bytes of the cache and seconds of a new token after `context` tokens.

    The model with Infini-attention really reads them, in chunks. Stock GPT-2's cache is filled with random keys and values:
    what a step costs does not depend on them, and reading 65,536 tokens with full attention takes hours on a CPU. Beyond
    `stock_limit` there is no row for it.
    """
    kinds = KINDS if context <= stock_limit else ("infini",)
    positions = context + steps * (how.rounds + 1)
    both = models.build_both(spec, positions if "gpt2" in kinds else 1, dtype)
    how.say(f"{context:,} tokens")
    caches = {"infini": models.read(both["infini"], models.random_ids(spec, 1, context), chunk)}
    if "gpt2" in kinds:
        caches["gpt2"] = models.random_cache(both["gpt2"], context)
    times = how.alternate({kind: models.new_tokens(both[kind], caches[kind], steps) for kind in kinds})
    per_token = {kind: [seconds / steps for seconds in values] for kind, values in times.items()}
    timed, rows = timing.summary(per_token, BASE), []
    for kind in kinds:
        row = {"context": context, "model": kind, "cache_bytes": cache_bytes(caches[kind])}
        values = {name.replace("seconds", "seconds_per_token"): value for name, value in timed[kind].items()}
        rows.append(row | values)
    return rows
