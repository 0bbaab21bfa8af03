"""Whole models with random weights, and what is done with them: a training step, reading a prompt, new tokens.

Two kinds: "infini", a GPT-2 with Infini-attention and segment positions, and "gpt2", stock GPT-2 with torch's sdpa and as
many positions as it needs. Neither drops anything out: with dropout torch's attention on a CPU falls back to a slow way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from evaluation.inference import read_in_chunks
from hf_infini import patch_model
from hf_infini.compat.cache_name import CACHE, cache_of
from hf_infini.tools.training import parameter_groups

KINDS = ("infini", "gpt2")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of both models, and the segments of the one that has some; `checkpoint` is the model of the part pretrained."""

    n_layer: int = 12
    n_embd: int = 768
    n_head: int = 12
    vocab_size: int = 50257
    segment_length: int = 256
    checkpoint: str | None = None
    device: str = "cpu"
    seed: int = 0


def build(kind: str, spec: ModelSpec, positions: int, changes: dict | None = None):
    """One of the two in evaluation mode; stock GPT-2 has so many `positions`, the other needs them only where `changes`,
    options of [`patch_model`], make its positions learned."""
    torch.manual_seed(spec.seed)
    sizes = {name: getattr(spec, name) for name in ("n_layer", "n_embd", "n_head", "vocab_size")}
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), spec.vocab_size - 1)
    nothing = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if kind == "infini" and (changes or {}).get("position_encoding") != "learned":
        positions = max(1024, spec.segment_length)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **special, **nothing, n_positions=positions)).eval()
    if kind == "infini":
        patch_model(model, **{"position_encoding": "segment", "segment_length": spec.segment_length, **(changes or {})})
    model.loss_type = "ForCausalLM"  # what it is anyway; unset, every process warns of it
    return model.to(spec.device)


def random_ids(spec: ModelSpec, batch: int, tokens: int) -> torch.Tensor:
    """`[batch, tokens]`, without the last id, which ends a text."""
    draw = torch.Generator().manual_seed(spec.seed)
    return torch.randint(spec.vocab_size - 1, (batch, tokens), generator=draw).to(spec.device)


# --- training ---------------------------------------------------------------------------------------------------------


def training_step(model, ids: torch.Tensor, dtype: str, compiled: bool = False) -> Callable[[], None]:
    """A step on `[batch, tokens]`: forward, backward and AdamW, as recipes/train.py takes it, without clipping; in
    bfloat16 that is autocast."""
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4, 1e-3, 0.1), fused=True)
    model = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare_training(kind: str, spec: ModelSpec, context: int, rows: int, dtype: str) -> Callable[[], None]:
    """Two steps, for [`measuring.peak_of`]: they hold weights, gradients, the optimiser's state and what a step computes."""
    ids = random_ids(spec, rows, context)

    def train() -> None:
        step = training_step(build(kind, spec, context), ids, dtype)
        step()
        step()

    return train


# --- reading and writing text -----------------------------------------------------------------------------------------


def random_cache(model, context: int) -> DynamicCache:
    """A stock model's cache after `context` tokens, of random keys and values: what a step costs does not depend on them."""
    cache, config = DynamicCache(config=model.config), model.config
    heads, width = config.num_attention_heads, getattr(config, "head_dim", None)
    shape = (1, getattr(config, "num_key_value_heads", heads), context, width or config.hidden_size // heads)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


@torch.inference_mode()
def padded_cache(model, ids: torch.Tensor, mask: torch.Tensor):
    """The cache after `[batch, tokens]`; `mask` of the same shape is 0 for padding."""
    places = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return cache_of(model(ids, use_cache=True, logits_to_keep=1, **places))


def new_tokens(model, cache, steps: int, mask: torch.Tensor | None = None) -> Callable[[], None]:
    """A run of `steps` new tokens for each row, one call each; the cache goes on from run to run.

    Args:
        mask: `[batch, tokens read]` of a padded batch; without it there is one row, without padding.
    """
    batch = 1 if mask is None else len(mask)
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def run() -> None:
        nonlocal mask
        for _ in range(steps):
            padding = {}
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
                padding = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
            found = model(token, use_cache=True, **padding, **{CACHE: cache}).logits[:, -1].argmax(-1)
        found.tolist()  # as a sampler has to see it

    return run


def prepare_prompt(kind: str, spec: ModelSpec, context: int, chunk: int) -> Callable[[], object]:
    """A prompt that is read in chunks, for [`measuring.peak_of`]: the cache counts, the weights do not."""
    model, ids = build(kind, spec, context), random_ids(spec, 1, context)
    read_in_chunks(model, ids[:, :64], chunk)  # libraries and thread pools
    return lambda: read_in_chunks(model, ids, chunk)
