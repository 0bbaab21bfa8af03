"""One HTML page of what [`hf_infini.inspect_attention`] found: no other file, nothing from a
network.

Its frame is `page.html`, which takes in the style `page.css` and the scripts, plain JavaScript
without a library.
"""

import base64
import html
import json
import math
import zlib
from dataclasses import replace
from importlib import resources

import torch
from torch import Tensor

from ...options import SINKS
from .heads import MEMORY, Inspection, LayerInspection

SCRIPTS = ("strings.js", "page.js", "map.js", "fates.js", "charts.js", "start.js")


def inspection_page(inspection: Inspection, *, title: str | None = None, row: int = 0) -> str:
    """The page, as HTML text: each head's weights with their tokens, and the memory. At least
    one layer has attention heads. `inspection`: of [`inspect_attention`]; `title`: by default
    the model's name; `row`: of the batch.

    It opens with the head that looks farthest back ([`reach`]). The more weights there are, the
    coarser they are rounded, which the page says: 30 layers of 9 heads take about 5 MB for 400
    tokens, with weights to 11 % and those below 0.002 as 0."""
    title, layers = title or inspection.name, inspection.layers.values()
    count = sum(layer.weights[0].numel() for layer in layers if layer.weights is not None) / 2
    floor, step = min(max(1e-10 * count, 1e-6), 2e-3), min(max(1e-8 * count, 0.01), 0.2)
    data: dict = {"title": title, "tokens": inspection.texts[row], "floor": floor, "step": step}
    data["layers"] = [_layer_data(layer, row, floor, step) for layer in layers]
    for first in farthest(inspection, 1, row).layers.values():  # one, or none without heads
        data["farthest"] = [first.layer, int(reach(first, row).argmax())]
    # In a script element only "</script" and "<!--" end the data or change its reading: without "<"
    # there is neither.
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return _text("page.html").format(
        policy="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        title=html.escape(title),
        style=_text("page.css"),
        data=content,
        script="".join(map(_text, SCRIPTS)),
    )


def farthest(inspection: Inspection, most: int, row: int = 0) -> Inspection:
    """So many layers of an `inspection` at `most`: those with the heads that look farthest back, in
    their order. `row`: of the batch."""
    layers = inspection.layers
    far = {
        number: float(reach(layer, row).max())
        for number, layer in layers.items()
        if layer.weights is not None
    }
    chosen = sorted(sorted(far, key=lambda number: -far[number])[:most])
    return replace(inspection, layers={number: layers[number] for number in chosen})


def reach(layer: LayerInspection, row: int = 0) -> Tensor:
    """How far back each head of a `layer` with heads looks, `[heads]`: the mean number of tokens
    between a query and its keys, by what they weigh in the output. The first tokens, which most
    heads look at whatever they are, do not count. `row`: of the batch."""
    weights, through = _shown(layer, row)
    weights = weights.nan_to_num().abs()
    if through is not None:
        gate = layer.tensors["token_gate"][row].unsqueeze(-1)
        weights = weights * torch.where(through, gate, 1 - gate)
    weights = weights[..., SINKS:]
    places = torch.arange(weights.shape[1])
    ago = (places[:, None] - places[SINKS:]).clamp(min=0)
    whole = weights.sum((1, 2)).clamp(min=torch.finfo(weights.dtype).tiny)
    return (weights * ago).sum((1, 2)) / whole


def _shown(layer: LayerInspection, row: int) -> tuple[Tensor, Tensor | None]:
    """The weights that the page shows, `[heads, queries, keys]`, NaN where there is none, and which
    of them are the memory's; `None` without one."""
    known = {name: layer.tensors[name][row] for name in ("weights", "scores")}
    weights = known["weights"].masked_fill(known["scores"].isinf(), torch.nan)
    if layer.gate is None:
        return weights, None
    fates, segments = (layer.tensors[name][row] for name in ("fates", "segments"))
    through = fates[:, segments] == MEMORY
    return torch.where(through, layer.tensors["memory_weights"][row], weights), through


def _layer_data(layer: LayerInspection, row: int, floor: float, step: float) -> dict:
    """`layer`, `kind` and, with `heads`, `weights`: the codes of head after head, those that a key
    has from the query at its own place on. They are the memory's where the key is in the memory:
    `fates` (of each head, segment and token) and `segments` (of the tokens) say so. Also with a
    memory: `gate`, `tokenGate`, `share`, and `memory` (norms)."""
    found: dict = {"layer": layer.layer, "kind": layer.kind}
    if layer.weights is None:
        return found
    known = {
        name: tensor if name == "gate" else tensor[row] for name, tensor in layer.tensors.items()
    }
    weights, _ = _shown(layer, row)
    if "gate" in known:
        segments, fates = known["segments"], known["fates"]
        stop = int(segments.max()) + 2
        found |= {"segments": segments.tolist(), "gate": _numbers(known["gate"])}
        found |= {
            "tokenGate": _numbers(known["token_gate"]),
            "share": _numbers(known["memory_share"]),
        }
        found["memory"] = _numbers(known["memory_norm"][:, :stop])
        found["fates"] = _packed(fates[:, :stop].contiguous().numpy().tobytes())
    seen = torch.ones(weights.shape[1:], dtype=torch.bool).triu()
    codes = _codes(weights.mT[:, seen], floor, step)
    planes = [codes & 255, *([codes >> 8] if codes.max() > 255 else [])]  # bytes, low before high
    packed = _packed(b"".join(plane.to(torch.uint8).numpy().tobytes() for plane in planes))
    return found | {"heads": len(weights), "weights": packed}


def _codes(weights: Tensor, floor: float, step: float) -> Tensor:
    """Whole numbers from 0 to 65,535: 0 for a weight whose size is below `floor`, 1 where there is
    none (NaN), and 2n, or 2n + 1 if it is negative, for ± floor · exp((n − 1) · step)."""
    size = weights.abs()
    number = (size.log() - math.log(floor)).div(step).round().clamp(
        0, 32_766
    ).nan_to_num().int() + 1
    codes = (2 * number + (weights < 0)).masked_fill(size < floor, 0)
    return codes.masked_fill(weights.isnan(), 1)


def _packed(content: bytes) -> str:
    """Base64 of its zlib stream, by the settings for noisy bytes; level 9 takes thrice as long."""
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    return base64.b64encode(packer.compress(content) + packer.flush()).decode("ascii")


def _text(name: str) -> str:
    """A file beside this module, of the kinds that pyproject.toml lists."""
    return resources.files("hf_infini.tools.inspection").joinpath(name).read_text(encoding="utf-8")


def _numbers(tensor: Tensor) -> list:
    """Nested lists with 5 digits, `None` for what is not finite (JSON has no name for it)."""
    if tensor.dim() > 1:
        return [_numbers(part) for part in tensor]
    return [float(f"{number:.5g}") if math.isfinite(number) else None for number in tensor.tolist()]
