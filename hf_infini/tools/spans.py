"""How a model predicts parts of rows: what lm-eval asks for, and recipes/recall."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..compat.cache_name import CACHE, cache_of


def score_spans(
    model,
    rows: Sequence,
    spans: Sequence[tuple[int, int, int]],
    chunk: int,
    progress: Callable[[range], Iterable] = iter,
    cache=None,
) -> list[tuple[float, bool]]:
    """How a model predicts parts of rows, read in chunks through its cache; logits are made only
    where a token is asked for.

    Args:
        model: a causal language model in evaluation mode.
        rows: the token numbers of each row, 1-D arrays of any lengths.
        spans: `(row, first, end)`: the part `rows[row][first:end]`, not empty; nothing predicts a
            row's first token.
        chunk: tokens per call of the model.
        progress: goes through the first columns of the chunks: `tqdm` shows a bar.
        cache: of what stands in front of the rows, which then holds them too; `None`: nothing.

    Returns, of each span, the sum of its tokens' negative log-likelihoods in nats, and whether all
    are the arg-max.
    """
    device = next(model.parameters()).device
    # Padding is on the right, where a causal model's other tokens do not see it
    tokens = pad_sequence([torch.as_tensor(row).long() for row in rows], batch_first=True)
    # which predict
    places = torch.tensor([(row, at - 1) for row, first, end in spans for at in range(first, end)])
    # of each token asked for: whether it is the arg-max, its loss
    found = torch.empty(len(places), 2, dtype=torch.float64)
    end = int(places[:, 1].max()) + 1
    for start in progress(range(0, end, chunk)):
        piece = tokens[:, start : min(start + chunk, end)].to(device)
        here = (places[:, 1] >= start) & (places[:, 1] < start + piece.shape[1])
        kept, columns = (places[here, 1] - start).unique(return_inverse=True)
        whole = cache is None and chunk >= end
        kwargs = {"use_cache": False} if whole else {CACHE: cache, "use_cache": True}
        with torch.no_grad():
            output = model(
                input_ids=piece, logits_to_keep=kept.to(device) if len(kept) else 1, **kwargs
            )
        cache = cache_of(output)
        if len(kept):
            logits = output.logits[places[here, 0].to(device), columns.to(device)].float()
            targets = tokens[places[here, 0], places[here, 1] + 1].to(device)
            losses = F.cross_entropy(logits, targets, reduction="none")
            found[here] = torch.stack(
                [(logits.argmax(-1) == targets).double(), losses.double()], -1
            ).cpu()
    parts = found.split([end - first for _, first, end in spans])
    return [(float(part[:, 1].sum()), bool(part[:, 0].all())) for part in parts]
