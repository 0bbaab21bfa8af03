"""Whether the kernels do on this device what plain torch does, for nobody has tried every GPU with
every compiler.

Before the first call of each kind a small one goes both ways, from random numbers, with the call's
sizes, options and dtype and enough segments that tokens are kept and evicted. Output, memory and,
if the call learns, gradients are compared.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ....options import Window
from ...keeping import SCORES
from ...layout.grid import segment_layout
from ...state import Attended, AttentionCall, InfiniState, Tokens
from ..grid import attend_grid
from .attend import run

Run = Callable[[AttentionCall], Attended]

# Of the largest number: rounding to the dtype (plain torch in bfloat16: up to 0.035), in float32
# perhaps to TF32
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.02, torch.float32: 0.002}
_found: dict[Any, str | None] = {}


class Trial(NamedTuple):
    """The numbers that a small call goes through both ways with: random ones, of one row."""

    leaves: list[Tensor]  # queries, keys, values and perhaps log weights, `[1, heads, tokens, dim]`
    gate: Tensor
    owed: Tensor  # the gradient of the outputs, of the tokens from `begin` on
    score: Tensor | None  # a learned one, where tokens are kept
    masks: dict[str, Tensor]  # as of [`segment_layout`]
    window: Window
    begin: int  # tokens before the call


def disagreement(call: AttentionCall) -> str | None:
    """Why the kernels are not used for calls of this kind; `None`: they are right. A warning says
    it, too."""
    device, said = call.query.device, None
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else call.query.dtype
    )
    parts = (call.query, *call.tokens[:3], call.gate, call.state.memory)
    learns = torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for part in parts
    )
    kind = _kind(call, dtype, learns)
    if kind in _found:
        return _found[kind]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return (
            "not compared with plain torch yet: make one such call before a CUDA graph is captured"
        )
    # Without the modes of the call that asks, and what a checkpoint does with saved tensors
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(learns),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                difference = torch.tensor(_differences(call, dtype, learns)).max()  # NaN, if one is
            if not difference <= TOLERANCE[dtype]:
                said = (
                    f"the kernels differ from plain torch by {difference:.2g} of the largest number"
                )
        except Exception as error:  # of the compiler, or on a chip with less memory
            said = (
                f"the kernels could not be compared: {type(error).__name__}: "
                f"{' '.join(str(error).split()):.200}"
            )
    if said is None or "OutOfMemoryError" not in said:  # there may be more another time
        _found[kind] = said
    if said is not None:
        warnings.warn(
            f"hf_infini computes such calls by plain torch on {device}: {said}", stacklevel=2
        )
    return said


def _kind(call: AttentionCall, dtype: torch.dtype, learns: bool) -> tuple:
    """What a call has in common with others for which the kernels are right where they are for
    it."""
    (key, value, log_weight, *_), layout, softmax = call.tokens, call.layout, call.softmax
    gate: Any = call.gate  # of a memory, which a call of kernels has
    rule: Any = call.rule
    turn, tables = softmax.turn, softmax.rotary
    sizes = (
        call.query.shape[1::2],
        key.shape[1],
        value.shape[3],
        layout.window._replace(kept_tokens=0),
        min(layout.window.ahead, 64),
    )
    form = (
        learns,
        call.return_state,
        layout.begun,
        layout.most_kept > 0,
        layout.source is None,
        layout.skipped is None,
    )
    # a layer's
    way = tables and (
        getattr(turn, "__func__", turn),
        type(getattr(turn, "__self__", None)),
        tables[0].dtype,
    )
    features = rule.feature_map, log_weight is None
    return call.query.device, dtype, gate.dtype, *features, sizes, form, way


def _differences(call: AttentionCall, dtype: torch.dtype, learns: bool) -> list[float]:
    """How far what the kernels find is from plain torch's in float32, of the largest number of each
    tensor."""
    trial = _drawn(call, dtype)
    found = _computed(call, trial, run, dtype, learns)
    wanted = _computed(call, trial, attend_grid, torch.float32, learns)
    return [
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
        for one, other in zip(found, wanted, strict=True)
    ]


def _drawn(call: AttentionCall, dtype: torch.dtype) -> Trial:
    """Random numbers of a call's sizes, with enough segments that tokens are kept and evicted."""
    query, (key, value, log_weight, *_), layout = call.query, call.tokens, call.layout
    (length, local, sinks, kept), device = layout.window, query.device
    gate_dtype = torch.float32 if call.gate is None else call.gate.dtype
    draw, most = torch.Generator(device).manual_seed(0), (local + 1) * length
    # how many are kept is not compiled in
    begin, kept = (most + length + sinks + 3 if layout.begun else 0), min(kept, 64)
    tokens = begin + most + 3 * length + sinks + 2 * kept + 3
    if kept and not layout.most_kept:  # nothing has left the window
        begin = max(1, most // 2) if layout.begun else 0
        tokens = max(most, begin + 2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=draw, device=device)

    leaves = [drawn(part.shape[1], tokens, part.shape[3]).to(dtype) for part in (query, key, value)]
    gate = drawn(query.shape[1])[0].to(gate_dtype)
    owed = drawn(query.shape[1], tokens - begin, value.shape[3])
    leaves += [] if log_weight is None else [drawn(key.shape[1], tokens, 1).to(dtype)]
    score = drawn(key.shape[1], tokens, 1) if kept else None
    columns = torch.arange(tokens, device=device)[None]
    masks: dict[str, Any] = {} if layout.skipped is None else {"memory_mask": columns % 7 > 0}
    if layout.source is not None:  # padding, and a second document soon after it
        masks |= {
            "attention_mask": columns != begin + 1,
            "position_ids": columns - (columns > begin + 2) * (begin + 3),
        }
    return Trial(leaves, gate, owed, score, masks, Window(length, local, sinks, kept), begin)


def _computed(
    call: AttentionCall, trial: Trial, way: Run, kind: torch.dtype, learns: bool
) -> list[Tensor]:
    """Output, state and gradients of a trial in this dtype, by `way`."""
    begin, end, state = trial.begin, trial.leaves[0].shape[2], None
    if begin:
        before = _attended(call, trial, attend_grid, kind, slice(0, begin), None, learns)
        state = before[1][1].detach().map(torch.clone)
    inputs, (output, after, _) = _attended(call, trial, way, kind, slice(begin, end), state, learns)
    found = [output, after.memory, after.normaliser] if call.return_state else [output]
    upstream = [trial.owed.to(kind), *map(torch.ones_like, found[1:])]
    gradients = (
        torch.autograd.grad(found, inputs, upstream, allow_unused=True, materialize_grads=True)
        if learns
        else ()
    )
    return [*(part.detach() for part in found), *gradients]


def _attended(
    call: AttentionCall,
    trial: Trial,
    way: Run,
    kind: torch.dtype,
    cut: slice,
    state: InfiniState | None,
    learns: bool,
) -> tuple[list[Tensor], Any]:
    """What has gradients of a call of these tokens of a trial; and what comes of it."""
    known = () if state is None else (state.memory, state.normaliser)
    parts = *(leaf[:, :, cut].to(kind) for leaf in trial.leaves), trial.gate.detach(), *known
    inputs = [part.requires_grad_(learns) for part in parts]
    query, key, value, *log_weight = inputs[: len(trial.leaves)]
    with torch.no_grad():  # as of a call that reads how many tokens are kept
        masks: dict[str, Any] = {name: mask[:, cut] for name, mask in trial.masks.items()}
        layout = segment_layout(
            1, cut.stop - cut.start, trial.window, **masks, state=state, device=query.device
        )
    if state is None:
        weighted = bool(log_weight)
        state = InfiniState.initial(key, value, *trial.window, rule=call.rule, weighted=weighted)
    tables = call.softmax.rotary and tuple(
        part.to(torch.promote_types(kind, part.dtype)).clone() for part in call.softmax.rotary
    )
    made = AttentionCall(
        query,
        Tokens(
            key,
            value,
            log_weight[0] if log_weight else None,
            None if trial.score is None else trial.score[:, :, cut],
        ),
        inputs[len(trial.leaves)],
        layout,
        call.rule,
        replace(call.softmax, rotary=tables),
        state,
        SCORES["learned"],  # which needs nothing of a model
        call.return_state or cut.stop == trial.begin,
    )
    return inputs, way(made.prepared())
