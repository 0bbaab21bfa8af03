"""The first training of a conversion: each layer learns to give with its memory what its own attention gives.

What layers are given and give in the plain model depends on nothing that is trained. It is computed once for each row and
kept, so that a step costs the attention of some layers, and not the whole model.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_infini.models.structure import attention_layers, decoder_of
from hf_infini.ops.state import Projections

from .teacher import full_attention
from .trainers import ConversionTrainer

# The standard deviation of the exponents of learned feature maps before training: e^x is then neither flat nor a maximum.
# 0.5 to 1 were as good on SmolLM2-135M, and 2 failed
SPREAD = 0.6
SMALLEST = 1e-12  # of a squared error, whose logarithm is taken


class LayerComparison(nn.Module):
    """How far the layers of a patched model are from their own attention: log Σ (with memory − own)² of each row, the mean
    over layers. By the logarithm every layer counts the same, however large its outputs are. Inside the window both are
    equal, so that what counts comes from beyond it.

    Args:
        model: with Infini-attention; it stays in evaluation mode.
        layers: numbers of those that are compared.

    Attributes:
        kept: of each row (its bytes), what the layers are given and their own attention gives, `[1, tokens, width]` each.
        calls: by the length of a segment, the layers' other arguments, which are the same for all rows of one length.
    """

    def __init__(self, model: nn.Module, layers: list[int]):
        super().__init__()
        self.model, self.layers = model, layers
        self.kept: dict[bytes, dict[int, tuple[Tensor, Tensor]]] = {}
        self.calls: dict[int, dict[int, tuple[tuple, dict[str, Any]]]] = {}

    def train(self, mode: bool = True) -> "LayerComparison":
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, input_ids: Tensor) -> Tensor:
        """Of rows `[batch, tokens]` without padding, of one length in all calls."""
        modules, losses = attention_layers(decoder_of(self.model)), []
        for ids in input_ids:
            self._keep(ids)
            calls = self.calls[decoder_of(self.model).config.segment_length]
            for number, (given, own) in self.kept[ids.cpu().numpy().tobytes()].items():
                layer, (args, keywords) = modules[number], calls[number]
                mine = layer(given.to(ids.device, torch.float32), *args, **keywords)[0]
                losses.append((mine - own.to(ids.device)).float().square().sum().clamp(min=SMALLEST).log())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _keep(self, ids: Tensor) -> None:
        """Runs the plain model where this row, or segments of this length, are new."""
        key, length = ids.cpu().numpy().tobytes(), decoder_of(self.model).config.segment_length
        if key in self.kept and length in self.calls:
            return
        found: dict[int, tuple[Tensor, Tensor]] = {}
        modules, calls, inputs = attention_layers(decoder_of(self.model)), self.calls.setdefault(length, {}), {}

        def keep_arguments(number: int, _, args: tuple, keywords: dict) -> None:
            (inputs[number], *others), keywords = (args or (keywords["hidden_states"],)), dict(keywords)
            keywords.pop("hidden_states", None)
            calls[number] = (tuple(others), keywords)

        def keep_tensors(number: int, _, args: tuple, output: tuple) -> None:
            found[number] = inputs.pop(number).to("cpu", output[0].dtype), output[0].cpu()

        with contextlib.ExitStack() as stack:
            for number in self.layers:
                before = modules[number].register_forward_pre_hook(partial(keep_arguments, number), with_kwargs=True)
                after = modules[number].register_forward_hook(partial(keep_tensors, number))
                stack.callback(before.remove), stack.callback(after.remove)
            stack.enter_context(full_attention(self.model, len(ids)))  # it changes arguments, after they are kept
            self.model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
        self.kept[key] = found


class Transfer(ConversionTrainer):
    """Minimises a [`LayerComparison`].

    Args:
        model: with Infini-attention; layers: numbers of those that learn; others: the Trainer's.
    """

    def __init__(self, model: nn.Module, *args, layers: list[int], **kwargs):
        super().__init__(LayerComparison(model, layers), *args, **kwargs)

    @property
    def patched(self) -> nn.Module:
        return self.model.model

    def loss_of(self, model, rows: Tensor) -> Tensor:
        return model(rows[:, 0])


@torch.no_grad()
def calibrated_scales(model: nn.Module, rows: Tensor, layers: list[int]) -> dict[int, list[list[float]]]:
    """What the numbers of the queries and keys of each head are multiplied by to have the standard deviation [`SPREAD`], by
    layer, for those of `rows` `[rows, 2, tokens]`."""
    modules, sums = attention_layers(decoder_of(model)), {number: [0.0, 0.0] for number in layers}

    def with_sums(number: int, tokens: Projections) -> Projections:
        for index, part in enumerate(tokens[:2]):
            sums[number][index] = sums[number][index] + part.float().square().mean((0, 2, 3))
        return tokens

    try:
        for number in layers:
            modules[number].change_projections = partial(with_sums, number)
        for ids in rows[:, 0]:
            model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    finally:
        for number in layers:
            modules[number].change_projections = None
    return {
        number: [(SPREAD / (part / len(rows)).sqrt()).tolist() for part in of_layer] for number, of_layer in sums.items()
    }
