"""One HTML page of what [`hf_infini.inspect_attention`] found: no other file, nothing from a
network.

Its frame is `page.html`, which takes in the style `page.css` and the scripts, plain JavaScript
without a library.
"""

import base64
import html
import json
import math
from importlib import resources

import torch
from torch import Tensor

from .heads import MEMORY, Inspection, LayerInspection

SCRIPTS = ("strings.js", "page.js", "map.js", "fates.js", "charts.js", "start.js")


def inspection_page(inspection: Inspection, *, title: str | None = None, row: int = 0) -> str:
    """The page, as HTML text: each head's weights with their tokens, and the memory, in about 1.3 ·
    tokens² bytes for each. At least one layer has attention heads. `title`: by default the model's
    name; `row`: of the batch."""
    title, layers = (
        title or inspection.name,
        [_layer_data(layer, row) for layer in inspection.layers.values()],
    )
    data = {"title": title, "tokens": inspection.texts[row], "layers": layers}
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


def _layer_data(layer: LayerInspection, row: int) -> dict:
    """`layer`, `kind` and, with heads, `weights`: of each head those of query after query, from the
    first key to the query itself, NaN where it sees nothing, as base64 of little-endian bfloat16.
    They are the memory's where the key is in the memory: `fates` (per head and segment the tokens'
    numbers, as a string of digits) and `segments` (of the tokens) say so. Also with a memory:
    `gate`, `tokenGate`, `share`, and `memory` (norms)."""
    found: dict = {"layer": layer.layer, "kind": layer.kind}
    if layer.weights is None:
        return found
    known = {
        name: tensor if name == "gate" else tensor[row] for name, tensor in layer.tensors.items()
    }
    weights = known["weights"].masked_fill(known["scores"].isinf(), torch.nan)
    if "gate" in known:
        segments, fates = known["segments"], known["fates"]
        stop = int(segments.max()) + 2
        weights = torch.where(fates[:, segments] == MEMORY, known["memory_weights"], weights)
        found |= {"segments": segments.tolist(), "gate": _numbers(known["gate"])}
        found |= {
            "tokenGate": _numbers(known["token_gate"]),
            "share": _numbers(known["memory_share"]),
        }
        found["memory"] = _numbers(known["memory_norm"][:, :stop])
        found["fates"] = [
            ["".join(map(str, moment)) for moment in head] for head in fates[:, :stop].tolist()
        ]
    below = torch.ones(weights.shape[1:], dtype=torch.bool).tril()
    packed = [head[below].bfloat16().view(torch.int16).numpy().astype("<i2") for head in weights]
    return found | {
        "weights": [base64.b64encode(numbers.tobytes()).decode("ascii") for numbers in packed]
    }


def _text(name: str) -> str:
    """A file beside this module, of the kinds that pyproject.toml lists."""
    return resources.files("hf_infini.tools.inspection").joinpath(name).read_text(encoding="utf-8")


def _numbers(tensor: Tensor) -> list:
    """Nested lists with 5 digits, `None` for what is not finite (JSON has no name for it)."""
    if tensor.dim() > 1:
        return [_numbers(part) for part in tensor]
    return [float(f"{number:.5g}") if math.isfinite(number) else None for number in tensor.tolist()]
