"""Fused kernels, each a row of the table of backends ([`Backend`] in ops/backends.py), the fastest first.

A kernel's module is imported only where its compiler is installed, and never travels with a saved model.
"""

import importlib
import importlib.util
import os
from typing import Any

import torch

from ..backends import Attended, AttentionCall, Backend
from ..layout.base import GridLayout

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _fits_linear(call: AttentionCall) -> tuple[bool, str]:
    """Whether the kernels of linear.py compute the call; the first reason against it."""
    if torch.compiler.is_compiling():  # before anything that a graph would have to follow
        return False, "a graph of torch.compile, which fuses plain torch itself"
    query, key, value = call.tokens[:3]
    # These two at once, for every layer asks at every new token
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False, "not on a CUDA device"
    if not isinstance(call.layout, GridLayout):
        return False, "one token for every row"
    rule, softmax = call.rule, call.softmax
    refused = {
        "triton is not installed": importlib.util.find_spec("triton") is None,
        "code that came with a model has no kernels": not __name__.endswith(".ops.kernels"),
        f"no kernel for update_rule={rule.update_rule!r}": rule.update_rule != "linear",
        f"no kernel for denominator={rule.denominator!r}": rule.denominator != "separate",
        "local weights are returned": call.return_weights or softmax.written_out,
        "no kernel for kept tokens": call.layout.kept_tokens > 0,
        "no kernel for dropout": softmax.dropout > 0,
        "no kernel for softcap": softmax.softcap is not None,
        "no kernel for query weights beside rotary positions": None not in (softmax.query_weight, softmax.rotary),
        f"no kernel for {query.dtype}": not {query.dtype, key.dtype, value.dtype} <= set(DTYPES),
        f"heads are {query.shape[3]} and {value.shape[3]} wide, not one of {', '.join(map(str, WIDTHS))}": (
            not {query.shape[3], value.shape[3]} <= set(WIDTHS)
        ),
        "a tensor of more numbers than 32 bits count": max(query.numel(), key.numel(), value.numel()) >= 2**31,
    }
    for reason, holds in refused.items():
        if holds:
            return False, reason
    if softmax.rotary is not None:
        width = softmax.rotary.tables[0].shape[-1]
        if width != query.shape[3] or _module("rotary").halves_of(softmax.rotary) is None:
            return False, "no kernel for this way of turning by rotary positions"
    return True, "Triton kernels"


def _run_linear(call: AttentionCall) -> Attended:
    return _module("linear").run(call)


def _module(name: str) -> Any:
    """A module of this folder, by its name: so that it does not travel with a saved model."""
    return importlib.import_module(f".{name}", __name__)


KERNELS: tuple[Backend, ...] = (Backend("triton", _fits_linear, _run_linear),)
