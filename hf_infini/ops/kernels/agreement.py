"""Whether the kernels do on this device what plain torch does, for nobody has tried every GPU with every compiler.

Before the first call of each kind a small one goes both ways, from random numbers, with the call's sizes, options and dtype
and enough segments that tokens are kept and evicted. Output, memory and, if the call learns, gradients are compared.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..attention import attend_grid, prepared
from ..layout.build import segment_layout
from ..state import AttentionCall, InfiniState, Projections
from .attend import run

# Of the largest number: rounding of inputs and products to the dtype; of float32, plain torch may round products to TF32
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 0.002}
_found: dict[Any, str | None] = {}


def disagreement(call: AttentionCall) -> str | None:
    """Why the kernels are not used for calls of this kind; `None`: they are right. A warning says it, once."""
    (query, key, value, log_weight, _), layout, softmax = call.tokens, call.layout, call.softmax
    device, turn, tables = query.device, softmax.turn, softmax.rotary
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value, call.gate))
    sizes = query.shape[1::2], key.shape[1], value.shape[3], layout.window_sizes[:3], min(layout.ahead, 64)
    form = learns, layout.source is None, layout.skipped is None, layout.begun, layout.most_kept > 0, log_weight is None
    # Of a model's layers, each of which has its own method
    way = tables and (getattr(turn, "__func__", turn), type(getattr(turn, "__self__", None)), tables[0].dtype)
    kind = device, dtype, call.gate.dtype, call.rule.feature_map, sizes, form, way
    if kind in _found:
        return _found[kind]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "not compared with plain torch yet: make one such call before a CUDA graph is captured"
    # Nothing of the call that asks: neither its mode, nor what a checkpoint makes of saved tensors
    modes = torch.inference_mode(False), torch.set_grad_enabled(learns), torch.autocast(device.type, enabled=False)
    with modes[0], modes[1], modes[2], saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        try:
            difference = torch.tensor(_differences(call, dtype, learns)).max()  # NaN, if one is
            said = f"the kernels differ from plain torch by {difference:.2g} of the largest number"
            _found[kind] = None if difference <= TOLERANCE[dtype] else said
        except torch.OutOfMemoryError:  # this time
            return "no memory was left to compare the kernels with plain torch"
        except Exception as error:  # of the compiler, or on a chip with less memory
            _found[kind] = f"the kernels do not run: {type(error).__name__}: {' '.join(str(error).split()):.200}"
    if _found[kind] is not None:
        warnings.warn(f"hf_infini computes such calls by plain torch on {device}: {_found[kind]}", stacklevel=2)
    return _found[kind]


def _differences(call: AttentionCall, dtype: torch.dtype, learns: bool) -> list[float]:
    """How far what the kernels find is from plain torch's in float32, of the largest number of each tensor."""
    (query, key, value, log_weight, _), layout, softmax = call.tokens, call.layout, call.softmax
    (length, local, sinks, kept), device = layout.window_sizes, query.device
    draw, keeps = torch.Generator(device).manual_seed(0), kept and layout.most_kept
    begin = 0 if not layout.begun else (local + 2) * length + sinks + 3 if keeps or not kept else (local + 1) * length // 2
    tokens = begin + (local + 4) * length + sinks + kept + 3 if keeps or not kept else (local + 1) * length

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=draw, device=device)

    leaves = [drawn(part.shape[1], tokens, part.shape[3]).to(dtype) for part in (query, key, value)]
    gate, owed = drawn(query.shape[1])[0].to(call.gate.dtype), drawn(query.shape[1], tokens - begin, value.shape[3])
    log_weight = None if log_weight is None else drawn(key.shape[1], tokens, 1).to(dtype)
    score, columns = drawn(key.shape[1], tokens) if kept else None, torch.arange(tokens, device=device)[None]
    masks: dict[str, Any] = {} if layout.skipped is None else {"memory_mask": columns % 7 > 0}
    if layout.source is not None:  # padding, and a second document soon after it
        masks |= {"attention_mask": columns != begin + 1, "position_ids": columns - (columns > begin + 2) * (begin + 3)}
    rule = replace(call.rule, keep_score="learned" if kept else call.rule.keep_score)

    def attended(way: Any, kind: torch.dtype, cut: slice, state: Any) -> tuple[list[Tensor], Any]:
        """Queries, keys and values of these tokens, and the gate; and what comes of them."""
        inputs = [*(leaf[:, :, cut].to(kind) for leaf in leaves), gate.detach()]
        query, key, value, _ = (part.requires_grad_(learns) for part in inputs)
        with torch.no_grad():  # as of a call that reads how many tokens are kept
            of_cut = {name: mask[:, cut] for name, mask in masks.items()}
            laid_out = segment_layout(*key.shape[:3:2], *layout.window_sizes, **of_cut, state=state, device=device)
        if state is None:
            state = InfiniState.initial(key, value, *layout.window_sizes, rule=rule, weighted=log_weight is not None)
        known = (None if part is None else part[:, :, cut].to(kind) for part in (log_weight, score))
        tables = softmax.rotary and tuple(part.to(torch.promote_types(kind, part.dtype)).clone() for part in softmax.rotary)
        scores = replace(softmax, rotary=tables)
        call = AttentionCall(Projections(query, key, value, *known), inputs[3], laid_out, rule, scores, state, True)
        return inputs, way(prepared(call))

    def computed(way: Any, kind: torch.dtype) -> list[Tensor]:
        state = attended(attend_grid, kind, slice(0, begin), None)[1][1].detach() if begin else None
        inputs, (output, after, _) = attended(way, kind, slice(begin, tokens), state)
        found = output, after.memory, after.normaliser
        upstream = owed.to(kind), *map(torch.ones_like, found[1:])
        return [*(part.detach() for part in found), *(torch.autograd.grad(found, inputs, upstream) if learns else ())]

    pairs = zip(computed(run, dtype), computed(attend_grid, torch.float32), strict=True)
    return [float((one.float() - other).abs().max() / other.abs().max().clamp(min=1e-6)) for one, other in pairs]
