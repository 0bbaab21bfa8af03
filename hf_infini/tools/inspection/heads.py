"""What each head of a model did with a text: scores, weights, context vectors and memory, named and labelled by token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..extras import needs
from .labels import unique_labels
from .page import LARGEST_FRAME, page_frame, show_page

DIMENSIONS = {
    "scores": ("batch", "head", "query", "key"),
    "weights": ("batch", "head", "query", "key"),
    "heads": ("batch", "head", "query", "head_dim"),
    "output": ("batch", "query", "width"),
    "local_heads": ("batch", "head", "query", "head_dim"),
    "memory_heads": ("batch", "head", "query", "head_dim"),
    "memory_weights": ("batch", "head", "query", "key"),
    "gate": ("head",),
    "token_gate": ("batch", "head", "query"),
    "memory_share": ("batch", "head", "query"),
    "memory_norm": ("batch", "head", "segment"),
    "normaliser_norm": ("batch", "head", "segment"),
    "segments": ("batch", "query"),
    "fates": ("batch", "head", "segment", "key"),
    "attention_score": ("batch", "head", "key"),
    "learned_score": ("batch", "head", "key"),
}


@dataclass(frozen=True)
class NamedTensor:
    """A tensor and the name of each of its dimensions.

    Attributes:
        values: on the CPU; float32 (float64 for float64 models), numbers of segments int64.
        dims: a name per dimension, such as `("batch", "head", "query", "key")`.
    """

    values: Tensor
    dims: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each dimension by name."""
        return dict(zip(self.dims, self.values.shape, strict=True))


@dataclass(frozen=True)
class LayerInspection:
    """What one attention layer did. A block without attention has only a kind, the rest is `None`.

    Attributes:
        layer: its number, from 0.
        kind: "global", "local", "infini" or "none".
        scores: `[batch, head, query, key]`, before the softmax, position biases included, −inf where a key is not visible.
        weights: `[batch, head, query, key]`; rows sum to 1, those of padding are 0.
        heads: `[batch, head, query, head_dim]`, each head's context vectors before the output projection; 0 for padding.
        output: `[batch, query, width]`, as the module returned it (at padding it means nothing).

    and, with Infini-attention (`kind == "infini"`), where heads = g · memory_heads + (1 − g) · local_heads:

    Attributes:
        gate: `[head]`, sigmoid(β).
        token_gate: `[batch, head, query]`, g: sigmoid(β), but 0 where the document has no memory yet, and another for each
            token where window and memory share a denominator.
        local_heads: `[batch, head, query, head_dim]`, weights · values: the softmax attention of the local window.
        memory_heads: `[batch, head, query, head_dim]`, what was read from the memory; 0 where the document has none yet.
        memory_weights: `[batch, head, query, key]`, the part that each token's value has in that: memory_heads =
            memory_weights · values, and what a learned start adds. 0 for tokens that the memory does not hold when the
            query reads it: its window, sinks, later tokens, other documents. By the linear rule weights are not negative,
            and a row sums to 1 if the memory started empty; by the delta rule neither need be so.
        memory_share: `[batch, head, query]`, ‖g · memory‖ / (‖g · memory‖ + ‖(1 − g) · local‖), Euclidean norms of a token's
            context vectors: 0, all local, to 1, all memory.
        memory_norm: `[batch, head, segment]`, Frobenius norm of the memory M. Entry s is what the row's segment s reads, so
            entry s + 1 comes after segment s; the last entry is the end of the call. A segment is written when it leaves the
            local window; a new document starts it again; in a row of fewer segments, the last value repeats. Heads that
            share keys and values share their memory.
        normaliser_norm: `[batch, head, segment]`, Euclidean norm of the normaliser z, likewise.
        segments: `[batch, query]`, int64, which segment of its row each token lies in; −1 for padding.
    """

    layer: int
    kind: str
    scores: NamedTensor | None = None
    weights: NamedTensor | None = None
    heads: NamedTensor | None = None
    output: NamedTensor | None = None
    gate: NamedTensor | None = None
    local_heads: NamedTensor | None = None
    memory_heads: NamedTensor | None = None
    memory_weights: NamedTensor | None = None
    token_gate: NamedTensor | None = None
    memory_share: NamedTensor | None = None
    memory_norm: NamedTensor | None = None
    normaliser_norm: NamedTensor | None = None
    segments: NamedTensor | None = None
    fates: NamedTensor | None = None
    attention_score: NamedTensor | None = None
    learned_score: NamedTensor | None = None


class Prediction(NamedTuple):
    """The next token as a model sees it.

    Attributes:
        likeliest: text and probability of the five likeliest tokens, the first the likeliest.
        following: probability of the token that follows in the text; `None` for the last one.
    """

    likeliest: list[tuple[str, float]]
    following: float | None


@dataclass(frozen=True)
class Inspection:
    """What [`inspect_attention`] returns.

    Attributes:
        input_ids: `[batch, tokens]`; real: `[batch, tokens]` bool, False for padding. On the CPU.
        texts: for each row the readable text of its real tokens, white space visible: `·cidade`.
        layers: number of the layer → [`LayerInspection`].
        name: the model's: its folder's, or its class's.
        predictions: for each row what a language model expects after each real token, a [`Prediction`]; `None` without a
            language-model head.

    A notebook shows it as the page of `show`, unless that would be larger than 20 MB.
    """

    input_ids: Tensor
    real: Tensor
    texts: list[list[str]]
    layers: dict[int, LayerInspection] = field(repr=False)
    name: str = ""
    predictions: list[list[Prediction]] | None = field(default=None, repr=False)

    def show(self, *, title: str | None = None, row: int = 0) -> Path | None:
        """Shows each head's weights with their tokens, and the memory: in a notebook below the cell, else in a browser.

        Args:
            title: of the page; by default the model's name.
            row: of the batch.

        Returns:
            Outside of a notebook, the page's file, a temporary one.

        Raises:
            ValueError: there is no such row, or no layer has attention heads.
        """
        return show_page(self, title=title or self.name, row=row)

    def _repr_html_(self) -> str | None:
        weights = [layer.weights.values[0].numel() for layer in self.layers.values() if layer.weights is not None]
        return page_frame(self, title=self.name) if 0 < sum(weights) <= LARGEST_FRAME else None

    def table(self, name: str = "weights", *, layer: int = 0, head: int = 0, row: int = 0):
        """One layer's tensor for one row and, where it is one matrix per head, one head, as a `pandas.DataFrame`.

        Queries are labelled `Q:` and keys `K:` with the token's text, and its place among the row's real tokens where a text
        comes twice (`Q:·de@3`); heads `H:0`, segments `S:0` and `S:end`, the numbers of a vector 0, 1, …. Padding is left
        out.

        Args:
            name: of the tensor, such as "weights", "memory_weights", "scores", "heads", "output" or "gate".

        Raises:
            ValueError: there is no such layer, head, row or tensor.
            ModuleNotFoundError: pandas is not installed (the extra "inspection").
        """
        with needs("inspection", "pandas"):
            import pandas

        if layer not in self.layers:
            raise ValueError(f"layer must be one of {', '.join(map(str, self.layers))}; got {layer}.")
        tensor = getattr(self.layers[layer], name, None) if name in DIMENSIONS else None
        if tensor is None:
            known = [name for name in DIMENSIONS if getattr(self.layers[layer], name) is not None]
            kind = self.layers[layer].kind
            raise ValueError(f"layer {layer} ({kind}) has the tensors {', '.join(known) or '(none)'}; got {name!r}.")
        values, dims = tensor.values, tensor.dims
        for dim, number in (("batch", row), ("head", head)):
            if dim in dims and (dim == "batch" or len(dims) > 2):
                if not 0 <= number < tensor.sizes[dim]:
                    raise ValueError(f"{dim} must be 0 to {tensor.sizes[dim] - 1}; got {number}.")
                values, dims = values.select(dims.index(dim), number), tuple(d for d in dims if d != dim)
        for axis, dim in enumerate(dims):
            if dim in ("query", "key"):
                values = values[(slice(None),) * axis + (self.real[row],)]
            elif dim == "segment":  # those of this row, and the end
                values = values[:, : int(self.layers[layer].segments.values[row].max()) + 2]
        if len(dims) == 2 and dims[0] == "head":  # a value per head and token or segment: heads are the columns
            values, dims = values.T, dims[::-1]
        labels = [self._labels(dim, values.shape[axis], row) for axis, dim in enumerate(dims)]
        columns = labels[1] if len(dims) == 2 else [name]
        return pandas.DataFrame(values.reshape(len(labels[0]), -1).numpy(), index=labels[0], columns=columns)

    def _labels(self, dim: str, size: int, row: int) -> list:
        if dim in ("query", "key"):
            return [f"{dim[0].upper()}:{label}" for label in unique_labels(self.texts[row])]
        if dim == "head":
            return [f"H:{number}" for number in range(size)]
        if dim == "segment":
            return [f"S:{number}" for number in range(size - 1)] + ["S:end"]
        return list(range(size))
