"""One HTML page of what [`hf_infini.inspection.inspect_attention`] found: no other file, nothing from a network.

Its frame is `page.html`, which takes in the style `page.css` and the scripts, plain JavaScript without a library: `page.js`,
and `charts.js` for the charts and tables of the memory, and to start the page.

The weights travel compactly. The row of a query is stored from the first key that it sees to the query itself, each weight
as a 16-bit level: weight = exp(−level / 1000), so 0.05 % exact, and score = −level / 1000 + s, with a number s per row, the
logarithm of the sum of its exponentials. That is about 2.7 · tokens² bytes of base64 characters a head for full attention.
"""

import base64
import html
import json
import math
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from .heads import Inspection, LayerInspection

LEVELS_PER_NAT = 1000
LAST_LEVEL = 65534  # exp(−65.5) = 4e-29: what is smaller is shown as this


def inspection_page(inspection: Inspection, *, title: str, row: int = 0) -> str:
    """The page, as HTML text.

    Args:
        inspection: of a model's layers; at least one has attention heads.
        title: such as the model's name.
        row: of the batch; its padding is left out.
    """
    content = json.dumps(page_data(inspection, title=title, row=row), ensure_ascii=False, allow_nan=False)
    # In a script element only "</script" and "<!--" end the data or change its reading: without "<" there is neither.
    content = content.replace("<", "\\u003c")
    return _text("page.html").format(
        policy="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        title=html.escape(title),
        style=_text("page.css"),
        data=content,
        script=_text("page.js"),
        charts=_text("charts.js"),
    )


def page_data(inspection: Inspection, *, title: str, row: int = 0) -> dict:
    """What the page's script draws, JSON-safe.

    Returns:
        `title`, `tokens` (their texts), and `layers`: for each `layer`, `kind` and, with heads, `first` (per query the
        first key it sees), `levels` and `sums` (per head, base64 of little-endian uint16 and float32: see the module) and,
        with a memory, `gate`, `share`, `memory`, `normaliser` (norms) and `segments`.
    """
    real = inspection.real[row]
    layers = [_layer_data(layer, real, row) for layer in inspection.layers.values()]
    return {"title": title, "tokens": inspection.texts[row], "layers": layers}


def _layer_data(layer: LayerInspection, real: Tensor, row: int) -> dict:
    found: dict[str, Any] = {"layer": layer.layer, "kind": layer.kind}
    if layer.scores is None:
        return found
    scores = layer.scores.values[row][:, real][:, :, real]
    first = torch.isfinite(scores[0]).int().argmax(-1)
    sums = scores.logsumexp(-1)
    levels = ((sums.unsqueeze(-1) - scores) * LEVELS_PER_NAT).round().clamp(0, LAST_LEVEL).to(torch.int32)
    places = torch.arange(len(first))
    stored = (places >= first[:, None]) & (places <= places[:, None])
    found["first"] = first.tolist()
    found["levels"] = [_base64(head[stored], "<u2") for head in levels]
    found["sums"] = [_base64(head, "<f4") for head in sums]
    norms = {"memory": layer.memory_norm, "normaliser": layer.normaliser_norm}
    if layer.gate is not None and layer.segments is not None and layer.memory_share is not None:
        segments = layer.segments.values[row][real]
        stop = int(segments.max()) + 2
        found["segments"] = segments.tolist()
        found["gate"] = _numbers(layer.gate.values)
        found["share"] = _numbers(layer.memory_share.values[row][:, real])
        found |= {name: _numbers(norm.values[row, :, :stop]) for name, norm in norms.items() if norm is not None}
    return found


def _text(name: str) -> str:
    """A file beside this module, such as the script: the wheel holds the kinds that pyproject.toml lists."""
    return resources.files("hf_infini.inspection").joinpath(name).read_text(encoding="utf-8")


def _base64(tensor: Tensor, dtype: str) -> str:
    return base64.b64encode(tensor.numpy().astype(dtype).tobytes()).decode("ascii")


def _numbers(tensor: Tensor) -> list:
    """Nested lists with 5 digits, `None` for what is not finite (JSON has no name for it)."""
    if tensor.dim() > 1:
        return [_numbers(part) for part in tensor]
    return [float(f"{number:.5g}") if math.isfinite(number) else None for number in tensor.tolist()]
