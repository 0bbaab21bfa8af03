"""zoology's two-layer model around one of our mixers, and the loss of its labelled places.

The first layer is a gated short convolution, the second the mixer; there are no MLPs and no
positions. As in zoology, where the layer norm of an omitted MLP remains, each layer adds x +
mixer(norm(x)), then norm(x).

Source: HazyResearch/zoology, `zoology/model.py`, `mixers/base_conv.py`, `mixers/hybrid.py`,
`experiments/models_repo.py`.
"""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

import hf_infini
from cli import UserError
from hf_infini import CausalMHAConfig, CausalMultiHeadAttention
from hf_infini.layers.memory_layer import PARAMETERS
from support.measurement import cache_bytes

from .rows import Rows

TAPS = 3  # of the gated convolution
STANDARD_DEVIATION, EMBEDDING_DROPOUT, ATTENTION_DROPOUT = 0.02, 0.1, 0.1
MEMORY_TAPS = 4  # of the convolution inside the memory: as many as those inside zoology's DeltaNets
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**28}  # at a time: 8 MB stay in the cache


def mixer_config(
    mixer: str, width: int, heads: int, window: int, memory: Mapping, **widths: int
) -> CausalMHAConfig:
    """The configuration of a mixer of the library.

    Args:
        mixer: of recipes/mqar.py.
        width, heads: of the model; window: tokens that a token of "window" sees, itself included.
        memory: options of the memory, with `segment_length`; widths: `head_dim` and `value_dim` of
            a head, if given.

    Raises UserError for options that do not go together.
    """
    options: dict = {"n_layer": 1, "n_embd": width, "n_head": heads, "qkv_bias": True, **widths}
    options["position_encoding"] = "none"
    if mixer == "attention":
        options |= {"attention": "global", "dropout": ATTENTION_DROPOUT}
    elif mixer == "window":
        options |= {"attention": "local", "sliding_window": window}
    else:
        rule = mixer.removesuffix("+conv")
        options |= {"attention": "infini", "update_rule": rule, **memory}
        options |= {"memory_conv": MEMORY_TAPS} if mixer != rule else {}
    try:
        return CausalMHAConfig(**options)
    except Exception as error:  # strict dataclasses wrap what their checks raise in other classes
        raise UserError(f"--mixers {mixer}: {error.__cause__ or error}") from error


class GatedConvolution(nn.Module):
    """`conv(x) ⊙ (W x + b) + x`, `[batch, tokens, width]`, with a depthwise causal convolution of
    [`TAPS`] taps."""

    def __init__(self, width: int):
        super().__init__()
        self.projection = nn.Linear(width, width)
        self.taps = nn.Parameter(torch.empty(TAPS, width))
        self.bias = nn.Parameter(torch.empty(width))
        for parameter in (self.taps, self.bias):  # as torch's Conv1d begins
            nn.init.uniform_(parameter, -(TAPS**-0.5), TAPS**-0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens, padded = inputs.shape[1], F.pad(inputs, (0, 0, TAPS - 1, 0))
        convolved = self.bias
        for back in range(TAPS):
            convolved = convolved + padded[:, TAPS - 1 - back :][:, :tokens] * self.taps[back]
        return convolved * self.projection(inputs) + inputs


class Recaller(nn.Module):
    """The model of one mixer. The output weights are the embeddings.

    Args:
        config: of the mixer; vocabulary: tokens that there are.
    """

    def __init__(self, config: CausalMHAConfig, vocabulary: int):
        super().__init__()
        width = config.n_embd
        how = {"dropout": config.dropout, "qkv_bias": config.qkv_bias, "layer_idx": 0}
        mixer = CausalMultiHeadAttention(width, width, config.n_head, **how, config=config)
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(EMBEDDING_DROPOUT)
        self.mixers = nn.ModuleList((GatedConvolution(width), mixer))
        self.norms = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width))) for _ in self.mixers
        )
        self.last_norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=STANDARD_DEVIATION)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        of_output = STANDARD_DEVIATION / math.sqrt(2 * len(self.mixers))
        nn.init.normal_(mixer.out_proj.weight, std=of_output)

    def forward(self, inputs: Tensor, cache=None) -> Tensor:
        """The last hidden states of ids `[batch, tokens]`, `[batch, tokens, width]`; `cache`: what
        the mixer's state is left in."""
        states = self.dropout(self.embedding(inputs))
        for mixer, (before, after) in zip(self.mixers, self.norms, strict=True):
            known = {} if isinstance(mixer, GatedConvolution) else {"cache": cache}
            states = states + mixer(before(states), **known)
            states = states + after(states)
        return self.last_norm(states)

    def asked(self, rows: Rows) -> Tensor:
        """The last hidden states of the labelled places only, `[rows * pairs, width]`."""
        states = self(rows.inputs)
        places = rows.places.unsqueeze(-1).expand(-1, -1, states.shape[-1])
        return states.gather(1, places).flatten(0, 1)

    def loss(self, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mean cross-entropy of the values, in nats; `dtype`: of the products with the output
        weights."""
        states, weight = self.asked(rows).to(dtype), self.embedding.weight.to(dtype)
        return LabelledLoss.apply(states, weight, rows.values.flatten())

    @torch.no_grad()
    def correct(self, rows: Rows) -> Tensor:
        """How many values of each row are the likeliest of all tokens, `[rows]`."""
        weight = self.embedding.weight
        parts = self.asked(rows).split(_chunk(weight))
        found = torch.cat([(part @ weight.T).argmax(-1) for part in parts])
        return (found.view_as(rows.values) == rows.values).sum(1)

    @torch.no_grad()
    def state_bytes(self, tokens: int) -> int:
        """Bytes of the mixer's cache after one row of `tokens` tokens."""
        config, weight = copy.copy(self.mixers[1].config), self.embedding.weight
        if config.has_memory:
            config.dtype = weight.dtype
            return hf_infini.cache_bytes(config) // len(config.infini_layers)  # of one
        cache = DynamicCache(config=config)
        self(torch.zeros(1, tokens, dtype=torch.int64, device=weight.device), cache)
        return cache_bytes(cache)

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Weight decay for all but the memory's own parameters, whose first values are not near
        zero for good reasons."""
        groups: dict[float, list] = {weight_decay: [], 0.0: []}
        for name, parameter in self.named_parameters():
            own = not set(PARAMETERS).isdisjoint(name.split("."))
            groups[0.0 if own else weight_decay].append(parameter)
        return [{"params": group, "weight_decay": of} for of, group in groups.items() if group]


def _chunk(weight: Tensor) -> int:
    """Rows of logits at a time."""
    return max(1, CHUNK_LOGITS.get(weight.device.type, CHUNK_LOGITS["cuda"]) // len(weight))


class LabelledLoss(Function):
    """The mean of `cross_entropy(states @ weight.T, values)`, of some rows at a time: with a
    vocabulary of thousands and a width of tens, logits are most of what there is to compute and to
    store. The gradients are made right with them.

    Args:
        states: `[n, width]`; weight: `[vocabulary, width]` of the same dtype, that of the products;
            values: `[n]`. Softmax and sums are float32.
    """

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, values: Tensor) -> Tensor:
        to_states = torch.empty_like(states)
        to_weight = torch.zeros_like(weight, dtype=torch.float32)
        loss, size = torch.zeros((), device=states.device), _chunk(weight)
        pieces = (tensor.split(size) for tensor in (states, values, to_states))
        for part, wanted, to_part in zip(*pieces, strict=True):
            logarithms, place = (part @ weight.T).float().log_softmax(1), wanted.unsqueeze(1)
            loss -= logarithms.gather(1, place).sum()
            wrong = torch.full_like(place, -1, dtype=torch.float32)
            errors = logarithms.exp_().scatter_add_(1, place, wrong).to(weight.dtype)
            torch.mm(errors, weight, out=to_part)
            to_weight += errors.T @ part
        ctx.save_for_backward(to_states, to_weight.to(weight.dtype))
        return loss / len(values)

    @staticmethod
    def backward(ctx, to_loss: Tensor):
        to_states, to_weight = ctx.saved_tensors
        share = to_loss / len(to_states)
        return to_states * share, to_weight * share, None
