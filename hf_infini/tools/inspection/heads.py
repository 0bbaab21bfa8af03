"""What each head of a model did with a text: scores, weights, context vectors and memory, named and
labelled by token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

# what stands for characters that would not be seen
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
FATES = ("none", "sink", "window", "kept", "memory")  # where a token is, by its number
NONE, SINK, WINDOW, KEPT, MEMORY = range(len(FATES))
DIMENSIONS = {
    **dict.fromkeys(("scores", "weights", "memory_weights"), ("batch", "head", "query", "key")),
    **dict.fromkeys(
        ("heads", "local_heads", "memory_heads"), ("batch", "head", "query", "head_dim")
    ),
    **dict.fromkeys(("token_gate", "memory_share"), ("batch", "head", "query")),
    "output": ("batch", "query", "width"),
    "gate": ("head",),
    "memory_norm": ("batch", "head", "segment"),
    "segments": ("batch", "query"),
    "fates": ("batch", "head", "segment", "key"),
}


@dataclass(frozen=True)
class LayerInspection:
    """What one attention layer did. A block without attention has only a kind, the rest is `None`.

    Attributes:
        layer: its number, from 0.
        kind: "global", "local", "infini" or "none".
        tensors: all that follow, by name; on the CPU, float32 (float64 for float64 models).
        scores: `[batch, head, query, key]`, before the softmax, position biases included, −inf
            where a key is not visible.
        weights: `[batch, head, query, key]`; rows sum to 1.
        heads: `[batch, head, query, head_dim]`, each head's context vectors before the output
            projection; as wide as values.
        output: `[batch, query, width]`, as the module returned it.

    and, with Infini-attention (`kind == "infini"`), where heads = g · memory_heads + (1 − g) ·
    local_heads:

    Attributes:
        gate: `[head]`, sigmoid(β).
        token_gate: `[batch, head, query]`, g: sigmoid(β), but 0 where the document has no memory
            yet.
        local_heads: `[batch, head, query, head_dim]`, weights · values: the softmax attention of
            the local window.
        memory_heads: `[batch, head, query, head_dim]`, what was read from the memory; 0 where the
            document has none yet.
        memory_weights: `[batch, head, query, key]`, the part that each token's value has in that:
            memory_heads = memory_weights · values. 0 for tokens that it does not hold. By the
            linear rule none is below 0, rows sum to 1.
        memory_share: `[batch, head, query]`, ‖g · memory‖ / (‖g · memory‖ + ‖(1 − g) · local‖),
            Euclidean norms of a token's context vectors: 0, all local, to 1, all memory.
        memory_norm: `[batch, head, segment]`, Frobenius norm of the memory M that the row's segment
            s reads; the last entry is the end of the call. In a row of fewer segments (of packed
            documents), the last value repeats.
        segments: `[batch, query]`, int64, which segment of its row each token lies in.
        fates: `[batch, head, segment, key]`, int8, where each token is when each segment is read,
            and at the end, counted like `memory_norm`; a number of
            `hf_infini.tools.inspection.FATES`: a "sink", in the "window", or "kept", all of which
            the softmax sees; or in the "memory". "none": not read yet, of another document, or left
            out by a mask.
    """

    layer: int
    kind: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __getattr__(self, name: str) -> Tensor | None:
        if name in DIMENSIONS:
            return self.tensors.get(name)
        raise AttributeError(f"a {type(self).__name__} has no {name}.")


@dataclass(frozen=True)
class Inspection:
    """What [`inspect_attention`] returns.

    Attributes:
        input_ids: `[batch, tokens]`, on the CPU.
        texts: for each row the readable text of its tokens, white space visible: `·cidade`.
        layers: number of the layer → [`LayerInspection`].
        name: the model's: its folder's, or its class's.
    """

    input_ids: Tensor
    texts: list[list[str]]
    layers: dict[int, LayerInspection] = field(repr=False)
    name: str = ""

    def table(self, name: str = "weights", *, layer: int = 0, head: int = 0, row: int = 0):
        """One layer's tensor of this name for one row and, where it is one matrix per head, one
        head, as a `pandas.DataFrame` (pandas comes with the extra "inspection"); ValueError where
        the layer has no such tensor.

        Queries are labelled `Q:` and keys `K:` with the token's text, and its place in the row
        where a text comes twice (`Q:·de@3`); heads `H:0`, segments `S:0` and `S:end`, the numbers
        of a vector 0, 1, …. "fates" is a table of words.
        """
        import pandas

        tensors = self.layers[layer].tensors
        if name not in tensors:
            raise ValueError(
                f"layer {layer} has the tensors {', '.join(tensors) or '(none)'}; got {name!r}."
            )
        values, dims, labels = tensors[name], DIMENSIONS[name], []
        for dim in dims:
            axis, size = len(labels), values.shape[len(labels)]
            if dim == "batch" or dim == "head" and len(dims) > 3:
                values = values.select(axis, row if dim == "batch" else head)
            elif dim in ("query", "key"):
                labels.append(
                    [f"{dim[0].upper()}:{label}" for label in unique_labels(self.texts[row])]
                )
            elif dim == "segment":  # those of this row, and the end
                last = int(tensors["segments"][row].max()) + 1
                values = values.narrow(axis, 0, last + 1)
                labels.append([*(f"S:{number}" for number in range(last)), "S:end"])
            else:
                labels.append(
                    [f"H:{number}" for number in range(size)]
                    if dim == "head"
                    else list(range(size))
                )
        if dims[:2] == ("batch", "head") and len(dims) == 3:
            # a value per head and token or segment: heads are the columns
            values, labels = values.T, labels[::-1]
        columns = labels[1] if len(labels) == 2 else [name]
        table = pandas.DataFrame(
            values.reshape(len(labels[0]), -1).numpy(), index=labels[0], columns=columns
        )
        return table.map(FATES.__getitem__) if name == "fates" else table


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """The readable text of each of these `ids`: `·cidade`, `⏎`; the tokenizer's own piece for
    one that is only a part of a letter; `#17` without a tokenizer (`None`), and for an id
    that it does not have."""
    return [
        f"#{number}" if tokenizer is None else _token_text(tokenizer, number)
        for number in map(int, ids)
    ]


def unique_labels(texts: Sequence[str]) -> list[str]:
    """The texts; those that occur more than once are followed by `@` and their place: `·de@3`,
    `·de@9`."""
    counts, placed = Counter(texts), [f"{text}@{place}" for place, text in enumerate(texts)]
    labels = [at if counts[text] > 1 else text for text, at in zip(texts, placed, strict=True)]
    # a text may look like another one's label
    return labels if len(set(labels)) == len(labels) else placed


def _token_text(tokenizer, number: int) -> str:
    piece = tokenizer.convert_ids_to_tokens(number)
    if piece is None:
        return f"#{number}"
    text = tokenizer.decode([number], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        text = piece
    elif piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # SentencePiece drops the space of a text's first piece
    return "".join(
        VISIBLE.get(c, c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in text or piece
    )
