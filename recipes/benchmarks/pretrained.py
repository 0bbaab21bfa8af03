"""A pretrained checkpoint as it is ("stock") and with Infini-attention in a window of two segments and 4 sinks ("infini"):
what reading a prompt and a new token cost, by the length of the text and the dtype of the weights.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from evaluation.inference import read_in_chunks
from hf_infini import patch_model
from support.measurement import cache_bytes

from .contestants import BASE
from .models import ModelSpec, new_tokens, random_cache, random_ids

KINDS = ("infini", "stock")
INT8 = "int8"  # weights of the linear layers; everything else bfloat16
WINDOW = {"local_segments": 1, "sink_tokens": 4, "gate_init": -4.0}
NEW_TOKENS = 8  # timed together


def load(kind: str, spec: ModelSpec, dtype: str):
    """The checkpoint `spec.checkpoint` in evaluation mode."""
    settings = {"dtype": torch.bfloat16 if dtype == INT8 else getattr(torch, dtype), "trust_remote_code": False}
    if dtype == INT8:
        from torchao.quantization import Int8WeightOnlyConfig

        settings["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(spec.checkpoint, **settings).eval().to(spec.device)
    return patch_model(model, segment_length=spec.segment_length, **WINDOW) if kind == "infini" else model


def prepare_reading(kind: str, spec: ModelSpec, dtype: str, context: int, chunk: int):
    """A prompt that is read in chunks, for [`measuring.peak_of`]: the cache counts, the weights do not."""
    model, ids = load(kind, spec, dtype), random_ids(spec, 1, context)
    read_in_chunks(model, ids[:, :64], chunk)  # libraries and thread pools
    return lambda: read_in_chunks(model, ids, chunk)


def pretrained(how) -> Iterator[list[dict]]:
    """Seconds and peak memory of reading a prompt, then bytes of the cache and seconds of a new token behind it.

    On a CPU the stock model reads no prompt that is longer than `stock_prompt`, which would take hours: its new tokens then
    follow a cache of random keys and values, whose content does not change what a token costs.
    """
    for dtype in how.dtypes:
        both = {kind: load(kind, how.spec, dtype) for kind in KINDS}
        spec = replace(how.spec, vocab_size=both["stock"].config.vocab_size)
        for context in how.size.read:
            yield from _after(replace(how, spec=spec), both, dtype, context)


def _after(how, both: dict, dtype: str, context: int) -> Iterator[list[dict]]:
    too_long = how.spec.device == "cpu" and context > how.size.stock_prompt
    reading, chunk, ids, caches = KINDS[:1] if too_long else KINDS, how.size.chunk, random_ids(how.spec, 1, context), {}

    def read(kind: str) -> None:
        caches[kind] = None  # the one before is not kept beside it
        caches[kind] = read_in_chunks(both[kind], ids, chunk)

    same = {"work": f"prompt in chunks of {chunk:,}, memory over the weights", "tokens": context, "dtype": dtype}
    peaks = {kind: how.peak(prepare_reading, kind, how.spec, dtype, context, chunk) for kind in reading}
    rows = {kind: {**same, "name": kind, **peak} for kind, peak in peaks.items()}
    runs = {kind: functools.partial(read, kind) for kind in reading}
    yield how.compare(rows, runs, dict.fromkeys(reading, BASE), tokens=context)
    if too_long:
        caches["stock"] = random_cache(both["stock"], context)
    rows = {kind: {"work": "new token", "tokens": context, "dtype": dtype, "name": kind} for kind in KINDS}
    runs = {kind: new_tokens(both[kind], caches[kind], NEW_TOKENS) for kind in KINDS}
    found = how.compare(rows, runs, dict.fromkeys(KINDS, BASE), NEW_TOKENS, tokens=1)
    yield [row | {"cache_bytes": cache_bytes(caches[row["name"]])} for row in found]
