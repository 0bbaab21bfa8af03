"""Runs a model once and collects what its heads did, with functions that write the weights down:
one where a model of transformers looks for its attention, and one where a layer with a memory looks
for its backend.

Shapes: `B` batch, `H` heads, `K` key/value heads, `T` tokens, `S` segments, `C` slots of one, `D`
head dimension.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask

from ...compat.execution_device import device_of
from ...layers.memory_layer import in_evaluation
from ...models.scratch.attention import CausalMultiHeadAttention
from ...models.structure import attention_layers, decoder_of
from ...ops.backends import forced_backend
from ...ops.backends.grid import attend_grid
from ...ops.checks import Model, check_ids, check_types
from ...ops.equations import MemoryRule, ScoreOptions, masked_scores
from ...ops.layout.grid import GridLayout
from ...ops.scores import visible_softmax
from ...ops.state import Attended, AttentionCall, InfiniState, Tokens
from ...options import layer_kinds
from .heads import KEPT, MEMORY, NONE, SINK, WINDOW, Inspection, LayerInspection, token_texts

INTERFACE = f"inspection of {__name__}"


@check_types
@torch.no_grad()
def inspect_attention(
    model: Model,
    inputs: str | Tensor | Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> Inspection:
    """Runs a model once, without a cache, in evaluation mode, leaves it as it was, and returns what
    every head of it did.

    Args:
        model: a decoder that [`hf_infini.patch_model`] takes, with a memory (in all layers or some)
            or without, or a `causal_mha` model; with any head or none; PEFT's wrapper around one.
        inputs: a text (which needs the tokenizer, and no special tokens are added), token ids
            `[batch, tokens]` without padding, or what the model takes by name: `input_ids` with
            `position_ids`, in which 0 begins a document.
        tokenizer: makes the labels readable; without it they are the ids.
        layers: numbers of the layers to keep; `None`: all. A layer takes 12 · batch · heads ·
            tokens² bytes and more.

    Raises:
        ValueError: a model of another kind, no such layer, a text without a tokenizer, or padded
            rows.
    """
    base = decoder_of(model)
    if not isinstance(base, PreTrainedModel) or not hasattr(base.config, "vocab_size"):
        raise ValueError(
            f"a {type(model).__name__} has no heads to inspect: give a decoder of transformers."
        )
    scratch = base.config.attention if base.config.model_type == "causal_mha" else None
    attentions = [] if scratch == "none" else attention_layers(base)
    every = range(base.config.num_hidden_layers)
    wanted = list(every) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(every):
        raise ValueError(f"layers must be numbers from 0 to {every[-1]}; got {wanted}.")
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError(
                "a text needs the model's tokenizer: inspect_attention(model, text, tokenizer)."
            )
        inputs = tokenizer(inputs, add_special_tokens=False, return_tensors="pt")
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    for name, part in ({"input_ids": None} | {**inputs}).items():
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} of inputs must be a tensor; got {type(part).__name__}.")
    if "attention_mask" in inputs and not bool(inputs["attention_mask"].all()):
        raise ValueError(
            "only rows without padding can be inspected: give texts of different "
            "lengths one after the other."
        )
    check_ids("inputs", ids := inputs["input_ids"], base.config.vocab_size)
    if ids.dim() != 2:
        raise ValueError(f"inputs must be [batch, tokens]; got ids of {list(ids.shape)}.")
    device, names = device_of(base.get_input_embeddings()), ("input_ids", "position_ids")
    given = {name: inputs[name].to(device) for name in names if name in inputs}
    watched = {number: attention for number, attention in enumerate(attentions) if number in wanted}
    caught, kinds, found = _caught_parts(base, watched, given), layer_kinds(base.config), {}
    for number in wanted:
        parts = caught.get(number, {})
        kind = (
            "infini"
            if "gate" in parts
            else "global"
            if kinds[number] == "full_attention"
            else "local"
        )
        found[number] = LayerInspection(number, scratch or kind, parts)
    ids = ids.cpu()
    texts = [token_texts(tokenizer, row) for row in ids.tolist()]
    return Inspection(ids, texts, found, Path(base.config.name_or_path or type(base).__name__).name)


def _caught_parts(
    base: PreTrainedModel, layers: Mapping[int, nn.Module], given: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Calls the model with what is given, and returns the parts of these attention modules, by
    their numbers: `output`, and what [`softmax_parts`] or [`_memory_parts`] return, on the CPU.
    Other layers compute as usual."""
    found: dict[int, dict[str, Tensor]] = {}
    running: list[int] = []  # the number of the layer to look into, while it runs

    def attention(
        module,
        query,
        key,
        value,
        attention_mask,
        *,
        scaling=None,
        softcap=None,
        s_aux=None,
        **others,
    ):
        if s_aux is not None:
            raise ValueError(
                f"cannot inspect a {type(module).__name__}: its softmax also counts learned sinks."
            )
        parts = softmax_parts(query, key, value, attention_mask, scaling, softcap)
        found.update(dict.fromkeys(running, parts))
        return parts["heads"].to(value.dtype).transpose(1, 2), None

    def run(call: AttentionCall) -> Attended:
        if call.layer not in layers:
            return attend_grid(call)
        parts = found[call.layer] = _memory_parts(call)
        return parts["heads"].to(call.tokens.value.dtype), None, None

    def end(module, args, given, output):
        number = running.pop()
        # it has no use for the interface
        if isinstance(module, CausalMultiHeadAttention) and number not in found:
            found[number] = module.parts(
                args[0], mask=given["mask"], position_ids=given["position_ids"]
            )._asdict()
        if number not in found:
            raise ValueError(
                f"cannot inspect layer {number}: a {type(module).__name__} computes "
                "attention in its own way."
            )
        found[number]["output"] = output[0] if isinstance(output, tuple) else output
        found[number] = {name: _widen(tensor).cpu() for name, tensor in found[number].items()}

    AttentionInterface.register(INTERFACE, attention)
    AttentionMaskInterface.register(INTERFACE, sdpa_mask)
    with contextlib.ExitStack() as stack:
        for number, module in layers.items():
            stack.enter_context(
                module.register_forward_pre_hook(lambda *_, number=number: running.append(number))
            )
            stack.enter_context(module.register_forward_hook(end, with_kwargs=True))
        stack.callback(
            setattr, base.config, "_attn_implementation", base.config._attn_implementation
        )
        base.config._attn_implementation = INTERFACE
        with in_evaluation(base), forced_backend(run):
            base(**given, use_cache=False)
    return found


def softmax_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> dict[str, Tensor]:
    """Scores, weights and heads of softmax(scaling · Q Kᵀ) V, of query `[B, H, T, D]` and key `[B,
    K, T, D]` as they are compared, and value `[B, K, T, D]`; mask: bool, True = visible, broadcast;
    `None`: what causality leaves; scaling, softcap: as of [`ScoreOptions`]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        _widen(query),
        *(_widen(part).repeat_interleave(groups, 1) for part in (key, value)),
    )
    if mask is None:
        mask = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    scores, weights = visible_softmax(
        masked_scores(query, key, None, ScoreOptions(scaling, softcap=softcap)), mask
    )
    return {"scores": scores, "weights": weights, "heads": weights @ value}


def _memory_parts(call: AttentionCall) -> dict[str, Tensor]:
    """What the heads of a layer with a memory did, in a call that begins its rows. A closed gate
    gives the local attention, an open one what the memory reads (equation 5). Both are linear in
    the values: of unit vectors they are the weights."""
    widened: Any = (None if part is None else _widen(part) for part in call.tokens)
    call = call._replace(query=_widen(call.query), tokens=Tokens(*widened))
    rule, gate = call.rule, call.gate
    if rule is None:  # as with a memory that nobody reads
        rule, gate = MemoryRule(), call.query.new_full((call.query.shape[1],), -torch.inf)
    gate = _widen(gate)
    local, weights, _ = _attended(call, rule, torch.full_like(gate, -torch.inf))
    memory, memory_weights, held = _attended(call, rule, torch.full_like(gate, torch.inf))
    # before, both are the local attention
    has_memory = (memory_weights != weights).any(-1, keepdim=True)
    memory, memory_weights = memory * has_memory, memory_weights * has_memory
    share = torch.sigmoid(gate)[:, None, None] * has_memory
    memory_part, local_part = share * memory, (1 - share) * local
    of_memory, of_local = memory_part.norm(dim=-1), local_part.norm(dim=-1)
    width, places = local.shape[-1], torch.arange(call.layout.segments, device=local.device)
    grid = places[None, :, None, None, None].expand(call.layout.batch, -1, call.layout.slots, 1, 1)
    segments = call.layout.from_grid(grid)[:, 0, :, 0]  # [B, T]
    norm, holds = held[..., :width].flatten(3).norm(dim=-1), held[..., width:].any(3)
    groups = local.shape[1] // held.shape[1]
    return {
        "scores": _scores(call, weights),
        "weights": weights,
        "heads": memory_part + local_part,
        "local_heads": local,
        "memory_heads": memory,
        "memory_weights": memory_weights,
        "gate": torch.sigmoid(gate),
        "token_gate": share.squeeze(-1),
        "memory_share": torch.where(of_memory > 0, of_memory / (of_memory + of_local), 0),
        "memory_norm": norm.repeat_interleave(groups, 1),
        "segments": segments,
        "fates": _fates(call.layout, segments, holds).repeat_interleave(groups, 1),
    }


def _attended(call: AttentionCall, rule: MemoryRule, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 5 with this rule and these logits: heads `[B, H, T, D]`, what each token's value
    weighs in them, `[B, H, T, T]`, and the memory that each segment reads, and the one after the
    last, `[B, K, S + 1, D, D + T]`: of the values, then of tokens."""
    value, (batch, kv_heads, count, _) = call.tokens.value, call.tokens.key.shape
    units = torch.eye(count, dtype=value.dtype, device=value.device).expand(batch, kv_heads, -1, -1)
    tokens, held = call.tokens._replace(value=torch.cat([value, units], -1)), []

    class Watched(type(rule)):
        def read(self, features, memory, normaliser):
            held.append(memory)
            return super().read(features, memory, normaliser)

    made: dict[str, Any] = {"rule": rule, "weighted": tokens.log_weight is not None}
    made["scores"] = call.keep_score.count
    state = InfiniState.initial(tokens.key, tokens.value, *call.layout.window, **made)
    call = call._replace(
        tokens=tokens, gate=gate, state=state, rule=Watched(**vars(rule)), return_state=True
    )
    attended: Any = attend_grid(call)
    heads, weights = attended[0].split([value.shape[-1], count], -1)
    return heads, weights, torch.cat([*held, attended[1].memory.unsqueeze(1)], 1).transpose(1, 2)


def _scores(call: AttentionCall, weights: Tensor) -> Tensor:
    """`[B, H, T, T]`, of which these are the softmax: that of a token with itself says what all
    others of its row are."""
    softmax, query = call.softmax, call.query
    key = call.tokens.key.repeat_interleave(query.shape[1] // call.tokens.key.shape[1], 1)
    place = slice(0, 1)  # both in the same place of the window, whichever it is
    own = (softmax.compared(query, place) * softmax.compared(key, place)).sum(
        -1
    ) * softmax.scaling_of(query)
    own = own if softmax.softcap is None else (own / softmax.softcap).tanh() * softmax.softcap
    log_sum = (
        own - weights.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(weights.dtype).tiny).log()
    )
    return weights.log() + log_sum.unsqueeze(-1)


def _fates(layout: GridLayout, segments: Tensor, taken_in: Tensor) -> Tensor:
    """`[B, K, S + 1, T]`, int8: where each token is, as a number of `FATES`, when each segment is
    read and after the last. `segments`: of the tokens, `[B, T]`; `taken_in`: by the memory, `[B, K,
    S + 1, T]` bool."""
    moments = torch.arange(layout.segments + 1, device=segments.device)
    latest = moments.minimum(
        layout.document[:, -1:] + layout.tokens_seen.unsqueeze(1) // layout.window.segment_length
    )
    ago = latest.unsqueeze(2) - segments.unsqueeze(1)  # [B, S + 1, T], in segments
    document = layout.document.expand(len(segments), -1)
    here = (ago >= 0) & (document.unsqueeze(2) == document.gather(1, segments).unsqueeze(1))
    left = torch.tensor(KEPT, device=segments.device)
    if layout.skipped is not None:
        skipped = layout.from_grid(layout.skipped[..., None, None])[..., 0].unsqueeze(1)
        left = torch.where(skipped, NONE, left)
    fates = torch.where(taken_in, MEMORY, left)
    fates = torch.where((ago <= layout.window.local_segments).unsqueeze(1), WINDOW, fates)
    fates = torch.where((layout.positions < layout.window.sink_tokens)[:, None, None], SINK, fates)
    return torch.where(here.unsqueeze(1), fates, NONE).to(torch.int8)


def _widen(tensor: Tensor) -> Tensor:
    return (
        tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if tensor.is_floating_point()
        else tensor
    )
