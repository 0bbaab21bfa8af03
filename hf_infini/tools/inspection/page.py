"""One HTML page of what [`hf_infini.inspection.inspect_attention`] found: no other file, nothing from a network.

Its frame is `page.html`, which takes in the style `page.css` and the scripts, plain JavaScript without a library: what it
says (`strings.js`), its numbers and colours (`page.js`), a head's heat map (`map.js`), what it keeps (`fates.js`), the
charts and tables of the memory (`charts.js`), and what reacts to the reader (`start.js`).

The weights travel compactly. The row of a query is stored from the first key that it sees to the query itself, each weight
as a 16-bit level: weight = exp(−level / 1000), so 0.05 % exact, and score = −level / 1000 + s, with a number s per row, the
logarithm of the sum of its exponentials. That is about 1.3 · tokens² bytes of base64 characters a head for full attention.
Weights through the memory likewise, from the first to the last token that it holds: weight = ± top · exp(−level / 1000),
with a number per row, its largest, and 32768 added to the level of a negative weight.
"""

import base64
import html
import json
import math
import sys
import tempfile
import webbrowser
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops.memory import KEEP_SCORES
from .parts import MEMORY

if TYPE_CHECKING:  # heads.py imports this module
    from .heads import Inspection, LayerInspection

LEVELS_PER_NAT = 1000
LAST_LEVEL = 65534  # exp(−65.5) = 4e-29: what is smaller is shown as this
LAST_MEMORY_LEVEL, NEGATIVE = 32766, 32768  # exp(−32.8) = 6e-15 of the row's largest
NOTHING = 65535  # a token that the query does not see
SCRIPTS = ("strings.js", "page.js", "map.js", "fates.js", "charts.js", "start.js")


def inspection_page(inspection: "Inspection", *, title: str, row: int = 0) -> str:
    """The page, as HTML text.

    Args:
        inspection: of a model's layers; at least one has attention heads.
        title: such as the model's name.
        row: of the batch; its padding is left out.

    Raises:
        ValueError: there is no such row, or no layer has attention heads.
    """
    if not 0 <= row < len(inspection.texts):
        raise ValueError(f"row must be 0 to {len(inspection.texts) - 1}; got {row}.")
    if all(layer.weights is None for layer in inspection.layers.values()):
        raise ValueError("the page needs a layer with attention heads; none of these layers has any.")
    content = json.dumps(page_data(inspection, title=title, row=row), ensure_ascii=False, allow_nan=False)
    # In a script element only "</script" and "<!--" end the data or change its reading: without "<" there is neither.
    content = content.replace("<", "\\u003c")
    return _text("page.html").format(
        policy="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        title=html.escape(title),
        style=_text("page.css"),
        data=content,
        script="".join(map(_text, SCRIPTS)),
    )


def show_page(inspection: "Inspection", *, title: str, row: int = 0) -> Path | None:
    """[`Inspection.show`]."""
    page = inspection_page(inspection, title=title, row=row)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):  # a notebook's, not a terminal's
        from IPython.display import HTML, display

        # An element that cannot reach anything of the notebook's page
        look = 'title="Attention heads" sandbox="allow-scripts" style="width: 100%; height: 900px; border: 0"'
        display(HTML(f'<iframe {look} srcdoc="{html.escape(page)}"></iframe>'))
        return None
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="heads_", suffix=".html", delete=False) as file:
        file.write(page)
    webbrowser.open(Path(file.name).as_uri())
    return Path(file.name)


def page_data(inspection: "Inspection", *, title: str, row: int = 0) -> dict:
    """What the page's script draws, JSON-safe.

    Returns:
        `title`, `tokens` (their texts), `predictions` after each token (`None` without: its likeliest next tokens with
        their probabilities, and the probability of the token that follows), and `layers`: for each `layer`, `kind` and,
        with heads, `first` (per query the first key it sees), `levels` and `sums` (per head, base64 of little-endian
        uint16 and float32: see the module) and, with a memory, `gate`, `tokenGate`, `share`, `memory`, `normaliser`
        (norms), `segments`, `memoryFirst` and `memoryStop` (per query, where the tokens begin and end that the memory
        holds), `memoryLevels`, `memoryTops`, `fates` (per head and segment the tokens' numbers, as a string of digits),
        and `scores` (by name, per head).
    """
    real = inspection.real[row]
    layers = [_layer_data(layer, real, row) for layer in inspection.layers.values()]
    predictions = None
    if inspection.predictions is not None:
        found = inspection.predictions[row]
        predictions = [[[[text, _short(p)] for text, p in likeliest], _short(after)] for likeliest, after in found]
    return {"title": title, "tokens": inspection.texts[row], "predictions": predictions, "layers": layers}


def _layer_data(layer: "LayerInspection", real: Tensor, row: int) -> dict:
    found: dict[str, Any] = {"layer": layer.layer, "kind": layer.kind}
    known = {name: tensor.values for name, tensor in layer.tensors.items()}
    if "scores" not in known:
        return found
    scores = known["scores"][row][:, real][:, :, real]
    sums = scores.logsumexp(-1)
    levels = _levels(scores - sums.unsqueeze(-1), LAST_LEVEL)
    found["first"], _, found["levels"] = _rows(levels, torch.isfinite(scores))
    found["sums"] = [_base64(head, "<f4") for head in sums]
    if "gate" in known:
        segments = known["segments"][row][real]
        stop, fates = int(segments.max()) + 2, known["fates"][row][..., real]
        found["segments"] = segments.tolist()
        found["gate"] = _numbers(known["gate"])
        found["tokenGate"] = _numbers(known["token_gate"][row][:, real])
        weights = known["memory_weights"][row][:, real][:, :, real]
        tops = weights.abs().amax(-1)
        levels = _levels((weights.abs() / tops.unsqueeze(-1)).log(), LAST_MEMORY_LEVEL) + NEGATIVE * (weights < 0)
        found["memoryFirst"], found["memoryStop"], found["memoryLevels"] = _rows(levels, fates[:, segments] == MEMORY)
        found["memoryTops"] = [_base64(head, "<f4") for head in tops]
        found["share"] = _numbers(known["memory_share"][row][:, real])
        found["memory"] = _numbers(known["memory_norm"][row, :, :stop])
        found["normaliser"] = _numbers(known["normaliser_norm"][row, :, :stop])
        found["fates"] = [["".join(map(str, moment)) for moment in head] for head in fates[:, :stop].tolist()]
        scores = {name: known.get(f"{name}_score") for name in KEEP_SCORES["half"]}
        found["scores"] = {name: _numbers(score[row][:, real]) for name, score in scores.items() if score is not None}
    return found


def _levels(logarithms: Tensor, last: int) -> Tensor:
    """Logarithms of weights as levels; what is not a number, or too small, as the last one."""
    return (-logarithms * LEVELS_PER_NAT).nan_to_num(last).round().clamp(0, last).to(torch.int32)


def _rows(levels: Tensor, seen: Tensor) -> tuple[list[int], list[int], list[str]]:
    """Where each query's keys begin and end in any head, and each head's levels from there to there, row after row, in
    base64.

    Args:
        levels: `[head, query, key]`; seen: bool likewise, the keys that have one.
    """
    places, any_head = torch.arange(seen.shape[-1]), seen.any(0)
    first, stop = any_head.int().argmax(-1), torch.where(any_head, places + 1, 0).amax(-1)
    stored = (places >= first[:, None]) & (places < stop[:, None])
    levels = levels.masked_fill(~seen, NOTHING)
    return first.tolist(), stop.tolist(), [_base64(head[stored], "<u2") for head in levels]


def _text(name: str) -> str:
    """A file beside this module, such as the script: the wheel holds the kinds that pyproject.toml lists."""
    return resources.files("hf_infini.tools.inspection").joinpath(name).read_text(encoding="utf-8")


def _base64(tensor: Tensor, dtype: str) -> str:
    return base64.b64encode(tensor.numpy().astype(dtype).tobytes()).decode("ascii")


def _numbers(tensor: Tensor) -> list:
    """Nested lists with 5 digits, `None` for what is not finite (JSON has no name for it)."""
    if tensor.dim() > 1:
        return [_numbers(part) for part in tensor]
    return list(map(_short, tensor.tolist()))


def _short(number: float | None) -> float | None:
    return float(f"{number:.5g}") if number is not None and math.isfinite(number) else None
