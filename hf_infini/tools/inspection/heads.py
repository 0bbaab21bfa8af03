"""What each head of a model did with a text: scores, weights, context vectors and memory, named and labelled by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Model, PreTrainedTokenizerBase

from ...models.scratch.modeling import CausalMHAModel
from ...ops.checks import check_kinds
from ..extras import needs
from .inputs import check_positions, model_inputs
from .labels import token_texts, unique_labels
from .parts import kind_of, parts_of
from .predictions import Prediction, predictions_of

SUPPORTED = "GPT-2 (model_type 'gpt2'), GPT-2 with Infini-attention ('infini_gpt2') and 'causal_mha'"

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
            local window; a new document starts it again; in a row of fewer segments, the last value repeats.
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
        from .page import show_page

        return show_page(self, title=title or self.name, row=row)

    def _repr_html_(self) -> str | None:
        from .page import LARGEST_FRAME, page_frame

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


@torch.no_grad()
@check_kinds
def inspect_attention(
    model,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    position_ids: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Inspection:
    """Runs a model once and returns what every head of it did.

    Each attention layer's input is caught during one forward pass, in evaluation mode and without a cache; from it the parts
    that a fused kernel does not show are computed again. The model is left as it was.

    Args:
        model: a GPT-2, a GPT-2 with Infini-attention (in all layers or some) or a `causal_mha` model, with or without its
            language-model head; eager or sdpa attention.
        inputs: a text or several (these need the tokenizer, which adds no special tokens, and are padded on its side), token
            ids `[batch, tokens]`, or what the model takes by name: `input_ids` with `attention_mask` `[batch, tokens]`
            (1 = real) and `position_ids`, where needed.
        tokenizer: makes the labels readable; without it they are the ids.
        position_ids: `[batch, tokens]`; where they go back to 0, a new document begins (packed rows). By default, the real
            tokens of a padded row are counted; else it is left to the model.
        layers: numbers of the layers to keep; `None`: all. A layer takes 12 · batch · heads · tokens² bytes and more.

    Raises:
        ValueError: a model of another kind or attention implementation, no such layer, or inputs that do not fit.
    """
    base = _supported_base(model)
    if getattr(base.config, "kept_tokens", 0):
        raise ValueError(
            f"cannot inspect a model with kept_tokens={base.config.kept_tokens}: what a head keeps is in the cache only "
            "(InfiniState.kept_position). Give kept_tokens=0."
        )
    wanted = list(range(len(base.h))) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(range(len(base.h))):
        raise ValueError(f"layers must be numbers from 0 to {len(base.h) - 1}; got {wanted}.")
    given = model_inputs(inputs, tokenizer, position_ids)
    ids = given["input_ids"]
    mask = given.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device, torch.bool)
    if not real.any(1).all():
        raise ValueError("every row needs a token: the text is empty, or its attention_mask has zeros only.")
    check_positions(base, given)
    device = next(base.parameters()).device
    given = {name: tensor.to(device) for name, tensor in given.items()}
    found, real = {}, real.to(device)
    calls, hidden_states = _captured_calls(base, wanted, given)
    for number, call in calls.items():
        found[number] = _inspect_layer(number, base.h[number], call, real)
    head = getattr(model, "lm_head", None)
    predictions = None if head is None else predictions_of(head, hidden_states, given["input_ids"], real, tokenizer)
    ids, real = ids.cpu(), real.cpu()
    texts = [token_texts(tokenizer, row[kept].tolist()) for row, kept in zip(ids, real, strict=True)]
    name = Path(base.config.name_or_path or "").name or type(model).__name__
    return Inspection(ids, real, texts, found, name, predictions)


def _supported_base(model):
    """The stack of blocks inside the model, without its head."""
    base = getattr(model, "transformer", model)
    if not isinstance(base, GPT2Model | CausalMHAModel):
        kind = getattr(getattr(model, "config", None), "model_type", None)
        raise ValueError(f"cannot inspect a {type(model).__name__} (model_type {kind!r}). Supported: {SUPPORTED}.")
    if base.config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"cannot inspect attn_implementation={base.config._attn_implementation!r}, whose masks have forms of their own: "
            "call model.set_attn_implementation('sdpa') or 'eager' first."
        )
    return base


def _captured_calls(base, wanted: Sequence[int], given: dict) -> tuple[dict[int, tuple | None], Tensor]:
    """One forward pass: number of the layer → (input, arguments by name, output) of its attention, `None` without one; and
    the last hidden states."""
    calls: dict[int, tuple | None] = dict.fromkeys(wanted)

    def catch(number):
        def hook(module, args, kwargs, output):
            calls[number] = (args[0], kwargs, output[0] if isinstance(output, tuple) else output)

        return hook

    training = [module for module in base.modules() if module.training]
    hooks = [
        base.h[number].attn.register_forward_hook(catch(number), with_kwargs=True)
        for number in wanted
        if hasattr(base.h[number], "attn")
    ]
    try:
        base.eval()
        hidden_states = base(**given, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return calls, hidden_states


def _inspect_layer(number: int, block, call: tuple | None, real: Tensor) -> LayerInspection:
    if call is None:
        return LayerInspection(number, "none")
    hidden_states, arguments, output = call
    tensors = vars(parts_of(block.attn, hidden_states, arguments, real)) | {"output": output}
    named = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            if tensor.is_floating_point():
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            named[name] = NamedTensor(tensor.cpu(), DIMENSIONS[name])
    return LayerInspection(number, kind_of(block.attn), **named)
