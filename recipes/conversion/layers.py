"""Which layers of a pretrained model need what is beyond the window.

Let every layer give a share of its own full attention, and the rest with its window only. From share 0 to share 1 the loss
falls by the gap between window and full attention, which is the integral of its derivative. What belongs to a layer's share
is that layer's part (integrated gradients, Sundararajan et al. 2017, arXiv 1703.01365). The parts add up to the gap, and all
layers are found in a few passes, not in one for each.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from hf_infini.models.structure import decoder_of
from recall.rows import NOT_COUNTED

from .teacher import full_attention, partly_full_attention
from .trainers import gates_closed

POINTS = 4  # of the integral, in the middles of as many intervals


def loss_beyond(model, row: Tensor, window: int) -> Tensor:
    """The summed cross-entropy, in nats, of the labels of a row `[2, tokens]` that come after the first `window`."""
    ids, labels = row
    logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(ids) - window + 1).logits[0, :-1]
    return F.cross_entropy(logits.float(), labels[window:], reduction="sum", ignore_index=NOT_COUNTED)


def counted_beyond(rows: Tensor, window: int) -> list[int]:
    """How many labels [`loss_beyond`] sums, by row."""
    return (rows[:, 1, window:] != NOT_COUNTED).sum(1).tolist()


def gap_by_layer(model, rows: Tensor, window: int) -> dict[int, float]:
    """How many nats a token beyond the window full attention brings in each layer with a memory; the memories are closed.

    Args:
        model: with Infini-attention.
        rows: `[rows, 2, tokens]`, ids and labels; window: tokens that the softmax sees at most.
    """
    numbers = decoder_of(model).config.infini_layers
    shares = torch.empty(len(numbers), device=rows.device, requires_grad=True)
    total = torch.zeros_like(shares)
    with gates_closed(model):
        for row in tqdm(rows, desc="choice of layers", unit="row", leave=False):
            for point in range(POINTS):
                with torch.no_grad():
                    shares.fill_((point + 0.5) / POINTS)
                with torch.enable_grad():
                    by_layer = dict(zip(numbers, shares.unbind(), strict=True))
                    with partly_full_attention(model, row.shape[1], by_layer):
                        total -= torch.autograd.grad(loss_beyond(model, row, window), shares)[0]
    tokens = sum(counted_beyond(rows, window))
    return dict(zip(numbers, (total / POINTS / tokens).tolist(), strict=True))


@torch.no_grad()
def losses_of(model, rows: Tensor, window: int) -> list[float]:
    """[`loss_beyond`] of each row."""
    return [float(loss_beyond(model, row, window)) for row in tqdm(rows, desc="evaluation", unit="row", leave=False)]


def losses_with_full_attention(model, rows: Tensor, window: int, layers: list[int] | None) -> list[float]:
    """[`losses_of`] with full attention in `layers` (`None`: all), and closed memories in the others."""
    with gates_closed(model), full_attention(model, rows.shape[2], layers=layers):
        return losses_of(model, rows, window)
