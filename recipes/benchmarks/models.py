"""Whole models, with their own attention ("stock") and with Infini-attention ("infini"), and what
is done with them: a training step, new tokens. Nothing is dropped out: with dropout torch's
attention on a CPU falls back to a slow way.
"""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import StaticCache
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from evaluation.inference import read_in_chunks
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.joined import joined
from hf_infini.compat.cache_name import CACHE
from hf_infini.options import key_heads
from hf_infini.tools.training import parameter_groups

KINDS = ("infini", "stock")
# How they decode: as `generate()` does it there, and on a GPU also without torch.compile, and with
# a cache that it compiles
WAYS = {"cpu": KINDS, "cuda": ("infini", "infini-eager", "stock-static", "stock")}
COMPILED = {"cpu": (), "cuda": ("infini", "stock-static")}
SEGMENT = 256
# of what was trained with its own attention
WINDOW = {"local_segments": 1, "sink_tokens": 4, "gate_init": -4.0}
# of what recalls: tokens in its cache, and ids of a question
PLACES, QUESTION = {"tiny": 32}, 16
# tokens that the model with Infini-attention reads at most: its state does not grow after them
READ = 2048


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = [*names.split(), "num_key_value_heads", "vocab_size"]
    return dict(zip(names, (width, inner, layers, heads, kv_heads, 49152), strict=True))


SIZES = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "smollm2-135m": _llama(576, 1536, 30, 9, 3),
    "smollm2-360m": _llama(960, 2560, 32, 15, 5),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32),
    "tiny": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 97},
}


def heads_of(name: str) -> tuple[int, int]:
    """Query heads and their width of a model in [`SIZES`], and GPT-2's of another."""
    sizes = SIZES.get(name, SIZES["gpt2"])
    heads = sizes.get("n_head") or sizes["num_attention_heads"]
    return heads, (sizes.get("n_embd") or sizes["hidden_size"]) // heads


def build(kind: str, name: str, positions: int, device: str, seed: int = 0, dtype=torch.float32):
    """A model in evaluation mode, of [`SIZES`] with random weights, or a checkpoint; stock GPT-2
    has so many `positions`. Its `kind` is of [`KINDS`], or "recall": a window, and places for what
    a question recalls."""
    torch.manual_seed(seed)
    options = {"segment_length": 16 if name == "tiny" else SEGMENT}
    if name not in SIZES:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        options |= WINDOW
    elif "n_head" in SIZES[name]:
        how = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        how |= dict.fromkeys(("bos_token_id", "eos_token_id"), SIZES[name]["vocab_size"] - 1)
        how["n_positions"] = positions if kind == "stock" else 1024
        model = GPT2LMHeadModel(GPT2Config(**SIZES[name], **how))
        options |= {"position_encoding": "segment"}
    else:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**SIZES[name], max_position_embeddings=8192))
        options |= WINDOW
    model = model.to(device, dtype).eval()
    model.loss_type = "ForCausalLM"  # what it is anyway; unset, every process warns of it
    if kind == "recall":
        same = {name: options[name] for name in ("position_encoding",) if name in options}
        return patch_model(model, cache_tokens=PLACES.get(name, 2048), keep_score="recent", **same)
    return patch_model(model, **options) if kind == "infini" else model


def random_ids(model, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """`[batch, tokens]`, without the last id, which ends a text."""
    draw, most = torch.Generator().manual_seed(seed), model.config.vocab_size - 1
    return torch.randint(most, (batch, tokens), generator=draw).to(model.device)


def training_step(model, ids: torch.Tensor, dtype: str) -> Callable[[], None]:
    """A step on `[batch, tokens]`: forward, backward and AdamW, as recipes/train.py takes it,
    without clipping; in bfloat16 that is autocast."""
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4, 1e-3, 0.1), fused=True)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def cache_after(model, way: str, batch: int, context: int, seed: int, room: int = 0):
    """The cache after `context` tokens of each row. A stock model's is of random keys and values, a
    memory of the last [`READ`] tokens: what a step costs depends on neither. `room`: new tokens
    that a static one must hold."""
    if way.startswith("infini"):
        return read_in_chunks(model, random_ids(model, batch, min(context, READ), seed), READ)
    cache, config = DynamicCache(config=model.config), model.config
    if way == "stock-static":
        cache = StaticCache(config=config, max_cache_len=context + room)
    heads, *widths = key_heads(config)
    like = {"device": model.device, "dtype": model.dtype}
    for layer in range(config.num_hidden_layers):
        cache.update(
            *(torch.randn(batch, heads, context, width, **like) for width in widths), layer
        )
    return cache


@torch.no_grad()
def read_once(model, ids: torch.Tensor, archive: bool | str) -> InfiniCache:
    """The cache of ids `[1, tokens]`, with an archive of them or without, as of [`InfiniCache`]."""
    return read_in_chunks(model, ids, READ, InfiniCache(model.config, archive=archive))


def repeated(cache: InfiniCache, times: int) -> InfiniCache:
    """A cache of a text that is there so many times, as if each were another document: a recall
    compares and sorts as many blocks, and reads those that are recalled."""
    return joined([cache] * times)


def new_tokens(model, cache, batch: int, steps: int, compiled: bool = False) -> Callable[[], None]:
    """A run of `steps` new tokens for each row, one call each; the cache goes on from run to run.
    `compiled`: by the call of `generate()` on a GPU."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    call = model.get_compiled_call(None) if compiled else model

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            found = call(input_ids=token, use_cache=True, **{CACHE: cache}).logits[:, -1].argmax(-1)
        found.tolist()  # as a sampler has to see it

    return run
