"""What each head of a model did with a text: scores, weights, context vectors and memory, named and labelled by token."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..extras import needs
from .labels import unique_labels
from .page import show_page
from .parts import FATES

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
        values: on the CPU; float32 (float64 for float64 models), whole numbers int64 or int8.
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
        tensors: all that follow, by name.
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
        fates: `[batch, head, segment, key]`, int8, where each token is when each segment is read, and at the end, counted
            like `memory_norm`; a number of `hf_infini.tools.inspection.FATES`: a "sink", in the "window", or "kept", all
            of which the softmax sees; or in the "memory", from the first segment on that reads it there. "none": not read
            yet, of another document, padding, or left out of the memory by a mask.
        attention_score, learned_score: `[batch, head, key]`, the scores by which tokens are kept, where they are by these.
            The first is what a token receives in the window, of a softmax over sinks and window: the mean over the
            queries so far, and the heads that share its key; by its logarithm, which fades, tokens are kept. 0 for sinks
            and padding.
    """

    layer: int
    kind: str
    tensors: Mapping[str, NamedTensor] = field(default_factory=dict, repr=False)

    def __getattr__(self, name: str) -> NamedTensor | None:
        if name in DIMENSIONS:
            return self.tensors.get(name)
        raise AttributeError(f"a {type(self).__name__} has no {name}.")


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

    def table(self, name: str = "weights", *, layer: int = 0, head: int = 0, row: int = 0):
        """One layer's tensor for one row and, where it is one matrix per head, one head, as a `pandas.DataFrame`.

        Queries are labelled `Q:` and keys `K:` with the token's text, and its place among the row's real tokens where a text
        comes twice (`Q:·de@3`); heads `H:0`, segments `S:0` and `S:end`, the numbers of a vector 0, 1, …. Padding is left
        out. "fates" is a table of words.

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
        kind, tensors = self.layers[layer].kind, self.layers[layer].tensors
        if name not in tensors:
            raise ValueError(f"layer {layer} ({kind}) has the tensors {', '.join(tensors) or '(none)'}; got {name!r}.")
        tensor, labels = tensors[name], []
        values = tensor.values
        for dim, size in tensor.sizes.items():
            axis = len(labels)
            if dim == "batch" or dim == "head" and len(tensor.dims) > 3:
                if not 0 <= (number := row if dim == "batch" else head) < size:
                    raise ValueError(f"{dim} must be 0 to {size - 1}; got {number}.")
                values = values.select(axis, number)
            elif dim in ("query", "key"):
                values = values[(slice(None),) * axis + (self.real[row],)]
                labels.append([f"{dim[0].upper()}:{label}" for label in unique_labels(self.texts[row])])
            elif dim == "segment":  # those of this row, and the end
                last = int(tensors["segments"].values[row].max()) + 1
                values = values.narrow(axis, 0, last + 1)
                labels.append([*(f"S:{number}" for number in range(last)), "S:end"])
            else:
                labels.append([f"H:{number}" for number in range(size)] if dim == "head" else list(range(size)))
        if tensor.dims[:2] == ("batch", "head") and len(labels) == 2 and len(tensor.dims) == 3:
            values, labels = values.T, labels[::-1]  # a value per head and token or segment: heads are the columns
        columns = labels[1] if len(labels) == 2 else [name]
        table = pandas.DataFrame(values.reshape(len(labels[0]), -1).numpy(), index=labels[0], columns=columns)
        return table.map(FATES.__getitem__) if name == "fates" else table
